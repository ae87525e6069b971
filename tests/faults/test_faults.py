"""The training script loses nothing: killed at any moment it resumes, and its losses are those of an undisturbed run.

Every test takes some starts of torchrun: `make test-faults` and `make test-nightly` run them.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.faults.injection import BRANCHES, SAVE_MOMENTS, STALLS, STEP_MOMENTS, Fault
from tests.faults.job import NUM_ITERATIONS, SAVE_INTERVAL, Job, Outcome

# Losses of fp32 sums in another order; each step adds to the difference.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = Job(tmp_path_factory.mktemp("undisturbed")).run()
    assert outcome.status == 0, outcome.output
    assert list(outcome.losses) == list(range(1, NUM_ITERATIONS + 1))
    return outcome


def assert_recovers(outcome: Outcome, undisturbed: Outcome, steps_redone: int) -> None:
    assert outcome.status == 0, outcome.output
    assert outcome.losses == undisturbed.losses
    assert outcome.steps_redone == steps_redone
    assert outcome.recovery_s is not None


@pytest.mark.slow
def test_a_rank_killed_in_forward_is_restarted_and_the_losses_are_those_of_an_undisturbed_run(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    outcome = Job(tmp_path, max_restarts=1, fault=Fault("forward", 5, 1)).run()
    assert_recovers(outcome, undisturbed, steps_redone=1)
    assert "resuming from run/iter_0000003: 3 iterations, 36 samples consumed" in outcome.output


@pytest.mark.slow
def test_a_rank_killed_when_a_checkpoint_is_complete_but_unnamed_goes_on_from_the_one_before(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    outcome = Job(tmp_path, max_restarts=1, fault=Fault("save: complete, unnamed", 6, 0)).run()
    assert_recovers(outcome, undisturbed, steps_redone=3)
    names = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert names == ["iter_0000006", f"iter_{NUM_ITERATIONS:07d}"]


# Watched for 0.8 of it, so that ranks which wait find out before their collectives give up.
TIMEOUT = ("--distributed-timeout-minutes", "0.2")


def assert_found(outcome: Outcome, undisturbed: Outcome, fault: Fault) -> None:
    assert outcome.status == 0, outcome.output
    assert outcome.has_died
    assert outcome.losses == undisturbed.losses
    assert f"rank {fault.rank}: " in outcome.output
    assert (
        "error: a rank has waited for 10 s:" in outcome.output or "the ranks did not issue the same" in outcome.output
    )
    assert "blocks." in outcome.output


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_with_its_place_and_the_run_goes_on_from_the_checkpoint(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    fault = Fault("stall: backward", 5, 1)
    outcome = Job(tmp_path, max_restarts=1, fault=fault, more_flags=TIMEOUT).run()
    assert_found(outcome, undisturbed, fault)
    assert "rank 1: standing at injection.py:" in outcome.output
    assert outcome.steps_redone == 1


def send_sigterm(job: Job, process: "subprocess.Popen[str]") -> None:
    job.wait_for_iteration(2)
    os.kill(process.pid, signal.SIGTERM)


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_goes_on_from_that_step_on_three_ranks_and_then_on_one(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    # Validation takes seconds per step, so that the signal comes before the last one.
    stopped = Job(tmp_path, more_flags=("--eval-interval", "1", "--eval-iters", "60")).run(send_sigterm)
    last = max(stopped.losses)
    assert 2 <= last < NUM_ITERATIONS
    assert f"stopped by SIGTERM after {last} iterations" in stopped.output
    assert re.search(rf"saved checkpoint \S*/run/iter_{last:07d}", stopped.output)
    paused = Job(tmp_path, 3, more_flags=("--load", "run", "--exit-interval", str(last + 1))).run()
    assert paused.status == 0, paused.output
    assert f"resuming from run/iter_{last:07d}" in paused.output
    outcome = Job(tmp_path, 1, more_flags=("--load", "run")).run()
    assert outcome.status == 0, outcome.output
    assert f"resuming from run/iter_{last + 1:07d}" in outcome.output
    assert outcome.losses == pytest.approx(undisturbed.losses, abs=TOLERANCE)


# ---------------------------------------------------------------------- every moment

MOMENTS = [
    *((moment, rank) for moment in STEP_MOMENTS for rank in (0, 1)),
    *((moment, rank) for moment, (_, _, _, rank) in SAVE_MOMENTS.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(("moment", "rank"), MOMENTS)
def test_a_run_loses_nothing_when_a_rank_is_killed(
    moment: str, rank: int, is_asynchronous: bool, undisturbed: Outcome, tmp_path: Path
) -> None:
    flags = ("--async-save",) if is_asynchronous else ()
    outcome = Job(tmp_path, max_restarts=1, fault=Fault(moment, 6, rank), more_flags=flags).run()
    assert outcome.status == 0, outcome.output
    assert outcome.has_died
    assert outcome.losses == undisturbed.losses
    assert outcome.steps_redone <= SAVE_INTERVAL


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", [*STALLS, *BRANCHES])
def test_a_run_loses_nothing_when_a_rank_stalls_or_takes_another_branch(
    moment: str, rank: int, undisturbed: Outcome, tmp_path: Path
) -> None:
    fault = Fault(moment, 5, rank)
    outcome = Job(tmp_path, max_restarts=1, fault=fault, more_flags=TIMEOUT).run()
    assert_found(outcome, undisturbed, fault)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_killed_run_goes_on_with_another_number_of_ranks(
    num_ranks: int, undisturbed: Outcome, tmp_path: Path
) -> None:
    killed = Job(tmp_path, fault=Fault("backward", 5, 0)).run()
    assert killed.status != 0
    outcome = Job(tmp_path, num_ranks, more_flags=("--load", "run")).run()
    assert outcome.status == 0, outcome.output
    assert "resuming from run/iter_0000003" in outcome.output
    assert outcome.losses == pytest.approx(undisturbed.losses, abs=TOLERANCE)
