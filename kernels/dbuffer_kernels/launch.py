"""Start the Triton kernel of an op.

Triton is imported when the first kernel starts, never before: CPU users do not pay for it and need not have it. Kernels
are therefore plain functions in their files, and ``jit`` binds ``tl`` and compiles them on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch

BLOCK = 4096
"""Elements per program: 16 per thread, so at least two 16-byte loads of 16-bit data are in flight in each thread."""
NUM_WARPS = 8
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
"""What a kernel is compiled with. Products and sums fuse, said aloud since Triton's default is about to change."""

Launcher = Callable[[Callable[..., None], tuple[Any, ...]], None]
"""Stands for the GPU: called with a kernel and its arguments."""

LAUNCHERS: list[Launcher] = []
"""The one that stands for the GPU now is last; empty where kernels are launched."""
_Device = TypeVar("_Device", bound=Callable[..., Any])
_DEVICE_FUNCTIONS: set[Callable[..., Any]] = set()


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
    if LAUNCHERS:
        LAUNCHERS[-1](kernel, arguments)
        return
    # Triton starts kernels on the current device, which need not be the tensors' one.
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        jit(kernel)[(num_blocks,)](*arguments, **constants, BLOCK=block, **OPTIONS)


@contextlib.contextmanager
def launch_with(launcher: Launcher) -> Iterator[None]:
    """Hand kernels to ``launcher`` in place of Triton, on tensors of any device, while the block runs."""
    LAUNCHERS.append(launcher)
    try:
        yield
    finally:
        LAUNCHERS.pop()


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


def element_type(dtype: torch.dtype) -> Any:
    """Return Triton's name for a torch dtype, such as ``tl.bfloat16``; kernels take it as a constexpr."""
    return dtype if LAUNCHERS else _element_type(dtype)


@functools.cache
def _element_type(dtype: torch.dtype) -> Any:
    return getattr(importlib.import_module("triton.language"), str(dtype).removeprefix("torch."))
