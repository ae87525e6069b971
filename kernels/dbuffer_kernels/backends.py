"""Decide where an op runs: the only file that asks which hardware and packages exist."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from dbuffer_kernels.launch import LAUNCHERS
from dbuffer_kernels.switches import is_off

Backend = Literal["triton", "reference"]
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

FORCED: list[Backend | Literal["auto"]] = []
"""What ``use_backend`` asks for, the innermost last: of the process, as autograd runs backward hooks on its threads."""


def backend(device: torch.device | str | None = None) -> Backend:
    """Return the name of what runs the ops on tensors of one device.

    Args:
        device: where the tensors live; None means CUDA when this process has it, else the CPU.
    """
    forced = FORCED[-1] if FORCED else "auto"
    if forced != "auto":
        return forced
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return "triton" if on_gpu and _triton_is_installed() else "reference"


@contextlib.contextmanager
def use_backend(name: Backend | Literal["auto"], /) -> Iterator[None]:
    """Force one backend for the whole process while the context lasts; for tests and comparisons.

    Args:
        name: "reference", "triton" (on CPU tensors only under TRITON_INTERPRET=1) or "auto", which chooses by device.
    Raises:
        ValueError: another name, or "triton" where Triton is not installed.
    """
    if name not in ("triton", "reference", "auto"):
        raise ValueError(f"use_backend: found {name!r}, wanted 'triton', 'reference' or 'auto'.")
    if name == "triton" and not _triton_is_installed():
        raise ValueError(
            "use_backend('triton'): Triton is not installed here. Install the package `triton`, or use 'reference'."
        )
    FORCED.append(name)
    try:
        yield
    finally:
        FORCED.pop()


def runs_on_triton(tensor: Tensor) -> bool:
    """Return whether an op that writes ``tensor`` runs its Triton kernel.

    Raises:
        ValueError: Triton is forced, but ``tensor`` is not on CUDA and Triton does not interpret.
    """
    if LAUNCHERS:
        return True
    forced = FORCED[-1] if FORCED else "auto"
    if forced == "auto":
        return tensor.is_cuda and _triton_is_installed()
    if forced == "triton" and not tensor.is_cuda and not importlib.import_module("triton").knobs.runtime.interpret:
        raise ValueError(
            f"use_backend('triton'): found a tensor on {tensor.device}, wanted cuda. Move it there, or set "
            "TRITON_INTERPRET=1 before Triton is imported to interpret the kernels on the CPU."
        )
    return forced == "triton"


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a GPU's own operators serve ``tensor``, or something stands for it (``launch.launch_with``)."""
    return tensor.is_cuda or bool(LAUNCHERS)


def without_grad(op: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Run ``op`` under no_grad, entering it only when gradients are on: backward hooks have them off already."""

    @functools.wraps(op)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not torch.is_grad_enabled():
            return op(*args, **kwargs)
        with torch.no_grad():
            return op(*args, **kwargs)

    return run


@functools.cache
def _triton_is_installed() -> bool:
    return not is_off("triton") and importlib.util.find_spec("triton") is not None
