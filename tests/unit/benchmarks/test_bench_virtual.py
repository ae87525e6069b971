"""The bench of virtual devices runs both engines' real code: both send equal gradients, and a bound lies below both."""

import argparse

import pytest
import torch

from benchmarks.bench_error_bar import Setting, calibrate, settings
from benchmarks.bench_virtual import bound, predict, rows_text, run
from benchmarks.h200 import H200
from megatron_fsdp.virtual.playback import play
from megatron_fsdp.virtual.recording import Item, Recording, Work
from tests.unit.megatron_fsdp.virtual.test_playback import Plain, collective, compute


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_both_engines_reduce_the_same_gradients(model: str) -> None:
    handles = vars(torch.cpu).copy()
    found = {engine: predict(model, "8", 1024, "bf16", engine, 2) for engine in ("ours", "FSDP2")}
    assert {name: vars(torch.cpu).get(name) for name in ("Stream", "Event", "stream", "current_stream")} == {
        name: handles.get(name) for name in ("Stream", "Event", "stream", "current_stream")
    }
    sent = {
        engine: sum(run.work.num_bytes for run in each.runs if run.work.kind == "reduce_scatter")
        for engine, each in found.items()
    }
    assert sent["ours"] == pytest.approx(sent["FSDP2"], rel=1e-3)
    # Both engines compute the same products; FSDP2 copies more.
    flops = {engine: sum(run.work.flops for run in each.runs) for engine, each in found.items()}
    assert flops["ours"] == flops["FSDP2"]
    assert bound(found["ours"]) <= found["ours"].seconds


def test_sums_over_nodes_have_a_lane_of_their_own_in_fsdp2() -> None:
    found = predict("llama3-8b", "hsdp 2x8", 1024, "bf16", "FSDP2", 2)
    assert {run.stream for run in found.runs if run.work.kind == "all_reduce"} == {"all-reduce lane"}


def test_the_table_has_both_engines_in_one_line() -> None:
    args = argparse.Namespace(
        models=["llama3-8b"],
        meshes=["8"],
        tokens=[1024],
        reduce=["bf16"],
        engines=["ours", "FSDP2"],
        layers=1,
        causes=0,
    )
    rows = run(args)
    assert {row.metric for row in rows} >= {"predicted step", "bound", "predicted step over FSDP2's"}
    assert rows_text(rows).splitlines()[-1].startswith("| llama3-8b | 8 | 1024 | bf16 | ")


def test_a_third_of_the_settings_calibrates_and_exact_quantities_are_found_again() -> None:
    chosen = settings()
    assert (len(chosen), len(set(chosen)), sum(each.calibrates for each in chosen)) == (24, 24, 8)
    fitted = [each for each in chosen if each.calibrates]
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 1000, (len(fitted), 3), generator=generator).tolist()
    recorded: dict[Setting, tuple[Item, ...]] = {
        each: (
            Item(None, Work("mm", "product", flops * 10**6, num_bytes * 10**3)),
            Item(None, Work("all_gather", "all_gather", 0, sent * 10**4, ranks=(0, 1))),
        )
        for each, (flops, num_bytes, sent) in zip(fitted, sizes, strict=True)
    }
    wanted = {"product": 1e-9, "memory": 2e-9, "call": 1e-4, "sent": 3e-9, "collective": 1e-3}
    measured = {
        each: 1e-4 + 1e-3 * flops + 2e-6 * num_bytes + 1e-3 + 1.5e-5 * sent
        for each, (flops, num_bytes, sent) in zip(fitted, sizes, strict=True)
    }
    found = calibrate(fitted, recorded, measured, "processor")
    for name in ("product", "memory", "sent"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-6)
    # Every setting has one call and one collective, so only the sum of their costs can be fitted.
    assert found["call"] + found["collective"] == pytest.approx(1.1e-3, rel=1e-6)


def test_the_bound_is_the_longer_of_compute_with_the_ends_and_communication() -> None:
    recording = Recording()
    for seconds in (1, 7, 2):
        with recording.use(recording.new()):
            recording.work(collective(seconds))
    # The collectives share a link, and shorter ones end first: 1, 2, 7.
    recording.work(compute(1))
    assert bound(play(recording.items, Plain())) == 10
    recording.work(compute(9))
    assert bound(play(recording.items, Plain())) == 10 + 1 + 7


def test_rings_inside_a_node_and_trees_between_nodes() -> None:
    inside = Work("all_gather", "all_gather", 0, 8 * 370 * 10**6, ranks=tuple(range(8)))
    assert H200.seconds(inside) == pytest.approx(7e-3 + 17e-6)
    across = tuple(range(0, 128, 8))
    small = H200.seconds(Work("all_reduce", "all_reduce", 0, 1024, ranks=across))
    # 16 nodes: a tree has 4 steps up and 4 down, a ring has 30 steps.
    assert small == pytest.approx(10e-6 + 8 * 5e-6 + 2 * 1024 / 48e9)
