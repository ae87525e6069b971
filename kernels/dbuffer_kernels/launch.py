"""Decide where an op runs, and start its Triton kernel: the only file that asks which hardware and packages exist.

Triton is imported when the first kernel starts, never before: CPU users do not pay for it and need not have it. Kernels
are therefore plain functions in their files, and ``jit`` binds ``tl`` and compiles them on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from dbuffer_kernels.switches import is_off

BLOCK = 4096
"""Elements per program: 16 per thread, so at least two 16-byte loads of 16-bit data are in flight in each thread."""
NUM_WARPS = 8
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
"""What a kernel is compiled with. Products and sums fuse, said aloud since Triton's default is about to change."""

Backend = Literal["triton", "reference"]
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Device = TypeVar("_Device", bound=Callable[..., Any])
_DEVICE_FUNCTIONS: set[Callable[..., Any]] = set()

# One switch for the process, not one per thread: autograd runs backward hooks of CUDA graphs on threads of its own.
_forced: Backend | Literal["auto"] = "auto"


def backend(device: torch.device | str | None = None) -> Backend:
    """Return the name of what runs the ops on tensors of one device.

    Args:
        device: where the tensors live; None means CUDA when this process has it, else the CPU.
    """
    if _forced != "auto":
        return _forced
    if device is None:
        return "triton" if torch.cuda.is_available() and _triton_is_installed() else "reference"
    return "triton" if torch.device(device).type == "cuda" and _triton_is_installed() else "reference"


@contextlib.contextmanager
def use_backend(name: Backend | Literal["auto"], /) -> Iterator[None]:
    """Force one backend for the whole process while the context lasts; for tests and comparisons.

    Args:
        name: "reference", "triton" (on CPU tensors only under TRITON_INTERPRET=1) or "auto", which chooses by device.
    Raises:
        ValueError: another name, or "triton" where Triton is not installed.
    """
    global _forced
    if name not in ("triton", "reference", "auto"):
        raise ValueError(f"use_backend: found {name!r}, wanted 'triton', 'reference' or 'auto'.")
    if name == "triton" and not _triton_is_installed():
        raise ValueError(
            "use_backend('triton'): Triton is not installed here. Install the package `triton`, or use 'reference'."
        )
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def runs_on_triton(tensor: Tensor) -> bool:
    """Return whether an op that writes ``tensor`` runs its Triton kernel.

    Raises:
        ValueError: Triton is forced, but ``tensor`` is not on CUDA and Triton does not interpret.
    """
    if _forced == "auto":
        return tensor.is_cuda and _triton_is_installed()
    if _forced == "triton" and not tensor.is_cuda and not importlib.import_module("triton").knobs.runtime.interpret:
        raise ValueError(
            f"use_backend('triton'): found a tensor on {tensor.device}, wanted cuda. Move it there, or set "
            "TRITON_INTERPRET=1 before Triton is imported to interpret the kernels on the CPU."
        )
    return _forced == "triton"


def without_grad(op: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Run ``op`` under no_grad, entering it only when gradients are on: backward hooks have them off already."""

    @functools.wraps(op)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not torch.is_grad_enabled():
            return op(*args, **kwargs)
        with torch.no_grad():
            return op(*args, **kwargs)

    return run


def launch(
    kernel: Callable[..., None],
    num_blocks: int,
    device: torch.device,
    *arguments: Any,
    block: int = BLOCK,
    **constants: Any,
) -> None:
    """Start ``num_blocks`` programs of a kernel on the current stream of ``device``.

    Args:
        kernel: a plain function in Triton's language; its other constexprs come by keyword.
        num_blocks: size of the one-dimensional grid; nothing starts when it is 0.
        block: the kernel's ``BLOCK``: smaller where a kernel holds many values of each element in registers.
    """
    if num_blocks == 0:
        return
    # Triton starts kernels on the current device, which need not be the tensors' one.
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        jit(kernel)[(num_blocks,)](*arguments, **constants, BLOCK=block, **OPTIONS)


@functools.cache
def jit(kernel: Callable[..., None]) -> Any:
    """Turn a plain function into a Triton kernel, importing Triton if that has not happened yet."""
    _bind_names(kernel.__globals__)
    return importlib.import_module("triton").jit(kernel)


def _bind_names(names: dict[str, Any]) -> None:
    """Give a kernel's file what its kernels look up by name: ``tl`` and the compiled form of what they call."""
    # Type checkers see a real import of triton.language there.
    names["tl"] = importlib.import_module("triton.language")
    for name, value in list(names.items()):
        if isinstance(value, FunctionType) and value in _DEVICE_FUNCTIONS:
            names[name] = _compiled(value)
            _bind_names(value.__globals__)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return importlib.import_module("triton").jit(function)


def device_function(function: _Device) -> _Device:
    """Mark a plain function in Triton's language as one that kernels call; ``jit`` compiles it along with them."""
    _DEVICE_FUNCTIONS.add(function)
    return function


@functools.cache
def element_type(dtype: torch.dtype) -> Any:
    """Return Triton's name for a torch dtype, such as ``tl.bfloat16``; kernels take it as a constexpr."""
    return getattr(importlib.import_module("triton.language"), str(dtype).removeprefix("torch."))


@functools.cache
def _triton_is_installed() -> bool:
    return not is_off("triton") and importlib.util.find_spec("triton") is not None
