"""The strategy as a triple of placements: what each name means, which triples are legal."""

import itertools
from typing import Any

import pytest

from dbuffer import BufferPlacement, Flat, Partial, PlacementError, Replicate
from megatron_fsdp import Placements

R, P, F = Replicate(), Partial(), Flat()
# Taken too: a list, or one value alone, where a field holds a tuple.
FREELY: Any = Placements


@pytest.mark.parametrize(
    ("placements", "parameter", "gradient", "optimizer"),
    [
        (Placements.no_shard(), (R,), (P,), (R,)),
        (Placements.optim(), (R,), (P,), (F,)),
        (Placements.optim_grads(), (R,), (F,), (F,)),
        (Placements.optim_grads_params(), (F,), (F,), (F,)),
        (Placements.hsdp(), (R, F), (P, F), (R, F)),
        (Placements.hfsdp(), (R, F), (P, F), (F, F)),
    ],
)
def test_a_strategy_by_name_is_its_triple(
    placements: Placements,
    parameter: tuple[BufferPlacement, ...],
    gradient: tuple[BufferPlacement, ...],
    optimizer: tuple[BufferPlacement, ...],
) -> None:
    assert placements.parameter == parameter
    assert placements.gradient == gradient
    assert placements.optimizer == optimizer


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (FREELY("dp", F, F, F), Placements.optim_grads_params("dp")),
        (FREELY(["dp"], [F], [F], [F]), Placements.optim_grads_params("dp")),
        (Placements(("outer", "inner"), (R, F), (P, F), (R, F)), Placements.hsdp("outer", "inner")),
        (Placements(("dp",), (F,), (Partial("avg"),), (F,)), FREELY("dp", F, P, F)),
        (Placements.no_shard("a", "b"), Placements(("a", "b"), (R, R), (P, P), (R, R))),
    ],
)
def test_a_strategy_may_be_written_in_several_ways(written: Placements, named: Placements) -> None:
    assert written == named
    assert hash(written) == hash(named)


LEGAL = {
    (type(parameter), type(gradient), type(optimizer))
    for parameter, gradient, optimizer in [(R, P, R), (R, P, F), (R, F, F), (F, F, F), (F, P, F)]
}


@pytest.mark.parametrize("triple", list(itertools.product((R, P, F), repeat=3)), ids=repr)
def test_a_triple_is_legal_exactly_when_nothing_replicated_is_sharded_elsewhere(
    triple: tuple[BufferPlacement, BufferPlacement, BufferPlacement],
) -> None:
    parameter, gradient, optimizer = triple
    if tuple(map(type, triple)) in LEGAL:
        assert Placements(("dp",), (parameter,), (gradient,), (optimizer,)).dp_axes == ("dp",)
    else:
        with pytest.raises(PlacementError, match="axis 'inner'"):
            Placements(("outer", "inner"), (R, parameter), (P, gradient), (R, optimizer))


@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (1, 2, 1, 1), (2, 2, 2, 1), (2, 1, 1, 1)])
def test_every_axis_needs_all_three_placements(lengths: tuple[int, ...]) -> None:
    axes, parameter, gradient, optimizer = lengths
    with pytest.raises(PlacementError, match="for each of dp_axes"):
        Placements(tuple(range(axes)), (F,) * parameter, (F,) * gradient, (F,) * optimizer)


@pytest.mark.parametrize(
    ("placements", "sizes", "wanted"),
    [
        (Placements.no_shard(), [8], 1),
        (Placements.optim(), [8], 8),
        (Placements.optim_grads_params(), [8], 8),
        (Placements.hsdp(), [3, 8], 8),
        (Placements.hfsdp(), [3, 8], 24),
    ],
)
def test_buffers_are_cut_for_the_optimizers_placement(placements: Placements, sizes: list[int], wanted: int) -> None:
    assert placements.num_shards(sizes) == wanted
