"""The clock that orders starts and ends of units' calls, also if forward raises, recomputes or skips the root."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer.events import listen
from megatron_fsdp import fully_shard
from megatron_fsdp.engine.unit import Call, Unit

pytestmark = pytest.mark.usefixtures("eight_ranks")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return a list to which every call of a unit is appended when it begins."""
    found: list[Call] = []
    begin_call = Unit.begin_call

    def begin(self: Unit, module: nn.Module) -> Call | None:
        call = begin_call(self, module)
        if call is not None:
            found.append(call)
        return call

    monkeypatch.setattr(Unit, "begin_call", begin)
    return found


class Fails(nn.Module):
    """A layer whose forward raises on demand."""

    is_failing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_failing:
            raise ValueError("as asked")
        return x


class Chain(nn.Module):
    """Two layers, and between them an optional checkpoint or error."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.fails, self.second = nn.Linear(8, 8), Fails(), nn.Linear(8, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fails(self.first(x))
        if self.use_reentrant is not None:
            result: torch.Tensor = checkpoint(self.second, x, use_reentrant=self.use_reentrant)
            return result
        return self.second(x)  # type: ignore[no-any-return]  # of a module


def sharded(use_reentrant: bool | None = None) -> Any:
    model = Chain(use_reentrant)
    for part in (model.first, model.second, model):
        fully_shard(part)
    return model


def names(calls: list[Call]) -> list[str]:
    return [call.unit.name.rpartition(".")[2] for call in calls]


def is_inside(inner: Call, outer: Call) -> bool:
    return outer.begin < inner.begin < inner.end < outer.end


def test_the_interval_of_a_call_holds_those_of_the_units_inside_it(calls: list[Call]) -> None:
    model = sharded()
    model(torch.ones(1, 8))
    root, first, second = calls
    assert names(calls)[1:] == ["first", "second"]
    assert is_inside(first, root)
    assert is_inside(second, root)
    assert first.end < second.begin


def test_calls_of_two_forwards_follow_each_other(calls: list[Call]) -> None:
    model = sharded()
    outputs = [model(torch.ones(1, 8)) for _ in range(2)]
    assert calls[0].end < calls[3].begin
    sum(outputs).sum().backward()
    model(torch.ones(1, 8))
    assert calls[5].end < calls[6].begin


def test_a_forward_that_raises_ends_its_calls(calls: list[Call]) -> None:
    model = sharded()
    model.fails.is_failing = True
    with pytest.raises(ValueError, match="as asked"):
        model(torch.ones(1, 8))
    model.fails.is_failing = False
    model(torch.ones(1, 8))
    root, first, again = calls[:3]
    assert is_inside(first, root)
    assert root.end < again.begin


def test_a_call_outside_of_the_root_counts(calls: list[Call]) -> None:
    model = sharded()
    x = torch.ones(1, 8, requires_grad=True)
    kept = model.first(x), model(x), model.second(x)
    assert names(calls) == ["first", names(calls)[1], "first", "second", "second"]
    before, root, _, _, after = calls
    assert before.end < root.begin < root.end < after.begin
    del kept


def test_a_reentrant_checkpoint_begins_another_call_after_those_of_forward(calls: list[Call]) -> None:
    model = sharded(use_reentrant=True)
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    root, _, second, again = calls
    assert names([second, again]) == ["second", "second"]
    assert root.end < again.begin < again.end


def test_a_non_reentrant_checkpoint_begins_no_second_call(calls: list[Call]) -> None:
    model = sharded(use_reentrant=False)
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert len(calls) == 3


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_backward_enters_the_calls_in_its_graph_latest_end_first(calls: list[Call], use_reentrant: bool | None) -> None:
    model, entered = sharded(use_reentrant), list[Call]()

    def note(action: str, subject: Any) -> None:
        if action == "enter":
            entered.append(subject)

    with listen(note):
        model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    # A reentrant checkpoint runs forward without a graph; only its second call has one.
    root, first, second = calls[:3]
    assert entered == [root, calls[3] if use_reentrant else second, first]


def test_units_that_run_without_their_root_are_reduced_as_early_in_every_step() -> None:
    model = sharded()
    steps = []
    for _ in range(3):
        actions: list[str] = []

        def note(action: str, subject: Any, actions: list[str] = actions) -> None:
            if action in ("gather", "reduce", "reshard"):
                actions.append(f"{action} {subject.name}")

        with listen(note):
            model.second(model.first(torch.ones(1, 8, requires_grad=True))).sum().backward()
        steps.append(actions)
    assert steps[0] == steps[1] == steps[2]
    # "second" is reduced when backward reaches "first", not at the end.
    assert steps[0].index("reduce second") < steps[0].index("reshard first", steps[0].index("reduce second"))


def test_a_pass_gathers_ahead_in_the_order_of_the_last_one(calls: list[Call]) -> None:
    model, gathered = sharded(), list[tuple[str, int]]()

    def note(action: str, subject: Any) -> None:
        if action == "gather":
            gathered.append((subject.name, len(calls)))

    with listen(note), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 8))
    # The clock counts calls. In the second pass, "first" is gathered when its root begins (call 4), and "second" when
    # "first" begins (call 5).
    assert gathered == [("first", 2), ("second", 3), ("first", 4), ("second", 5)]
