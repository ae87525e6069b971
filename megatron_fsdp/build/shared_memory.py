"""Detect separate parameters and buffers that share memory: a tie that sharding would break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import ConfigError

__all__ = ["Memory", "refuse_shared_memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor's memory when its unit was made. It keeps no memory alive, but no other tensor gets its ``storage``.

    Attributes:
        name: of the parameter or buffer, with its kind.
        storage: the storage. begin, end: the tensor's bytes in it. size, stride, itemsize: of its elements.
    """

    name: str
    storage: StorageWeakRef
    begin: int
    end: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, kind: str, name: str, tensor: torch.Tensor) -> Memory | None:
        """Return a tensor's memory; None for an empty tensor, or one on the meta device."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        has_storage = type(local) in (torch.Tensor, nn.Parameter) or isinstance(local, nn.Parameter)
        if not has_storage or isinstance(local, FakeTensor) or local.is_meta or local.layout is not torch.strided:
            return None
        if not local.numel():
            return None
        begin = int(local.storage_offset())
        last = begin + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        storage = StorageWeakRef(local.untyped_storage())
        return cls(
            f"{kind} {name!r}", storage, begin * local.itemsize, (last + 1) * local.itemsize,
            tuple(local.shape), local.stride(), local.itemsize,
        )  # fmt: skip

    def overlaps(self, other: Memory) -> bool:
        """Return whether elements of both tensors share bytes. Different columns of one matrix do not."""
        if self.storage.cdata != other.storage.cdata or self.end <= other.begin or other.end <= self.begin:
            return False
        if self.itemsize != other.itemsize or (self._is_dense() and other._is_dense()):
            return True
        first = min(self.begin, other.begin)
        marks = torch.zeros((max(self.end, other.end) - first) // self.itemsize, dtype=torch.bool, device="cpu")
        mine, others = (
            marks.as_strided(each.size, each.stride, (each.begin - first) // each.itemsize) for each in (self, other)
        )
        mine.fill_(True)
        return bool(others.any())

    def _is_dense(self) -> bool:
        return self.end - self.begin == torch.Size(self.size).numel() * self.itemsize


def refuse_shared_memory(
    modules: Sequence[nn.Module], owned: Sequence[OwnedParameter], below: Sequence[OwnedParameter]
) -> None:
    """Record the memory of a new unit's parameters; refuse one that shares it with another tensor of the modules.

    The unit copies its parameters into a buffer, so a tensor that shared memory with one would keep the old values.
    Slices of one storage that do not overlap are no tie.

    Args:
        modules: of the unit. owned: its parameters. below: those of the units below it, made before.
    Raises:
        ConfigError: it names both and the fix.
    """
    for each in owned:
        each.memory = None if each.extension is not None else Memory.of("parameter", each.name, each.parameter)
    paths = {id(module): f"{path}." if path else "" for root in modules for path, module in root.named_modules()}
    copied: list[Memory] = [each.memory for each in owned if each.memory is not None]
    for each in below:
        if each.memory is not None:
            info = each.param_module_infos[0]
            path = paths.get(id(info.module))
            # A unit of several modules may have some outside of these.
            name = each.memory.name if path is None else f"parameter {path + info.attribute!r}"
            copied.append(replace(each.memory, name=name))
    is_copied = {id(memory) for memory in copied}
    by_storage: dict[int, list[Memory]] = {}
    for memory in (*copied, *_rest(modules, {id(each.parameter) for each in owned})):
        by_storage.setdefault(memory.storage.cdata, []).append(memory)
    for together in by_storage.values():
        reaching: list[Memory] = []
        for memory in sorted(together, key=lambda memory: memory.begin):
            reaching = [other for other in reaching if other.end > memory.begin]
            for other in reaching:
                if (id(memory) in is_copied or id(other) in is_copied) and memory.overlaps(other):
                    _refuse(type(modules[0]).__name__, other, memory)
            reaching.append(memory)


def _rest(modules: Sequence[nn.Module], taken: set[int]) -> Iterator[Memory]:
    """Yield the memory of buffers, and of parameters outside of units."""
    seen = set(taken)
    for module in modules:
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in named:
                if id(tensor) in seen or isinstance(tensor, DTensor):
                    continue
                seen.add(id(tensor))
                memory = Memory.of(kind, name, tensor)
                if memory is not None:
                    yield memory


def _refuse(unit: str, first: Memory, second: Memory) -> None:
    fix = (
        "keep no buffer over a weight: read the weight where the buffer was read, or give the buffer a clone()"
        if "buffer" in (first.name.split()[0], second.name.split()[0])
        else "tie them as one object, second.weight = first.weight, in one unit (fully_shard([first, second]), or "
        "leave both to the unit around them); or, if they are no tie, give one a clone()"
    )
    raise ConfigError(
        f"{unit}: {first.name} and {second.name} share memory and are two objects (.data of one was assigned to the "
        "other, or one is a view of it). A unit keeps its parameters in a buffer of its own, so the tie would be lost "
        f"without a word. fix: {fix}; or list parameters that stay as they are, all of a tie, in ignored_params."
    )
