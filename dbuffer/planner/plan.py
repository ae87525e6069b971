"""Plan: where every tensor lies in a flat buffer of equal shards, as pure data.

A plan has only shapes and integers, no device and no process group. There is one plan per buffer, and all else derives
from it. Every query is arithmetic on one tensor and one shard, so 16,384 shards cost as little as two.
"""

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from dbuffer.errors import LayoutError, PaddingWarning
from dbuffer.planner.granularity import Granularity, row_numel


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The layout of one flat buffer, with sizes in elements.

    Tensor ``t`` occupies ``[offsets[t], offsets[t] + tensor_numel(t))``. Shard ``k`` stores
    ``[k * shard_numel, (k + 1) * shard_numel)``.

    Two plans are equal if they lay out the same tensors in the same way; ``lower_bound_numel`` and ``binding`` are not
    compared. Plans are made by ``dbuffer.planner.plan``.

    Attributes:
        shapes: one per tensor, in the caller's order.
        granularities: where a shard boundary may cut, one per tensor.
        num_shards: number of equal shards, one for each rank of the sharding axis.
        offsets: one per tensor; need not ascend.
        shard_numel: elements of one shard; 0 only if all tensors are empty.
        alignment_numel: all offsets and ``shard_numel`` are multiples of it.
        lower_bound_numel: no legal plan of these tensors has a smaller ``numel`` (docs/design/planner.md, "Proof").
            Raised to ``data_numel`` if a smaller value is passed.
        binding: what determines the buffer's size, in words for a report; tensors are numbered as the caller of the
            planner passed them.
        binding_tensors: the tensors named in ``binding``, in that order, as positions in ``shapes``.
        data_numel: sum of the tensors' elements.
    """

    shapes: tuple[tuple[int, ...], ...]
    granularities: tuple[Granularity, ...]
    num_shards: int
    offsets: tuple[int, ...]
    shard_numel: int
    alignment_numel: int = 1
    lower_bound_numel: int = 0
    binding: str = ""
    binding_tensors: tuple[int, ...] = ()
    data_numel: int = field(init=False)

    def __post_init__(self) -> None:
        # Plain tuples, so that shapes given as torch.Size print, compare and hash alike.
        object.__setattr__(self, "shapes", tuple(map(tuple, self.shapes)))
        object.__setattr__(self, "granularities", tuple(self.granularities))
        object.__setattr__(self, "offsets", tuple(self.offsets))
        data_numel = sum(map(math.prod, self.shapes))
        object.__setattr__(self, "data_numel", data_numel)
        object.__setattr__(self, "lower_bound_numel", max(self.lower_bound_numel, data_numel))

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def padding_ratio(self) -> float:
        """Padding over data: 0.25 means that the buffer is a quarter larger than its tensors."""
        return self.numel / self.data_numel - 1 if self.data_numel else 0.0

    @property
    def gap(self) -> float:
        """How far ``numel`` is above its lower bound, relative to the bound; 0.0: the plan is proved optimal."""
        return self.numel / self.lower_bound_numel - 1 if self.lower_bound_numel else 0.0

    def tensor_numel(self, tensor: int) -> int:
        """Return the elements of one tensor."""
        return math.prod(self.shapes[tensor])

    def row_numel(self, tensor: int) -> int:
        """Return the elements of one row: the last dim, but 1 for 1-D and 0-d tensors."""
        return row_numel(self.shapes[tensor])

    def owned_rows(self, tensor: int, shard: int) -> range:
        """Return the rows of one tensor that one shard stores; empty if it stores none.

        Args:
            tensor: position in ``shapes``; a (1024, 4096) weight has 1024 rows of 4096 elements.
            shard: 0 <= shard < ``num_shards``.
        Raises:
            IndexError: ``tensor`` or ``shard`` is out of range.
            LayoutError: the shard stores a part of a row, which only ``Element()`` permits.
        """
        if not (0 <= tensor < len(self.shapes) and 0 <= shard < self.num_shards):
            raise IndexError(f"tensor {tensor} of {len(self.shapes)}, shard {shard} of {self.num_shards}")
        numel, width = self.tensor_numel(tensor), self.row_numel(tensor)
        if not numel:
            # Rows without elements, as in shape (5, 0), are counted in shard 0.
            return range(0 if shard or len(self.shapes[tensor]) < 2 else math.prod(self.shapes[tensor][:-1]))
        first = shard * self.shard_numel - self.offsets[tensor]
        start, stop = (min(max(edge, 0), numel) for edge in (first, first + self.shard_numel))
        if start % width or stop % width:
            raise LayoutError(
                f"shard {shard} stores elements {start} to {stop} of tensor {tensor}, whose rows have {width} "
                "elements: no whole rows. fix: plan this tensor with granularity=Row()"
            )
        return range(start // width, stop // width)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that identify the layout; ranks compare them to check that they agree.

        The same layout has the same digits in all processes, machines and Python versions.
        """
        return hashlib.blake2b(repr(self._layout()).encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._layout() == other._layout() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        # Plans are dictionary keys on hot paths. A few integers tell them apart without a hash of 20,000 shapes.
        return hash((self.num_shards, self.shard_numel, self.data_numel, len(self.shapes), self.offsets[:8]))

    def _layout(self) -> tuple[object, ...]:
        sizes = self.num_shards, self.shard_numel, self.alignment_numel
        return (*sizes, self.offsets, self.shapes, self.granularities)


@dataclass(frozen=True, slots=True)
class Region:
    """Some tensors of a unit that share one flat buffer.

    Attributes:
        indices: ascending positions in the shapes given to ``plan_regions``; ``plan.shapes[i]`` is the shape at
            ``indices[i]``.
        plan: the layout of those tensors.
        relaxed: the tensors of ``indices`` whose granularity in ``plan`` is finer than requested, because the
            requested one pads too much (``PaddingLimits.fallback``).
    """

    indices: tuple[int, ...]
    plan: Plan
    relaxed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PaddingLimits:
    """How much padding justifies an extra buffer, a finer granularity, a warning or an error.

    Each limit is a ratio and a number of bytes; it applies if both are exceeded.

    Attributes:
        split_ratio, split_bytes: an extra region must save more than this share of the data and this many bytes.
        relax_ratio, relax_bytes: above these, the tensors that cause the padding get ``fallback``, if it is set.
        fallback: a finer granularity; None: every tensor keeps its own.
        warn_ratio, warn_bytes: above these, a ``PaddingWarning`` is issued.
        refuse_ratio, refuse_bytes: above these, a ``LayoutError`` is raised; ratio 3.0: a buffer of 4x its data.
    """

    split_ratio: float = 0.0005
    split_bytes: int = 16 * 1024
    warn_ratio: float = 0.25
    warn_bytes: int = 1 << 20
    refuse_ratio: float = 3.0
    refuse_bytes: int = 64 << 20
    relax_ratio: float = 0.01
    relax_bytes: int = 64 * 1024
    fallback: Granularity | None = None

    def is_relaxed_from(self, padding_numel: int, data_numel: int, itemsize: int) -> bool:
        """Return whether this much padding makes tensors use ``fallback``."""
        return padding_numel > self.relax_ratio * data_numel and padding_numel * itemsize > self.relax_bytes


def check_padding(regions: Sequence[Region], limits: PaddingLimits, itemsize: int) -> None:
    """Warn or raise if the padding of all regions of one unit exceeds ``limits``.

    Raises:
        LayoutError: the padding exceeds ``refuse_ratio`` and ``refuse_bytes``.
    """
    data = sum(region.plan.data_numel for region in regions)
    padding = sum(region.plan.numel for region in regions) - data
    worst = max(regions, key=lambda region: region.plan.numel - region.plan.data_numel).plan
    is_refused = padding > limits.refuse_ratio * data and padding * itemsize > limits.refuse_bytes
    is_wasteful = padding > limits.warn_ratio * data and padding * itemsize > limits.warn_bytes
    if not is_refused and not is_wasteful:
        return
    message = (
        f"padding makes {len(regions)} flat buffer(s) {1 + padding / data:.2f}x their data, "
        f"{padding * itemsize / 2**20:.1f} MiB more, over {worst.num_shards} shards. What forces it: {worst.binding}. "
        "fix: give that tensor a buffer of its own (plan_regions) or a finer granularity (Element()), replicate it if "
        "it is tiny, or use fewer shards"
    )
    if is_refused:
        raise LayoutError(f"{message}; or raise the limit with PaddingLimits(refuse_ratio=..., refuse_bytes=...)")
    warnings.warn(message, PaddingWarning, stacklevel=3)
