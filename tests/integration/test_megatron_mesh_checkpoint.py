"""Checkpoints of Megatron's meshes: a run goes on as without a break, and other meshes load them, bit for bit."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from megatron_fsdp import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.integrations.megatron.checkpoint import innermost, lay_out_for_megatron
from tests.integration.megatron_meshes import (
    GATED,
    MOE,
    Mesh,
    Task,
    build,
    global_names,
    parts_of,
    run_steps,
    whole_rows,
)
from tests.integration.megatron_training import megatron_processes, optimizers
from tests.integration.ranks import run_ranks

SEQUENCE = {"sequence_parallel": True}
Held = dict[str, list[tuple[int, int, int, int, torch.Tensor]]]


def save(chunks: list[Any], optimizer: Any, folder: Path, kind: str = "dcp") -> None:
    if kind == "own":
        save_checkpoint(chunks[0].module, optimizer.optimizer, folder)
        return
    if kind == "local":
        state = {"model": chunks[0].state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder.with_suffix(f".{torch.distributed.get_rank()}"))
        return
    weights = {f"model{i or ''}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    state_dict_saver.save({**weights, "optimizer": optimizer.sharded_state_dict(weights)}, checkpoint_id=folder)


def load(chunks: list[Any], optimizer: Any, folder: Path, kind: str = "dcp") -> None:
    if kind == "own":
        load_checkpoint(chunks[0].module, optimizer.optimizer, folder)
        return
    if kind == "local":
        state = torch.load(folder.with_suffix(f".{torch.distributed.get_rank()}"), weights_only=False)
    else:
        state = {f"model{i or ''}": chunk.state_dict_for_save_checkpoint() for i, chunk in enumerate(chunks)}
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True)
        state_dict_loader.load(state, checkpoint_id=folder)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i or ''}"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.reload_model_params()


Figures = list[tuple[float, float]]


def resume(task: Task, mesh: Mesh, folder: Path, kind: str) -> tuple[Figures, Figures, int]:
    """Return losses and norms of two steps after a save, and of the same steps of a new model after a load."""
    with megatron_processes(**mesh.groups()):
        chunks, optimizer = build(task, mesh)
        run_steps(task, chunks, optimizer, range(2))
        save(chunks, optimizer, folder, kind)
        wanted, _ = run_steps(task, chunks, optimizer, range(2, 4))
        chunks, optimizer = build(task, mesh)
        load(chunks, optimizer, folder, kind)
        found, _ = run_steps(task, chunks, optimizer, range(2, 4))
        return wanted, found, len(optimizer.param_groups)


TIED_EXPERTS = Task(MOE, data=2, is_tied=True)
MESHES = {
    "dp2": (2, TIED_EXPERTS, Mesh()),
    "tp2, gated": (2, Task(GATED, is_tied=True), Mesh(tp=2)),
    "ep2": (2, Task(MOE, data=2), Mesh(ep=2)),
    "pp2, tied": (2, Task(is_tied=True), Mesh(pp=2)),
    "pp2 interleaved": (
        2, Task(layers=4, num_microbatches=4), Mesh(pp=2, chunks=2, model={"batch_p2p_comm": False})
    ),
    "tp2 ep2 etp1+sp": (4, Task(MOE, data=2), Mesh(tp=2, ep=2, etp=1, model=SEQUENCE)),
    "tp2 pp2, gated, tied": (4, Task(GATED, is_tied=True), Mesh(tp=2, pp=2)),
    "ep2 hsdp": (4, Task(MOE, data=4), Mesh(ep=2, instances=2)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [("dp2", "own"), ("dp2", "local"), *((name, "dcp") for name in MESHES if name != "dp2")]
)
def test_a_run_goes_on_from_a_checkpoint_as_without_a_break(name: str, kind: str, tmp_path: Path) -> None:
    ranks, task, mesh = MESHES[name]
    for wanted, found, _ in run_ranks(ranks, resume, task, mesh, tmp_path / "step2", kind):
        assert found == wanted


def held_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out parameters without an element on this rank, as Megatron does for version 2 of Megatron-FSDP."""
    held = [{**group, "params": [p for p in group["params"] if p._local_tensor.numel()]} for group in groups]
    return [group for group in held if group["params"]]


def resume_with_held_groups(folder: Path) -> tuple[Figures, Figures, int]:
    original = optimizers._get_param_groups
    with mock.patch.object(
        optimizers, "_get_param_groups", lambda *args, **options: held_groups(original(*args, **options))
    ):
        return resume(TIED_EXPERTS, Mesh(), folder, "dcp")


def test_a_run_resumes_if_ranks_omit_their_empty_parameters(tmp_path: Path) -> None:
    found = run_ranks(5, resume_with_held_groups, tmp_path / "step2")
    for wanted, again, _ in found:
        assert again == wanted
    assert len({num_groups for *_, num_groups in found}) == 2


def ask_early(kind: str) -> tuple[Figures, Figures]:
    """Train; then train another model whose optimizer returned its state before the first step."""
    task = Task(MOE, is_tied=True, optimizer={"optimizer": kind})
    with megatron_processes():
        wanted, _ = run_steps(task, *build(task, Mesh()), range(2))
        chunks, optimizer = build(task, Mesh())
        with pytest.raises(ConfigError, match=r"sharded_offsets=.*fix: leave sharded_offsets out"):
            chunks[0].sharded_state_dict(sharded_offsets=((0, 0, 2),))
        state = optimizer.sharded_state_dict(chunks[0].sharded_state_dict(), is_loading=True)
        assert state["state"]
        return wanted, run_steps(task, chunks, optimizer, range(2))[0]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_search_for_a_missing_checkpoint_changes_nothing(kind: str) -> None:
    for wanted, found in run_ranks(2, ask_early, kind):
        assert found == wanted


def held(chunks: list[Any], optimizer: Any) -> Held:
    """Return this rank's parts of weights and moments, with where they belong."""
    found: Held = {}
    for chunk in chunks:
        for name, parameter in global_names(chunk.module).items():
            rank, size = parts_of(parameter)
            dim, stride = (parameter.partition_dim, parameter.partition_stride) if size > 1 else (0, 1)
            state = optimizer.optimizer.state[parameter]
            for key, value in {"weight": parameter, **state}.items():
                entry = (rank, size, dim, stride, whole_rows(value))
                found.setdefault(f"{name} {key}", []).append(entry)
    return found


def assembled(ranks: list[Held]) -> Mapping[str, torch.Tensor]:
    """Return whole tensors, as Megatron's constructors would cut them; ranks with the same part must agree."""
    entries: Held = {}
    for name, found in (each for rank in ranks for each in rank.items()):
        entries.setdefault(name, []).extend(found)
    whole = {}
    for name, found in entries.items():
        parts: dict[int, torch.Tensor] = {}
        for rank, _, _, _, value in found:
            assert torch.equal(parts.setdefault(rank, value), value), name
        _, size, dim, stride, value = found[0]
        assert sorted(parts) == list(range(size)), name
        if not value.ndim:
            whole[name] = value
            continue
        blocks = [parts[rank].chunk(stride, dim) for rank in range(size)]
        whole[name] = torch.cat([blocks[rank][block] for block in range(stride) for rank in range(size)], dim)
    return whole


def exchange(task: Task, first: Mesh, second: Mesh, folder: Path) -> tuple[Held, Held]:
    """Train and save on one mesh, load on another; return what both hold."""
    with megatron_processes(**first.groups()):
        chunks, optimizer = build(task, first)
        run_steps(task, chunks, optimizer, range(2))
        save(chunks, optimizer, folder)
        wanted = held(chunks, optimizer)
    with megatron_processes(**second.groups()):
        chunks, optimizer = build(task, second)
        load(chunks, optimizer, folder)
        return wanted, held(chunks, optimizer)


PAIRS = {
    "tp2 to dp2, gated": (2, Task(GATED), Mesh(tp=2), Mesh()),
    "dp2 to tp2, gated": (2, Task(GATED, data=2), Mesh(), Mesh(tp=2)),
    "ep2 to dp2": (2, Task(MOE, data=2), Mesh(ep=2), Mesh()),
    "dp2 to ep2": (2, Task(MOE, data=2), Mesh(), Mesh(ep=2)),
    "pp2 to dp2, tied": (2, Task(is_tied=True), Mesh(pp=2), Mesh()),
    "dp2 to pp2, tied": (2, Task(is_tied=True, data=2), Mesh(), Mesh(pp=2)),
    "tp2 pp2 to pp2 dp2, gated": (4, Task(GATED), Mesh(tp=2, pp=2), Mesh(pp=2, strategy="optim")),
    "tp2 ep2 etp1 to ep4": (4, Task(MOE, data=2), Mesh(tp=2, ep=2, etp=1, model=SEQUENCE), Mesh(ep=4)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_another_mesh_loads_the_same_weights_and_moments(name: str, tmp_path: Path) -> None:
    ranks, task, first, second = PAIRS[name]
    results = run_ranks(ranks, exchange, task, first, second, tmp_path / "saved")
    wanted, found = (assembled([result[side] for result in results]) for side in (0, 1))
    assert any("exp_avg_sq" in entry for entry in wanted)
    assert found.keys() == wanted.keys()
    for entry, value in wanted.items():
        assert torch.equal(found[entry], value), entry


def refuse_own(folder: Path) -> str:
    with megatron_processes(tensor_model_parallel_size=2):
        chunks, optimizer = build(Task(), Mesh(tp=2))
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(chunks[0].module, optimizer.optimizer, folder)
        return str(caught.value)


def test_our_checkpoint_format_refuses_tensor_parallel_parts(tmp_path: Path) -> None:
    for message in run_ranks(2, refuse_own, tmp_path / "own"):
        assert "save sharded_state_dict() of Megatron's wrapper" in message


def laid_out_names(mesh: Mesh, bits: dict[str, Any]) -> list[str]:
    """Return the names that Megatron's scripts save weights under: they take its wrappers off before they ask."""
    with megatron_processes(**mesh.groups()):
        chunks, _ = build(Task(MOE | bits, data=2 // mesh.pp), mesh)
        model = innermost(chunks[0])
        return list(lay_out_for_megatron({"model": model.state_dict()}, model, is_gated=False)["model"])


@pytest.mark.parametrize("bits", [{}, {"bf16": True, "params_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_megatrons_scripts_save_whole_names(bits: dict[str, Any]) -> None:
    for mesh, pattern in ((Mesh(pp=2), r"layers\.(\d+)"), (Mesh(ep=2), r"local_experts\.(\d+)")):
        first, second = (
            {match[1] for name in names if (match := re.search(pattern, name))}
            for names in run_ranks(2, laid_out_names, mesh, bits)
        )
        assert first
        assert second
        assert not first & second
