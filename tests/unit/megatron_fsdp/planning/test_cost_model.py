"""Time: collectives by the formulas of rings, and steps in the engine's order, against numbers worked out by hand."""

from typing import Any

import pytest

from dbuffer import CollectiveCall
from megatron_fsdp import MixedPrecisionPolicy, Placements
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.cost_model import Hardware, Link, StepTime, predict_step, transfer_seconds
from megatron_fsdp.planning.model_source import shaped_module
from megatron_fsdp.planning.parallelism import Parallelism, stages_of
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.transformer import UnitWork, Workload
from tests.unit.megatron_fsdp.planning.chains import THREE, Chain, setup_of, sharding_of, stand_ins_of

GIGABYTE = 10**9


def test_a_ring_moves_all_but_one_part_and_waits_once_per_hop() -> None:
    link = Link(GIGABYTE, 1e-3)
    gather = transfer_seconds(CollectiveCall("all_gather", "dp", 4, GIGABYTE), link)
    assert gather == pytest.approx(0.75 + 3e-3)
    assert transfer_seconds(CollectiveCall("reduce_scatter", "dp", 4, GIGABYTE), link) == gather
    assert transfer_seconds(CollectiveCall("all_reduce", "dp", 4, GIGABYTE), link) == pytest.approx(2 * gather)


def step(
    flops: float,
    num_microbatches: int = 1,
    *,
    rows: tuple[int, ...] = THREE,
    sizes: tuple[int, ...] = (4,),
    placements: Placements | None = None,
    policy: MixedPrecisionPolicy | None = None,
    recompute: str = "none",
) -> StepTime:
    """Predict with 1 byte per second on links, no latency, and 1 operation per token and unit with parameters."""
    stand_ins = stand_ins_of(Chain(rows), UnitWork(1, is_layer=True), sharding_of(sizes, placements, policy))
    played = play_step(stand_ins, [num_microbatches])
    links = {f"axis{position}": Link(1.0) for position in range(2)}
    return predict_step(played, Workload(1, 1, num_microbatches, recompute), Hardware(flops, 1e9, links=links))


def test_fast_compute_leaves_all_communication_exposed() -> None:
    # 64 + 128 + 32 elements of 4 bytes, three quarters of them moved: gathered twice (the last unit once), reduced
    # once.
    time = step(1e9)
    assert time.communication == pytest.approx((3 * 224 - 32) * 4 * 0.75)
    assert time.exposed == pytest.approx(time.communication, rel=1e-6)
    assert time.total == pytest.approx(time.compute + time.exposed + time.optimizer)


def test_slow_compute_hides_all_but_the_first_gathers_and_the_last_reduction() -> None:
    time = step(1e-4)
    # Forward begins with unit1 and backward ends with it; unit3 keeps its weights for backward.
    assert time.exposed == pytest.approx((64 + 64) * 4 * 0.75)
    assert time.compute == pytest.approx(3 * 3 / 1e-4)


def test_compute_and_overlapped_communication_grow_with_the_microbatches() -> None:
    one, three = step(1.0), step(1.0, 3)
    assert three.compute == pytest.approx(3 * one.compute)
    assert three.communication == pytest.approx(3 * one.communication)
    assert three.optimizer == one.optimizer


def test_reductions_after_the_last_microbatch_are_never_hidden() -> None:
    one, three = (step(1e-9, count, rows=(16,), sizes=(2, 4), placements=Placements.hsdp(0, 1)) for count in (1, 3))
    # Each microbatch gathers and reduces over the inner axis; the sum over the outer axis comes once per step.
    tail = 2 * 0.5 * 16 * 4
    assert three.communication - tail == pytest.approx(3 * (one.communication - tail))
    assert one.exposed > tail


def test_all_but_the_first_unit_hide_reduction_and_refresh_of_replicated_weights() -> None:
    time = step(1e-9, placements=Placements.optim(0))
    # The reduce-scatter of the last unit in backward, and the first all-gather in forward, are exposed.
    assert time.exposed == pytest.approx((64 + 64) * 4 * 0.75)


def test_replicas_on_one_rank_communicate_nothing() -> None:
    time = step(1.0, rows=(16,), sizes=(1,))
    # Only host time remains.
    wanted: Any = (0.0, pytest.approx(0.0, abs=1e-4))
    assert (time.communication, time.exposed) == wanted


def test_recomputing_a_layer_costs_another_forward() -> None:
    assert step(1.0, recompute="full").compute == pytest.approx(3 * 4)


def test_the_optimizer_reads_and_writes_its_own_part() -> None:
    # 56 elements: the gradient, and weights and moments twice, in FP32; three step counts.
    for placements in (Placements.optim(0), Placements.optim_grads_params(0)):
        assert step(1.0, placements=placements).optimizer == pytest.approx(56e-9 * (4 + 6 * 4) + 3e-9 * 8)


@pytest.mark.parametrize(
    ("mesh", "bandwidths"),
    [
        ("8", [450.0]),
        ("64", [400.0]),
        ("8x8", [50.0, 450.0]),
        ("16x4", [100.0, 450.0]),
        ("4x16", [50.0, 400.0]),
        ("4x2", [450.0, 450.0]),
        # A measured bandwidth is used.
        ("2x8 --bandwidth 1G 2G", [1.0, 2.0]),
        ("2x8 --bandwidth 3G", [3.0, 3.0]),
    ],
)
def test_an_axis_gets_the_ports_of_its_members_in_a_node(mesh: str, bandwidths: list[float]) -> None:
    links = setup_of(f"--model gpt2 --mesh {mesh}").hardware.links
    axes = ("outer", "inner") if "x" in mesh else ("dp",)
    assert [links[axis].bytes_per_second / 1e9 for axis in axes] == bandwidths


def test_layers_of_a_stage_have_their_numbers_in_the_whole_model() -> None:
    found = catalog.architecture(catalog.load("deepseek-v3"))
    names = [vars(block)["path"] for block in shaped_module(found)[1]]
    assert names[1:6] == ["dense_layer.0", "dense_layer.1", "dense_layer.2", "moe_layer.3", "moe_layer.3.experts"]
    stages = stages_of(found, Parallelism(pipeline=4))
    staged = [shaped_module(stage.architecture, stage.layers[0])[1] for stage in stages]
    assert [vars(block)["path"] for blocks in staged for block in blocks] == names
