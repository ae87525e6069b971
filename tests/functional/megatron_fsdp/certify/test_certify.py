"""The certificate finds no race in the engine, and finds each race that a test adds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dbuffer.collectives.all_reduce import all_reduce
from dbuffer.mesh import mesh_axes
from megatron_fsdp import AdamW, fully_shard
from megatron_fsdp.certify.certificate import Certificate, Certification, certify, watching
from tests.certify.__main__ import main
from tests.certify.cases import CASES, SHORT
from tests.certify.host_order import order_findings
from tests.certify.matrix import Run, merged, run_matrix, run_on_rank
from tests.certify.mutants import EQUIVALENT, MODULES, OPEN, applied, key, mutants, survey
from tests.harness import on_ranks, run_ranks
from tests.harness.models import inputs, three_blocks, world_mesh
from tests.harness.oracle import sharded


def findings(runs: list[Run]) -> list[str]:
    return [line for run in runs if not run.is_clean for line in run.certificate.lines()]


def test_one_configuration_of_each_mechanism_is_in_order() -> None:
    runs = run_matrix(SHORT)
    assert findings(runs) == []
    assert all(run.certificate.num_conflicts > 5 for run in runs)


@pytest.mark.slow
def test_every_configuration_is_in_order() -> None:
    assert findings(run_matrix(CASES)) == []


def test_no_two_configurations_have_one_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.name for case in SHORT} <= {case.name for case in CASES}


def unordered(check: Certification) -> None:
    tensor = torch.zeros(5)
    with check.streams.use(check.streams.stream("side")):
        tensor.add_(1)


def columns(check: Certification) -> None:
    """Two streams use disjoint columns of one matrix."""
    matrix = torch.zeros(5, 4)
    side = check.streams.stream("side")
    check.streams.order(check.streams.compute, side)
    matrix[:, 0].add_(1)
    with check.streams.use(side):
        matrix[:, 1].add_(1)


def overlapping(check: Certification) -> None:
    flat = torch.zeros(12)
    side = check.streams.stream("side")
    check.streams.order(check.streams.compute, side)
    flat[2:7].add_(1)
    with check.streams.use(side):
        flat[6:9].add_(1)


def early(check: Certification) -> None:
    """Free memory that another stream still reads, and allocate it again."""
    tensor = torch.zeros(5)
    side = check.streams.stream("side")
    check.streams.order(check.streams.compute, side)
    with check.streams.use(side):
        tensor.sum()
    del tensor
    torch.zeros(7)


def in_time(check: Certification) -> None:
    tensor = torch.zeros(5)
    side = check.streams.stream("side")
    check.streams.order(check.streams.compute, side)
    with check.streams.use(side):
        tensor.sum()
    check.streams.order(side, check.streams.compute)
    del tensor
    torch.zeros(7)


def looking(check: Certification) -> None:
    tensor = torch.arange(4, device=torch.device("cpu"))
    assert tensor.sum().item() == 6
    assert tensor.tolist() == [0, 1, 2, 3]
    assert bool(tensor.any())
    tensor[tensor > 1].sum()


def by_communicator(check: Certification) -> None:
    """Issue a collective before another stream has written its input."""
    tensor = torch.ones(4)
    side = check.streams.stream("side")
    check.streams.order(check.streams.compute, side)
    (axis,) = mesh_axes(world_mesh())
    all_reduce(tensor, axis, "sum")
    with check.streams.use(side):
        tensor.add_(1)


def certificate_of(script: Callable[[Certification], None]) -> Certificate:
    with watching(script.__name__) as check:
        script(check)
        return check.certificate()


@pytest.mark.parametrize(
    ("script", "num_races", "num_reuses"),
    [
        (unordered, 1, 0),
        (columns, 0, 0),
        (overlapping, 1, 0),
        (early, 0, 1),
        (in_time, 0, 0),
        (by_communicator, 1, 0),
    ],
)
def test_only_unordered_accesses_are_found(
    script: Callable[[Certification], None], num_races: int, num_reuses: int
) -> None:
    found = merged("", run_ranks(2, certificate_of, script))
    assert (len(found.races), len(found.early_reuses)) == (num_races, num_reuses)


def test_a_finding_names_the_lines_of_both_sides() -> None:
    (found,) = run_ranks(1, certificate_of, overlapping)
    lines = Path(__file__).read_text().splitlines()
    first, second = (lines.index(line) + 1 for line in ("    flat[2:7].add_(1)", "        flat[6:9].add_(1)"))
    (race,) = found.races
    assert f"test_certify.py:{first}, then" in race
    assert race.endswith(f"test_certify.py:{second}")


def test_lines_where_the_host_would_wait_for_a_gpu_are_named() -> None:
    (found,) = run_ranks(1, certificate_of, looking)
    whats = sorted(one.what for one in found.host_waits)
    assert whats == ["aten::_local_scalar_dense", "aten::_local_scalar_dense", "aten::index", "tolist"]
    assert all("test_certify.py" in one.place and not one.is_engine for one in found.host_waits)


def issues_of(order: tuple[int, ...]) -> Certificate:
    with watching("order") as check:
        (axis,) = mesh_axes(world_mesh())
        mine = order if dist.get_rank() else tuple(sorted(order))
        for size in mine:
            all_reduce(torch.ones(size)[:1].clone(), axis, "sum")
            # At these sizes this process would run out of memory.
            check.checker.issues[-1] = dataclasses.replace(check.checker.issues[-1], num_bytes=size)
        return check.certificate()


def test_ranks_that_issue_different_collectives_are_found() -> None:
    assert order_findings([one.issues for one in run_ranks(2, issues_of, (1, 2, 3))]) == []
    (line,) = order_findings([one.issues for one in run_ranks(2, issues_of, (1, 3, 2))])
    assert "collective 1: rank 0 issues all_reduce of 2 bytes" in line


def certified_job(has_sync: bool) -> Certificate:
    model = sharded(three_blocks())
    optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=1.0)

    def step(number: int) -> None:
        loss = model(inputs(dist.get_rank(), number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if has_sync:
            loss.item()

    step(0)
    with certify(model, optimizer) as check:
        step(1)
        step(2)
    step(3)
    return check.certificate()


@pytest.mark.parametrize("has_sync", [False, True])
def test_two_steps_of_a_job_are_certified_and_training_continues(has_sync: bool) -> None:
    found = merged("job", run_ranks(2, certified_job, has_sync))
    assert found.is_clean()
    assert found.num_conflicts > 100
    assert sum(one.count for one in found.host_waits) == (4 if has_sync else 0)


def test_the_command_prints_the_number_of_checks_and_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "unshard by hand"]) == 0
    assert "1 configurations" in capsys.readouterr().out
    assert main(["--case", "no such"]) == 2


@pytest.mark.parametrize(
    ("what", "case"),
    [
        ("without `mine.wait_stream(stream)`", "slots largest, prefetch lists"),
        ("without `stream.wait_event(self._event)`", "unshard by hand"),
        ("without `self._event.synchronize()`", "offload, optim_grads_params, fp32, microbatch"),
        ("without `each.join()`", "deleted in flight"),
    ],
)
@on_ranks(1)
def test_a_lane_that_waits_less_is_found(what: str, case: str) -> None:
    found = mutants("megatron_fsdp.engine.streams")
    with applied(next(mutant for mutant in found if mutant.what == what)):
        (certificate,) = run_on_rank([case])
    assert [*certificate.races, *certificate.early_reuses, *certificate.disorders]


def test_the_listed_equivalent_mutants_exist_among_many() -> None:
    keys = {key(mutant) for module in MODULES for mutant in mutants(module)}
    assert len(keys) >= 80
    assert set(EQUIVALENT) | set(OPEN) <= keys


@pytest.mark.slow
def test_every_mutant_is_killed_or_equivalent_or_known_to_be_open() -> None:
    assert {key(mutant) for mutant, found in survey().items() if not found} <= set(OPEN)


@on_ranks(1)
def test_a_model_can_be_certified_more_than_once() -> None:
    model = fully_shard(three_blocks())
    # The first forward agrees between ranks on the order of use, once.
    model(inputs(0, 0)).square().mean().backward()
    found = []
    for step in range(2):
        with certify(model) as check:
            model(inputs(0, step)).square().mean().backward()
            model.zero_grad()
        found.append(check.certificate().is_clean())
    assert found == [True, True]
