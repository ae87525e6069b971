"""Which weights travel in 8 bits, in what layout, and what that takes on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dbuffer import Plan
from dbuffer_kernels.quantize import MX_BLOCK

__all__ = ["amax_numel", "cut_blocks", "is_packed", "wire_words"]


def is_packed(shape: Sequence[int], gather: str | None) -> bool:
    """Whether a weight of this shape travels in 8 bits: matrices do, and for MXFP8 those that blocks of 32 divide."""
    if gather is None or len(shape) < 2 or not math.prod(shape):
        return False
    return gather != "mxfp8" or (shape[-1] % MX_BLOCK == 0 and shape[-2] % MX_BLOCK == 0)


def cut_blocks(plan: Plan, gather: str) -> dict[tuple[int, int], slice]:
    """Return the blocks of 32 rows of MXFP8's second grid that a shard boundary cuts: tensor, number of block.

    With each the place of its columns' magnitudes among all that ranks exchange.
    """
    found: set[tuple[int, int]] = set()
    for tensor, (shape, offset) in enumerate(zip(plan.shapes, plan.offsets, strict=True)):
        numel, shard = math.prod(shape), plan.shard_numel if gather == "mxfp8" else 0
        boundaries = range((offset // shard + 1) * shard, offset + numel, shard) if shard else ()
        rows = ((boundary - offset) // shape[-1] for boundary in boundaries)
        found |= {(tensor, row // MX_BLOCK) for row in rows if row % MX_BLOCK}
    places, start = {}, 0
    for tensor, block in sorted(found):
        places[tensor, block] = slice(start, start := start + plan.shapes[tensor][-1])
    return places


def amax_numel(plan: Plan, gather: str) -> int:
    """Return how many largest magnitudes ranks exchange after an optimizer step; 0: none, they need no exchange."""
    if gather == "fp8":
        return len(plan.shapes)
    return sum(place.stop - place.start for place in cut_blocks(plan, gather).values())


def wire_words(plan: Plan, gather: str) -> str:
    """Return how the weights of a plan travel, and what the layout costs or saves, in words for a report."""
    count, cut = amax_numel(plan, gather), len(cut_blocks(plan, gather))
    exchange = f"{count} largest magnitudes in an all-reduce per step" if count else "no exchange of magnitudes"
    layout = {
        "mxfp8": f"{cut} blocks of 32 rows are cut by shards" if cut else "shards cut no block of 32 rows",
        "fp8": "a scale per tensor",
        "int8_block": "blocks of 256, cut by no shard",
    }
    return f"gathered as {gather}: {layout[gather]}, {exchange}"
