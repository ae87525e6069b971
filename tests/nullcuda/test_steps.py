"""Calls of a step to the host and to the allocator on CUDA, and steps of two processes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bench_gpu import TARGETS
from benchmarks.bench_step import LLAMA_LIKE, null_rows
from megatron_fsdp import (
    AdamW,
    CPUOffloadPolicy,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    materialize,
    save_checkpoint,
)
from tests.functional.test_gpu_ranks import BF16, build, data, loss_of
from tests.functional.test_readme import run_script
from tests.harness import run_ranks
from tests.harness.models import Block
from tests.harness.twins import sharded
from tests.nullcuda import accesses, machine, races
from tests.nullcuda.test_settings import stream_names

ROOT = Path(__file__).parents[2]


def a_fourth_step(strategy: str) -> tuple[races.Findings, int]:
    """Return the findings in the log of the fourth step, and how often it called cudaMalloc."""
    machine.become_rank_0_of(8)
    mesh = init_device_mesh("cuda", (2, 4) if strategy == "hsdp" else (8,))
    model: Any = sharded(build(Block).to("cuda"), strategy, mesh=mesh, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = data(0, 0, 0).to("cuda")

    def step() -> None:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with machine.logged(), accesses.recorded() as record:
        step()
    calls = machine.calls()
    return races.check(calls, record, stream_names()), sum(call.kind == "malloc" for call in calls)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params", "hsdp"])
def test_a_step_neither_waits_on_the_host_nor_allocates(strategy: str) -> None:
    ((found, mallocs),) = run_ranks(1, a_fourth_step, strategy, fresh=True, timeout=120)
    assert found.num_accesses > 30
    assert dict(found.host_waits) == {}
    assert mallocs == 0


def offloaded(folder: str) -> list[str]:
    """Train with offload on two GPUs, with a user's calls between steps."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    mesh = init_device_mesh("cuda", (2,))
    model: Any = sharded(build(Block).to("cuda"), "optim_grads_params", mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    with machine.logged(), accesses.recorded() as record:
        for step in range(2):
            for part in range(2):
                x = data(dist.get_rank(), step, part).to("cuda")
                scaler.scale(loss_of(model, x)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, 1.0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for parameter in model.parameters():
        assert parameter.full_tensor().shape == parameter.shape
        parameter.sum()
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    save_checkpoint(model, optimizer, folder)
    load_checkpoint(model, optimizer, folder)
    found = races.check(machine.calls(), record, stream_names())
    return [*found.races, *found.illegal]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")


@pytest.mark.usefixtures("two_gpus")
def test_offload_on_two_processes_with_gloo_for_tensors_of_the_cpu(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    found = run_ranks(2, offloaded, folder, backend="cpu:gloo,cuda:nccl", fresh=True, timeout=200)
    assert found == [[], []]


def saved_asynchronously(folder: str) -> tuple[int, int, list[str]]:
    """Return how many tensors a save copied to the host, how many of them the host waited for, and all its waits."""
    device = "cuda"
    model: Any = sharded(build(Block).to(device), "optim_grads_params", mesh=init_device_mesh(device, (1,)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    loss_of(model, data(0, 0, 0).to(device)).backward()
    optimizer.step()
    save_checkpoint(model, optimizer, folder, asynchronous=True).wait()
    with machine.logged(), accesses.recorded() as record:
        saving = save_checkpoint(model, optimizer, folder, asynchronous=True)
    calls = machine.calls()
    saving.wait()
    # Kind 2 copies from a device to the host; the last value says whether that memory is pinned.
    copies = [call for call in calls if call.kind == "copy" and call.values[2] == 2 and call.values[1] > 8]
    waits = races.check(calls, record, stream_names()).host_waits
    return len(copies), sum(not call.values[3] for call in copies), list(waits.elements())


def test_an_asynchronous_save_waits_for_no_copy(tmp_path: Path) -> None:
    ((copies, awaited, waits),) = run_ranks(
        1, saved_asynchronously, str(tmp_path / "checkpoint"), backend="nccl", fresh=True, timeout=120
    )
    assert copies > 20
    assert awaited == 0
    assert len(waits) < copies // 4, waits


FLAGS = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 2 --seq-length 64 --micro-batch-size 2 --lr 6e-4 --train-iters 3 --log-interval 1"
).split()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("extra", [[], ["--bf16"], ["--fsdp-double-buffer"], ["--use-nccl-ub"]], ids=" ".join)
def test_the_training_script_runs_on_two_gpus(extra: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 400)
    start: list[str | Path] = [
        sys.executable,
        ROOT / "examples/start_ranks.py",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    script: list[str | Path] = [ROOT / "examples/pretrain_gpt.py", *FLAGS, "--data-path", "text", *extra]
    done = subprocess.run([*start, *script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def memory_by_the_bench() -> list[tuple[str, bool]]:
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)
    target = next(target for target in TARGETS if "memory over" in target.metric and target.bench == "step")
    rows = null_rows(LLAMA_LIKE, 8, "cuda", 1)
    return [(f"{row.case}: {row.samples.median}", target.is_met_by(row)) for row in rows if target.is_about(row)]


def test_the_target_for_memory_of_the_gpu_bench_can_be_met() -> None:
    (found,) = run_ranks(1, memory_by_the_bench, fresh=True, timeout=200)
    assert len(found) == 2
    assert all(is_met for _, is_met in found), found


MEMORY = [("bf16", 4096, 0.90), ("fp32", 4096, 0.95)]


@pytest.mark.parametrize(("sums", "tokens", "limit"), MEMORY)
def test_less_memory_is_reserved_than_by_fsdp2(sums: str, tokens: int, limit: float) -> None:
    reserved = {}
    for engine in ("ours", "fsdp2"):
        command = [sys.executable, "-m", "tests.nullcuda.memory", engine, sums, str(tokens)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ))
        assert done.returncode == 0, done.stderr[-6000:]
        reserved[engine] = json.loads(done.stdout.splitlines()[-1])["reserved"]
    assert reserved["ours"] <= limit * reserved["fsdp2"], reserved


@dataclass
class Batch:
    """Arguments in a structure that PyTorch does not know."""

    words: torch.Tensor
    weight: torch.Tensor


class Reader(nn.Module):
    """Adds up all that it is given, and records on which devices its arguments were."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.devices: set[str] = set()

    def forward(self, batch: Batch, many: list[torch.Tensor], *, named: dict[str, Any]) -> torch.Tensor:
        """Return one number."""
        tensors = [batch.words, batch.weight, *many, named["a"], named["b"][0]]
        self.devices = {each.device.type for each in tensors}
        return sum((self.block(each).sum() for each in tensors), torch.zeros((), device="cuda"))


def devices_of_arguments(built_on: str) -> tuple[set[str], str, bool]:
    with torch.device(built_on):
        model: Any = Reader()
    for module in (model.block, model):
        fully_shard(module)
    if built_on == "meta":
        materialize(model)
    assert model._fsdp_unit.root.backward.max_packed_buffers == 2, "as on any GPU"
    x, trained = torch.ones(2, 8), torch.ones(2, 8, requires_grad=True)
    output = model(Batch(x, trained), [x, x.to("cuda")], named={"a": x, "b": (x, "a word")})
    output.backward()
    assert trained.grad is not None
    return model.devices, trained.grad.device.type, x.device.type == "cpu"


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_the_roots_arguments_are_moved_to_the_gpu(built_on: str) -> None:
    found = run_ranks(1, devices_of_arguments, built_on, backend="nccl", fresh=True, timeout=120)
    ((devices, gradient, is_left),) = found
    assert devices == {"cuda"}
    assert gradient == "cpu"
    assert is_left


@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_readmes_script_runs_on_a_gpu_with_both_engines(sign: str) -> None:
    run_ranks(1, run_script, sign, backend="nccl", fresh=True, timeout=120)
