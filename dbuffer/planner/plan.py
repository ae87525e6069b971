"""Where every tensor sits in a flat buffer of equal shards: pure data, and the questions the engine asks of it.

A plan knows shapes and integers only: no device, no process group. One plan per buffer; everything else derives from
it, and every answer is arithmetic on one tensor and one shard, so 16,384 shards cost no more than two.
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
    """One flat buffer: tensor ``t`` occupies ``[offsets[t], offsets[t] + tensor_numel(t))``, shard ``k`` stores
    ``[k * shard_numel, (k + 1) * shard_numel)``. All sizes are in elements.

    Two plans are equal when they lay out the same tensors in the same way; how good the layout was proved to be
    (``lower_bound_numel``, ``binding``) does not take part. Made by ``dbuffer.planner.plan``.

    Attributes:
        shapes: one per tensor, in the caller's order.
        granularities: one per tensor: where a shard boundary may cut it.
        num_shards: equal shards of the buffer, one for each rank of the sharding axis.
        offsets: one per tensor; need not ascend.
        shard_numel: elements of one shard, 0 only if no tensor has an element.
        alignment_numel: every offset and ``shard_numel`` are multiples of it.
        lower_bound_numel: no legal plan of these tensors has a smaller ``numel`` (docs/design/planner.md, "Proof").
            At least ``data_numel``, whatever is passed in.
        binding: what forces the size, in words for a report; tensors are numbered as the planner's caller gave them.
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
        # Plain tuples, so that a torch.Size prints, compares and digests like the shape it is.
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
        """How far ``numel`` may be above the optimum, relative to it: 0.0 means proved optimal."""
        return self.numel / self.lower_bound_numel - 1 if self.lower_bound_numel else 0.0

    def tensor_numel(self, tensor: int) -> int:
        """Return the elements of one tensor."""
        return math.prod(self.shapes[tensor])

    def row_numel(self, tensor: int) -> int:
        """Return the elements of one row: the last dim, but 1 for 1-D and 0-d tensors."""
        return row_numel(self.shapes[tensor])

    def owned_rows(self, tensor: int, shard: int) -> range:
        """Return the rows of one tensor that one shard stores, empty when it stores none.

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
            # Rows without elements, as in shape (5, 0), count as the first shard's.
            return range(0 if shard or len(self.shapes[tensor]) < 2 else math.prod(self.shapes[tensor][:-1]))
        first = shard * self.shard_numel - self.offsets[tensor]
        start, stop = (min(max(edge, 0), numel) for edge in (first, first + self.shard_numel))
        if start % width or stop % width:
            raise LayoutError(
                f"shard {shard} stores elements {start} to {stop} of tensor {tensor}, whose rows have {width} "
                "elements: no whole rows. Plan this tensor with Row()."
            )
        return range(start // width, stop // width)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that ranks compare to agree on a layout: same digits, same layout.

        Stable across processes, machines and Python versions.
        """
        return hashlib.blake2b(repr(self._layout()).encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._layout() == other._layout() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        # Plans are dictionary keys on warm paths: a few integers tell plans apart without walking 20,000 shapes.
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
        relaxed: those of ``indices`` whose granularity in ``plan`` is finer than was asked, because what was asked pads
            too much (``PaddingLimits.fallback``).
    """

    indices: tuple[int, ...]
    plan: Plan
    relaxed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PaddingLimits:
    """What padding is worth: an extra collective, a finer cut, a warning, a refusal. Both numbers of a pair must be
    exceeded.

    Attributes:
        split_ratio, split_bytes: an extra region must save more than this share of the data and this many bytes.
        relax_ratio, relax_bytes: padding beyond both lets the tensors that cause it fall back, if there is a fallback.
        fallback: the granularity to fall back on, None to keep every tensor to its own.
        warn_ratio, warn_bytes: padding beyond both draws a ``PaddingWarning``.
        refuse_ratio, refuse_bytes: padding beyond both is a ``LayoutError``; ratio 3.0 means a buffer of 4x its data.
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
        """Return whether so much padding draws the fallback."""
        return padding_numel > self.relax_ratio * data_numel and padding_numel * itemsize > self.relax_bytes


def check_padding(regions: Sequence[Region], limits: PaddingLimits, itemsize: int) -> None:
    """Warn about, or refuse, padding beyond ``limits`` summed over the regions of one unit.

    Raises:
        LayoutError: padding beyond ``refuse_ratio`` and ``refuse_bytes``.
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
        "Give that tensor a buffer of its own (plan_regions) or a finer granularity (Element()), replicate it if it is "
        "tiny, or use fewer shards."
    )
    if is_refused:
        raise LayoutError(f"{message} PaddingLimits moves this refusal.")
    warnings.warn(message, PaddingWarning, stacklevel=3)
