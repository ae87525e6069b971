"""Random state as tensors: of PyTorch (CPU and this rank's GPU), NumPy and Python."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megatron_fsdp.errors import CheckpointError

__all__ = ["random_state", "restore_random_state"]


def random_state() -> dict[str, torch.Tensor]:
    """Return the state of this rank's generators as 1-D uint8 tensors on the CPU."""
    kind, keys, *rest = numpy.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": _encode([kind, numpy.asarray(keys).tolist(), *rest]),
        "python": _encode(random.getstate()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], *, is_trial: bool = False) -> None:
    """Set this rank's generators to the states in ``state``, which ``random_state`` returned.

    Args:
        is_trial: set unused generators instead, to check the state.
    Raises:
        CheckpointError: the state is damaged.
    """
    theirs: Any = (torch.Generator(), numpy.random.RandomState(), random.Random())
    in_torch, in_numpy, in_python = theirs if is_trial else (torch.default_generator, numpy.random, random)
    for name, value in state.items():
        try:
            if name == "torch":
                in_torch.set_state(value)
            elif name == "numpy":
                kind, keys, *rest = _decode(value)
                in_numpy.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
            elif name == "python":
                version, internal, gauss = _decode(value)
                in_python.setstate((version, tuple(internal), gauss))
            elif torch.cuda.is_available() and not is_trial:
                torch.cuda.set_rng_state(value)
        except Exception as error:
            raise CheckpointError(
                f"the random state of {name!r} is damaged ({type(error).__name__}: {error}); nothing was loaded. fix: "
                "load an older checkpoint, or a copy of this one"
            ) from None


def _encode(value: Any) -> torch.Tensor:
    # As text, so that decoding runs no code. JSON keeps floats exactly.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


def _decode(tensor: torch.Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
