"""Facts of small models whose bytes can be worked out by hand."""

import torch

from dbuffer import plan
from megatron_fsdp import Placements
from megatron_fsdp.planning.model_spec import AxisFacts, GroupFacts, ModelFacts, UnitFacts, Visit, VisitKind
from megatron_fsdp.policy.precision import GroupDtypes

FP32 = GroupDtypes(torch.float32, torch.float32, torch.float32, torch.float32)
BF16 = GroupDtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)


def group_of(
    rows: int, placements: Placements | None = None, dtypes: GroupDtypes = FP32, sizes: tuple[int, ...] = (4,)
) -> GroupFacts:
    """A weight of ``rows`` rows of 4 elements, which 16 bytes align in FP32: nothing is padded if ranks divide rows."""
    axes = tuple(AxisFacts(f"axis{position}", size, size - 1) for position, size in enumerate(sizes))
    placements = placements or Placements.optim_grads_params(0)
    layout = plan([(rows, 4)], placements.num_shards(sizes), itemsize=4)
    return GroupFacts(("weight",), layout, axes, placements, dtypes, requires_grad=True)


def chain(*groups: GroupFacts) -> ModelFacts:
    """A root without parameters around units of one group each, which run one after the other."""
    units = [UnitFacts("root", (), reshards_after_forward=False)]
    units += [UnitFacts(f"unit{number}", (group,)) for number, group in enumerate(groups, start=1)]
    visits = [Visit(VisitKind.OPEN, 0)]
    for number in range(1, len(units)):
        visits += [Visit(VisitKind.OPEN, number), Visit(VisitKind.USE, number, 0), Visit(VisitKind.CLOSE, number)]
    return ModelFacts(tuple(units), (*visits, Visit(VisitKind.CLOSE, 0)))


def three_units(dtypes: GroupDtypes = FP32, placements: Placements | None = None) -> ModelFacts:
    """Buffers of 64, 128 and 32 elements."""
    return chain(*(group_of(rows, placements, dtypes) for rows in (16, 32, 8)))
