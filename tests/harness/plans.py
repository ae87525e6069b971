"""Check that a plan is a legal zero-copy layout, independently of the planner."""

import math

from dbuffer.planner.plan import Plan


def fault_of(plan: Plan) -> str:
    """Return the first rule that a plan breaks, in words; "" where it is legal.

    The rules: one offset and granularity for each shape; offsets and shards are aligned; every tensor lies inside the
    buffer; no two overlap; a shard boundary inside a tensor lies between two of its units; the buffer is not smaller
    than the bound that the plan claims.
    """
    count, alignment, shard = len(plan.shapes), plan.alignment_numel, plan.shard_numel
    if plan.num_shards < 1 or shard < 0 or alignment < 1 or {len(plan.offsets), len(plan.granularities)} != {count}:
        return "sizes"
    if shard % alignment or any(offset % alignment for offset in plan.offsets):
        return "alignment"
    end = 0
    for tensor in sorted(range(count), key=lambda index: plan.offsets[index]):
        offset, shape, numel = plan.offsets[tensor], plan.shapes[tensor], math.prod(plan.shapes[tensor])
        if offset < 0 or offset + numel > plan.numel:
            return f"tensor {tensor} leaves the buffer"
        if numel and offset < end:
            return f"tensor {tensor} overlaps the one before it"
        end = offset + numel if numel else end
        unit = plan.granularities[tensor].unit_numel(shape)
        # If the first two boundaries are legal, all later ones are, a shard apart each.
        cuts = [(offset // shard + number) * shard - offset for number in (1, 2)] if numel else []
        if any(cut < numel and cut % unit for cut in cuts):
            return f"tensor {tensor} is cut inside a unit"
    return "claim" if plan.numel < plan.lower_bound_numel else ""
