"""Facts of small models whose bytes can be worked out by hand."""

import torch

from dbuffer import plan
from megatron_fsdp import Placements
from megatron_fsdp.planning.model_spec import AxisFacts, Call, GroupFacts, ModelFacts, UnitFacts, Use
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
    """A root without parameters around units of one group each, which run one after the other, on a CPU."""
    units = [UnitFacts("root", (), is_root=True)]
    units += [
        UnitFacts(f"unit{number}", (group,), reshard_after_forward=True) for number, group in enumerate(groups, start=1)
    ]
    calls = [
        Call(number, tuple(Use(number, 0, index) for index in range(len(group.names))))
        for number, group in enumerate(groups, start=1)
    ]
    return ModelFacts(tuple(units), Call(0, tuple(calls)), has_streams=False)


def three_units(dtypes: GroupDtypes = FP32, placements: Placements | None = None) -> ModelFacts:
    """Buffers of 64, 128 and 32 elements."""
    return chain(*(group_of(rows, placements, dtypes) for rows in (16, 32, 8)))
