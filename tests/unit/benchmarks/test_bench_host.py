"""Host time: what is subtracted from what, and the time within hooks."""

import pytest

from benchmarks.bench_host import added_microseconds, measure, timed
from benchmarks.harness import Samples
from benchmarks.null_group import null_world


class Worker:
    """Works by a clock of its own."""

    now = 0.0

    def outer(self) -> str:
        Worker.now += 1.0
        return self.inner()

    def inner(self) -> str:
        Worker.now += 3.0
        return "done"


def test_the_plain_step_of_the_same_round_is_subtracted() -> None:
    found = added_microseconds(Samples((5.0, 9.0)), Samples((1.0, 2.0)))
    assert found.values == (4e6, 7e6)


def test_time_within_an_inner_method_is_not_counted_twice() -> None:
    methods = {"outer": (Worker, "outer"), "inner": (Worker, "inner")}
    with timed(methods, clock=lambda: Worker.now) as spent:
        assert Worker().outer() == "done"
        Worker().inner()
    assert spent == {"outer": 1.0, "inner": 6.0}


def test_methods_are_themselves_again_afterwards() -> None:
    method = Worker.outer
    with timed({"outer": (Worker, "outer")}):
        assert Worker.outer is not method
    assert Worker.outer is method


def test_the_ratio_is_ours_over_the_peers_round_by_round() -> None:
    with null_world(8):
        rows = measure({"layers": 2, "parameters": 3, "ranks": 8}, rounds=3)
    by_key = {row.key: row for row in rows}
    case = "layers=2, parameters=3, ranks=8"
    mine = by_key[f"host: host time added to a step (engine=ours, {case})"].samples.values
    peer = by_key[f"host: host time added to a step (engine=FSDP2, {case})"].samples.values
    ratio = by_key[f"host: host time over FSDP2's ({case})"].samples.values
    assert ratio == pytest.approx([a / b for a, b in zip(mine, peer, strict=True)])
    hooks = [row for row in rows if row.metric == "time in hook"]
    assert {row.case["hook"] for row in hooks} >= {"pre-forward", "gradient arrival", "end of backward"}
    assert all(row.samples.median > 0 for row in hooks if row.case["hook"] != "fold")
