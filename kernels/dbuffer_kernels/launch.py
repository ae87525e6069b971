"""Where an op runs, and how the Triton kernel of an op is started: the only file that asks which hardware there is.

Triton is imported when the first kernel starts, never before: CPU users do not pay for it and need not have it. Kernels
are therefore plain functions in their files, and ``jit`` binds ``tl`` and compiles them on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterator
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from dbuffer_kernels.switches import is_off

FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""What the ops compute with; other dtypes can only be copied."""
BLOCK = 4096
"""Elements per program: 16 per thread, so at least two 16-byte loads of 16-bit data are in flight in each thread."""
NUM_WARPS = 8
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
"""What a kernel is compiled with. Products and sums fuse, said aloud since Triton's default is about to change."""

Launcher = Callable[[Callable[..., None], tuple[Any, ...]], None]
"""Stands for the GPU: called with a kernel and its arguments."""

LAUNCHERS: list[Launcher] = []
"""The one that stands for the GPU now is last; empty where kernels are launched."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Device = TypeVar("_Device", bound=Callable[..., Any])
_DEVICE_FUNCTIONS: set[Callable[..., Any]] = set()

Backend = Literal["triton", "reference"]

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


def check_tensor(
    what: str, tensor: Tensor, shape: tuple[int, ...], dtypes: Collection[torch.dtype], device: torch.device
) -> None:
    """Raise a ValueError unless a tensor is contiguous and has this shape, one of the dtypes, and this device."""
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != device or not tensor.is_contiguous():
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"{what} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; wanted "
            f"contiguous {names} {tuple(shape)} on {device}. Pass flat buffers, or pieces of them."
        )


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


def compute_dtype(source_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype the arithmetic runs in: fp64 when either side is fp64, else fp32."""
    return torch.float64 if torch.float64 in (source_dtype, out_dtype) else torch.float32


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
    with _current(device):
        _start(kernel, num_blocks, device, arguments, {**constants, "BLOCK": block})


_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels and the constants that follow their arguments, by everything that makes Triton compile another."""


def _start(
    kernel: Callable[..., None],
    num_blocks: int,
    device: torch.device,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Start a kernel on the current device; from the second time on, call the compiled kernel that Triton returned.

    Triton's own call looks for the compiled kernel each time, which takes 30 us of the host. A call of the compiled
    kernel, as in Triton's tutorials, takes 13, and the key 2 (Triton 3.7.1 on the null CUDA machine). Where Triton
    returns no ``CompiledKernel``, as in its interpreter, every launch is Triton's own call.
    """
    key = (kernel, device, *map(_specialization, arguments), *constants.values())
    found = _COMPILED.get(key)
    if found is not None:
        compiled, values = found
        compiled[(num_blocks, 1, 1)](*arguments, *values)
        return
    compiled = jit(kernel)[(num_blocks,)](*arguments, **constants, **OPTIONS)
    if type(compiled).__name__ == "CompiledKernel":
        names = list(inspect.signature(kernel).parameters)[len(arguments) :]
        _COMPILED[key] = compiled, tuple(constants[name] for name in names)


def _specialization(argument: Any) -> object:
    """Return everything about an argument that Triton compiles a kernel for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        # Divisible by 16, equal to 1, and its width in bits.
        return argument % 16 == 0, argument == 1, argument.bit_length() > 31, argument.bit_length() > 63
    return type(argument)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one while the block runs: Triton starts kernels there, wherever the tensors are.

    It mostly is, and finding that out takes 0.5 us, where ``torch.cuda.device`` takes 6 to 22.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


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
