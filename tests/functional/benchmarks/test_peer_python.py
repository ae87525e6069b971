"""Peers in interpreters of their own: found, measured, or left out with their own error in one line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_memory, bench_step, peer_python
from benchmarks.engines import Precision
from benchmarks.harness import Row, Samples
from benchmarks.models import Shape
from benchmarks.peer_python import Peer, Task, ask, peers_of

TINY = Shape(1, 8, 11, batch=1, length=4, head_width=4)
MEMORY = Task("memory", TINY, Precision(), 8, "null")

# What DeepSpeed looks like from outside.
DEEPSPEED = """
from types import SimpleNamespace

def initialize(model, optimizer, config, dist_init_required):
    assert config["zero_optimization"]["stage"] == 3

    class Engine:
        def __call__(self, tokens):
            return model(tokens)

        def backward(self, loss):
            loss.backward()

        def step(self):
            optimizer.step()
            optimizer.zero_grad()

    return Engine(), optimizer, None, None
"""


def interpreter(folder: Path, **packages: str) -> Path:
    """Make an interpreter that is this one with other packages in front, given by name and source."""
    place = folder / "packages"
    for name, source in packages.items():
        (place / f"{name}-1.2.dist-info").mkdir(parents=True)
        (place / f"{name}-1.2.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.2\n"
        )
        if source:
            (place / name).mkdir()
            (place / name / "__init__.py").write_text(source)
    if "deepspeed" in packages:
        (place / "deepspeed" / "ops.py").write_text("__compatible_ops__ = {}\n")
    start = f"import sys; sys.path.insert(0, {str(place)!r}); sys.argv = sys.argv[2:]; import runpy"
    run = "runpy.run_path(sys.argv[0], run_name='__main__')"
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{start}; {run}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_an_interpreter_tells_which_peers_it_has_and_one_of_them_trains_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The package of the other peer is not where its metadata says: this project's would be imported in its place.
    python = interpreter(tmp_path, deepspeed=DEEPSPEED, megatron_fsdp="")
    peers = peers_of([python])
    assert [peer.label for peer in peers] == ["megatron-fsdp 1.2", "deepspeed 1.2"]
    ((peer, answers),) = ask(peers, MEMORY)
    assert peer.name == "deepspeed"
    start, peak, _ = answers[0]["phases"]["whole step"]
    # Weights and two moments rest, in FP32.
    with_moments = 3 * 4 * sum(parameter.numel() for parameter in bench_memory.make_model(TINY, "cpu").parameters())
    assert with_moments <= start < peak
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("megatron-fsdp 1.2: left out: ")
    assert "Error: " in line


@pytest.mark.slow
def test_ranks_of_a_peer_and_of_fsdp2_train_in_turn(tmp_path: Path) -> None:
    python = interpreter(tmp_path, deepspeed=DEEPSPEED)
    peer = Peer("deepspeed", "1.2", python)
    ((_, answers),) = ask([peer], Task("step", TINY, Precision(), 2, rounds=3))
    for times in peer_python.times_of(answers):
        assert {name: len(rounds) for name, rounds in times.items()} == {"deepspeed": 3, "FSDP2": 3}
        assert all(wall > 0 for rounds in times.values() for wall, _ in rounds)


def test_an_interpreter_that_does_not_start_is_left_out_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named torch\nexit 3\n")
    python.chmod(0o755)
    assert peers_of([python]) == []
    assert "left out: rank 0 ended with exit status 3: no module named torch" in capsys.readouterr().out


PEER = Peer("deepspeed", "1.2", Path("python"))


def answer_with(answers: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_python, "_run", lambda python, requests: list(answers))


def test_two_engines_that_share_no_process_are_compared_by_fsdp2_beside_each(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with([{"times": {"deepspeed": [[3.0, 1.0]], "FSDP2": [[2.0, 1.0]]}}] * 2, monkeypatch)
    ours = [Row("step", {"peer": "FSDP2"}, "wall time over peer's", "", Samples((0.75,)))]
    rows = bench_step.peer_rows({"model": "m"}, [PEER], Task("step", TINY, Precision(), 2), ours)
    found = {row.key: row.samples.values for row in rows}
    assert found["step: wall time (engine=deepspeed 1.2, model=m)"] == (3.0,)
    assert found["step: processor time (engine=FSDP2 beside deepspeed 1.2, model=m)"] == (2.0,)
    assert found["step: wall time over peer's (engine=deepspeed 1.2, model=m, peer=FSDP2)"] == (1.5,)
    assert found["step: wall time over peer's, by FSDP2 beside each (model=m, peer=deepspeed 1.2)"] == (0.5,)
    assert all("ZeRO-3" in row.notes["settings"] for row in rows)


def test_a_peak_of_ours_is_set_over_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with([{"phases": {"whole step": [1, 400, 1]}}], monkeypatch)
    ours = [Row("memory", {"engine": "ours"}, bench_memory.WHOLE_STEP, "B", Samples((100.0,)))]
    rows = bench_memory.peer_rows({"ranks": 8}, [PEER], MEMORY, ours)
    assert [(row.case, row.samples.values) for row in rows] == [
        ({"ranks": 8, "engine": "deepspeed 1.2"}, (400.0,)),
        ({"ranks": 8, "peer": "deepspeed 1.2"}, (0.25,)),
    ]
