"""Checker: record every operator, allocation and collective, and check their order with clocks and the memory model."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer.errors import StorageError
from dbuffer.events import Transfer, listen
from dbuffer.storage import FlatStorage
from megatron_fsdp.certify.clocks import Clock, Queue, VirtualStreams
from megatron_fsdp.certify.memory import Access, Block, Memory, Span
from megatron_fsdp.certify.origins import Origin, here

__all__ = ["Checker", "Issue"]

_OF_UNITS = frozenset(("gather", "use", "reshard", "reduce", "fold", "final"))
_ACTIONS = frozenset(("allocated", "released", "exchanged", "transfer", "transferred"))
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALLOCATES_ONLY = ("aten::empty", "aten::new_empty")
_NO_ACCESS = ("aten::set_", "aten::resize_", "aten::is_pinned", "profiler::", "prim::", "aten::record_stream")
# On a GPU the host waits for the result of these operators: a value, or a size.
_BLOCKING = frozenset(
    """aten::_local_scalar_dense aten::is_nonzero aten::equal aten::nonzero aten::masked_select aten::_unique2
    aten::_unique aten::unique_dim aten::unique_consecutive aten::bincount""".split()
)
_BLOCKING_METHODS = {torch.Tensor.tolist: "tolist", torch.Tensor.cpu: "cpu", torch.Tensor.numpy: "numpy"}
_FACTORIES = (torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty)
_MOST_RUNS = 64
_KERNELS = f"{os.sep}dbuffer_kernels{os.sep}"


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective of this rank, in the order of issue.

    Attributes:
        group: name of the communicator, equal on all of its ranks. number: position among its collectives, from 1.
        after: for each communicator, how many of its collectives have certainly ended when this one begins.
    """

    group: str
    number: int
    kind: str
    num_bytes: int
    origin: Origin
    after: Clock


class _Signature(NamedTuple):
    """An operator's schema: its arguments and whether each is written, and whether the result is a view."""

    name: str
    arguments: tuple[tuple[str, bool], ...]
    is_view: bool
    is_ignored: bool
    allocates_only: bool


@dataclass(slots=True)
class _Known:
    """The address of a storage's memory, and a weak reference that tells when the storage is deleted."""

    pointer: int
    reference: weakref.ref[torch.UntypedStorage]


class Checker(TorchDispatchMode):
    """The dispatch mode that checks operators while it is active.

    Attributes:
        memory: the memory model, with its findings. syncs: each operation that makes the host wait for a GPU, and its
            line, in order.
        issues: collectives of this rank, in order.
        misplaced: collectives on the wrong lane. num_operators: number of operators seen.
    """

    def __init__(self, streams: VirtualStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.streams = streams
        self.memory = Memory()
        self.syncs: list[tuple[str, Origin]] = []
        self.issues: list[Issue] = []
        self.misplaced: list[str] = []
        self.num_operators = 0
        self._unit = ""
        self._names: dict[int, str] = {}
        self._storages: dict[int, _Known] = {}
        self._blocks: dict[int, Block] = {}
        self._communicators: dict[str, Queue] = {}
        self._in_collective: tuple[Queue, Queue, int] | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Checker:
        self._open.enter_context(listen(self._hear))
        self._open.enter_context(_Methods(self))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._open.close()

    # ------------------------------------------------------------------ what callers say

    def name(self, name: str, *tensors: torch.Tensor) -> None:
        """Set the name of the tensors' memory in findings."""
        for tensor in tensors:
            block = self._block(tensor)
            if block is not None:
                block.name = name

    def lies_on_host(self, *tensors: torch.Tensor) -> None:
        """Mark the memory of tensors as host memory, and attribute its earlier accesses to the host."""
        for tensor in tensors:
            block = self._block(tensor)
            if block is not None and not block.is_host:
                block.is_host = True
                block.forget()

    def _hear(self, action: str, subject: Any) -> None:
        """Handle an event of the runtime: the current unit, or a change of memory that no operator makes."""
        if action in _OF_UNITS:
            self._unit = subject.name
        elif action in _ACTIONS:
            getattr(self, f"_{action}")(subject)

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            # DTensor dispatches the operator again for its local tensors.
            return NotImplemented
        kwargs = kwargs or {}
        signature = _signature(func)
        if self._in_collective is not None or signature.is_ignored:
            return func(*args, **kwargs)
        touched = _touched(signature, args, kwargs)
        # Look up blocks before the operator runs: it may exchange the memory of storages.
        inputs = [self._block(tensor) for tensor, _ in touched]
        if None in inputs and not signature.is_view:
            raise StorageError(_released_memory(signature.name, self._unit))
        result = func(*args, **kwargs)
        if not signature.is_view:
            self.num_operators += 1
            self._note(signature, touched, inputs, result, _is_non_blocking(signature, args, kwargs))
        return result

    def _note(
        self,
        signature: _Signature,
        touched: list[tuple[torch.Tensor, bool]],
        inputs: list[Block | None],
        result: Any,
        non_blocking: bool,
    ) -> None:
        places = {block.is_host for block in inputs if block is not None}
        runs_on_host = self.streams.is_on_host or places == {True} or _needs_host(signature, touched, inputs)
        queue = self.streams.host if runs_on_host else self.streams.current()
        origin, unit = here(), self._unit
        number = queue.tick()
        read, write = (Access(signature.name, queue.name, number, is_write, origin, unit) for is_write in (False, True))
        for (tensor, is_write), block in zip(touched, inputs, strict=True):
            if block is not None:
                block.is_host = block.is_host or runs_on_host
                self.memory.touch(block, _spans(tensor), write if is_write else read, queue)
        known = {tensor.untyped_storage()._cdata for tensor, _ in touched}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                block = self._block(tensor, write)
                if block is not None:
                    block.is_host = block.is_host or runs_on_host
                    if not signature.allocates_only:
                        self.memory.touch(block, _spans(tensor), write, queue)
        is_copy_between = len(places) == 2 and not non_blocking and signature.name.startswith("aten::copy_")
        if not runs_on_host and (is_copy_between or _blocks_host(signature, touched)):
            self._block_host("a copy between host and device" if is_copy_between else signature.name, queue)

    def sync(self, what: str, tensor: torch.Tensor) -> None:
        """Record a method that makes the host wait for a tensor, unless the tensor is in host memory."""
        block = self._block(tensor) if type(tensor) in _PLAIN else None
        if block is not None and not block.is_host and not self.streams.is_on_host:
            self._block_host(what, self.streams.current())

    def _block_host(self, what: str, queue: Queue) -> None:
        origin = here()
        if _KERNELS in origin.path:
            # On a GPU this is a kernel, which does not read memory from the host.
            return
        self.syncs.append((what, origin))
        self.streams.host.follow(queue, dict(queue.clock), is_host=True)
        self.streams.waits.pop()

    # ------------------------------------------------------------------ memory

    def _allocated(self, owner: FlatStorage) -> None:
        if owner.nbytes:
            access = Access("allocation", self.streams.current().name, 0, True, here(), self._unit)
            block = self._block(owner.tensor, access, is_new=True)
            if block is not None:
                block.name = owner.name

    def _released(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None:
            self._release(known.pointer)
            known.pointer = 0

    def _exchanged(self, storages: tuple[torch.UntypedStorage, torch.UntypedStorage]) -> None:
        for storage in storages:
            known = self._known(storage)
            known.pointer = storage.data_ptr()
            if known.pointer and known.pointer not in self._blocks:
                self._blocks[known.pointer] = Block(self.streams.current())

    def _known(self, storage: torch.UntypedStorage) -> _Known:
        key = int(storage._cdata)
        known = self._storages.get(key)
        if known is None:
            # The storage may outlive the checker.
            mine = weakref.ref(self)

            def gone(_: Any) -> None:
                checker = mine()
                ended = None if checker is None else checker._storages.pop(key, None)
                if checker is not None and ended is not None:
                    checker._release(ended.pointer)

            known = self._storages[key] = _Known(0, weakref.ref(storage, gone))
        return known

    def _release(self, pointer: int) -> None:
        block = self._blocks.pop(pointer, None)
        if block is not None:
            self.memory.release(block)

    def _block(self, tensor: torch.Tensor, made_by: Access | None = None, *, is_new: bool = False) -> Block | None:
        """Return the block that a tensor lies in; None for one without memory.

        Args:
            made_by: the access that allocates the block, if it is not known yet.
            is_new: the storage has other memory than before.
        """
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if not pointer:
            return None
        known = self._known(storage)
        # Two storages may share an address (a view of foreign memory); one may end before the other.
        if known.pointer != pointer or is_new or pointer not in self._blocks:
            if known.pointer:
                self._release(known.pointer)
            known.pointer = pointer
            if pointer not in self._blocks or is_new:
                self._blocks[pointer] = self._allocate(made_by)
        return self._blocks[pointer]

    def _allocate(self, made_by: Access | None) -> Block:
        if made_by is None:
            # The memory is older than the checker, or was allocated by an operator that it does not see.
            return Block(self.streams.compute)
        queue = self.streams.current()
        queue.launch()
        return self.memory.allocate(queue, made_by)

    # ------------------------------------------------------------------ collectives

    def _transfer(self, transfer: Transfer) -> None:
        """Record a collective's reads and writes on its communicator's own stream, ordered after the current stream."""
        kind, name = transfer.kind, _name_of(transfer.group)
        queue = self._communicators.setdefault(name, Queue(name, self.streams))
        current, origin = self.streams.current(), here()
        # ``dbuffer.mesh`` gives these names to communicators.
        of_others = name.startswith("reduce over") or kind == "reduce_scatter"
        if (of_others and current.name == "gather lane") or (kind == "all_gather" and current.name == "reduce lane"):
            self.misplaced.append(f"{kind} on the {current.name}, where it waits for what it has nothing to do with")
        after = {other: number for other, number in current.clock.items() if other in self._communicators}
        num_waits = len(self.streams.waits)
        queue.is_captured = current.is_captured
        queue.come_after(current)
        number = queue.tick()
        num_bytes = max(map(_num_bytes, (*transfer.reads, *transfer.writes)))
        self.issues.append(Issue(name, number, kind, num_bytes, origin, after))
        for tensors, is_write in ((transfer.reads, False), (transfer.writes, True)):
            access = Access(kind, name, number, is_write, origin, self._unit)
            for tensor in tensors:
                block = self._block(tensor)
                if block is None and tensor.numel():
                    raise StorageError(_released_memory(kind, self._unit))
                if block is not None and tensor.numel():
                    self.memory.touch(block, _spans(tensor), access, queue)
        self._in_collective = current, queue, num_waits

    def _transferred(self, _: Transfer) -> None:
        """Order the current stream after the collective; its two waits are the communicator's, not the engine's."""
        if self._in_collective is not None:
            current, queue, num_waits = self._in_collective
            self._in_collective = None
            current.come_after(queue)
            del self.streams.waits[num_waits:]


class _Methods(TorchFunctionMode):
    """The function mode that sees methods that read memory without an operator, and scalars on the host."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = weakref.ref(checker)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        checker = self._checker()
        what = _BLOCKING_METHODS.get(func) if checker is not None else None
        if what is not None and checker is not None:
            checker.sync(what, args[0])
        result = func(*args, **kwargs)
        if (
            checker is not None
            and func in _FACTORIES
            and type(result) is torch.Tensor
            and _is_made_on_host(result, kwargs)
        ):
            checker.lies_on_host(result)
        return result


def _released_memory(action: str, unit: str) -> str:
    return (
        f"{action} was called on memory that was released, while unit {unit!r} ran. fix: gather the unit's weights or "
        "allocate the buffer before this call, and release it after"
    )


def _is_made_on_host(result: torch.Tensor, kwargs: Any) -> bool:
    """Return whether a factory function would allocate host memory on a machine with a GPU too.

    A scalar tensor without a device argument lies on the host and is passed to kernels by value. The engine writes
    "cpu" only for host memory, because the device of its buffers comes from a mesh.
    """
    device = kwargs.get("device")
    if device is None:
        return result.dim() == 0 or here().is_engine
    return isinstance(device, str) and device == "cpu" and here().is_engine


@functools.cache
def _signature(func: Any) -> _Signature:
    schema = func._schema
    # The schemas of collectives do not say which arguments they write.
    is_collective = func.namespace == "c10d"
    writes = [
        (one.name, is_collective or (one.alias_info is not None and one.alias_info.is_write))
        for one in schema.arguments
    ]
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    name = schema.name
    return _Signature(name, tuple(writes), is_view, name.startswith(_NO_ACCESS), name.startswith(_ALLOCATES_ONLY))


def _touched(signature: _Signature, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
    touched: list[tuple[torch.Tensor, bool]] = []
    for position, (name, is_write) in enumerate(signature.arguments):
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            if type(value) in _PLAIN and value.numel():
                touched.append((value, is_write))
        elif isinstance(value, list | tuple):
            touched += [(tensor, is_write) for tensor in _tensors(value)]
    return touched


def _is_non_blocking(signature: _Signature, args: Any, kwargs: Any) -> bool:
    return kwargs.get("non_blocking") is True or (
        signature.name.startswith("aten::copy_") and len(args) > 2 and args[2] is True
    )


def _blocks_host(signature: _Signature, touched: Sequence[tuple[torch.Tensor, bool]]) -> bool:
    if signature.name in _BLOCKING:
        return True
    # An index with a mask counts the mask's true elements before it allocates.
    is_masked = signature.name in ("aten::index", "aten::index_put", "aten::index_put_")
    return is_masked and any(tensor.dtype in (torch.bool, torch.uint8) for tensor, _ in touched[1:])


def _needs_host(
    signature: _Signature, touched: Sequence[tuple[torch.Tensor, bool]], inputs: Sequence[Block | None]
) -> bool:
    """Return whether an operator with an operand in host memory has to run on the host. Copies do not.

    A scalar may be an operand on any device. Collectives of objects, which the host waits for, use separate memory.
    """
    if signature.name.startswith(("aten::copy_", "aten::_to_copy")):
        return False
    pairs = zip(touched, inputs, strict=True)
    return any(
        block is not None and block.is_host and (tensor.dim() > 0 or is_write) for (tensor, is_write), block in pairs
    )


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if type(leaf) in _PLAIN and leaf.numel()]


def _spans(tensor: torch.Tensor) -> Sequence[Span]:
    """Return the bytes of a tensor as runs; with too many runs, the whole range from its first to its last byte."""
    itemsize = tensor.itemsize
    start = int(tensor.storage_offset()) * itemsize
    numel = tensor.numel()
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    run = 1
    while dims and dims[0][0] <= run:
        stride, size = dims.pop(0)
        run = max(run, stride * size)
    last = sum((size - 1) * stride for stride, size in dims)
    if not dims or math.prod(size for _, size in dims) > min(_MOST_RUNS, numel):
        return ((start, start + (last + run) * itemsize),)
    starts = [0]
    for stride, size in dims:
        starts = [begin + stride * index for begin in starts for index in range(size)]
    return [(start + begin * itemsize, start + (begin + run) * itemsize) for begin in starts]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


@functools.lru_cache(maxsize=1024)
def _name_of(group: dist.ProcessGroup) -> str:
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    return f"{group.group_desc or 'communicator'} {group.group_name} of ranks {ranks}"
