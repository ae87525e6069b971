"""The engines that benches compare, through their public interfaces: dtypes, meshes, and steps in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megatron_fsdp
from benchmarks.harness import Times, ranks_in_turn
from benchmarks.models import Model, Shape

__all__ = [
    "ENGINES",
    "LEARNING_RATE",
    "Precision",
    "Shard",
    "Step",
    "fsdp2",
    "make_model",
    "ours",
    "plain",
    "step_of",
    "train_fsdp2",
    "train_in_turn",
    "world_mesh",
]

Step = Callable[[torch.Tensor], None]
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a run.

    Attributes:
        compute: dtype of gathered weights. None: that of the model (FP32).
        reduce: dtype of gradients in reductions. None: that of the model; allowed only if ``compute`` is None, because
            engines and versions of PyTorch choose different dtypes otherwise.
        main_grads: dtype of reduced gradients. None: that of the main weights. Ignored by engines without this option.
        is_split: store main weights as compute weights and remainders. Ignored by engines without this option.
        fuses: multiply weight gradients into place. Ignored by engines without this option.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    is_split: bool = False
    fuses: bool = True


Shard = Callable[[nn.Module, Sequence[nn.Module], DeviceMesh, Precision], nn.Module]


def world_mesh(device_type: str = "cpu") -> DeviceMesh:
    """Return the mesh of one axis over all ranks."""
    return init_device_mesh(device_type, (dist.get_world_size(),))


def make_model(shape: Shape, device: str) -> Model:
    """Make a model whose values are the same on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return Model(shape)


def step_of(model: nn.Module, optimizer: Any) -> Step:
    """Return a training step: forward, backward, the optimizer's step and zero_grad."""

    def step(tokens: torch.Tensor) -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_in_turn(steps: Mapping[str, Step], shape: Shape, rounds: int, device: str = "cpu") -> Times:
    """Run the steps in turn, and return their seconds on this rank.

    Args:
        steps: the step functions, by name.
        shape: shape of the token batch, which this rank draws anew for each round.
        rounds: number of measured rounds.
        device: device of the tokens; on "cuda" the time includes waiting for the device.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, number = (
        [
            torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator).to(device)
            for _ in range(rounds + 2)
        ],
        itertools.count(),
    )
    # Steps of a round see the same tokens.
    calls = {name: lambda step=step: step(tokens[next(number) // len(steps)]) for name, step in steps.items()}
    return ranks_in_turn(calls, rounds, synchronize=torch.cuda.synchronize if device == "cuda" else None)


def plain(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Leave the model unsharded, in the compute dtype."""
    return model if precision.compute is None else model.to(precision.compute)


def ours(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Shard every unit and the root with this project, which prefetches by default."""
    policy = megatron_fsdp.MixedPrecisionPolicy(
        precision.compute,
        precision.reduce,
        cast_forward_inputs=False,
        main_grads_dtype=precision.main_grads,
        split_main_params=precision.is_split,
        fuse_weight_gradients=precision.fuses,
    )
    for module in (*units, model):
        megatron_fsdp.fully_shard(module, mesh, mp_policy=policy)
    return model


def fsdp2(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Shard every unit and the root with torch.distributed.fsdp, with an asynchronous prefetch one unit ahead."""
    policy = fsdp.MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
    for module in (*units, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    sharded: list[Any] = list(units)
    for before, after in itertools.pairwise(sharded):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    if mesh.device_type == "cpu":
        # Without this a gather on a CPU ends before the call returns, so nothing overlaps. CUDA overlaps by streams.
        root: Any = model
        root._set_unshard_async_op(True)
    return model


ENGINES: dict[str, Shard] = {"plain": plain, "ours": ours, "FSDP2": fsdp2}


def train_fsdp2(shape: Shape, precision: Precision, device: str) -> Step:
    """Train with torch.distributed.fsdp.fully_shard and torch's fused AdamW."""
    model = make_model(shape, device)
    fsdp2(model, list(model.layers), world_mesh(device), precision)
    return step_of(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))
