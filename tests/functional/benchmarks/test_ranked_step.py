"""The comparison of steps on real ranks, as torchrun starts it, on CPU ranks with gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import read_rows
from benchmarks.ranked_step import ENGINES

WORDS = "-m benchmarks gpu --device cpu --small --rounds 1 --batches 1 --results"


@pytest.mark.slow
def test_all_engines_take_the_same_steps_on_real_ranks_and_one_rank_tells(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *WORDS.split(), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows in") == 1
    _, rows = read_rows(tmp_path / "gpu-rehearsal-2-ranks.json")
    losses = {(row.case["precision"], row.case["engine"]): row.samples.median for row in rows if row.metric == "loss"}
    for precision in ("bf16", "bf16, reduced in bf16"):
        found = [losses[precision, engine] for engine in ENGINES]
        assert found == [pytest.approx(found[-1], rel=1e-3)] * len(ENGINES)
        ratios = [row for row in rows if row.metric == "wall time over peer's" and row.case["precision"] == precision]
        assert [row.case["engine"] for row in ratios] == list(ENGINES)[:-1]
