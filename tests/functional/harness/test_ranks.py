"""The rank pool: returned values, reports of failing ranks, and isolation between calls."""

import os
import select
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness import FailureKind, RankError, on_ranks, ranks, run_ranks


def rank_and_process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def raise_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("shards of rank 2 overlap")
    dist.barrier()


def end_process() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_forever_on_rank_one() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        threading.Event().wait()
    raise ValueError("gave up on rank 1")


def exit_politely() -> None:
    raise SystemExit(0)


def draw() -> torch.Tensor:
    return torch.rand(3)


def spoil_process_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["PATH"]


def process_state() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(1).device,
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "left behind": os.environ.get("LEFT_BEHIND"),
        "path": os.environ.get("PATH"),
    }


def doubling_stays_on_the_mesh() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    doubled = distribute_tensor(torch.arange(7), mesh, [Shard(0)]).mul(2)
    assert isinstance(doubled, DTensor)
    return doubled.device_mesh is mesh


def warn() -> str:
    warnings.warn("the old name", FutureWarning, stacklevel=2)
    return "only warned"


class FailsToDie:
    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        raise RuntimeError("storage freed twice")


def raise_in_finalizer() -> None:
    FailsToDie()


def raise_in_thread() -> None:
    def prefetch() -> None:
        raise RuntimeError("prefetch of a released unit")

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()


def write_a_line() -> None:
    print("padding is 3 rows")


def return_a_lock() -> object:
    return threading.Lock()


def failure_of(world_size: int, function: object, **options: object) -> RankError:
    with pytest.raises(RankError) as caught:
        run_ranks(world_size, function, **options)  # type: ignore[arg-type]
    return caught.value


def test_groups_of_all_sizes_share_processes_and_communicate_among_all_ranks() -> None:
    pool = [process for _, process in run_ranks(4, rank_and_process)]
    for size in (1, 2, 3, 4, 2, 1):
        assert run_ranks(size, rank_and_process) == list(enumerate(pool[:size]))
        assert [total.tolist() for total in run_ranks(size, sum_over_ranks, torch.tensor([1.5, -2.0]))] == [
            [1.5 * size * (size + 1) / 2, -2.0 * size * (size + 1) / 2]
        ] * size


def test_an_exception_is_reported_with_its_rank_first_and_the_pool_survives() -> None:
    before = run_ranks(2, rank_and_process)
    failures = failure_of(3, raise_on_last_rank, timeout=60.0).failures
    assert failures[0].rank == 2
    assert "ValueError: shards of rank 2 overlap" in failures[0].report
    assert "in raise_on_last_rank" in failures[0].report
    assert {failure.rank: failure.kind for failure in failures} == dict.fromkeys(range(3), FailureKind.RAISED)
    assert run_ranks(2, rank_and_process) == before


def test_a_worker_that_dies_between_calls_is_replaced() -> None:
    ((_, process),) = run_ranks(1, rank_and_process)
    end = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    select.select([end], [], [])
    os.close(end)
    ((_, replacement),) = run_ranks(1, rank_and_process)
    assert replacement != process


def test_a_call_that_the_caller_interrupts_does_not_answer_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(1, draw)
    ((rank, _),) = run_ranks(1, rank_and_process)
    assert rank == 0


def test_dead_ranks_are_named_before_the_peers_that_lost_them() -> None:
    dead = failure_of(3, end_process)
    assert {failure.rank: failure.exit_code for failure in dead.failures} == {0: 7, 1: -signal.SIGKILL, 2: None}
    assert [failure.kind for failure in dead.failures] == [FailureKind.DIED, FailureKind.DIED, FailureKind.RAISED]
    assert [rank for rank, _ in run_ranks(3, rank_and_process)] == [0, 1, 2]


def test_a_rank_that_hangs_is_ended_and_its_stack_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    raised, stuck = failure_of(2, wait_forever_on_rank_one, timeout=60.0).failures
    assert (raised.rank, raised.kind, stuck.rank, stuck.kind) == (0, FailureKind.RAISED, 1, FailureKind.STUCK)
    assert "in wait_forever_on_rank_one" in stuck.output


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (exit_politely, FailureKind.RAISED, "SystemExit: 0"),
        (warn, FailureKind.RAISED, "FutureWarning: the old name"),
        (return_a_lock, FailureKind.RAISED, "cannot pickle"),
        (raise_in_finalizer, FailureKind.UNCLEAN, "RuntimeError: storage freed twice"),
        (raise_in_thread, FailureKind.UNCLEAN, "RuntimeError: prefetch of a released unit"),
    ],
)
def test_a_call_fails_by(function: Callable[[], object], kind: FailureKind, words: str) -> None:
    (failure,) = failure_of(1, function).failures
    assert failure.kind is kind
    assert words in failure.report


def test_every_rank_of_every_call_starts_from_the_same_seed() -> None:
    first, second = run_ranks(2, draw)
    (third,) = run_ranks(1, draw)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_settings_of_a_process_are_reset_after_a_call() -> None:
    before = run_ranks(1, process_state)
    run_ranks(1, spoil_process_state)
    assert run_ranks(1, process_state) == before


def test_dtensors_of_one_call_never_get_the_mesh_of_an_earlier_one() -> None:
    assert [run_ranks(2, doubling_stays_on_the_mesh) for _ in range(2)] == [[True, True], [True, True]]


@pytest.mark.filterwarnings("ignore:the old name:FutureWarning")
def test_a_warning_that_the_caller_ignores_is_ignored_on_the_ranks() -> None:
    assert run_ranks(1, warn) == ["only warned"]


def test_output_of_a_rank_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, write_a_line)
    assert capsys.readouterr().out == "[rank 0] padding is 3 rows\n[rank 1] padding is 3 rows\n"


def fail_to_join_on_the_first_rank() -> None:
    """Close the call's process group, and on rank 0 announce a group that is never made."""
    rank = dist.get_rank()
    dist.barrier()  # until the other rank has joined too
    dist.destroy_process_group()
    if rank == 0:
        dist.distributed_c10d._world.group_count += 1


def test_a_group_that_one_rank_failed_to_make_does_not_block_the_next_call() -> None:
    run_ranks(2, fail_to_join_on_the_first_rank)
    assert len(run_ranks(2, rank_and_process, timeout=20.0)) == 2


@pytest.mark.parametrize("value", [3, 4])
@on_ranks(2)
def test_the_body_of_a_test_runs_on_every_rank_with_what_pytest_passes(value: int, tmp_path: Path) -> None:
    (tmp_path / f"{dist.get_rank()}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert value in (3, 4)


@on_ranks(2)
def fails_on_rank_1(limit: int) -> None:
    found = 10 * dist.get_rank()
    assert found < limit


def test_an_assertion_that_fails_on_one_rank_fails_the_test_and_shows_its_variables() -> None:
    with pytest.raises(RankError, match=r"found < limit\n[ ^]+\nAssertionError\n +limit = 7\n +found = 10") as caught:
        fails_on_rank_1(limit=7)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert str(caught.value).startswith("fails_on_rank_1 failed on 1 of 2 ranks")
