"""``reduction="invariant"`` on all numbers of ranks, strategies, wires and optimizers, against one rank, to the bit."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    AdamW,
    MixedPrecisionPolicy,
    Muon,
    Placements,
    checksum,
    clip_grad_norm_,
    fully_shard,
    microbatch,
)
from megatron_fsdp.optim.param_groups import muon_param_groups
from tests.functional.megatron_fsdp.runtime.grads.test_invariance import NUM_MICROBATCHES, WIRES
from tests.harness import run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import make_mesh
from tests.harness.oracle import differing, units_of, whole

NUM_STEPS, SKIPPED = 10, 7


class Model(nn.Module):
    """One matrix large enough for 8-bit moments, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 13)
        self.wide = nn.Sequential(nn.Linear(13, 331), nn.GELU(), nn.Linear(331, 13))
        self.head = nn.Linear(13, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.wide(x))


@dataclass(frozen=True, slots=True)
class Run:
    """Which optimizer trains on which mesh, by which strategy, with what on the wire."""

    optimizer: str
    wire: str
    mesh: tuple[int, ...] = (1,)
    strategy: str = "optim_grads_params"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run leaves: by step norms, losses of all microbatches in order, checksums; weights and moments at the end.

    One step is skipped, and its norm is that of gradients that are not finite.
    """

    norms: torch.Tensor
    losses: list[list[float]]
    checksums: list[int]
    values: dict[str, torch.Tensor]


def loss_of(model: nn.Module, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + number)
    tokens = torch.randint(0, 29, (3, 8), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind.startswith("torch's AdamW"):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    if kind == "muon":
        groups = muon_param_groups(model)
        return Muon(groups, lr=0.02, adamw={"lr": 1e-2}, max_norm=0.1, nonfinite="skip")
    return AdamW(
        model.parameters(),
        lr=1e-2,
        capturable=kind == "capturable",
        max_norm=0.1,
        nonfinite="skip",
        moments="int8" if "int8" in kind else None,
        rounding_seed=5 if kind == "stochastic int8" else None,
    )


def made_model(run: Run) -> nn.Module:
    torch.manual_seed(7)
    model = Model()
    axes = tuple(range(len(run.mesh)))
    policy = MixedPrecisionPolicy(
        reduce_dtype=WIRES[run.wire], reduction="invariant", moments="int8" if "int8" in run.optimizer else None
    )
    for part in (model.wide, model):
        fully_shard(part, make_mesh(run.mesh), getattr(Placements, run.strategy)(*axes), mp_policy=policy)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(NUM_MICROBATCHES)
    return model


def losses_of(model: nn.Module, step: int) -> list[float]:
    """Run this rank's microbatches; return the losses of all ranks' by number."""
    size, rank = dist.get_world_size(), dist.get_rank()
    losses = torch.zeros(NUM_MICROBATCHES)
    for number in range(rank, NUM_MICROBATCHES, size):
        with microbatch(model, is_last=number + size >= NUM_MICROBATCHES):
            loss = loss_of(model, step, number)
            loss.backward()
        losses[number] = loss.detach()
    # Each has one rank's value and zeros.
    dist.all_reduce(losses)
    found: list[float] = losses.tolist()
    return found


def norm_of(kind: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
    """Clip, step unless the norm is not finite, and return it."""
    if isinstance(optimizer, AdamW | Muon):
        optimizer.step()
        assert optimizer.grad_norm is not None
        return optimizer.grad_norm.clone()
    norm = clip_grad_norm_(model, 0.1) if kind == "torch's AdamW" else clipped_by_torch(model)
    if norm.isfinite():
        optimizer.step()
    return norm


def clipped_by_torch(model: nn.Module) -> torch.Tensor:
    """Clip, by one tensor or all at once, and return the norm and those of the gradients as one."""
    each = [torch.linalg.vector_norm(parameter.grad) for parameter in model.parameters()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False if each[0] > 0.1 else None)
    return torch.stack([whole(value, value).clone() for value in (norm, *each)]).sum()


def trained(run: Run) -> Trained:
    model = made_model(run)
    optimizer = made(run.optimizer, model)
    norms, losses, checksums = [], [], []
    for step in range(NUM_STEPS):
        losses.append(losses_of(model, step))
        if step == SKIPPED:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.mul_(torch.inf)
        norms.append(norm_of(run.optimizer, optimizer, model).nan_to_num())
        optimizer.zero_grad()
        checksums.append(checksum(model, optimizer))
    values = {}
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state[parameter]}.items():
            values[f"{name}.{key}"] = whole(value, value)
    return Trained(torch.stack(norms), losses, checksums, values)


@functools.cache
def trained_alone(optimizer: str, wire: str) -> Trained:
    return run_ranks(1, trained, Run(optimizer, wire))[0]


OPTIMIZERS = [
    "torch's AdamW",
    "torch's AdamW, clipped by torch",
    "adamw",
    "capturable",
    "int8",
    "stochastic int8",
    "muon",
]
FLAT, NESTED = ("no_shard", "optim", "optim_grads", "optim_grads_params"), ("hsdp", "hfsdp")
SHARDED = [
    *(((size,), strategy) for size in (1, 2, 3, 4) for strategy in FLAT),
    *((mesh, strategy) for mesh in ((2, 2), (1, 4)) for strategy in NESTED),
]
GRID = [(optimizer, wire, *sharded) for optimizer in OPTIMIZERS for wire in WIRES for sharded in SHARDED]


# By day every value, and every optimizer on three ranks.
QUICK = list(dict.fromkeys([*covering(GRID, strength=1), *((name, "bf16", (3,), FLAT[-1]) for name in OPTIMIZERS)]))


@pytest.mark.parametrize(("optimizer", "wire", "mesh", "strategy"), nightly_but(QUICK, GRID))
def test_losses_norms_checksums_weights_and_moments_are_those_of_one_rank_to_the_last_bit(
    optimizer: str, wire: str, mesh: tuple[int, ...], strategy: str
) -> None:
    wanted = trained_alone(optimizer, wire)
    assert (wanted.norms > 0.1).any()
    assert len(set(wanted.checksums)) == NUM_STEPS - 1
    for found in run_ranks(torch.Size(mesh).numel(), trained, Run(optimizer, wire, mesh, strategy)):
        assert found.losses == wanted.losses
        assert torch.equal(found.norms, wanted.norms)
        assert found.checksums == wanted.checksums
        assert differing(found.values, wanted.values) == []
