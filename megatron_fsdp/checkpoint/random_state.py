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
    setters: dict[str, Callable[[torch.Tensor], object]] = {
        "torch": torch.set_rng_state,
        "numpy": lambda tensor: numpy.random.set_state(_numpy_state(tensor)),
        "python": lambda tensor: random.setstate(_python_state(tensor)),
    }
    if torch.cuda.is_available():
        setters["cuda"] = torch.cuda.set_rng_state
    for generator in setters.keys() & state.keys():
        setters[generator](state[generator])


def check_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set generators that nobody uses to a state, those that are in it.

    Raises:
        CheckpointError: it is none; the message names the generator.
    """
    attempts: Mapping[str, Callable[[torch.Tensor], object]] = {
        "torch": torch.Generator().set_state,
        "numpy": lambda tensor: numpy.random.RandomState().set_state(_numpy_state(tensor)),
        "python": lambda tensor: random.Random().setstate(_python_state(tensor)),
    }
    for generator in attempts.keys() & state.keys():
        try:
            attempts[generator](state[generator])
        except Exception as error:
            raise CheckpointError(
                f"the random state of {generator!r} is damaged ({type(error).__name__}: {error}); nothing was loaded"
            ) from None


def _numpy_state(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, gauss = _decode(tensor)
    return kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss


def _python_state(tensor: torch.Tensor) -> tuple[Any, ...]:
    version, internal, gauss = _decode(tensor)
    return version, tuple(internal), gauss


def _encode(value: Any) -> torch.Tensor:
    # As text, so that reading it back can run nothing; repr of a float in JSON is exact.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


def _decode(tensor: torch.Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
