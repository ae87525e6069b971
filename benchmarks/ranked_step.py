"""Training steps on real ranks, compared with FSDP2: the bench of ``torchrun --nproc-per-node N -m benchmarks gpu``.

Collectives are real, so weights have real values, exposed communication takes its time, and clocks and power are those
of a real run. All engines start from the same weights and use the same tokens, so their final losses must agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

import megatron_fsdp
from benchmarks.engines import LEARNING_RATE, Precision, fsdp2, make_model, ours, step_of, train_in_turn, world_mesh
from benchmarks.harness import Row, Samples, Times, both, ratio
from benchmarks.models import Shape

__all__ = ["ENGINES", "is_ranked", "joined", "ranked_rows"]

PEER = "FSDP2"
BENCH = "ranked step"


def is_ranked() -> bool:
    """Return whether ``torchrun`` has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the other ranks as long as the block runs: NCCL on this rank's GPU, or gloo; yields the device."""
    bound = None
    if device == "cuda":
        bound = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(bound)
    dist.init_process_group("gloo" if bound is None else "nccl", device_id=bound)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _flat_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return megatron_fsdp.AdamW(model.parameters(), lr=LEARNING_RATE)


def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _ours(num_buffers: int) -> Callable[[Shape, Precision, str], nn.Module]:
    def make(shape: Shape, precision: Precision, device: str) -> nn.Module:
        model = make_model(shape, device)
        ours(model, list(model.layers), world_mesh(device), precision)
        assert isinstance(model, megatron_fsdp.FSDPModule)
        model.set_reduce_scatter_max_input_buffers(num_buffers)
        return model

    return make


def _fsdp2(shape: Shape, precision: Precision, device: str) -> nn.Module:
    model = make_model(shape, device)
    return fsdp2(model, list(model.layers), world_mesh(device), precision)


ENGINES: Mapping[str, tuple[Callable[[Shape, Precision, str], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "ours, 1 packed buffer": (_ours(1), _flat_adamw),
    "ours, 2 packed buffers": (_ours(2), _flat_adamw),
    PEER: (_fsdp2, _fused_adamw),
}


def ranked_rows(shape: Shape, precision: Precision, device: str, rounds: int, name: str) -> list[Row]:
    """Return the slowest rank's seconds per step and the final losses, and both compared with FSDP2's; on rank 0 only.

    Args:
        name: name of the precision, for the rows.
    """
    models = {engine: make(shape, precision, device) for engine, (make, _) in ENGINES.items()}
    steps = {engine: step_of(model, ENGINES[engine][1](model)) for engine, model in models.items()}
    times = train_in_turn(steps, shape, rounds, device)
    losses = {engine: _loss(model, shape, device) for engine, model in models.items()}
    ranks: list[Times] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, times)
    if dist.get_rank() != 0:
        return []
    llama = f"llama-like, {shape.num_layers} layers of {shape.width}"
    case: dict[str, str | int | float] = {
        "model": llama,
        "tokens": shape.batch * shape.length,
        "precision": name,
        "ranks": len(ranks),
    }
    rows, seconds = [], both(ranks)["wall time"]
    for engine in ENGINES:
        rows.append(Row(BENCH, {**case, "engine": engine}, "wall time", "s", seconds[engine]))
        rows.append(Row(BENCH, {**case, "engine": engine}, "loss", "", Samples((losses[engine],))))
        if engine != PEER:
            beside = {**case, "engine": engine, "peer": PEER}
            rows.append(Row(BENCH, beside, "wall time over peer's", "", ratio(seconds[engine], seconds[PEER])))
            off = abs(losses[engine] - losses[PEER]) / losses[PEER]
            rows.append(Row(BENCH, beside, "difference of the loss from peer's", "", Samples((off,))))
    return rows


@torch.no_grad()
def _loss(model: nn.Module, shape: Shape, device: str) -> float:
    """Return the mean loss of all ranks; each rank draws its own tokens."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator).to(device)
    loss = model(tokens).float()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()
