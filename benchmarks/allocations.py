"""Measure allocated memory by phase of a step, and the bytes that operators read and write."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["MovedBytes", "PhaseMemory", "cuda_phases_of", "phases_of"]

_MARK = "phase: "


@dataclass(slots=True)
class PhaseMemory:
    """Bytes allocated in one phase of a run, relative to the beginning of the run.

    Attributes:
        start, peak, end: bytes at the beginning of the phase, the maximum in the phase, and bytes at its end.
    """

    start: int
    peak: int
    end: int


def phases_of(run: Callable[[Callable[[str], None]], object]) -> list[tuple[str, PhaseMemory]]:
    """Return the memory of each phase of ``run``, in order, from the profiler's events of PyTorch's CPU allocator.

    The events cover all CPU tensors, including temporary tensors inside operators.

    Args:
        run: a function whose argument is another function: ``begin(name)`` ends the current phase and begins a new one.
    """

    def begin(name: str) -> None:
        with record_function(_MARK + name):
            pass

    # Free the reference cycles of earlier runs first, so that they are not counted in this one.
    gc.collect()
    # acc_events only silences PyTorch 2.11's warning about several profiler cycles; there is one.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        result = run(begin)
    results: Any = recorded.profiler
    events = sorted(_flattened(results.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    held, phases = 0, [("", PhaseMemory(0, 0, 0))]
    for event in events:
        if event.name.startswith(_MARK):
            phases.append((event.name.removeprefix(_MARK), PhaseMemory(held, held, held)))
        size = getattr(event.extra_fields, "alloc_size", None)
        if size is not None and event.extra_fields.device.type == "cpu":
            held += size
            phase = phases[-1][1]
            phase.peak, phase.end = max(phase.peak, held), held
    del result
    return phases[1:]


def cuda_phases_of(run: Callable[[Callable[[str], None]], object]) -> list[tuple[str, PhaseMemory]]:
    """Return what every phase of ``run`` held on the current CUDA device, as ``phases_of`` does for the CPU."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    phases: list[tuple[str, PhaseMemory]] = []

    def finish() -> None:
        torch.cuda.synchronize()
        if phases:
            phases[-1][1].peak = torch.cuda.max_memory_allocated() - before
            phases[-1][1].end = torch.cuda.memory_allocated() - before

    def begin(name: str) -> None:
        finish()
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        phases.append((name, PhaseMemory(held, held, held)))

    result = run(begin)
    finish()
    del result
    return phases


def _flattened(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flattened(event.children)


# Matrix products and collectives: the bytes that they move are not overhead of the engine.
_MULTIPLIES = frozenset(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"))
_COLLECTIVES = frozenset(("c10d", "_c10d_functional"))
# Operators that allocate or describe memory without reading or writing it.
_UNTOUCHED = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided resize_ set_ _unsafe_view detach".split()
)
_WRITE_ONLY = frozenset(("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_"))


@dataclass
class MovedBytes:
    """Counts the bytes that operators read and write while ``counting`` is open.

    Matrix products and collectives are left out; views cost nothing; an operator reads each of its inputs and writes
    each of its outputs once.
    """

    total: int = 0
    by_operator: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operators in the block, and those of its backward."""
        with _Counter(self):
            yield

    def add(self, name: str, num_bytes: int) -> None:
        """Count one call."""
        self.total += num_bytes
        self.by_operator[name] = self.by_operator.get(name, 0) + num_bytes


class _Counter(TorchDispatchMode):
    def __init__(self, moved: MovedBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._moved = moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        moved = bytes_moved(func, args, kwargs, result)
        if moved:
            self._moved.add(str(func), moved)
        return result


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that one call of an operator reads and writes, 0 for a view, a product or a collective.

    Args:
        func: the overload. args, kwargs, result: of the call.
    """
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace in _COLLECTIVES or name in _MULTIPLIES or name in _UNTOUCHED:
        return 0
    if name == "all_gather_copy_in":
        # FSDP2's own: copies its first argument into the second, and returns views of that.
        return 2 * _sum_bytes(args[0])
    read = written = 0
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        size = _sum_bytes(value)
        written += size if is_written else 0
        read += 0 if is_written and (name in _WRITE_ONLY or argument.is_out) else size
    aliases = [returned.alias_info for returned in schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases) and not written:
        return 0
    if all(alias is None for alias in aliases):
        written += _sum_bytes(result)
    return read + written


def _sum_bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))
