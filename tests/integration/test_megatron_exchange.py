"""torch_dist checkpoints of Megatron's DDP and its optimizers are loaded on other sizes, bit for bit."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.integrations.megatron.checkpoint import innermost
from megatron_fsdp.integrations.megatron.torch_dist import load_torch_dist
from tests.integration.megatron_meshes import (
    GATED,
    MOE,
    Mesh,
    Task,
    build,
    global_names,
    run_steps,
)
from tests.integration.megatron_training import (
    DistributedOptimizer,
    dist_checkpointing,
    megatron_processes,
    parallel_state,
)
from tests.integration.ranks import run_ranks
from tests.integration.test_megatron_mesh_checkpoint import Held, assembled, held

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
DISTRIBUTED = {"use_distributed_optimizer": True}


@contextmanager
def written_by_threads() -> Iterator[None]:
    """Let Megatron write files in threads: the ranks are daemons, which may not start processes."""
    context = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, Process=threading.Thread)
    context.Manager = lambda: context
    files = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    threads = SimpleNamespace(get_context=lambda kind: context)
    with mock.patch.object(files, "mp", threads), mock.patch.object(files, "_results_queue", None):
        yield


def ddp(distributed: bool = True, **sizes: Any) -> Mesh:
    """Return a mesh under Megatron's own DDP."""
    return Mesh(strategy=None, ddp=DISTRIBUTED if distributed else {}, **sizes)


def task_of(task: Task, mesh: Mesh) -> Task:
    return Task(**{**vars(task), "optimizer": {**task.optimizer, **(DISTRIBUTED if mesh.ddp else {})}})


def megatrons_state(chunks: list[Any], optimizer: Any, **more: Any) -> dict[str, Any]:
    """Return what Megatron's save_checkpoint makes of a model and an optimizer."""
    metadata = {**METADATA, **more, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = innermost(chunks[0]).sharded_state_dict(metadata=metadata)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata), "iteration": 2}


def optimizers_in(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def all_held(chunks: list[Any], optimizer: Any, mesh: Mesh) -> Held:
    """Return this rank's weights, FP32 main weights and moments, whole along data-parallel ranks."""
    parameters = [parameter for chunk in chunks for parameter in global_names(chunk.module).values()]
    if mesh.strategy is not None:
        shown = {parameter: {**optimizer.optimizer.state[parameter], "main": parameter} for parameter in parameters}
    else:
        states = dict(entry for inner in optimizers_in(optimizer) for entry in states_of(inner))
        shown = {parameter: states[id(parameter)] for parameter in parameters}
    return held(chunks, SimpleNamespace(optimizer=SimpleNamespace(state=shown)))


def states_of(optimizer: Any) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    if not isinstance(optimizer, DistributedOptimizer):
        for parameter, state in optimizer.optimizer.state.items():
            yield id(parameter), {**state, "main": parameter}
        return
    step = optimizer.state_dict()["optimizer"]["param_groups"][0]["step"]
    gathered = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    for index, buffer in enumerate(optimizer.buffers):
        (tensors,) = gathered[index].values()
        for parameter, (start, end, _) in buffer.param_index_map.items():
            names = {"main": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            values = {name: tensors[key][start:end].view(parameter.shape) for name, key in names.items()}
            yield id(parameter), {**values, "step": torch.tensor(float(step))}


def groups_in(optimizer: Any) -> list[dict[str, Any]]:
    return [group for inner in optimizers_in(optimizer) for group in inner.optimizer.param_groups]


def load_of_ddp(task: Task, first: Mesh, second: Mesh, folder: Path) -> tuple[Held, Held, Any, Any]:
    """Train and save under Megatron's DDP, load under this engine; return what both hold, and their next steps."""
    steps: list[tuple[int, list[tuple[float, float]]]] = []
    with megatron_processes(**first.groups()):
        chunks, optimizer = build(task_of(task, first), first)
        run_steps(task, chunks, optimizer, range(2))
        for group in groups_in(optimizer):
            group["lr"] = 3e-3
        folder.mkdir(exist_ok=True)
        with written_by_threads():
            dist_checkpointing.save(megatrons_state(chunks, optimizer), str(folder))
        wanted = all_held(chunks, optimizer, first)
        figures, _ = run_steps(task, chunks, optimizer, range(2, 4))
        steps.append((parallel_state.get_data_parallel_world_size(), figures))
    with megatron_processes(**second.groups()):
        chunks, optimizer = build(task_of(task, second), second)
        assert load_torch_dist(chunks, optimizer, folder)["iteration"] == 2
        assert {group["lr"] for group in groups_in(optimizer)} == {3e-3}
        found = all_held(chunks, optimizer, second)
        figures, _ = run_steps(task, chunks, optimizer, range(2, 4))
        steps.append((parallel_state.get_data_parallel_world_size(), figures))
    return wanted, found, steps[0], steps[1]


INTERLEAVED = Mesh(pp=2, chunks=2, model={"batch_p2p_comm": False})
LOW = {"bf16": True, "params_dtype": torch.bfloat16}
PAIRS = {
    "ddp dp2 to dp2": (2, Task(GATED, data=2), ddp(), Mesh()),
    "ddp dp2 to dp2, bf16": (2, Task(GATED | LOW, data=2), ddp(), Mesh()),
    "ddp tp2 to dp2, gated": (2, Task(GATED), ddp(tp=2), Mesh()),
    "ddp of whole tensors to tp2": (2, Task(GATED), ddp(distributed=False), Mesh(tp=2)),
    "ddp pp2 to dp2, tied": (2, Task(is_tied=True), ddp(pp=2), Mesh()),
    "ddp dp2 to pp2 interleaved": (2, Task(layers=4, num_microbatches=4), ddp(), INTERLEAVED),
    "ddp ep2 to dp2": (2, Task(MOE, data=2), ddp(ep=2), Mesh()),
    "ddp dp2 to ep2": (2, Task(MOE, data=2), ddp(), Mesh(ep=2)),
    "ddp tp2 dp2 to pp2 dp2": (4, Task(GATED), ddp(tp=2), Mesh(pp=2, strategy="optim")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_weights_and_moments_are_loaded(name: str, tmp_path: Path) -> None:
    ranks, task, first, second = PAIRS[name]
    results = run_ranks(ranks, load_of_ddp, task, first, second, tmp_path / "saved")
    wanted, found = (assembled([result[side] for result in results]) for side in (0, 1))
    assert {entry.split()[-1] for entry in wanted} == {"weight", "main", "exp_avg", "exp_avg_sq", "step"}
    assert found.keys() == wanted.keys()
    for entry, value in wanted.items():
        # Megatron's weights are what main weights are rounded to.
        kind = task.model.get("params_dtype", value.dtype) if entry.endswith(" weight") else value.dtype
        assert torch.equal(found[entry].to(kind), value.to(kind)), entry
    for _, _, (num_data, figures), (num_data_after, again) in results:
        if num_data == num_data_after:
            for before, after in zip(figures, again, strict=True):
                assert after == pytest.approx(before, rel=1e-2 if task.model.get("bf16") else 1e-5)


def refuse(folder: Path) -> tuple[str, str, str]:
    """Try to load three wrong states: state by buckets, another model's, and an optimizer's where the file has none."""
    messages = []
    with megatron_processes():
        chunks, optimizer = build(task_of(Task(), ddp()), ddp())
        run_steps(Task(), chunks, optimizer, range(1))
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        weights = innermost(chunks[0]).sharded_state_dict(metadata=metadata)
        by_bucket = {**metadata, "distrib_optim_sharding_type": "dp_reshardable"}
        state = optimizer.sharded_state_dict(weights, metadata=by_bucket)
        for kind, document in (("buckets", {"model": weights, "optimizer": state}), ("weights", {"model": weights})):
            (folder / kind).mkdir(exist_ok=True)
            with written_by_threads():
                dist_checkpointing.save(document, str(folder / kind))
        sharded, its_optimizer = build(Task(), Mesh())
        other, _ = build(Task(layers=4), Mesh())
        cases = ((sharded, its_optimizer, "buckets"), (other, None, "weights"), (sharded, its_optimizer, "weights"))
        for chunks_, optimizer_, kind in cases:
            with pytest.raises(CheckpointError) as caught:
                load_torch_dist(chunks_, optimizer_, folder / kind)
            messages.append(str(caught.value))
        load_torch_dist(sharded, None, folder / "weights")
        wanted = {name: value.detach() for name, value in global_names(chunks[0].module).items()}
        for name, value in global_names(sharded[0].module).items():
            assert torch.equal(value.full_tensor(), wanted[name]), name
    by_bucket_, other_, without = messages
    return by_bucket_, other_, without


def test_unloadable_state_is_refused_and_weights_load_alone(tmp_path: Path) -> None:
    for by_bucket, other, without in run_ranks(2, refuse, tmp_path):
        assert "fix: save with --dist-ckpt-optim-fully-reshardable" in by_bucket
        assert "in the checkpoint and (4, 16) in this model. fix: give the folder of this model's checkpoint" in other
        assert "fix: optimizer=None loads weights only" in without


def load_by_number(folder: Path, name: str) -> None:
    """Load what Megatron saved with each layer under its number, gates and up-projections apart or not."""
    task = Task(GATED)
    with megatron_processes():
        chunks, optimizer = build(task_of(task, ddp()), ddp())
        run_steps(task, chunks, optimizer, range(1))
        (folder / name).mkdir(exist_ok=True)
        with written_by_threads():
            dist_checkpointing.save(megatrons_state(chunks, optimizer, **{name: True}), str(folder / name))
        sharded, its_optimizer = build(task, Mesh())
        load_torch_dist(sharded, its_optimizer, folder / name)
        wanted, found = all_held(chunks, optimizer, ddp()), all_held(sharded, its_optimizer, Mesh())
        assert wanted.keys() == found.keys()
        for entry, parts in wanted.items():
            assert torch.equal(found[entry][0][-1], parts[0][-1]), entry


@pytest.mark.parametrize("name", ["non_homogeneous_layers", "singleton_local_shards"])
def test_layers_by_number_are_found(name: str, tmp_path: Path) -> None:
    run_ranks(2, load_by_number, tmp_path, name)
