"""Units whose outputs are views: of their results, changed in place by the caller, or of their weights."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer.events import listen
from megatron_fsdp import fully_shard
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Made, inputs
from tests.harness.twins import Twins, sharded

Output = Callable[[torch.Tensor], Any]
VIEWS: dict[str, Output] = {
    "a view": lambda y: y.view(-1, 1, WIDTH),
    "a slice": lambda y: y[:, : WIDTH - 1],
    "a transpose": lambda y: y.t(),
    "slices in a dict": lambda y: {"left": y[:, :2], "right": y[:, 2:]},
    "itself and a slice": lambda y: (y[:, :3], y),
}


def _shift(y: torch.Tensor) -> None:
    y[:, :1] += 1.0


def _scale(y: torch.Tensor) -> None:
    y.mul_(3.0)


def _flatten(y: torch.Tensor) -> None:
    y[:1].unsqueeze(0).mul_(2.0)


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "+= on columns": _shift,
    "mul_": _scale,
    "mul_ of a view": _flatten,
}


def changed(view: str, change: str) -> nn.Module:
    """Return a model that changes in place the output of its second unit, a view of a result of two layers."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        returned = m.middle(m.first(x).sin())
        parts = list(returned.values()) if isinstance(returned, dict) else returned
        parts = [parts] if isinstance(parts, torch.Tensor) else list(parts)
        CHANGES[change](parts[0])
        return m.last(sum(part.square().sum() for part in parts).tanh().expand(WIDTH))

    middle = Made(
        lambda m, x: VIEWS[view](m.up(m.down(x).tanh())), **{k: nn.Linear(WIDTH, WIDTH) for k in ("up", "down")}
    )
    return Made(forward, first=nn.Linear(WIDTH, WIDTH), middle=middle, last=nn.Linear(WIDTH, 3))


class Table(nn.Module):
    """A table of queries whose output the caller uses after the module has returned."""

    def __init__(self, take: Output) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(5, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.take = take

    def forward(self, x: torch.Tensor) -> Any:
        """Return a view of the table, and a computed tensor."""
        return self.take(self.weight), x * self.scale


TAKEN: dict[str, Output] = {
    "the weight": lambda w: w,
    "a slice": lambda w: w[:3],
    "a transpose twice": lambda w: w.t().t(),
    "an expanded one": lambda w: w.unsqueeze(0).expand(2, -1, -1)[1],
    "detached": lambda w: w.detach()[1:],
    "data": lambda w: w.data,
}


def table(take: str) -> nn.Module:
    """Return a model that multiplies with a view of a unit's weights that the unit returned."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        queries, y = m.table(m.first(x).sin())
        return m.last(y) @ queries.t()

    parts = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH)}
    return Made(forward, **parts, table=Table(TAKEN[take]))


def apart(build: Callable[[], nn.Module], **options: Any) -> float:
    """Return the largest difference of outputs and gradients to the whole model in two steps."""

    def lose(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(inputs(rank, step)).square().mean()

    twins, rank, worst = Twins(build, **options), dist.get_rank(), []
    for step in range(2):
        loss = lose(twins.model, rank, step)
        loss.backward()
        worst += [float((loss - lose(twins.plain, rank, step)).detach().abs())]
        twins.plain_backward(step, lose)
        worst.append(twins.gradients_apart())
        twins.zero_grad()
    with torch.no_grad():
        worst.append(float((lose(twins.model, rank, 5) - lose(twins.plain, rank, 5)).abs()))
    return max(worst)


RESHARD = [{"reshard_after_forward": True}, {}, {"reshard_after_forward": False}]


@pytest.mark.parametrize("view", VIEWS)
@on_ranks(2)
def test_a_view_that_a_unit_returns_may_be_changed_in_place(view: str) -> None:
    for change in CHANGES:
        for options in RESHARD:
            assert apart(partial(changed, view, change), **options) < 1e-6, (change, options)


@pytest.mark.parametrize("take", TAKEN)
@on_ranks(3)
def test_a_unit_may_return_its_weight_or_a_view_of_it(take: str) -> None:
    for options in RESHARD:
        assert apart(lambda: table(take), **options) < 1e-6, options


@on_ranks(2)
def test_a_returned_weight_keeps_its_values_after_the_unit_resharded() -> None:
    model: Any = table("a slice")
    wanted = copy.deepcopy(model.table.weight[:3].detach())
    fully_shard(model.table, reshard_after_forward=True)
    assert model.table(inputs(0, 0))[0].equal(wanted)


@on_ranks(2)
def test_a_view_of_an_earlier_units_output_gathers_no_unit_twice() -> None:
    through = Made(lambda m, x: (m.linear(x), x[:, :2]), linear=nn.Linear(WIDTH, WIDTH))
    model: Any = Made(
        lambda m, x: (lambda h: (lambda y, z: m.last(y).sum() + z.sum())(*m.through(h)))(m.first(x)),
        first=nn.Linear(WIDTH, WIDTH), through=through, last=nn.Linear(WIDTH, 3),
    )  # fmt: skip
    sharded(model, reshard_after_forward=True)
    gathers: list[str] = []

    def note(what: str, subject: Any) -> None:
        if what == "gather":
            gathers.append(subject.name)

    model(inputs(0, 0)).backward()
    with listen(note):
        model(inputs(0, 0)).backward()
    assert sorted(gathers) == sorted(2 * ["first", "through", "last"])
