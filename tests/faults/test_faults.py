"""The training script loses nothing: killed at any moment it resumes, and its losses are those of an undisturbed run.

Every test takes some starts of torchrun: `make test-faults` and `make test-nightly` run them.
"""

from pathlib import Path

import pytest

from tests.faults.job import NUM_ITERATIONS, SAVE_INTERVAL, Job, Outcome
from tests.faults.reliability import FAULTS, is_same

pytestmark = pytest.mark.slow
# These faults concern a single rank; each is tried on both ranks.
ON_BOTH = ("a rank", "another branch")
RESUMED = "resuming from run/iter_0000003"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = Job(tmp_path_factory.mktemp("undisturbed")).run()
    assert outcome.status == 0, outcome.output
    assert list(outcome.losses) == list(range(1, NUM_ITERATIONS + 1))
    return outcome


@pytest.mark.parametrize(
    ("fault", "rank"), [(name, rank) for name in FAULTS for rank in ((0, 1) if name.startswith(ON_BOTH) else (0,))]
)
def test_a_run_loses_nothing_when(fault: str, rank: int, undisturbed: Outcome, tmp_path: Path) -> None:
    outcome = FAULTS[fault](tmp_path, rank)
    assert outcome.status == 0, outcome.output
    assert is_same(outcome.losses, undisturbed.losses)
    assert outcome.steps_redone <= SAVE_INTERVAL
    assert outcome.has_died != fault.startswith("SIGTERM")
    if "rank(s)" in fault or "a rank killed" in fault:
        assert RESUMED in outcome.output
    elif outcome.has_died:
        # On as many ranks as before.
        assert outcome.losses == undisturbed.losses
    if "stalled" in fault or "branch" in fault:
        assert f"rank {rank}: " in outcome.output
        found = ("error: a rank has waited for 10 s:", "the ranks did not issue the same")
        assert any(words in outcome.output for words in found), outcome.output
        assert "blocks." in outcome.output
    if "unnamed" in fault and "asynchronous" not in fault:
        names = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
        assert names == ["iter_0000006", f"iter_{NUM_ITERATIONS:07d}"]
    if "stalled in backward" in fault:
        assert f"rank {rank}: standing at injection.py:" in outcome.output
