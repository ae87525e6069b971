"""Every mesh of docs/megatron.md trains as one process does: losses, norms, every gradient and every updated weight."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron.groups import ModelGroups
from tests.integration.megatron_meshes import (
    GATED,
    MOE,
    Case,
    Mesh,
    Task,
    build,
    references,
    run_cases,
)
from tests.integration.megatron_training import megatron_processes
from tests.integration.ranks import run_ranks

SEQUENCE = {"sequence_parallel": True}
PER_TOKEN = {"calculate_per_token_loss": True}
# Over gloo, messages of a batch to one neighbour that is before and behind are mixed up, also under Megatron's DDP.
UNBATCHED = {"batch_p2p_comm": False}
OUTER = {"outer_dp_sharding_strategy": "optim"}
DEEP = Task(layers=4, num_microbatches=4)
DEEP_TIED = Task(layers=4, num_microbatches=4, is_tied=True)
# fmt: off
CASES: dict[int, dict[str, Case]] = {
    2: {
        "dp2": Case(Task(data=2), Mesh()),
        "ep2": Case(Task(MOE, data=2), Mesh(ep=2)),
        "ep2, no_shard": Case(Task(MOE, data=2), Mesh(ep=2, strategy="no_shard")),
        "ep2, optim": Case(Task(MOE, data=2), Mesh(ep=2, strategy="optim")),
        "ep2, per token": Case(Task(MOE | PER_TOKEN, data=2, is_masked=True), Mesh(ep=2)),
        "tp2": Case(Task(), Mesh(tp=2)),
        "tp2, tied": Case(Task(is_tied=True), Mesh(tp=2)),
        "tp2+sp": Case(Task(), Mesh(tp=2, model=SEQUENCE)),
        "tp2+sp, gated, qk norm": Case(Task(GATED | {"qk_layernorm": True}), Mesh(tp=2, model=SEQUENCE)),
        "tp2+sp, experts": Case(Task(MOE), Mesh(tp=2, model=SEQUENCE)),
        "tp2 ep2 etp1+sp": Case(Task(MOE), Mesh(tp=2, ep=2, etp=1, model=SEQUENCE)),
        "cp2": Case(Task(), Mesh(cp=2)),
        "cp2, per token": Case(Task(PER_TOKEN, is_masked=True), Mesh(cp=2)),
        "cp2 ep2": Case(Task(MOE), Mesh(cp=2, ep=2)),
        "pp2": Case(Task(), Mesh(pp=2)),
        "pp2, outputs freed": Case(DEEP, Mesh(pp=2, model={"deallocate_pipeline_outputs": True})),
        "pp2, tied": Case(Task(is_tied=True), Mesh(pp=2)),
        "pp2 interleaved": Case(DEEP, Mesh(pp=2, chunks=2, model=UNBATCHED)),
        "pp2 interleaved, tied, per token": Case(
            Task(PER_TOKEN, layers=4, num_microbatches=4, is_tied=True, is_masked=True),
            Mesh(pp=2, chunks=2, model=UNBATCHED),
        ),
    },
    4: {
        "ep4": Case(Task(MOE, data=4), Mesh(ep=4)),
        "ep2 dp4": Case(Task(MOE, data=4), Mesh(ep=2)),
        "ep2 hsdp": Case(Task(MOE, data=4), Mesh(ep=2, instances=2)),
        "ep2 hsdp, outer optim": Case(Task(MOE, data=4), Mesh(ep=2, instances=2, ddp=OUTER)),
        "ep2 hsdp, optim, per token": Case(
            Task(MOE | PER_TOKEN, data=4, is_masked=True), Mesh(ep=2, instances=2, strategy="optim")
        ),
        "tp2 dp2+sp, gated": Case(Task(GATED, data=2), Mesh(tp=2, model=SEQUENCE)),
        "tp2 dp2, optim, per token": Case(Task(PER_TOKEN, data=2, is_masked=True), Mesh(tp=2, strategy="optim")),
        "hsdp, optim_grads": Case(Task(data=4), Mesh(instances=2, strategy="optim_grads")),
        "tp2 hsdp": Case(Task(data=2), Mesh(tp=2, instances=2)),
        "tp2 ep2+sp": Case(Task(MOE, data=2), Mesh(tp=2, ep=2, model=SEQUENCE)),
        "tp2 ep2 etp1 dp2+sp": Case(Task(MOE, data=2), Mesh(tp=2, ep=2, etp=1, model=SEQUENCE)),
        "tp2 ep4 etp1+sp": Case(Task(MOE, data=2), Mesh(tp=2, ep=4, etp=1, model=SEQUENCE)),
        "tp2 pp2, tied": Case(Task(is_tied=True), Mesh(tp=2, pp=2)),
        "tp2 pp2+sp, gated, optim_grads": Case(
            Task(GATED), Mesh(tp=2, pp=2, strategy="optim_grads", model=SEQUENCE)
        ),
        "pp2 dp2, tied": Case(Task(data=2, is_tied=True), Mesh(pp=2)),
        "pp2 dp2, tied, optim": Case(Task(data=2, is_tied=True), Mesh(pp=2, strategy="optim")),
        "pp2 dp2, tied, no_shard, per token": Case(
            Task(PER_TOKEN, data=2, is_tied=True, is_masked=True), Mesh(pp=2, strategy="no_shard")
        ),
        "pp2 dp2 interleaved, tied": Case(
            Task(layers=4, num_microbatches=4, is_tied=True, data=2), Mesh(pp=2, chunks=2, model=UNBATCHED)
        ),
        "pp4, tied": Case(DEEP_TIED, Mesh(pp=4)),
        "pp2 ep2": Case(Task(MOE, data=2), Mesh(pp=2, ep=2)),
        "pp2 hsdp": Case(Task(data=2), Mesh(pp=2, instances=2)),
        "cp2 dp2": Case(Task(data=2), Mesh(cp=2)),
        "tp2 cp2+sp": Case(Task(), Mesh(tp=2, cp=2, model=SEQUENCE)),
        "tp2 cp2 ep2 etp1+sp": Case(Task(MOE), Mesh(tp=2, cp=2, ep=2, etp=1, model=SEQUENCE)),
    },
    8: {
        "tp2 pp2 dp2+sp, tied, gated": Case(Task(GATED, data=2, is_tied=True), Mesh(tp=2, pp=2, model=SEQUENCE)),
        "tp2 pp2 ep2 etp1+sp": Case(Task(MOE, data=2), Mesh(tp=2, pp=2, ep=2, etp=1, model=SEQUENCE)),
    },
}
# fmt: on
NAMES = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


@functools.cache
def found_by(ranks: int) -> list[dict[str, list[str]]]:
    """Run all meshes of one size in one job, after their tasks in one process; return what each rank found unlike."""
    cases = CASES[ranks]
    outcomes = run_ranks(1, references, [case.task for case in cases.values()])[0]
    return run_ranks(
        ranks, run_cases, {name: (cases[name], outcome) for name, outcome in zip(cases, outcomes, strict=True)}
    )


@pytest.mark.parametrize(
    ("ranks", "name"), [pytest.param(*each, marks=pytest.mark.slow if each[0] == 8 else ()) for each in NAMES]
)
def test_a_mesh_trains_as_one_process(ranks: int, name: str) -> None:
    assert [found[name] for found in found_by(ranks)] == [[]] * ranks


def test_the_page_lists_just_these_meshes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")
    table = text.split("<!-- meshes -->")[1]
    listed = re.findall(r"^\| `([^`]+)` \| (\d) \|", table, re.MULTILINE)
    assert [(int(ranks), name) for name, ranks in listed] == NAMES


def wrap_with_others() -> str:
    """Wrap stages whose tied embedding shares its group with the stage's other parameters; return the error."""
    mesh, tied = Mesh(pp=2), ModelGroups.tied
    # The first call for shared parameters finds none, so that they get no separate group.
    found: Iterator[Any] = iter([lambda groups, model: []])
    first_not = mock.patch.object(ModelGroups, "tied", lambda groups, model: next(found, tied)(groups, model))
    with megatron_processes(**mesh.groups()), first_not:
        with pytest.raises(ConfigError) as caught:
            build(Task(is_tied=True, data=2), mesh)
        return str(caught.value)


def test_a_tied_embedding_that_stages_cut_differently_is_refused() -> None:
    for message in run_ranks(4, wrap_with_others):
        assert "the tied embedding of shape (32, 16) is cut differently on the first and the last" in message
        assert "--untie-embeddings-and-output-weights" in message
