"""Random state as tensors: PyTorch's (CPU, and this rank's GPU), NumPy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from megatron_fsdp.errors import CheckpointError

__all__ = ["check_random_state", "random_state", "restore_random_state"]


def random_state() -> dict[str, torch.Tensor]:
    """Return the state of this rank's generators, 1-D uint8 tensors on the CPU."""
    kind, keys, *rest = numpy.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": _encode([kind, numpy.asarray(keys).tolist(), *rest]),
        "python": _encode(random.getstate()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to a state that ``random_state`` returned, those that are in it."""
    _set(state, torch.set_rng_state, numpy.random.set_state, random.setstate)
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def check_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set generators that nobody uses to a state, those that are in it."""
    for name, value in state.items():
        try:
            unused = torch.Generator().set_state, numpy.random.RandomState().set_state, random.Random().setstate
            _set({name: value}, *unused)
        except Exception as error:
            raise CheckpointError(
                f"the random state of {name!r} is damaged ({type(error).__name__}: {error}); nothing was loaded"
            ) from None


def _set(
    state: Mapping[str, torch.Tensor],
    set_torch: Callable[[torch.Tensor], object],
    set_numpy: Callable[[Any], object],
    set_python: Callable[[Any], object],
) -> None:
    if "torch" in state:
        set_torch(state["torch"])
    if "numpy" in state:
        kind, keys, *rest = _decode(state["numpy"])
        set_numpy((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "python" in state:
        version, internal, gauss = _decode(state["python"])
        set_python((version, tuple(internal), gauss))


def _encode(value: Any) -> torch.Tensor:
    # As text, so that reading it back can run nothing; repr of a float in JSON is exact.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


def _decode(tensor: torch.Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
