"""Crashes of saves, explored state by state with the real code.

The real code is checked, not a model of it. A save runs, and the state that a crash would leave at each of its effects
on the disk is copied (``tests/harness/effects.py``). Every such state is loaded and saved again, with further crashes.
"""

from __future__ import annotations

import itertools
import json
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import CheckpointError, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.scratch import resting_place
from megatron_fsdp.checkpoint.series import CheckpointSeries
from tests.harness.effects import Recording, Tree, key_of, record, restore
from tests.harness.grids import nightly_but


@contextmanager
def one_life(number: int) -> Iterator[None]:
    """Run as a separate process with the same names in every run."""
    tokens = (f"{number:02x}{count:06x}" for count in itertools.count())
    with (
        mock.patch.object(secrets, "token_hex", side_effect=tokens),
        mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=number)),
    ):
        yield


def trained(value: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer with state, all derived from one number."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * value)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [optimizer.state[parameter][key] for parameter in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [*(parameter.detach() for parameter in model.parameters()), *state]


@dataclass(frozen=True)
class Use:
    """A way to save: the folder's state before, and how it is saved over.

    Attributes:
        before: values saved one after another, at the steps of that number where it is a series.
        keep_last: how many a series keeps; None for a path that is saved to again and again.
        step: that a series saves to each time.
    """

    before: tuple[int, ...]
    keep_last: int | None = None
    step: int | None = None
    is_asynchronous: bool = False

    def save(self, root: Path, value: int) -> None:
        """Save a value; ``value`` is the step too unless one step is saved again and again."""
        model, optimizer = trained(value)
        extra = {"value": value}
        if self.keep_last is None:
            handle = save_checkpoint(model, optimizer, root / "step", extra=extra, asynchronous=self.is_asynchronous)
        else:
            handle = CheckpointSeries(root).save(
                model,
                optimizer,
                self.step or value,
                extra=extra,
                keep_last=self.keep_last,
                asynchronous=self.is_asynchronous,
            )
        handle.wait()

    def load(self, root: Path) -> int | None:
        """Return the checkpoint's value, after checking that all numbers belong to it; None without a checkpoint."""
        model, optimizer = trained(99)
        if self.keep_last is None:
            if not (root / "step").exists() and resting_place(root / "step") == root / "step":
                with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
                    load_checkpoint(model, optimizer, root / "step")
                return None
            extra = load_checkpoint(model, optimizer, root / "step")
        else:
            series = CheckpointSeries(root)
            found = series.load(model, optimizer)
            if found is None:
                return None
            assert found.damaged == ()
            extra = found.extra
            latest = series.latest()
            if latest is not None:
                load_checkpoint(*trained(99), series.path(latest))
        value = int(extra["value"])
        for mine, wanted in zip(numbers(model, optimizer), numbers(*trained(value)), strict=True):
            assert torch.equal(mine, wanted)
        assert optimizer.param_groups[0]["lr"] == 0.01 * value
        return value

    def names(self, value: int) -> set[str]:
        if self.keep_last is None:
            return {"step"}
        steps = [self.step] if self.step else [*self.before, value][-self.keep_last :]
        return {"latest", *(f"step_{step:07d}" for step in steps)}


USES = {
    "over a checkpoint": Use((1,)),
    "into a new path": Use(()),
    "a series that keeps one": Use((1,), keep_last=1),
    "a series that saves a step again": Use((1,), keep_last=1, step=7),
}


class Explorer:
    """Save, crash, load, and save again.

    Attributes:
        num_states: different folders from which it was loaded and saved. num_effects: of one save without a crash.
    """

    def __init__(self, use: Use, root: Path) -> None:
        self.use, self.root = use, root
        self.num_states = self.num_effects = 0
        self._loaded: dict[int, int | None] = {}

    def begin(self) -> Tree:
        restore(self.root, {})
        with one_life(0):
            for value in self.use.before:
                self.use.save(self.root, value)
        return self.seen()

    def seen(self) -> Tree:
        recording = Recording(self.root)
        recording.look()
        return recording.killed[0]

    def saved(self, tree: Tree, value: int) -> Recording:
        restore(self.root, tree)
        with one_life(value), record(self.root) as recording:
            self.use.save(self.root, value)
        return recording

    def loaded(self, tree: Tree) -> int | None:
        """Return the value of the checkpoint in a folder; loading changes nothing there."""
        key = key_of(tree)
        if key not in self._loaded:
            restore(self.root, tree)
            self._loaded[key] = self.use.load(self.root)
            assert self.seen() == tree
            self.num_states += 1
        return self._loaded[key]

    def check_end(self, tree: Tree, value: int) -> None:
        """Check the folder after an undisturbed save: the new value, and no leftovers."""
        assert self.loaded(tree) == value
        left = {name.split("/")[0] for name in tree} - self.use.names(value)
        assert [name for name in left if not _is_bare(tree, name)] == []

    def explore(self, depth: int) -> None:
        """Crash in a save and in the next ``depth - 1`` saves, and save undisturbed from each resulting state."""
        trees = [self.begin()]
        for value in range(2, 2 + depth + 1):
            following: dict[int, Tree] = {}
            for tree in trees:
                old = self.loaded(tree)
                recording = self.saved(tree, value)
                self.num_effects = self.num_effects or len(recording.effects)
                self.check_end(recording.killed[-1], value)
                for moment, left in recording.crashes():
                    if value < 2 + depth:
                        found = self.loaded(left)
                        assert found in (old, value), f"{moment}: {found}, wanted {old} or {value}"
                        following[key_of(left)] = left
            trees = list(following.values())

    def fail(self, error: type[BaseException]) -> int:
        """Make each effect of a save fail, one per run: one checkpoint stays whole, and the next save clears up."""
        start = self.begin()
        old, num_effects = self.loaded(start), len(self.saved(start, 2).effects)
        for number in range(num_effects):
            restore(self.root, start)
            raised = None
            with one_life(2), record(self.root, (number, error("injected"))) as recording:
                try:
                    self.use.save(self.root, 2)
                except BaseException as caught:
                    raised = caught
            moment = recording.effects[number]
            assert raised is None or isinstance(raised, CheckpointError), f"{moment}: {raised!r}"
            found = self.loaded(recording.killed[-1])
            assert found == 2 if raised is None else found in (old, 2), f"{moment}: {found} after {raised}"
            self.check_end(self.saved(recording.killed[-1], 3).killed[-1], 3)
        return num_effects


def _is_bare(tree: Tree, name: str) -> bool:
    """Return whether a folder is empty but for an incomplete mark: it could as well be a foreign folder."""
    below = {path: content for path, content in tree.items() if path.startswith(f"{name}/")}
    if not below:
        return True
    try:
        json.loads(below.get(f"{name}/owner.json") or b"")
    except ValueError:
        return set(below) == {f"{name}/owner.json"}
    return False


@pytest.mark.parametrize("name", nightly_but(list(USES)[:3], USES))
def test_after_a_crash_at_any_effect_a_checkpoint_is_whole_and_a_save_clears_up(name: str, tmp_path: Path) -> None:
    explorer = Explorer(USES[name], tmp_path / "root")
    explorer.explore(depth=1)
    print(f"{name}: {explorer.num_effects} effects, {explorer.num_states} states")
    assert explorer.num_effects >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", USES)
def test_any_two_crashes_in_a_row_leave_one_checkpoint_whole(name: str, tmp_path: Path) -> None:
    explorer = Explorer(USES[name], tmp_path / "root")
    explorer.explore(depth=2)
    print(f"{name}, two crashes: {explorer.num_states} states")
    assert explorer.num_states > explorer.num_effects


@pytest.mark.parametrize("name", nightly_but(["over a checkpoint"], USES))
@pytest.mark.parametrize("error", [OSError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
def test_after_a_failure_at_any_effect_a_checkpoint_is_whole(
    name: str, error: type[BaseException], tmp_path: Path
) -> None:
    assert Explorer(USES[name], tmp_path / "root").fail(error) >= 20


def test_a_save_in_the_background_does_the_same_on_the_disk(tmp_path: Path) -> None:
    effects = []
    for use in (Use((1,)), Use((1,), is_asynchronous=True), Use((1,), 1), Use((1,), 1, is_asynchronous=True)):
        explorer = Explorer(use, tmp_path / "root")
        effects.append(explorer.saved(explorer.begin(), 2).effects)
    assert effects[0] == effects[1]
    assert effects[2] == effects[3]
