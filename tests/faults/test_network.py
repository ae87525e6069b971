"""A link between two hosts is cut during a run: every rank ends with a reason, and the run goes on afterwards."""

import json
import time
from pathlib import Path

import pytest

from tests.faults.hosts import Hosts, are_allowed, finish
from tests.faults.injection import note, read_notes
from tests.faults.job import NUM_ITERATIONS, Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not are_allowed(), reason="needs `ip` and the right to make network namespaces (root)"),
]
MODULE = "tests.faults.faulty_gpt"
TIMEOUT = ("--distributed-timeout-minutes", "0.5")


def losses_of(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def test_a_cut_link_ends_both_hosts_with_a_reason_and_the_run_goes_on_when_it_is_restored(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    undisturbed = Job(tmp_path / "whole").run()
    folder = tmp_path / "cut"
    (folder / "text").write_bytes((tmp_path / "whole" / "text").read_bytes())
    words = [MODULE, str(folder / "notes.jsonl"), "pause: before a step", "5", "0"]
    with Hosts().built() as hosts:
        running = [hosts.start(number, folder, words, TIMEOUT) for number in (0, 1)]
        deadline = time.monotonic() + 120
        while not any(event["event"] == "paused" for event in read_notes(folder / "notes.jsonl")):
            assert time.monotonic() < deadline, finish(running)
            time.sleep(0.05)
        hosts.cut()
        note(folder / "notes.jsonl", "go on", 5)
        ended = finish(running)
        assert [status != 0 for status, _ in ended] == [True, True]
        # The store is on the first host, so each side tells another story.
        assert "no answer; the process ended or its machine cannot be reached" in ended[0][1], ended[0][1]
        assert "the job's store cannot be reached" in ended[1][1], ended[1][1]
        hosts.restore()
        again = finish([hosts.start(number, folder, words, ("--load", "run")) for number in (0, 1)])
    assert [status for status, _ in again] == [0, 0], again
    assert "resuming from run/iter_0000003" in again[0][1]
    assert losses_of(folder) == undisturbed.losses
    assert max(undisturbed.losses) == NUM_ITERATIONS
