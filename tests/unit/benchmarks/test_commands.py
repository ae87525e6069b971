"""The command line of the benchmarks."""

from benchmarks import __main__ as commands


def test_every_bench_of_the_project_says_what_it_measures() -> None:
    assert all(summary.endswith(".") or "," in summary for summary in commands.benches().values())
    assert "planner" in commands.benches()
