"""``Segments``: the ranges of flat buffers that a step updates, and how each program of a kernel finds its range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from dbuffer_kernels.launch import FLOAT_DTYPES, check_tensor, device_function, launch

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

STEP_BLOCK = 2048
"""Elements per program: half as many as for a copy, because each element has up to five values in registers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop`` of a flat buffer, updated with one row of hyperparameters."""

    start: int
    stop: int
    row: int = 0


AnySegment = TypeVar("AnySegment", bound=Segment)


class SegmentTable(Generic[AnySegment]):
    """The ranges of a flat buffer that a step updates, each with its row of hyperparameters.

    It is made once and used in every step. On CUDA it keeps a table on the device, of 8 bytes per column for every 2048
    elements. The first step copies the table there and waits for the copy.

    Args:
        segments: disjoint ranges in any order; empty ones are dropped.
        numel: length of the buffers.
    Raises:
        ValueError: a range is out of bounds, two ranges share a grain, or a range starts inside a grain.
    """

    grain: ClassVar[int] = 1
    columns: ClassVar[int] = 4

    def __init__(self, segments: Sequence[AnySegment], numel: int) -> None:
        self.numel = numel
        self.ranges = tuple(sorted((s for s in segments if s.start < s.stop), key=lambda segment: segment.start))
        self.num_rows = max((segment.row for segment in self.ranges), default=-1) + 1
        self._tables: dict[torch.device, Tensor] = {}
        end = 0
        for segment in self.ranges:
            if segment.start < end or segment.stop > numel or segment.row < 0 or segment.start % self.grain:
                raise ValueError(
                    f"{type(self).__name__}: {segment} begins before {end}, where the one before it ends, or inside of "
                    f"a block of {self.grain}, or leaves the buffer of {numel} elements, or has a negative row. fix: "
                    "give disjoint ranges inside the buffer, in ascending order"
                )
            end = -(-segment.stop // self.grain) * self.grain

    def launch(self, kernel: Callable[..., None], written: Tensor, *arguments: Any, **constants: Any) -> None:
        """Start a kernel on all segments; the table is passed after ``arguments``."""
        table = self.table(written.device)
        launch(kernel, table.shape[0], written.device, *arguments, table, block=STEP_BLOCK, **constants)
        # Every operator that writes in place does this.
        torch.autograd.graph.increment_version(written)

    def table(self, device: torch.device) -> Tensor:
        """Return the kernel's int64 table with one row per program: block, start, stop, row, and extra columns."""
        if device not in self._tables:
            entries = [
                (block, segment.start, segment.stop, segment.row, *self.rest(segment))
                for segment in self.ranges
                # Blocks are counted from the start of the buffer, which is aligned; a range may not be.
                for block in range(segment.start // STEP_BLOCK, -(-segment.stop // STEP_BLOCK))
            ]
            self._tables[device] = torch.tensor(entries, dtype=torch.int64).view(-1, self.columns).to(device)
        return self._tables[device]

    def check(
        self, op: str, buffers: Sequence[Tensor], rows: Tensor, num_columns: int, clip: Tensor | None = None
    ) -> None:
        """Raise ValueError unless the buffers, the hyperparameter rows and the clip factor fit these segments."""
        device = buffers[0].device
        for buffer in buffers:
            check_tensor(f"{op}: a buffer", buffer, (self.numel,), FLOAT_DTYPES, device)
        wanted = max(rows.shape[:1].numel(), self.num_rows), num_columns
        check_tensor(f"{op}: rows, for segments that use {self.num_rows},", rows, wanted, (torch.float64,), device)
        if clip is not None:
            check_tensor(f"{op}: clip", clip, (), (torch.float32,), device)

    def rest(self, segment: AnySegment) -> tuple[int, ...]:
        """Return a segment's columns after the first four."""
        return ()


class Segments(SegmentTable[Segment]):
    """Ranges that ``adamw`` and ``muon_*`` update; they may start and stop at any element."""


@device_function
def find_segment(
    table: tl.tensor, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's row of the table, the start of its block, and its segment's start and stop."""
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    # The product tells the compiler that the block starts on a 16-byte boundary; an offset from memory would not.
    return entry, tl.load(entry) * BLOCK, tl.load(entry + 1), tl.load(entry + 2)
