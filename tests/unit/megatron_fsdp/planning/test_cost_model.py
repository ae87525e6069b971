"""Time: collectives by the formulas of rings, steps as the engine does them, against numbers worked out by hand."""

import pytest

from dbuffer import CollectiveCall
from megatron_fsdp import MixedPrecisionPolicy, Placements
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.cost_model import Hardware, Link, Machine, StepTime, predict_step, transfer_seconds
from megatron_fsdp.planning.model_source import shaped_module
from megatron_fsdp.planning.options import mesh_axes_of
from megatron_fsdp.planning.parallelism import Parallelism, stages_of
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.transformer import Recompute, UnitWork, Workload
from tests.unit.megatron_fsdp.planning.chains import BF16, THREE, Chain, sharding_of, subject_of

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
    recompute: Recompute = Recompute.NONE,
) -> StepTime:
    """Predict with 1 byte per second on links, no latency, and 1 operation per token and unit with parameters."""
    subject = subject_of(Chain(rows), UnitWork(1, is_layer=True))
    played = play_step(subject.stand_ins(sharding_of(sizes, placements, policy), 1), [num_microbatches])
    links = {f"axis{position}": Link(1.0) for position in range(2)}
    return predict_step(played, Workload(1, 1, num_microbatches, recompute), Hardware(flops, 1e9, links))


def test_fast_compute_leaves_all_communication_exposed() -> None:
    # 64 + 128 + 32 elements of 4 bytes, three quarters of them moved: gathered twice but for the last, reduced once.
    time = step(1e9)
    assert time.communication == pytest.approx((3 * 224 - 32) * 4 * 0.75)
    assert time.exposed == pytest.approx(time.communication, rel=1e-6)
    assert time.total == pytest.approx(time.compute + time.exposed + time.optimizer)


def test_slow_compute_hides_all_but_the_first_gather_of_each_pass_and_the_last_reduction() -> None:
    time = step(1e-4)
    # Forward begins with unit1, backward ends with it; unit3 waits for backward with its weights.
    assert time.exposed == pytest.approx((64 + 64) * 4 * 0.75)
    assert time.compute == pytest.approx(3 * 3 / 1e-4)


def test_compute_and_overlapped_communication_grow_with_the_microbatches() -> None:
    one, three = step(1.0), step(1.0, 3)
    assert three.compute == pytest.approx(3 * one.compute)
    assert three.communication == pytest.approx(3 * one.communication)
    assert three.optimizer == one.optimizer


def test_what_is_reduced_after_the_last_microbatch_is_never_hidden() -> None:
    one, three = (step(1e-9, count, rows=(16,), sizes=(2, 4), placements=Placements.hsdp(0, 1)) for count in (1, 3))
    tail = 2 * 0.5 * 16 * 4
    assert one.units[1].tail == three.units[1].tail == pytest.approx(tail)
    assert one.exposed > tail


def test_all_but_the_first_unit_hide_the_reduction_and_the_refresh_of_replicated_weights() -> None:
    time = step(1e-9, placements=Placements.optim(0))
    # The reduce-scatter of the unit that backward leaves last, and the all-gather that it waits for in forward.
    assert time.exposed == pytest.approx((64 + 64) * 4 * 0.75)


def test_replicas_on_one_rank_communicate_nothing() -> None:
    time = step(1.0, rows=(16,), sizes=(1,))
    # What is left is the host's.
    assert (time.communication, time.exposed, time.tokens_to_hide) == (0.0, pytest.approx(0.0, abs=1e-4), 0)


def test_recomputing_a_layer_costs_another_forward() -> None:
    assert step(1.0, recompute=Recompute.FULL).compute == pytest.approx(3 * 4)


def test_the_optimizer_reads_and_writes_its_own_part() -> None:
    # 56 elements: the gradient, and weights and moments twice, in FP32.
    assert step(1.0).optimizer == pytest.approx(56e-9 * (4 + 6 * 4))


def test_the_optimizer_writes_compute_weights_where_they_rest() -> None:
    assert step(1.0, policy=BF16, placements=Placements.optim(0)).optimizer == pytest.approx(56e-9 * (4 + 6 * 4 + 2))
    assert step(1.0, policy=BF16).optimizer == pytest.approx(56e-9 * (4 + 6 * 4))


def test_tokens_to_hide_grow_with_bandwidth_bound_time() -> None:
    # unit2 reduces and gathers 512 bytes in backward, 2 operations per token; forward 512 against 1.
    assert step(1.0).tokens_to_hide == 128 * 4 * 3 // 4


@pytest.mark.parametrize(
    ("sizes", "bandwidths"),
    [
        ((8,), [450.0]),
        ((64,), [400.0]),
        ((8, 8), [50.0, 450.0]),
        ((16, 4), [100.0, 450.0]),
        ((4, 16), [50.0, 400.0]),
        ((4, 2), [450.0, 450.0]),
    ],
)
def test_an_axis_gets_the_ports_of_its_members_in_a_node(sizes: tuple[int, ...], bandwidths: list[float]) -> None:
    axes = mesh_axes_of(sizes)
    links = Machine().links(axes)
    assert [links[axis.name].bytes_per_second / 1e9 for axis in axes] == bandwidths


def test_given_bandwidths_replace_those_of_the_nodes() -> None:
    links = Machine().links(mesh_axes_of((2, 8)), (1e9, 2e9))
    assert (links["outer"].bytes_per_second, links["inner"].bytes_per_second) == (1e9, 2e9)


def test_layers_of_a_stage_have_their_numbers_in_the_whole_model() -> None:
    found = catalog.architecture(catalog.load("deepseek-v3"))
    names = [vars(block)["path"] for block in shaped_module(found)[1]]
    assert names[1:6] == ["dense_layer.0", "dense_layer.1", "dense_layer.2", "moe_layer.3", "moe_layer.3.experts"]
    stages = stages_of(found, Parallelism(pipeline=4))
    staged = [shaped_module(stage.architecture, stage.layers[0])[1] for stage in stages]
    assert [vars(block)["path"] for blocks in staged for block in blocks] == names
