"""Random state as tensors: PyTorch's (CPU, and this rank's GPU), NumPy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

__all__ = ["random_state", "restore_random_state"]


def random_state() -> dict[str, torch.Tensor]:
    """Return the state of this rank's generators, 1-D uint8 tensors on the CPU."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": _encode([kind, numpy.asarray(keys).tolist(), position, has_gauss, gauss]),
        "python": _encode(random.getstate()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to a state that ``random_state`` returned, those that are in it."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        kind, keys, position, has_gauss, gauss = _decode(state["numpy"])
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    if "python" in state:
        version, internal, gauss = _decode(state["python"])
        random.setstate((version, tuple(internal), gauss))


def _encode(value: Any) -> torch.Tensor:
    # As text, so that reading it back can run nothing; repr of a float in JSON is exact.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


def _decode(tensor: torch.Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
