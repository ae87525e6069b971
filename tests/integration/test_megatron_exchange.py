"""Exchange of torch_dist checkpoints with Megatron's DDP and its optimizers: both directions, other sizes, bit for bit."""

import queue
import threading
import warnings
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
from megatron_fsdp.integrations.megatron.torch_dist import load_torch_dist, save_torch_dist
from tests.integration.megatron_meshes import (
    GATED,
    MOE,
    Mesh,
    Task,
    build,
    global_names,
    megatron_processes,
    parallel_state,
    run_steps,
)
from tests.integration.megatron_training import DistributedOptimizer, dist_checkpointing
from tests.integration.ranks import run_ranks
from tests.integration.test_megatron_mesh_checkpoint import Held, assembled, held

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
DISTRIBUTED = {"use_distributed_optimizer": True}


@contextmanager
def written_by_threads() -> Iterator[None]:
    """Let Megatron write files in threads: ranks of these tests are daemons, which may start no process."""
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


def megatrons_state(chunks: list[Any], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """Return what Megatron's save_checkpoint makes of a model and an optimizer."""
    metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = innermost(chunks[0]).sharded_state_dict(metadata=metadata)
    state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": state}


def save(chunks: list[Any], optimizer: Any, mesh: Mesh, folder: Path, distributed: bool) -> None:
    if mesh.strategy is not None:
        save_torch_dist(chunks, optimizer, folder, {"iteration": 2}, is_distributed=distributed)
        return
    folder.mkdir(exist_ok=True)
    state = {**megatrons_state(chunks, optimizer, is_loading=False), "iteration": 2}
    dist_checkpointing.save(state, str(folder))


def load(chunks: list[Any], optimizer: Any, mesh: Mesh, folder: Path) -> int:
    if mesh.strategy is not None:
        return load_torch_dist(chunks, optimizer, folder)["iteration"]
    with warnings.catch_warnings():
        # Megatron reads into PyTorch's older kind of sharded tensor.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        loaded = dist_checkpointing.load(megatrons_state(chunks, optimizer, is_loading=True), str(folder))
    innermost(chunks[0]).load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded["iteration"]


def optimizers_in(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def all_held(chunks: list[Any], optimizer: Any, mesh: Mesh) -> Held:
    """Return this rank's weights and moments, whole along data-parallel ranks."""
    if mesh.strategy is not None:
        return held(chunks, optimizer)
    states = dict(entry for inner in optimizers_in(optimizer) for entry in states_of(inner))

    class Shown:
        class optimizer:
            state = {parameter: states[id(parameter)] for parameter in global_names(chunks[0].module).values()}

    return held(chunks, Shown)


def states_of(optimizer: Any) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    if not isinstance(optimizer, DistributedOptimizer):
        yield from ((id(parameter), state) for parameter, state in optimizer.optimizer.state.items())
        return
    step = optimizer.state_dict()["optimizer"]["param_groups"][0]["step"]
    gathered = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    for index, buffer in enumerate(optimizer.buffers):
        (tensors,) = gathered[index].values()
        for parameter, (start, end, _) in buffer.param_index_map.items():
            values = {key: tensors[key][start:end].view(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
            assert torch.equal(tensors["param"][start:end].view(parameter.shape), parameter.detach())
            yield id(parameter), {**values, "step": torch.tensor(float(step))}


def exchange(task: Task, first: Mesh, second: Mesh, folder: Path) -> tuple[Held, Held, Any, Any]:
    """Train and save under one engine, load under the other; return what both hold, and their next steps."""
    is_distributed = bool((first if first.strategy is None else second).ddp)
    with megatron_processes(**first.groups()):
        chunks, optimizer = build(task_of(task, first), first)
        run_steps(task, chunks, optimizer, range(2))
        with written_by_threads():
            save(chunks, optimizer, first, folder, is_distributed)
        wanted = all_held(chunks, optimizer, first)
        after, _ = run_steps(task, chunks, optimizer, range(2, 3))
    with megatron_processes(**second.groups()):
        chunks, optimizer = build(task_of(task, second), second)
        if second.strategy is None:
            # PyTorch's Adam, which Megatron takes without TransformerEngine's, has no state to load into before.
            run_steps(task, chunks, optimizer, range(7, 8))
        assert load(chunks, optimizer, second, folder) == 2
        found = all_held(chunks, optimizer, second)
        again, _ = run_steps(task, chunks, optimizer, range(2, 3))
    return wanted, found, after, again


PAIRS = {
    "ddp dp2 to dp2": (2, Task(GATED, data=2), ddp(), Mesh()),
    "dp2 to ddp dp2": (2, Task(GATED, data=2), Mesh(), ddp()),
    "ddp tp2 to dp2, gated": (2, Task(GATED), ddp(tp=2), Mesh()),
    "dp2 to ddp tp2, gated": (2, Task(GATED, data=2), Mesh(), ddp(tp=2)),
    "ddp of whole tensors to tp2": (2, Task(GATED), ddp(distributed=False), Mesh(tp=2)),
    "tp2 to ddp of whole tensors": (2, Task(GATED), Mesh(tp=2), ddp(distributed=False)),
    "ddp pp2 to dp2, tied": (2, Task(is_tied=True), ddp(pp=2), Mesh()),
    "pp2 to ddp dp2, tied": (2, Task(is_tied=True), Mesh(pp=2), ddp()),
    "ddp ep2 to dp2": (2, Task(MOE, data=2), ddp(ep=2), Mesh()),
    "ep2 to ddp dp2": (2, Task(MOE, data=2), Mesh(ep=2), ddp()),
    "ddp tp2 dp2 to pp2 dp2": (4, Task(GATED), ddp(tp=2), Mesh(pp=2, strategy="optim")),
    "hsdp to ddp tp2 pp2": (4, Task(GATED, data=4), Mesh(instances=2), ddp(tp=2, pp=2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_other_engine_loads_the_same_weights_and_moments(name: str, tmp_path: Path) -> None:
    ranks, task, first, second = PAIRS[name]
    results = run_ranks(ranks, exchange, task, first, second, tmp_path / "saved")
    wanted, found = (assembled([result[side] for result in results]) for side in (0, 1))
    assert any("exp_avg_sq" in entry for entry in wanted)
    assert found.keys() == wanted.keys()
    for entry, value in wanted.items():
        assert torch.equal(found[entry], value), entry
