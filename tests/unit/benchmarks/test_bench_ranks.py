"""Rows of benches that run on several ranks."""

import torch

from benchmarks.bench_checkpoint import checkpoint_rows
from benchmarks.bench_redistribute import layer_shapes, move_rows

KINDS, WAYS = ("gather", "reduce-scatter"), ("DBuffer", "DTensor", "bare")


def test_a_gather_takes_as_long_as_on_its_slowest_rank_and_as_much_processor_time_as_on_all() -> None:
    ranks = [
        {
            f"{kind}: {way}": [(scale * wall, 1.0)]
            for kind in KINDS
            for way, wall in zip(WAYS, (2.0, 8.0, 1.0), strict=True)
        }
        for scale in (1.0, 2.0)
    ]
    rows = {row.key: row.samples.values for row in move_rows({"width": 4}, ranks)}
    assert rows["redistribute: gather, wall time (way=DBuffer, width=4)"] == (4.0,)
    assert rows["redistribute: gather, processor time (way=bare, width=4)"] == (2.0,)
    assert rows["redistribute: reduce-scatter, wall time over peer's (peer=DTensor, width=4)"] == (0.25,)
    assert rows["redistribute: gather, wall time over peer's (peer=bare, width=4)"] == (2.0,)


def test_a_layer_has_twelve_squares_of_its_width() -> None:
    matrices = [shape for shape in layer_shapes(8) if len(shape) == 2]
    assert sum(torch.Size(shape).numel() for shape in matrices) == 12 * 8 * 8


def test_speed_is_the_whole_state_over_the_slowest_ranks_time() -> None:
    times = {"ours": 2.0, "torch DCP": 4.0, "torch.save": 1.0}
    ranks = [
        {f"{kind}: {way}": [scale * time] for kind in ("save", "load") for way, time in times.items()}
        for scale in (0.5, 1.0)
    ]
    rows = {row.key: row for row in checkpoint_rows({"ranks": 2}, 100, ranks)}
    assert rows["checkpoint: save speed (ranks=2, way=ours)"].samples.values == (50.0,)
    ratio = rows["checkpoint: load speed over peer's (peer=torch DCP, ranks=2)"]
    assert ratio.samples.values == (2.0,)
    assert ratio.higher_is_better
