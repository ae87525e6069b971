"""What a step takes, from facts alone, against numbers worked out by hand: four ranks unless a test says otherwise."""

from dataclasses import replace

import pytest
import torch

from dbuffer import Flat, Partial, Replicate, plan
from megatron_fsdp import ConfigError, Placements
from megatron_fsdp.planning.model_spec import AxisFacts, Call, GroupFacts, ModelFacts, Transfer, Use
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.report import report_of
from megatron_fsdp.planning.report_text import CollectiveTotal, PeakReport
from tests.unit.megatron_fsdp.planning.chains import BF16, FP32, chain, group_of, three_units


def test_a_sharded_model_rests_as_a_weight_shard_and_has_a_gradient_shard_after_backward() -> None:
    # 64 + 128 + 32 elements of 4 bytes over 4 ranks.
    report = report_of(three_units())
    assert (report.persistent_bytes, report.gradient_bytes) == (224 * 4 // 4, 224 * 4 // 4)


def test_a_replicated_model_rests_whole_but_the_optimizer_works_on_a_slice() -> None:
    report = report_of(three_units(placements=Placements.optim(0)))
    # Weights and gradients whole, main weights a slice of the former. Two moments of 56 elements, three step counts.
    assert (report.persistent_bytes, report.gradient_bytes) == (224 * 4, 224 * 4)
    assert report.optimizer_bytes == 2 * 56 * 4 + 3 * 4
    assert [buffer.shares for buffer in report.units[1].groups[0].resting] == ["model_weight", ""]


def test_main_weights_of_another_dtype_have_memory_of_their_own() -> None:
    report = report_of(three_units(BF16, Placements.optim(0)))
    # Per element: 2 bytes of bf16 weights, and a quarter of 4 of FP32 weights; 4 of FP32 gradients.
    assert (report.persistent_bytes, report.gradient_bytes) == (224 * 2 + 56 * 4, 224 * 4)


def test_no_weights_of_another_dtype_rest_where_a_gather_can_cast_main_weights() -> None:
    report = report_of(three_units(BF16))
    assert (report.persistent_bytes, report.gradient_bytes) == (56 * 4, 56 * 4)


def test_forward_holds_a_unit_and_the_one_gathered_ahead() -> None:
    report = report_of(three_units())
    assert report.forward_peak == PeakReport((64 + 128) * 4, "unit2")
    assert (report.largest_unit, report.largest_unit_bytes) == ("unit2", 128 * 4)


def test_backward_holds_a_unit_the_one_gathered_ahead_and_one_packed_buffer() -> None:
    # unit2 with its gradients packed, while unit1 is gathered ahead: 128 + 128 + 64 elements; a shard of unit3's
    # gradients is there by then.
    assert report_of(three_units()).backward_peak == PeakReport((128 + 128 + 64) * 4 + 8 * 4, "unit2", 8 * 4)


def test_gradients_that_are_reduced_in_fp32_count_twice_against_bf16_weights() -> None:
    report = report_of(three_units(BF16))
    assert report.forward_peak.num_bytes == (64 + 128) * 2
    assert report.backward_peak.num_bytes == (128 + 64) * 2 + 128 * 4 + 8 * 4


def test_a_root_that_keeps_its_weights_adds_them_to_every_peak() -> None:
    facts = three_units()
    root = replace(facts.units[0], groups=(group_of(4),))
    call = Call(0, (Use(0, 0, 0), *facts.call.steps))
    facts = replace(facts, units=(root, *facts.units[1:]), call=call)
    report = report_of(facts)
    assert report.forward_peak.num_bytes == (16 + 64 + 128) * 4
    assert report.backward_peak.num_bytes == (16 + 128 + 128 + 64 + 8) * 4


def test_weights_that_rest_whole_need_no_transient_memory_in_forward() -> None:
    for strategy in (Placements.no_shard(0), Placements.optim(0), Placements.optim_grads(0)):
        assert report_of(three_units(placements=strategy)).forward_peak == PeakReport(0, "")


def test_each_strategy_issues_its_collectives_per_microbatch_or_per_step() -> None:
    def issued(placements: Placements) -> list[tuple[str, str, int, int]]:
        totals = report_of(three_units(placements=placements), 5).collectives
        return [(total.phase, total.kind, total.count, total.num_bytes) for total in totals]

    whole = 224 * 4
    assert issued(Placements.no_shard(0)) == [("backward", "all_reduce", 3, whole)]
    assert issued(Placements.optim(0)) == [
        ("forward", "all_gather", 3, whole),
        ("backward", "reduce_scatter", 3, whole),
    ]
    assert issued(Placements.optim_grads(0)) == [
        ("forward", "all_gather", 3, whole),
        ("backward", "reduce_scatter", 15, 5 * whole),
    ]
    assert issued(Placements.optim_grads_params(0)) == [
        ("forward", "all_gather", 15, 5 * whole),
        ("backward", "all_gather", 15, 5 * whole),
        ("backward", "reduce_scatter", 15, 5 * whole),
    ]


def test_hybrid_sharding_reduces_the_outer_axis_once_per_step_in_pieces_of_an_inner_shard() -> None:
    report = report_of(chain(group_of(16, Placements.hsdp(0, 1), sizes=(2, 4))), 3)
    assert report.collectives == (
        CollectiveTotal("forward", "all_gather", "axis1", 4, 3, 3 * 64 * 4),
        CollectiveTotal("backward", "all_gather", "axis1", 4, 3, 3 * 64 * 4),
        CollectiveTotal("backward", "all_reduce", "axis0", 2, 1, 16 * 4),
        CollectiveTotal("backward", "reduce_scatter", "axis1", 4, 3, 3 * 64 * 4),
    )


def test_an_axis_of_one_rank_issues_nothing() -> None:
    assert report_of(chain(group_of(16, sizes=(1,)))).collectives == ()


def sent(facts: ModelFacts, num_microbatches: int = 1) -> list[Transfer]:
    """Return what a step sends, in order."""
    segments = play_step(facts, None, [num_microbatches]).segments[num_microbatches]
    return [event.transfer for _, events in segments for event in events if event.transfer is not None]


def test_a_change_on_two_axes_goes_through_an_intermediate_buffer() -> None:
    both = Placements((0, 1), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat()))
    group = group_of(16, both, sizes=(2, 4))
    # 8 elements rest; 16 after the gather over axis0, which are gathered over axis1 into the 64.
    assert sent(chain(group))[:2] == [
        Transfer("all_gather", "axis0", 2, 16 * 4),
        Transfer("all_gather", "axis1", 4, 64 * 4),
    ]
    assert report_of(chain(group)).forward_peak.num_bytes == (16 + 64) * 4


def test_two_partial_axes_are_reduced_one_after_the_other() -> None:
    both = Placements((0, 1), (Replicate(), Replicate()), (Partial(), Partial()), (Replicate(), Replicate()))
    group = group_of(16, both, sizes=(2, 4))
    assert [(transfer.kind, transfer.axis) for transfer in sent(chain(group), 2)] == [
        ("all_reduce", "axis1"),
        ("all_reduce", "axis0"),
    ]


def test_padding_is_counted_on_the_rank_that_holds_it() -> None:
    axes = [AxisFacts("axis0", 3, rank) for rank in range(3)]
    layout = plan([(4, 4)], 3, itemsize=4)
    groups = [GroupFacts(("weight",), layout, (axis,), Placements.optim_grads_params(0), FP32, True) for axis in axes]
    padded = [report_of(chain(group)).padding_bytes for group in groups]
    # Rows of 16 bytes in shards of two rows: the third shard is empty.
    assert padded == [0, 0, 8 * 4]
    assert [report_of(chain(group)).optimizer_bytes for group in groups] == [2 * 8 * 4 + 4, 2 * 8 * 4 + 4, 4]


def test_gradients_of_another_dtype_are_copied_for_the_optimizer() -> None:
    dtypes = replace(FP32, main_grad=torch.bfloat16)
    assert report_of(three_units(dtypes)).step_peak == PeakReport(224 * (4 + 2) // 4, "unit3", 224 * 2 // 4)


def lingering(facts: ModelFacts) -> ModelFacts:
    """Units below the root are released when the next one runs, as by default."""
    root, *units = facts.units
    return replace(facts, units=(root, *(replace(unit, reshard_after_forward=None) for unit in units)))


def test_the_last_unit_of_forward_is_not_gathered_again_for_its_backward() -> None:
    report = report_of(lingering(three_units()), 5)
    gathers = {total.phase: (total.count, total.num_bytes) for total in report.collectives if "gather" in total.kind}
    assert gathers == {"forward": (15, 5 * 224 * 4), "backward": (10, 5 * (64 + 128) * 4)}
    assert [unit.reason for unit in report.units[1:]] == [
        "",
        "",
        "kept after forward: the last that forward uses, its backward is next",
    ]


def test_a_unit_that_waits_for_the_next_one_takes_no_more_room_than_two_units() -> None:
    # When unit2 runs, unit1 goes before unit3 is gathered ahead.
    assert report_of(lingering(three_units())).forward_peak == PeakReport((64 + 128) * 4, "unit2")


def test_a_frozen_last_unit_is_released_because_no_backward_comes_for_it() -> None:
    facts = lingering(three_units())
    frozen = tuple(
        replace(unit, groups=tuple(replace(group, requires_grad=False) for group in unit.groups))
        for unit in facts.units
    )
    report = report_of(replace(facts, units=frozen))
    assert not any("last" in unit.reason for unit in report.units)
    assert {total.phase for total in report.collectives} == {"forward"}


def test_parts_kept_for_backward_take_their_room_and_are_gathered_by_neighbours() -> None:
    facts = three_units()
    parts = tuple(unit if unit.is_root else replace(unit, reshard_after_forward=2) for unit in facts.units)
    report = report_of(replace(facts, units=parts))
    backward = [total for total in report.collectives if (total.phase, total.kind) == ("backward", "all_gather")]
    assert backward == [CollectiveTotal("backward", "all_gather", "axis0, runs of 2", 2, 3, 224 * 4)]
    # In forward unit2 leaves a half while unit3 is there, and unit1's half with it.
    assert report.forward_peak == PeakReport((32 + 64 + 128 + 32) * 4, "unit2")
    # When unit2 is packed unit1 is gathered ahead, whose half is still there; and a shard of unit3's gradients.
    assert report.backward_peak.num_bytes == (32 + 128 + 128 + 64 + 8) * 4
    kinds = [buffer.kind for buffer in report.units[1].groups[0].transient]
    assert kinds == ["gathered weights", "post-forward shard", "packed gradients", "main_grad"]


def test_two_packed_buffers_may_live_at_once_where_that_was_chosen() -> None:
    facts = three_units()
    two = replace(facts, units=tuple(replace(unit, max_packed_buffers=2) for unit in facts.units))
    assert report_of(two).backward_peak.num_bytes - report_of(facts).backward_peak.num_bytes == 32 * 4


def test_a_unit_that_needs_no_weights_in_backward_is_not_gathered_there() -> None:
    facts = three_units()
    units = (*facts.units[:2], replace(facts.units[2], unshards_in_backward=False), facts.units[3])
    gathers = [each for each in report_of(replace(facts, units=units)).collectives if each.kind == "all_gather"]
    assert [(each.phase, each.count) for each in gathers] == [("forward", 3), ("backward", 2)]


def test_frozen_parameters_of_a_trained_group_have_no_optimizer_state() -> None:
    layout = plan([(4, 4), (4, 4)], 1, itemsize=4)
    axes = (AxisFacts("axis0", 1, 0),)
    group = GroupFacts(("a", "b"), layout, axes, Placements.no_shard(0), FP32, True, frozen=frozenset({1}))
    assert report_of(chain(group)).optimizer_bytes == 2 * 16 * 4 + 4


def test_an_accumulator_that_is_not_used_any_more_still_takes_its_room() -> None:
    frozen = replace(group_of(16), frozen=frozenset({0}))
    more = report_of(chain(replace(frozen, holds_gradients=True))).persistent_bytes
    assert more - report_of(chain(frozen)).persistent_bytes == 64 * 4 // 4


@pytest.mark.parametrize("keeps", [False, True], ids=["released", "kept after backward"])
def test_alike_microbatches_are_counted_as_if_each_was_played(keeps: bool) -> None:
    facts = lingering(three_units())
    facts = replace(facts, units=tuple(replace(unit, reshards_after_backward=not keeps) for unit in facts.units))
    counts = [
        {(each.phase, each.kind): each.count for each in report_of(facts, number).collectives} for number in (2, 3, 100)
    ]
    for key, two in counts[0].items():
        assert counts[2].get(key, 0) == two + 98 * (counts[1].get(key, 0) - two)


def test_moments_of_another_dtype_take_its_size() -> None:
    assert report_of(three_units(), moments_dtype=torch.bfloat16).optimizer_bytes == 2 * 56 * 2 + 3 * 4


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        report_of(three_units(), 0)
