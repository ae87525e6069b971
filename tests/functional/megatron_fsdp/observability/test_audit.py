"""The audit finds what it says it finds, names unit and parameter, and lets right training pass with the same bits."""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from megatron_fsdp import Audit, ConfigError, MixedPrecisionPolicy, StateError, Watch, fully_shard_optimizer, microbatch
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from tests.harness import run_ranks
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import shard_model, whole_state

LAYOUTS = {
    "zero 3": ("optim_grads_params", (3,)), "zero 2": ("optim_grads", (2,)), "zero 1": ("optim", (2,)),
    "zero 0": ("no_shard", (2,)), "hsdp": ("hsdp", (2, 2)), "hfsdp": ("hfsdp", (2, 2)),
}  # fmt: skip


MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)


def sharded(layout: str, policy: MixedPrecisionPolicy | None = None) -> Model:
    strategy, shape = LAYOUTS[layout]
    return shard_model(make_model(), make_mesh(shape), strategy, policy)


def step(model: Model, number: int = 0) -> None:
    for index in range(2):
        tokens = draw_tokens(dist.get_rank(), number, index)
        with microbatch(model, index == 1):
            loss_of(model(tokens), tokens).backward()


def train(layout: str, is_audited: bool, is_mixed: bool) -> dict[str, torch.Tensor]:
    model = sharded(layout, MIXED if is_mixed else None)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    before = {name: dict(vars(group)) for name, group in groups_of(model).items()}
    with Audit(model) if is_audited else mock.MagicMock():
        for number in range(3):
            step(model, number)
            optimizer.step()
            optimizer.zero_grad()
    assert {name: set(vars(group)) for name, group in groups_of(model).items()} == {
        name: set(attributes) for name, attributes in before.items()
    }
    return whole_state(model)


def groups_of(model: Model) -> dict[str, ParameterGroup]:
    return {group.name: group for block in (model, *model.blocks) for group in block.parameter_groups}


# The others take part in `make test-nightly`.
QUICK = [("zero 3", True), ("zero 1", True), ("zero 0", False), ("hfsdp", False)]


@pytest.mark.parametrize(
    ("layout", "is_mixed"),
    [
        pytest.param(layout, is_mixed, marks=() if (layout, is_mixed) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for is_mixed in (False, True)
    ],
)
def test_right_training_passes_and_keeps_its_bits(layout: str, is_mixed: bool) -> None:
    num_ranks = torch.Size(LAYOUTS[layout][1]).numel()
    plain = run_ranks(num_ranks, train, layout, False, is_mixed)
    for mine, other in zip(run_ranks(num_ranks, train, layout, True, is_mixed), plain, strict=True):
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def leave_weights_stale(model: Model) -> None:
    step(model)
    group = model.blocks[1].parameter_groups[0]
    with torch.no_grad():
        model.blocks[1].experts.add_(1.0)
    mock.patch.object(group.weights, "start_refresh", return_value=[]).start()


def change_while_gathered(model: Model) -> None:

    def change(block: nn.Module, _inputs: object) -> None:
        block.project.weight.data.mul_(1.5)

    model.blocks[0].register_forward_pre_hook(change)


def reduce_twice(model: Model) -> None:
    buffer = model.blocks[1].parameter_groups[0].gradients
    assert buffer is not None
    reduce = GradientBuffer.reduce

    def twice(buffers: Sequence[GradientBuffer], **options: Any) -> None:
        reduce(buffers, **options)
        if buffer in buffers:
            buffer._begin()
            buffer.packed.zero_()
            reduce([buffer])

    mock.patch.object(GradientBuffer, "reduce", staticmethod(twice)).start()


def never_reduce(model: Model) -> None:
    buffer = model.blocks[1].parameter_groups[0].gradients
    close = buffer.close

    def keep(*, reduce: bool) -> bool:
        return close(reduce=False)

    mock.patch.object(buffer, "close", keep).start()


class Borrowed(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.kept: list[torch.Tensor] = []
        model.blocks[0].register_forward_pre_hook(lambda block, _: self.kept.append(block.project.weight.detach()))

    def use(self) -> None:
        functional.linear(torch.ones(15), self.kept[-1])


def use_released(model: Model) -> None:
    borrowed = Borrowed(model)
    model.register_forward_hook(lambda *_: borrowed.use())


def gather_wrongly(model: Model) -> None:
    group = model.blocks[1].parameter_groups[0]
    finish = group.use_gathered

    def spoil() -> None:
        finish()
        if dist.get_rank() == 1:
            group.gathered.local_buffer[0] += 1.0

    mock.patch.object(group, "use_gathered", spoil).start()


FAULTS: dict[str, tuple[Callable[[Model], None], str, str]] = {
    "stale": (
        leave_weights_stale,
        "hfsdp",
        "'blocks.1': (the gathered weight of parameter 'experts' is not its|on another rank)",
    ),
    # Where weights rest whole, a rank's own part is the main weight itself, and the others' are old.
    "stale zero 1": (leave_weights_stale, "zero 1", "'blocks.1': the ranks gathered different weights"),
    "mutated": (change_while_gathered, "zero 3", "'blocks.0': parameter 'project.weight' was changed in place while"),
    "twice": (reduce_twice, "zero 3", "'blocks.1': gradients were reduced twice in this backward"),
    "never": (never_reduce, "zero 3", "'blocks.1': gradients arrived and were not reduced in this backward"),
    "released": (use_released, "zero 3", "'blocks.0': aten.* reads the gathered weight of parameter 'project.weight'"),
    "gathered": (gather_wrongly, "zero 3", "'blocks.1': the ranks gathered different weights in the backward"),
}


def find(fault: str, is_watched: bool) -> str:
    make, layout, _ = FAULTS[fault]
    model = sharded(layout, MIXED if fault == "stale" else None)
    make(model)
    try:
        with Audit(model), Watch(model) if is_watched else contextlib.nullcontext():
            step(model)
    except StateError as error:
        return str(error)
    finally:
        mock.patch.stopall()
    return "nothing found"


# What is found at the end of a backward must be found with a watch there too.
@pytest.mark.parametrize(("fault", "is_watched"), [*((fault, False) for fault in FAULTS), ("gathered", True)])
def test_a_fault_is_found_on_every_rank_and_named(fault: str, is_watched: bool) -> None:
    _, layout, wanted = FAULTS[fault]
    for found in run_ranks(torch.Size(LAYOUTS[layout][1]).numel(), find, fault, is_watched):
        assert re.search(wanted, found), found


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module of the model has parameters that fully_shard took"):
        Audit(nn.Linear(2, 2))
