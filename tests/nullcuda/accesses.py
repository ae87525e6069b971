"""Records which memory each operation of PyTorch, kernel of Triton and block of the allocator reads and writes."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nullcuda.machine import log_size, stream_id, stream_id_of_handle

ROOT = str(Path(__file__).parents[2])
# Positions of the arguments that our kernels write. A kernel without an entry writes the first argument after its
# inputs.
WRITTEN_BY = {
    "elementwise_kernel": [1], "split_kernel": [1, 2], "join_kernel": [2], "adamw_kernel": [1, 2, 3, 4, 5],
    "decode_kernel": [2],
}  # fmt: skip
# Operators that overwrite their first argument; other in-place operators also read it.
OVERWRITING = ("copy_", "zero_", "fill_", "normal_", "uniform_")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes from ``start`` up to ``end``, of a device or of pinned memory."""

    start: int
    end: int
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """The operator that issued the calls ``begin`` up to ``end`` of the log; an operation of the host issued none."""

    name: str
    where: str
    begin: int
    end: int
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """An event of a block of the allocator, when the log had ``at`` calls.

    Attributes:
        kind: "allocated", for work on ``stream``; "freed"; "used", on ``stream`` too, by ``Tensor.record_stream``.
    """

    at: int
    kind: str
    address: int
    stream: int


@dataclass(slots=True)
class Record:
    """Operations and allocations in the order of their issue."""

    operations: list[Operation] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Record]:
    """Record operations and allocations of the block; call it inside of ``machine.logged()``."""
    # Later accesses to the memory of a block that is allocated already belong to that block.
    record = Record(allocations=list(_allocated_blocks()))
    _trace_allocator()
    _SINKS.append(record)
    try:
        with _Operations(record), _launches(record):
            yield record
    finally:
        _SINKS.remove(record)


class _Operations(TorchDispatchMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin = log_size()
        result = func(*args, **kwargs)
        end = log_size()
        if func is torch.ops.aten.record_stream.default:
            address = args[0].untyped_storage().data_ptr()
            self._record.allocations.append(Allocation(end, "used", address, stream_id(args[1])))
            return result
        # Collectives record their reads and writes themselves; is_pinned reads nothing.
        if func.is_view or str(func).startswith(("c10d", "aten.is_pinned")):
            return result
        is_of_host = begin == end
        reads, writes = _accesses(func, args, kwargs, result, is_of_host)
        if reads or writes:
            name = ("host " if is_of_host else "") + str(func).removeprefix("aten.")
            self._record.operations.append(Operation(name, _where(), begin, end, tuple(reads), tuple(writes)))
        return result


def _accesses(func: Any, args: Any, kwargs: Any, result: Any, is_of_host: bool) -> tuple[list[Span], list[Span]]:
    """Return the memory that an operation reads and writes; for an operation of the host, only pinned memory."""
    reads: list[Span] = []
    writes: list[Span] = []
    name = func._schema.name.removeprefix("aten::")
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        spans = list(_spans(value, is_of_host))
        (writes if is_written else reads).extend(spans)
        if is_written and "foreach" not in name and name not in OVERWRITING and "out" not in argument.name:
            reads.extend(spans)
    values = result if isinstance(result, (list, tuple)) else [result]
    for returned, value in zip(func._schema.returns, values, strict=False):
        if returned.alias_info is None:
            writes.extend(_spans(value, is_of_host))
    return reads, writes


def _spans(value: Any, is_of_host: bool) -> Iterator[Span]:
    for tensor in _tensors(value):
        if tensor.numel() == 0 or tensor.layout is not torch.strided:
            continue
        is_pinned = tensor.device.type == "cpu" and tensor.is_pinned()
        if is_pinned or (tensor.device.type == "cuda" and not is_of_host):
            length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            yield Span(start, start + length * tensor.element_size(), is_pinned)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _where() -> str:
    """Return the innermost three lines of the project that are being run."""
    frame: FrameType | None = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "/nullcuda/" not in name:
            found.append(f"{os.path.basename(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


@contextmanager
def _launches(record: Record) -> Iterator[None]:
    """Record launches of our Triton kernels, which PyTorch's dispatcher does not see."""
    import dbuffer_kernels.launch as launch_file

    real = launch_file.launch

    def launch(kernel: Any, num_blocks: int, device: torch.device, *args: Any, **options: Any) -> None:
        begin = log_size()
        real(kernel, num_blocks, device, *args, **options)
        written = WRITTEN_BY.get(kernel.__name__, [1])
        reads = tuple(span for each in args for span in _spans(each, False))
        writes = tuple(span for i, each in enumerate(args) if i in written for span in _spans(each, False))
        if log_size() > begin:
            record.operations.append(Operation(kernel.__name__, _where(), begin, log_size(), reads, writes))

    with mock.patch.object(launch_file, "launch", launch):
        users: Iterable[Any] = [
            module
            for name, module in sys.modules.items()
            if name.startswith("dbuffer_kernels.") and getattr(module, "launch", None) is real
        ]
        for module in users:
            module.launch = launch
        try:
            yield
        finally:
            for module in users:
                module.launch = real


def _allocated_blocks() -> Iterator[Allocation]:
    """Return an event for each block that the caching allocator has handed out so far."""
    for segment in torch.cuda.memory_snapshot():
        stream = stream_id_of_handle(segment["stream"])
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                yield Allocation(log_size(), "allocated", block["address"], stream)


_SINKS: list[Record] = []


def _trace_allocator() -> None:
    """Record every block that the caching allocator allocates or frees; call it once per process."""
    if _trace_allocator in _TRACED:
        return
    _TRACED.append(_trace_allocator)
    torch._C._activate_gpu_trace()

    def allocated(address: int) -> None:
        for record in _SINKS:
            stream = stream_id(torch.cuda.current_stream())
            record.allocations.append(Allocation(log_size(), "allocated", address, stream))

    def freed(address: int) -> None:
        for record in _SINKS:
            record.allocations.append(Allocation(log_size(), "freed", address, 0))

    _gpu_trace.register_callback_for_memory_allocation(allocated)
    _gpu_trace.register_callback_for_memory_deallocation(freed)


_TRACED: list[Any] = []


__all__ = ["Allocation", "Operation", "Record", "Span", "recorded"]
