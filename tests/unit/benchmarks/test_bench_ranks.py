"""Rows of benches that run on several ranks."""

from benchmarks.bench_checkpoint import checkpoint_rows
from benchmarks.bench_redistribute import KINDS, move_rows


def test_a_way_to_gather_stands_beside_the_others_of_its_kind() -> None:
    times = {"DBuffer": (2.0, 1.0), "DTensor": (8.0, 2.0), "bare": (1.0, 1.0)}
    ranks = [{f"{kind}: {way}": [spent] for kind in KINDS for way, spent in times.items()}] * 2
    rows = {row.key: row.samples.values for row in move_rows({"width": 4}, ranks)}
    assert rows["redistribute: gather, processor time (way=bare, width=4)"] == (2.0,)
    assert rows["redistribute: reduce-scatter, wall time over peer's (peer=DTensor, width=4)"] == (0.25,)
    assert len(rows) == 2 * 2 * 5


def test_speed_is_the_whole_state_over_the_slowest_ranks_time() -> None:
    times = {"ours": 2.0, "torch DCP": 4.0, "torch.save": 1.0}
    ranks = [{way: [(scale * time, scale * time)] for way, time in times.items()} for scale in (0.5, 1.0)]
    rows = {row.key: row for row in checkpoint_rows({"ranks": 2}, 100, ranks)}
    assert rows["checkpoint: save speed (ranks=2, way=ours)"].samples.values == (50.0,)
    ratio = rows["checkpoint: load speed over peer's (peer=torch DCP, ranks=2)"]
    assert ratio.samples.values == (2.0,)
    assert ratio.higher_is_better
