"""Backend choice and kernel launch: the only file that checks the hardware.

Triton is imported when the first kernel starts, never earlier, so CPU users need not install it or wait for its import.
Kernels are therefore plain functions in their files; ``jit`` binds ``tl`` and compiles them on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from dbuffer_kernels.switches import is_off

FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Dtypes that the ops compute with; other dtypes can only be copied."""
BLOCK = 4096
"""Elements per program: 16 per thread, so at least two 16-byte loads of 16-bit data are in flight in each thread."""
NUM_WARPS = 8
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
"""Compile options of all kernels. Fusion of products and sums is explicit, because Triton's default may change."""

Launcher = Callable[[Callable[..., None], tuple[Any, ...]], None]
"""A function that replaces the GPU; it is called with a kernel and the kernel's arguments."""

LAUNCHERS: list[Launcher] = []
"""Active launchers; the last one replaces the GPU. Empty: kernels run on the GPU."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Device = TypeVar("_Device", bound=Callable[..., Any])
_DEVICE_FUNCTIONS: set[Callable[..., Any]] = set()

Backend = Literal["triton", "reference"]

FORCED: list[Backend | Literal["auto"]] = []
"""Backends of open ``use_backend`` blocks, innermost last. Global, because autograd runs hooks on its own threads."""


def backend(device: torch.device | str | None = None) -> Backend:
    """Return the name of the backend that runs the ops on tensors of a device.

    Args:
        device: the tensors' device; None: CUDA if this process has it, else the CPU.
    """
    forced = FORCED[-1] if FORCED else "auto"
    if forced != "auto":
        return forced
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return "triton" if on_gpu and _triton_is_installed() else "reference"


@contextlib.contextmanager
def use_backend(name: Backend | Literal["auto"], /) -> Iterator[None]:
    """Force one backend for the whole process while the context is open; for tests and comparisons.

    Args:
        name: "reference", "triton" (on CPU tensors only under TRITON_INTERPRET=1) or "auto", which chooses by device.
    Raises:
        ValueError: ``name`` is unknown, or is "triton" while Triton is not installed.
    """
    if name not in ("triton", "reference", "auto"):
        raise ValueError(f"use_backend: found {name!r}. fix: give 'triton', 'reference' or 'auto'")
    if name == "triton" and not _triton_is_installed():
        raise ValueError(
            "use_backend('triton'): Triton is not installed here. fix: pip install triton, or use_backend('reference')."
        )
    FORCED.append(name)
    try:
        yield
    finally:
        FORCED.pop()


def runs_on_triton(tensor: Tensor) -> bool:
    """Return whether an op that writes ``tensor`` runs its Triton kernel.

    Raises:
        ValueError: Triton is forced, but ``tensor`` is not on CUDA and Triton does not run in interpreter mode.
    """
    if LAUNCHERS:
        return True
    forced = FORCED[-1] if FORCED else "auto"
    if forced == "auto":
        return tensor.is_cuda and _triton_is_installed()
    if forced == "triton" and not tensor.is_cuda and not importlib.import_module("triton").knobs.runtime.interpret:
        raise ValueError(
            f"use_backend('triton'): found a tensor on {tensor.device}, wanted cuda. fix: move it there, or set "
            "TRITON_INTERPRET=1 before Triton is imported to interpret the kernels on the CPU."
        )
    return forced == "triton"


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on a GPU, or a launcher replaces the GPU (``launch_with``)."""
    return tensor.is_cuda or bool(LAUNCHERS)


def check_tensor(
    what: str, tensor: Tensor, shape: tuple[int, ...], dtypes: Collection[torch.dtype], device: torch.device
) -> None:
    """Raise ValueError unless a tensor is contiguous and has this shape and device and one of these dtypes."""
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != device or not tensor.is_contiguous():
        names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"{what} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; wanted "
            f"contiguous {names} {tuple(shape)} on {device}. fix: pass flat buffers, or slices of them."
        )


def without_grad(op: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Run ``op`` under no_grad. The context is entered only if gradients are on; in backward hooks they are off."""

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
    """Return the dtype of the arithmetic: fp64 if either side is fp64, else fp32."""
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
        kernel: a plain function in Triton's language; its other constexprs are passed by keyword.
        num_blocks: size of the one-dimensional grid; 0 starts nothing.
        block: the kernel's ``BLOCK``. Kernels that hold many values per element in registers need a smaller one.
    """
    if num_blocks == 0:
        return
    if LAUNCHERS:
        LAUNCHERS[-1](kernel, arguments)
        return
    with _current(device):
        jit(kernel)[(num_blocks,)](*arguments, **constants, BLOCK=block, **OPTIONS)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` current while the block runs: Triton launches on the current device, not on the tensors'.

    The device is mostly current already. Checking that takes 0.5 us, while ``torch.cuda.device`` takes 6 to 22.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@contextlib.contextmanager
def launch_with(launcher: Launcher) -> Iterator[None]:
    """Pass kernels to ``launcher`` instead of Triton, for tensors of any device, while the block runs."""
    LAUNCHERS.append(launcher)
    try:
        yield
    finally:
        LAUNCHERS.pop()


@functools.cache
def jit(kernel: Callable[..., None]) -> Any:
    """Return a plain function as a Triton kernel; imports Triton on first use."""
    _bind_names(kernel.__globals__)
    return importlib.import_module("triton").jit(kernel)


def _bind_names(names: dict[str, Any]) -> None:
    """Bind names in a kernel's file: ``tl``, and the compiled versions of the device functions it calls."""
    # Type checkers instead see a real import of triton.language.
    names["tl"] = importlib.import_module("triton.language")
    for name, value in list(names.items()):
        if isinstance(value, FunctionType) and value in _DEVICE_FUNCTIONS:
            names[name] = _compiled(value)
            _bind_names(value.__globals__)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return importlib.import_module("triton").jit(function)


def device_function(function: _Device) -> _Device:
    """Mark a plain function in Triton's language as callable from kernels; ``jit`` compiles it with them."""
    _DEVICE_FUNCTIONS.add(function)
    return function


def element_type(dtype: torch.dtype) -> Any:
    """Return Triton's name of a torch dtype, such as ``tl.bfloat16``; kernels take it as a constexpr."""
    return dtype if LAUNCHERS else _element_type(dtype)


@functools.cache
def _element_type(dtype: torch.dtype) -> Any:
    return getattr(importlib.import_module("triton.language"), str(dtype).removeprefix("torch."))
