"""Other contents of a checkpoint: schedules, param groups, random states, ties, and modules' own state."""

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import CheckpointError, fully_shard, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.api import load_matching
from tests.functional.checkpoint_cases import Layout, State, full_optimizer_state, make_two_groups, message_of
from tests.functional.checkpoint_cases import train_alone as train
from tests.harness import on_ranks, run_ranks
from tests.harness.models import make_model, world_mesh
from tests.harness.oracle import differing, sharded_model, whole_state
from tests.harness.oracle import train as train_on_all

# ---------------------------------------------------------------------- schedules and groups


@on_ranks(2)
def test_a_learning_rate_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    """Train with a schedule, save half way, and continue both the run and a run resumed from the checkpoint."""
    path = str(tmp_path / "step")

    def build(seed: int) -> tuple[Any, Any, Any]:
        model, optimizer = Layout((2,)).build(seed)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 + seed)

    def advance(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        rates = []
        for step in steps:
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    run, twin = build(0), build(1)
    advance(*run, range(3))
    save_checkpoint(run[0], run[1], path, extra={"scheduler": run[2].state_dict()})
    twin[2].load_state_dict(load_checkpoint(twin[0], twin[1], path)["scheduler"])
    one, other = advance(*run, range(3, 6)), advance(*twin, range(3, 6))
    differences = differing(whole_state(twin[0]), whole_state(run[0]))
    assert one == other
    assert len(set(one)) == 3
    assert differences == []


@on_ranks(2)
def test_moments_and_hyperparameters_follow_the_names_into_other_groups(tmp_path: Path) -> None:
    """Save an optimizer of two groups, and load into one with another order of parameters and three groups."""
    path = str(tmp_path / "step")
    model, optimizer = Layout((2,)).build(seed=0)
    train(model, optimizer, range(2))
    save_checkpoint(model, optimizer, path)
    other = sharded_model(seed=1)
    parameters = list(other.parameters())[::-1]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    groups = [matrices[2:], matrices[:2], [parameter for parameter in parameters if parameter.ndim <= 1]]
    other_optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)
    load_checkpoint(other, other_optimizer, path)
    decays = [group["weight_decay"] for group in other_optimizer.param_groups]
    found = full_optimizer_state(other, other_optimizer)
    wanted = full_optimizer_state(model, optimizer)
    assert differing(found, wanted) == []
    assert decays == [0.1, 0.1, 0.0]


@on_ranks(1)
def test_groups_that_differ_are_not_merged_silently(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = Layout((1,)).build(seed=0)
    save_checkpoint(model, optimizer, path)
    merged = torch.optim.AdamW(model.parameters(), lr=0.5)
    message = message_of(CheckpointError, lambda: load_checkpoint(model, merged, path))
    is_untouched = merged.param_groups[0]["lr"] == 0.5 and not merged.state
    assert "are in one group of this optimizer and were saved in two, with another weight_decay" in message
    assert is_untouched


# ---------------------------------------------------------------------- an optimizer that has not stepped


def save_before_the_first_step(path: str) -> tuple[State, State, int]:
    model, optimizer = Layout((2,)).build(seed=0)
    save_checkpoint(model, optimizer, path)
    num_states = len(optimizer.state)
    other, other_optimizer = Layout((2,)).build(seed=1)
    train(other, other_optimizer, range(1))
    load_checkpoint(other, other_optimizer, path)
    num_states += len(other_optimizer.state)
    train(model, optimizer, range(2))
    train(other, other_optimizer, range(2))
    return whole_state(model), whole_state(other), num_states


def test_saving_before_the_first_step_changes_nothing_and_loading_takes_state_away(tmp_path: Path) -> None:
    never_saved = make_model(0)
    train_both = make_two_groups(never_saved, lr=0.01)
    train_on_all(never_saved, train_both, range(2), range(2))
    for uninterrupted, resumed, num_states in run_ranks(2, save_before_the_first_step, str(tmp_path / "step")):
        assert num_states == 0
        assert differing(resumed, uninterrupted) == []
        assert differing(uninterrupted, never_saved.state_dict(), 1e-5) == []


@on_ranks(2)
def test_an_optimizer_that_was_refused_before_its_first_step_is_as_fresh_as_before(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = Layout((2,)).build(seed=0)
    train(model, optimizer, range(1))
    save_checkpoint(model, optimizer, path)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    message = message_of(CheckpointError, lambda: load_checkpoint(model, fresh, path))
    num_states = len(fresh.state)
    assert "of another optimizer; nothing was loaded" in message
    assert "betas" in message
    assert num_states == 0


# ---------------------------------------------------------------------- random numbers


def draw() -> list[float]:
    """Draw from every generator."""
    return [torch.rand(()).item(), float(numpy.random.normal()), random.gauss(0.0, 1.0)]


def save_and_draw(path: str, is_common: bool) -> list[float]:
    seed = 5 if is_common else 5 + dist.get_rank()
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    draw()
    save_checkpoint(nn.Linear(2, 2), None, path)
    return draw()


def load_and_draw(path: str) -> tuple[bool, list[float]]:
    """Return whether loading left PyTorch's generator alone, and the numbers drawn afterwards."""
    model = nn.Linear(2, 2)
    before = torch.get_rng_state()
    load_checkpoint(model, None, path)
    return torch.equal(torch.get_rng_state(), before), draw()


@pytest.mark.parametrize("is_common", [False, True])
def test_random_states_resume_on_every_rank_whose_state_was_saved(is_common: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    drawn = run_ranks(3, save_and_draw, path, is_common)
    assert (drawn[0] == drawn[1]) is is_common
    assert run_ranks(3, load_and_draw, path) == [(False, numbers) for numbers in drawn]
    # On another number of ranks, a generator's state is known only if all ranks had the same.
    for (is_untouched, numbers), wanted in zip(run_ranks(2, load_and_draw, path), drawn[:2], strict=True):
        assert is_untouched is not is_common
        assert (numbers == wanted) is is_common


# ---------------------------------------------------------------------- ties


class Tied(nn.Module):
    """An embedding and a head of one shape, tied or not."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def build_tied(is_tied: bool, seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(Tied(is_tied=is_tied), world_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save_tied(path: str, is_tied: bool) -> tuple[State, State]:
    model, optimizer = build_tied(is_tied, seed=0)
    model(torch.arange(7) + dist.get_rank()).square().mean().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, path)
    return whole_state(model), full_optimizer_state(model, optimizer)


def load_tied(path: str) -> list[tuple[State, State]]:
    """Load into an untied and a tied model."""
    found = []
    for is_tied in (False, True):
        model, optimizer = build_tied(is_tied, seed=1)
        load_checkpoint(model, optimizer, path)
        found.append((whole_state(model), full_optimizer_state(model, optimizer)))
    return found


def test_a_tied_checkpoint_gives_its_value_and_moments_to_both_untied_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    weights, moments = run_ranks(2, save_tied, path, True)[0]
    of_both = moments | {name.replace("embedding", "head"): value for name, value in moments.items()}
    for rank in run_ranks(3, load_tied, path):
        for (found, found_moments), wanted in zip(rank, (of_both, moments), strict=True):
            assert differing(found, weights) == []
            assert differing(found_moments, wanted) == []


def refuse_untied(path: str) -> tuple[str, bool]:
    model, optimizer = build_tied(True, seed=1)
    before = whole_state(model)
    message = message_of(CheckpointError, lambda: load_checkpoint(model, optimizer, path))
    return message, differing(whole_state(model), before) == []


def test_two_different_weights_do_not_become_one(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    run_ranks(2, save_tied, path, False)
    for message, is_untouched in run_ranks(3, refuse_untied, path):
        assert "different values for 'embedding.weight' and 'head.weight', which are one parameter" in message
        assert is_untouched


def match_untied(path: str) -> tuple[str, bool]:
    model, _ = build_tied(True, seed=1)
    before = whole_state(model)
    message = message_of(CheckpointError, lambda: load_matching(model, path))
    return message, differing(whole_state(model), before) == []


def test_two_different_weights_do_not_become_one_in_a_partial_load(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    run_ranks(2, save_tied, path, False)
    for message, is_untouched in run_ranks(3, match_untied, path):
        assert "different values for 'embedding.weight' and 'head.weight', which are one parameter" in message
        assert is_untouched


# ---------------------------------------------------------------------- extra and modules' own state


class Counter(nn.Module):
    """A module whose extra state is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@on_ranks(2)
def test_modules_get_their_own_state_back(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model = fully_shard(Counter(), world_mesh())
    model.seen = {"scale": 0.5, "history": [1, 2]}
    save_checkpoint(model, None, path)
    other = fully_shard(Counter(), world_mesh())
    load_checkpoint(other, None, path)
    assert other.seen == {"scale": 0.5, "history": [1, 2]}


@on_ranks(2)
def test_a_checkpoint_without_a_modules_own_state_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    without = nn.Sequential(OrderedDict(linear=nn.Linear(3, 3)))
    save_checkpoint(fully_shard(without, world_mesh()), None, path)
    model = fully_shard(Counter(), world_mesh())
    with pytest.raises(CheckpointError, match=r"_extra_state: not in the checkpoint"):
        load_checkpoint(model, None, path)


class Anything:
    """An object that only code can restore."""


def save_anything(path: str) -> str:
    return message_of(
        CheckpointError, lambda: save_checkpoint(nn.Linear(2, 2), None, path, extra={"thing": Anything()})
    )


def test_extra_that_could_not_be_loaded_safely_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for message in run_ranks(2, save_anything, str(tmp_path / "step")):
        assert "extra" in message
        assert "without running code" in message
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- optimizers with options like Adam's


def stepped(kind: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Linear(5, 3), world_mesh())
    optimizer = kind(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


@on_ranks(2)
def test_state_of_another_member_of_adams_family_is_refused(tmp_path: Path) -> None:
    Adam, Adamax, NAdam, RAdam = torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam
    for kind in (Adam, Adamax, NAdam, RAdam):
        save_checkpoint(*stepped(kind), tmp_path / kind.__name__)
    refused = [(Adam, Adamax), (Adamax, Adam), (Adamax, NAdam), (Adamax, RAdam), (NAdam, RAdam), (RAdam, NAdam)]
    for saver, loader in refused:
        model, optimizer = stepped(loader)
        before = whole_state(model), full_optimizer_state(model, optimizer)
        with pytest.raises(
            CheckpointError, match=r"(?s)state '(exp_inf|mu_product)', which (Adamax|NAdam) has: .*fix: "
        ):
            load_checkpoint(model, optimizer, tmp_path / saver.__name__)
        assert differing(whole_state(model), before[0]) == []
        assert differing(full_optimizer_state(model, optimizer), before[1]) == []
    for saver, loader in ((RAdam, Adam), (NAdam, NAdam)):
        load_checkpoint(*stepped(loader), tmp_path / saver.__name__)
