"""Rows of benches that run on several ranks."""

from benchmarks.bench_checkpoint import checkpoint_rows


def test_speed_is_the_whole_state_over_the_slowest_ranks_time() -> None:
    times = {"ours": 2.0, "torch DCP": 4.0, "torch.save": 1.0}
    ranks = [{way: [(scale * time, scale * time)] for way, time in times.items()} for scale in (0.5, 1.0)]
    rows = {row.key: row for row in checkpoint_rows({"ranks": 2}, 100, ranks)}
    assert rows["checkpoint: save speed (ranks=2, way=ours)"].samples.values == (50.0,)
    ratio = rows["checkpoint: load speed over peer's (peer=torch DCP, ranks=2)"]
    assert ratio.samples.values == (2.0,)
