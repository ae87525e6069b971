"""The harness of the benches: measuring, writing and reading rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import (
    Row,
    Samples,
    Summary,
    Times,
    beside_peers,
    both,
    device_seconds,
    environment,
    interleaved,
    ratio,
    read_rows,
    write_rows,
    write_samples,
)


class Clock:
    """Time that passes only when the measured code works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[[], None]:
        def function() -> None:
            self.now += seconds

        return function


def row(**changes: object) -> Row:
    fields = {"bench": "cast", "case": {"size": 3, "dtype": "bf16"}, "metric": "time", "unit": "s"}
    return Row(**{**fields, "samples": Samples((1.0, 2.0)), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "quartiles", "spread"),
    [((5.0, 1.0, 2.0, 3.0, 4.0), (1.5, 3.0, 4.5), 1.0), ((7.0,), (7.0, 7.0, 7.0), 0.0)],
)
def test_quartiles_and_spread_are_those_of_the_values(
    values: tuple[float, ...], quartiles: tuple[float, ...], spread: float
) -> None:
    samples = Samples(values)
    assert (samples.low, samples.median, samples.high) == quartiles
    assert samples.spread == spread


def test_functions_alternate_in_changing_order_and_are_timed_separately() -> None:
    clock, calls = Clock(), []

    def work(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock.work(seconds)()

        return run

    functions = {"a": work("a", 5.0), "b": work("b", 1.0)}
    found = interleaved(functions, rounds=2, warmup=1, clock=clock)
    assert "".join(calls) == "abbaab"
    assert {name: samples.values for name, samples in found.items()} == {"a": (5.0,) * 2, "b": (1.0,) * 2}


def test_pending_work_is_charged_to_the_function_that_started_it() -> None:
    clock, pending = Clock(), [0.0]

    def start() -> None:
        pending[0] = 3.0

    def synchronize() -> None:
        clock.now += pending[0]
        pending[0] = 0.0

    found = interleaved({"start": start, "idle": lambda: None}, rounds=2, synchronize=synchronize, clock=clock)
    assert (found["start"].values, found["idle"].values) == ((3.0, 3.0), (0.0, 0.0))


def test_wall_time_is_the_slowest_ranks_and_processor_time_is_the_sum() -> None:
    ranks: list[Times] = [
        {"ours": [(1.0, 0.5), (2.0, 0.5)], "FSDP2": [(4.0, 1.0), (4.0, 2.0)]},
        {"ours": [(3.0, 1.5), (1.0, 0.5)], "FSDP2": [(2.0, 1.0), (8.0, 2.0)]},
    ]
    rows = [each for what, found in both(ranks).items() for each in beside_peers(Row("step", {}, what, "s"), found)]
    assert {each.key: each.samples.values for each in rows if isinstance(each.samples, Samples)} == {
        "step: wall time (engine=ours)": (3.0, 2.0),
        "step: wall time (engine=FSDP2)": (4.0, 8.0),
        "step: wall time over peer's (peer=FSDP2)": (0.75, 0.25),
        "step: processor time (engine=ours)": (2.0, 1.0),
        "step: processor time (engine=FSDP2)": (2.0, 4.0),
        "step: processor time over peer's (peer=FSDP2)": (1.0, 0.25),
    }


def test_rows_read_back_are_summaries_of_those_written(tmp_path: Path) -> None:
    rows = [row(), row(metric="padding", unit="%", samples=Samples((0.5,)), notes={"why": "rows"})]
    write_rows(tmp_path / "new" / "rows.json", rows, {"rounds": 2})
    read_environment, read = read_rows(tmp_path / "new" / "rows.json")
    summaries = (Summary(1.5, 0.666667, 2), Summary(0.5, 0.0, 1))
    assert read == [replace(one, samples=summary) for one, summary in zip(rows, summaries, strict=True)]
    assert read_environment["versions"] == environment()["versions"]


def test_samples_are_written_by_the_key_of_their_row(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.json", [row()])
    assert json.loads((tmp_path / "samples.json").read_text(encoding="utf-8")) == {row().key: [1.0, 2.0]}


def test_rows_about_the_same_case_have_the_same_key_whatever_the_order_of_its_names() -> None:
    assert row(case={"dtype": "bf16", "size": 3}).key == row().key == "cast: time (dtype=bf16, size=3)"
    assert row(metric="bytes").key != row().key


def test_a_ratio_is_taken_round_by_round() -> None:
    assert ratio(Samples((1.0, 6.0)), Samples((2.0, 3.0))).values == (0.5, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        ratio(Samples((1.0, 6.0)), Samples((2.0,)))


class Simulated:
    """A simulated device that runs a host's work: microseconds for each piece, and events that record its time."""

    host = device = 0.0

    def work(self, host: float, device: float) -> None:
        """Issue work that takes ``host`` microseconds of the host and ``device`` microseconds of the device."""
        self.host += host
        self.device = max(self.device, self.host) + device

    def event(self, *, enable_timing: bool) -> "Simulated.Event":
        """Make an event."""
        return Simulated.Event(self)

    class Event:
        """A stand-in for ``torch.cuda.Event``."""

        def __init__(self, owner: "Simulated") -> None:
            self.owner, self.at = owner, 0.0

        def record(self) -> None:
            self.at = max(self.owner.device, self.owner.host)

        def synchronize(self) -> None:
            self.owner.host = max(self.owner.host, self.at)

        def elapsed_time(self, other: "Simulated.Event") -> float:
            return (other.at - self.at) / 1e3


@pytest.mark.parametrize("host", [10.0, 45.0, 200.0])
def test_time_on_the_device_has_nothing_of_the_host_s(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    simulated = Simulated()
    monkeypatch.setattr(torch.cuda, "Event", simulated.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: simulated.work(simulated.device, 0.0))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: simulated.work(5.0, cycles / 2000))
    samples = interleaved({"kernel": lambda: simulated.work(host, 120.0)}, rounds=3, stopwatch=device_seconds)
    assert samples["kernel"].median == pytest.approx(120e-6)
