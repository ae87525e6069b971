"""FP16 with Megatron's grad scaler: the steps that it leaves out, its scales, losses and norms are those of its DDP."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.integration.megatron_meshes import (
    Mesh,
    Task,
    build,
    forward_and_backward,
)
from tests.integration.megatron_training import finalize_model_grads, megatron_processes
from tests.integration.ranks import run_ranks
from tests.integration.test_megatron_mesh_checkpoint import load, save

HALF = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
# The initial scale is far too large, so steps are skipped; two good steps in a row let it grow.
SCALER = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 1.0}
Steps = list[tuple[bool, float, float | None, float]]


def train(task: Task, chunks: list[Any], optimizer: Any, steps: range) -> Steps:
    """Return whether each step was made, the scale after it, and its norm and loss."""
    config = chunks[0].config
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    found = []
    for step in steps:
        reports = forward_and_backward(task, chunks, optimizer, step)
        is_done, norm, _ = optimizer.step()
        loss = torch.tensor([sum(((entry["loss"][0] / entry["loss"][1]).item() for entry in reports), 0.0)])
        dist.all_reduce(loss)
        found.append((is_done, optimizer.get_loss_scale().item(), norm if is_done else None, loss.item()))
    return found


def compare(task: Task, mesh: Mesh) -> tuple[Steps, Steps]:
    with megatron_processes(**mesh.groups()):
        wanted = train(task, *build(task, replace(mesh, strategy=None)), range(16))
        return wanted, train(task, *build(task, mesh), range(16))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(strategy="no_shard"), Mesh(tp=2), Mesh(pp=2)], ids=str)
def test_steps_scales_and_figures_are_those_of_megatrons_ddp(mesh: Mesh) -> None:
    task = Task(HALF, data=2 // (mesh.tp * mesh.pp), optimizer=SCALER)
    for wanted, found in run_ranks(2, compare, task, replace(mesh, model=HALF)):
        assert {is_done for is_done, *_ in wanted} == {False, True}
        assert [step[:2] for step in found] == [step[:2] for step in wanted]
        for (*_, norm, loss), (*_, wanted_norm, wanted_loss) in zip(found, wanted, strict=True):
            assert norm == (wanted_norm if wanted_norm is None else pytest.approx(wanted_norm, rel=2e-2))
            assert loss == pytest.approx(wanted_loss, rel=5e-3)


def resume(task: Task, mesh: Mesh, folder: Path) -> tuple[Steps, Steps]:
    with megatron_processes(**mesh.groups()):
        chunks, optimizer = build(task, mesh)
        train(task, chunks, optimizer, range(12))
        save(chunks, optimizer, folder)
        wanted = train(task, chunks, optimizer, range(12, 15))
        chunks, optimizer = build(task, mesh)
        load(chunks, optimizer, folder)
        return wanted, train(task, chunks, optimizer, range(12, 15))


def test_a_run_goes_on_with_the_scale_that_it_had(tmp_path: Path) -> None:
    for wanted, found in run_ranks(2, resume, Task(HALF, data=2, optimizer=SCALER), Mesh(), tmp_path / "step12"):
        assert found == wanted


def gradients(mesh: Mesh) -> torch.Tensor:
    """Return the gradients of the first step before they are unscaled, one after the other."""
    task = Task(HALF, data=2, optimizer={"fp16": True, "loss_scale": 1024.0})
    chunks, optimizer = build(task, replace(mesh, model=HALF))
    model, config = chunks[0], chunks[0].config
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    forward_and_backward(task, chunks, optimizer, 0)
    found = [value if (value := getattr(p, "main_grad", None)) is not None else p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).double().flatten() for g in found])


def errors_of_sums() -> dict[str, float]:
    with megatron_processes():
        exact = gradients(Mesh(strategy=None, ddp={"grad_reduce_in_fp32": True}))
        found = {
            "fp32 sums": gradients(Mesh(ddp={"grad_reduce_in_fp32": True})),
            "ddp": gradients(Mesh(strategy=None, ddp={"grad_reduce_in_fp32": False})),
            "fp16 sums": gradients(Mesh(ddp={"grad_reduce_in_fp32": False})),
        }
    return {name: ((each - exact).norm() / exact.norm()).item() for name, each in found.items()}


def test_sums_of_fp16_gradients_are_exact_in_fp32_and_else_rounded_no_more_than_ddps() -> None:
    (found, _) = run_ranks(2, errors_of_sums)
    assert found["fp32 sums"] < 1e-6
    assert found["ddp"] > 1e-4
    assert found["fp16 sums"] < found["ddp"]
