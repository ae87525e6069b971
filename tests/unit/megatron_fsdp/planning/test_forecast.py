"""The forecast of a step equals numbers worked out by hand, on four ranks unless a test says otherwise."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dbuffer import Flat, Partial, Replicate
from megatron_fsdp import ConfigError, MixedPrecisionPolicy, Placements, Report, explain
from megatron_fsdp.planning.step_listener import Peak
from megatron_fsdp.planning.unit_report import CollectiveReport
from tests.unit.megatron_fsdp.planning.chains import BF16, THREE, Chain, sharded, world

WHOLE = 224 * 4  # bytes of the three units in FP32


def report(
    placements: Placements | None = None,
    policy: MixedPrecisionPolicy | None = None,
    count: int = 1,
    *,
    rows: tuple[int, ...] = THREE,
    sizes: tuple[int, ...] = (4,),
    rank: int | None = None,
    root_rows: int = 0,
    change: Callable[[Any], object] = lambda model: None,
    **options: Any,
) -> Report:
    with world(*sizes, rank=rank) as mesh:
        model = sharded(Chain(rows, root_rows), mesh, placements, mp_policy=policy, **options)
        change(model)
        return explain(model, count)


@pytest.mark.parametrize(
    ("placements", "policy", "rests", "gradients"),
    [
        # A shard of the weights, and of the gradients after backward.
        (Placements.optim_grads_params(0), None, WHOLE // 4, WHOLE // 4),
        # Weights whole, main weights a slice of them.
        (Placements.optim(0), None, WHOLE, WHOLE),
        # Main weights of another dtype have separate memory, unless a gather can cast them.
        (Placements.optim(0), BF16, 224 * 2 + 56 * 4, WHOLE),
        (Placements.optim_grads_params(0), BF16, WHOLE // 4, WHOLE // 4),
    ],
)
def test_bytes_of_weights_gradients_and_optimizer_state_equal_those_by_hand(
    placements: Placements, policy: MixedPrecisionPolicy | None, rests: int, gradients: int
) -> None:
    found = report(placements, policy)
    assert (found.persistent_bytes, found.gradient_bytes) == (rests, gradients)
    # Two moments of 56 elements, three step counts.
    assert found.optimizer_bytes == 2 * 56 * 4 + 3 * 4
    shares = [buffer.shares for buffer in found.units[1].groups[0].resting]
    assert shares == (
        ["model_weight", ""] if (placements, policy) == (Placements.optim(0), None) else [""] * len(shares)
    )


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        # A unit and the next one, gathered ahead. The peak of backward is at unit2 with its packed gradients, while
        # unit1 is gathered ahead and a shard of unit3's gradients exists.
        ({}, (64 + 128) * 4, (128 + 128 + 64 + 8) * 4),
        # Gradients that are reduced in FP32 count twice against bf16 weights.
        ({"policy": BF16}, (64 + 128) * 2, (128 + 64) * 2 + (128 + 8) * 4),
        # A root that keeps its weights adds them to every peak.
        ({"root_rows": 4}, (16 + 64 + 128) * 4, (16 + 128 + 128 + 64 + 8) * 4),
        # A unit that waits for the next one is released before the unit after that is gathered ahead.
        ({"reshard_after_forward": None}, (64 + 128) * 4, (128 + 128 + 64 + 8) * 4),
        # In forward, halves of unit1 and unit2 remain while unit3 is gathered; in backward, half of unit1.
        ({"reshard_after_forward": 2}, (32 + 64 + 128 + 32) * 4, (32 + 128 + 128 + 64 + 8) * 4),
    ],
)
def test_peaks_of_forward_and_backward(options: dict[str, Any], forward: int, backward: int) -> None:
    found = report(**options)
    assert found.forward_peak == Peak(forward, "unit2")
    assert found.backward_peak == Peak(backward, "unit2", 8 * 4)
    assert (found.largest_unit, found.largest_unit_bytes) == ("unit2", 128 * (2 if "policy" in options else 4))


def test_with_two_packed_buffers_two_units_are_gathered_ahead() -> None:
    found = report(change=lambda model: model.set_reduce_scatter_max_input_buffers(2))
    assert found.forward_peak == Peak((64 + 128 + 32) * 4, "unit3")
    assert found.backward_peak == Peak((128 + 128 + 64 + 32 + 8) * 4, "unit2", 8 * 4)


def test_unsharded_weights_need_no_transient_memory_in_forward() -> None:
    for strategy in (Placements.no_shard(0), Placements.optim(0), Placements.optim_grads(0)):
        assert report(strategy).forward_peak == Peak(0, "")


def test_gradients_of_another_dtype_are_copied_for_the_optimizer() -> None:
    found = report(policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))
    assert found.step_peak == Peak(224 * (4 + 2) // 4, "unit3", 224 * 2 // 4)


def issued(found: Report) -> list[tuple[str, str, int, int]]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for each in found.collectives:
        count, num_bytes = sums.get((each.phase, each.kind), (0, 0))
        sums[each.phase, each.kind] = count + each.count, num_bytes + each.num_bytes
    return [(*key, *numbers) for key, numbers in sums.items()]


@pytest.mark.parametrize(
    ("placements", "collectives"),
    [
        (Placements.no_shard(0), [("backward", "all_reduce", 3, WHOLE)]),
        (Placements.optim(0), [("forward", "all_gather", 3, WHOLE), ("backward", "reduce_scatter", 3, WHOLE)]),
        (
            Placements.optim_grads(0),
            [("forward", "all_gather", 3, WHOLE), ("backward", "reduce_scatter", 15, 5 * WHOLE)],
        ),
        (
            Placements.optim_grads_params(0),
            [
                ("forward", "all_gather", 15, 5 * WHOLE),
                ("backward", "all_gather", 15, 5 * WHOLE),
                ("backward", "reduce_scatter", 15, 5 * WHOLE),
            ],
        ),
    ],
)
def test_each_strategy_issues_its_collectives_per_microbatch_or_per_step(
    placements: Placements, collectives: list[tuple[str, str, int, int]]
) -> None:
    assert issued(report(placements, count=5)) == collectives


def test_hybrid_sharding_reduces_an_inner_shard_over_the_outer_axis_once_per_step() -> None:
    assert report(Placements.hsdp(0, 1), rows=(16,), sizes=(2, 4), count=3).collectives == (
        CollectiveReport("forward", "all_gather", "axis1", 4, 3, 3 * 64 * 4),
        CollectiveReport("backward", "all_gather", "axis1", 4, 3, 3 * 64 * 4),
        CollectiveReport("backward", "all_reduce", "axis0", 2, 1, 16 * 4),
        CollectiveReport("backward", "reduce_scatter", "axis1", 4, 3, 3 * 64 * 4),
    )


def test_changes_on_two_axes_go_through_an_intermediate_buffer_one_after_the_other() -> None:
    both = Placements((0, 1), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat()))
    found = report(both, rows=(16,), sizes=(2, 4))
    # 8 elements per rank; the gather over axis0 makes 16, and the gather over axis1 makes all 64.
    sent = [(each.kind, each.axis, each.num_bytes // each.count) for each in found.collectives]
    assert sent[:2] == [("all_gather", "axis0", 16 * 4), ("all_gather", "axis1", 64 * 4)]
    assert found.forward_peak.num_bytes == (16 + 64) * 4
    partial = Placements((0, 1), (Replicate(), Replicate()), (Partial(), Partial()), (Replicate(), Replicate()))
    found = report(partial, rows=(16,), sizes=(2, 4), count=2)
    assert [(each.kind, each.axis) for each in found.collectives] == [("all_reduce", "axis0"), ("all_reduce", "axis1")]


def test_an_axis_of_one_rank_issues_nothing() -> None:
    assert report(rows=(16,), sizes=(1,)).collectives == ()


def test_padding_is_counted_on_the_rank_that_holds_it() -> None:
    found = [report(rows=(4,), sizes=(3,), rank=rank) for rank in range(3)]
    # Rows of 16 bytes in shards of two rows: the third shard is empty.
    assert [each.padding_bytes for each in found] == [0, 0, 8 * 4]
    assert [each.optimizer_bytes for each in found] == [2 * 8 * 4 + 4, 2 * 8 * 4 + 4, 4]


def test_the_last_unit_of_forward_is_not_gathered_again_for_its_backward() -> None:
    found = report(count=5, reshard_after_forward=None)
    gathers = [each for each in issued(found) if "gather" in each[1]]
    assert gathers == [("forward", "all_gather", 15, 5 * 224 * 4), ("backward", "all_gather", 10, 5 * (64 + 128) * 4)]


def test_a_frozen_last_unit_is_released_because_no_backward_comes_for_it() -> None:
    with world(4) as mesh:
        model = Chain(THREE)
        model.requires_grad_(False)
        found = explain(sharded(model, mesh, reshard_after_forward=None))
    assert {total.phase for total in found.collectives} == {"forward"}


def test_parts_kept_for_backward_are_gathered_by_neighbours() -> None:
    found = report(reshard_after_forward=2)
    assert ("backward", "all_gather", 3, 224 * 4) in issued(found)
    assert {(each.axis, each.num_ranks) for each in found.collectives} == {("axis0", 4), ("axis0, runs of 2", 2)}
    kinds = [buffer.kind for buffer in found.units[1].groups[0].transient]
    assert kinds == ["gathered weights", "post-forward shard", "packed gradients", "main_grad"]


def test_a_unit_that_needs_no_weights_in_backward_is_not_gathered_there() -> None:
    found = report(change=lambda model: model.unit2.set_unshard_in_backward(False))
    gathers = [each[::2] for each in issued(found) if each[1] == "all_gather"]
    assert gathers == [("forward", 3), ("backward", 2)]


def test_an_accumulator_that_is_not_used_any_more_still_takes_its_room() -> None:
    before = report(Placements.no_shard(0))
    frozen = report(Placements.no_shard(0), change=lambda model: model.unit1.requires_grad_(False))
    assert frozen.persistent_bytes >= before.persistent_bytes
    # A frozen unit has no optimizer state either.
    assert before.optimizer_bytes - frozen.optimizer_bytes == 2 * 64 * 4 + 4


@pytest.mark.parametrize("keeps", [False, True], ids=["released", "kept after backward"])
def test_equal_microbatches_are_counted_without_playing_each(keeps: bool) -> None:
    def counted(number: int) -> Counter[tuple[str, str]]:
        found = report(
            count=number,
            reshard_after_forward=None,
            change=lambda model: model.set_reshard_after_backward(not keeps),
        )
        return Counter({(phase, kind): count for phase, kind, count, _ in issued(found)})

    two, three, hundred = map(counted, (2, 3, 100))
    for key in two:
        assert hundred[key] == two[key] + 98 * (three[key] - two[key])


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        report(count=0)
