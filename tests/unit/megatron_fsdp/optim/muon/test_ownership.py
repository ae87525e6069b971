"""Muon's ownership covers each matrix once, is balanced within a proven bound, and moves the promised bytes."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from dbuffer.errors import PaddingWarning
from megatron_fsdp.optim.local_parts import holders_of
from megatron_fsdp.optim.muon.matrix_views import MatrixBlock, MatrixView
from megatron_fsdp.optim.muon.muon import Muon
from megatron_fsdp.optim.muon.ownership import MatrixWork, Ownership, OwnershipReport, plan_ownership
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.model_source import named_subject
from megatron_fsdp.planning.options import mesh_axes_of, placements_of
from megatron_fsdp.planning.stand_in import Sharding, StoodIn
from megatron_fsdp.policy.precision import MixedPrecisionPolicy


def works(shapes: list[tuple[int, int]], shard_numel: int) -> list[MatrixWork]:
    found, offset = [], 0
    for rows, columns in shapes:
        block = MatrixBlock(columns, ((0, rows),))
        found.append(MatrixWork(f"{rows}x{columns}", block, holders_of(offset, rows * columns, shard_numel)))
        offset += rows * columns
    return found


def test_the_longest_work_goes_first_to_the_least_loaded_rank() -> None:
    found = plan_ownership(works([(2, 2), (8, 8), (4, 4), (4, 4)], 200), 3)
    owners = found.owners
    assert sorted(owners[1:]) == [0, 1, 2]
    assert owners[0] != owners[1]
    assert max(found.load_flops) == found.works[1].flops == OwnershipReport(found).bound_flops


def test_among_equals_the_rank_that_holds_most_owns() -> None:
    # Shards of 30 elements: the second matrix lies on shards 0 to 2, most of it on 1.
    found = plan_ownership(works([(5, 4), (5, 9)], 30), 3)
    assert found.owners == (0, 1)


def test_replicas_divide_the_work() -> None:
    found = plan_ownership(works([(4, 4)] * 8, 64), 2, 2)
    counts = [found.owners.count(rank) for rank in range(4)]
    assert counts == [2, 2, 2, 2]


def test_received_elements_are_those_of_a_step_worked_out_by_hand() -> None:
    # Two matrices of 16 on two shards of 16: each rank owns the matrix that it has, and nothing travels.
    assert plan_ownership(works([(4, 4)] * 2, 16), 2).received_numel == (0, 0)
    # A matrix of 32 over both shards: its owner receives the other half, and the other rank receives its update.
    found = plan_ownership(works([(4, 8)], 16), 2)
    assert found.received_numel == (16, 16)


def test_the_bound_counts_matrices_that_one_rank_must_own() -> None:
    # Three equal matrices on two ranks: one gets two, above the mean of one and a half.
    found = plan_ownership(works([(4, 4)] * 3, 24), 2)
    report = OwnershipReport(found)
    assert report.bound_flops == 2 * found.works[0].flops == report.max_flops
    assert report.gap == 0


def test_loads_are_those_of_the_matrices_given() -> None:
    found = plan_ownership(works([(3, 5), (16, 16), (2, 9), (31, 7)], 127), 4)
    loads = [0] * 4
    for work, owner in zip(found.works, found.owners, strict=True):
        loads[owner] += work.flops
    assert tuple(loads) == found.load_flops


def catalog_ownership(name: str, num_ranks: int) -> Ownership:
    sizes = (num_ranks,)
    sharding = Sharding(mesh_axes_of(sizes), placements_of("optim_grads_params", sizes), MixedPrecisionPolicy())
    with warnings.catch_warnings():
        # Ownership does not depend on padding; the plan page lists the padding.
        warnings.simplefilter("ignore", PaddingWarning)
        with named_subject(name).stand_ins(sharding, 1)() as model:
            (domain,) = muon_of(model.units).domains()
            return domain.exchange.ownership


def muon_of(units: Sequence[StoodIn]) -> Muon:
    """Return Muon for a catalog model: it steps parameters of two or more dims, except embeddings and heads."""
    by_dims: defaultdict[int, list[Any]] = defaultdict(list)
    for unit in units:
        is_inside = unit.modules[0] not in ("embedding", "head")
        for group in unit.unit.groups:
            for shape, parameter in zip(group.plan.shapes, group.parameters.values(), strict=True):
                by_dims[len(shape) if len(shape) > 1 and is_inside else 0].append(parameter)
    views = {dims: {"view": MatrixView(batch_dims=dims - 2)} if dims else {"use_muon": False} for dims in by_dims}
    return Muon([{"params": found, **views[dims]} for dims, found in by_dims.items()])


def check_balance(found: Ownership) -> None:
    report = OwnershipReport(found, itemsize=1)
    mean_numel = report.num_elements / report.num_ranks
    # If a matrix is larger than a rank's fair share, its owner has to receive all of it.
    largest_numel = max(work.block.numel for work in found.works)
    # LPT is within a third of the optimum (Graham 1969), and the bound may lie below the optimum.
    assert report.gap <= 0.2
    # Two bytes each in bf16: 4.2 P / N on average, and not much more on any rank.
    mean_received = report.mean_received_bytes
    assert mean_received <= 2.1 * mean_numel
    assert report.max_received_bytes <= max(1.3 * mean_received, 2.1 * mean_numel, mean_numel + 1.1 * largest_numel)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_owners_of_a_published_model_are_balanced(name: str) -> None:
    check_balance(catalog_ownership(name, 64))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("name", catalog.names())
def test_owners_of_every_published_model_are_balanced(name: str, num_ranks: int) -> None:
    check_balance(catalog_ownership(name, num_ranks))


def test_embeddings_and_heads_are_no_matrices() -> None:
    found = catalog_ownership("llama3-8b", 8)
    assert len(found.works) == 32 * 7
    assert not any("embed" in work.name or "lm_head" in work.name for work in found.works)


def test_experts_are_matrices_each() -> None:
    found = catalog_ownership("mixtral-8x7b", 8)
    assert len(found.works) == 32 * (4 + 1 + 8 * 2)
