"""Asynchronous saves hold the state at the call, run in order, and lose no error."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import CheckpointError, export_safetensors, full_state_dict, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint import writer as checkpoint_writer
from tests.functional.checkpoint_cases import LAYOUTS, Layout, full_optimizer_state, message_of, train_alone
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.oracle import differing, whole_state


@contextmanager
def held_up(gate: threading.Event) -> Iterator[None]:
    """Block all writes until the gate opens."""
    write = checkpoint_writer._write_mine

    def wait_and_write(draft: checkpoint_writer.Draft) -> object:
        gate.wait(timeout=30.0)
        return write(draft)

    with mock.patch.object(checkpoint_writer, "_write_mine", wait_and_write):
        yield


def train_while_saving(layout: Layout, path: str) -> tuple[bool, list[str], list[str]]:
    """Train on before a byte is written; compare the loaded state with the state at the call."""
    model, optimizer = layout.build(seed=0)
    train_alone(model, optimizer, range(2))
    gate = threading.Event()
    with held_up(gate):
        handle = save_checkpoint(model, optimizer, path, extra={"step": 2}, asynchronous=True)
        wanted = whole_state(model), full_optimizer_state(model, optimizer)
        train_alone(model, optimizer, range(2, 4))
        is_early = not handle.done and not Path(path).exists()
        gate.set()
        assert handle.wait() == Path(path)
    changed = differing(whole_state(model), wanted[0])
    other, other_optimizer = layout.build(seed=1)
    assert load_checkpoint(other, other_optimizer, path) == {"step": 2}
    found = differing(whole_state(other), wanted[0])
    found += differing(full_optimizer_state(other, other_optimizer), wanted[1])
    return is_early and bool(changed), found, [] if handle.done else ["not done"]


@pytest.mark.parametrize(
    "name", nightly_but(["3 ranks", "HSDP"], ["3 ranks", "HSDP", "4 ranks, whole tensors, bf16", "FSDP2"])
)
def test_the_checkpoint_holds_the_state_of_the_call_though_training_went_on(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for is_early, differences, complaints in run_ranks(
        layout.num_ranks, train_while_saving, layout, str(tmp_path / "s")
    ):
        assert is_early
        assert differences == []
        assert complaints == []


@on_ranks(2)
def test_the_copies_take_no_more_than_what_a_rank_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = Layout((2,)).build(seed=0)
    train_alone(model, optimizer, range(1))
    held: list[int] = []
    hold = checkpoint_writer.HoldingPlanner.hold

    def measure(planner: checkpoint_writer.HoldingPlanner) -> None:
        hold(planner)
        tensors = [value for value in planner.held.values() if isinstance(value, torch.Tensor)]
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        assert planner.state_dict == {}

    with mock.patch.object(checkpoint_writer.HoldingPlanner, "hold", measure):
        save_checkpoint(model, optimizer, path, asynchronous=True).wait()
    mine = Path(path).glob(f"__{dist.get_rank()}_*")
    written = sum(file.stat().st_size for file in mine)
    assert 0 < held[0] < written


@on_ranks(2)
def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = Layout((2,)).build(seed=0)
    gate = threading.Event()
    with held_up(gate):
        first = save_checkpoint(model, optimizer, f"{path}-1", asynchronous=True)
        threading.Timer(0.2, gate.set).start()
        second = save_checkpoint(model, optimizer, f"{path}-2", asynchronous=True)
        is_ordered = first.done
        second.wait()
    names = sorted(entry.name for entry in Path(path).parent.iterdir())
    assert is_ordered
    assert names == ["step-1", "step-2"]


@on_ranks(2)
def test_a_load_waits_for_the_save_before_it(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = Layout((2,)).build(seed=0)
    save_checkpoint(model, optimizer, path, asynchronous=True)
    other, other_optimizer = Layout((2,)).build(seed=1)
    load_checkpoint(other, other_optimizer, path)
    found = whole_state(other)
    wanted = whole_state(model)
    assert differing(found, wanted) == []


def wait_too_short(path: str) -> tuple[str, str]:
    model, optimizer = Layout((2,)).build(seed=0)
    gate = threading.Event()
    with held_up(gate):
        handle = save_checkpoint(model, optimizer, path, asynchronous=True)
        message = message_of(TimeoutError, lambda: handle.wait(0.01))
        gate.set()
        return message, str(handle.wait())


def test_waiting_may_end_before_the_save_does_and_be_repeated(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    for message, saved in run_ranks(2, wait_too_short, path):
        assert message == f"the save of {path} is still under way after 0.01 s"
        assert saved == path


def fail_on_the_last_rank(draft: checkpoint_writer.Draft) -> object:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError(28, "No space left on device")
    return _write(draft)


_write = checkpoint_writer._write_mine


def fail_in_the_background(path: str) -> list[str]:
    """Return the errors of: wait, wait again, a save after a failure without a wait, and the save after that."""
    model, optimizer = Layout((2,)).build(seed=0)
    said = []
    with mock.patch.object(checkpoint_writer, "_write_mine", fail_on_the_last_rank):
        handle = save_checkpoint(model, optimizer, path, asynchronous=True)
        said += [message_of(CheckpointError, handle.wait), message_of(CheckpointError, handle.wait)]
        save_checkpoint(model, optimizer, path, asynchronous=True)
        said.append(message_of(CheckpointError, lambda: save_checkpoint(model, optimizer, path)))
    said.append(message_of(CheckpointError, lambda: save_checkpoint(model, optimizer, path)))
    return said


def test_a_background_failure_raises_on_all_ranks_in_wait_or_the_next_save(tmp_path: Path) -> None:
    for said in run_ranks(2, fail_in_the_background, str(tmp_path / "step")):
        assert said[0] == said[1] == said[2]
        assert "failed on rank 1: OSError: [Errno 28] No space left on device" in said[0]
        assert said[3] == "no error"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_exports_wait_for_the_save_before_them(late: int, tmp_path: Path) -> None:
    model, optimizer = Layout((2,)).build(seed=0)
    wanted = whole_state(model)
    for number, export in enumerate((full_state_dict, lambda each: export_safetensors(each, tmp_path / "files"))):
        gate = threading.Event()
        with held_up(gate):
            handle = save_checkpoint(model, optimizer, tmp_path / f"step-{number}", asynchronous=True)
            # The thread of one rank communicates while that of the other one has not begun to.
            threading.Timer(0.3 if dist.get_rank() == late else 0.0, gate.set).start()
            found = export(model)
        assert handle.done
        assert found is None or dist.get_rank() or differing(found, wanted) == []
