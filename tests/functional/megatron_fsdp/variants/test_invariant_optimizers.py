"""``reduction="invariant"`` on many ranks, strategies, dtypes and optimizers equals one rank to the bit."""

import functools

import pytest
import torch
from torch import nn

from megatron_fsdp import AdamW, Muon, clip_grad_norm_
from megatron_fsdp.optim.muon.param_groups import muon_param_groups
from tests.functional.megatron_fsdp.variants.test_invariance import WIRES, Run, accumulate, sharded_net
from tests.harness import run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.oracle import differing, whole

NUM_STEPS, SKIPPED = 4, 2
Trained = tuple[torch.Tensor, dict[str, torch.Tensor]]


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
    )


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
    """Clip, by one tensor or all at once; return the total norm plus the sum of the single norms."""
    each = [torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False if each[0] > 0.1 else None)
    return torch.stack([whole(value, value).clone() for value in (norm, *each)]).sum()


def trained(kind: str, run: Run) -> Trained:
    """Return the norms of all steps, including one skipped for non-finite gradients; weights and moments."""
    model = sharded_net(run, moments="int8" if "int8" in kind else None)
    optimizer, norms, values = made(kind, model), [], {}
    for step in range(NUM_STEPS):
        accumulate(model, run, step)
        if step == SKIPPED:
            model.head.weight.grad.mul_(torch.inf)
        norms.append(norm_of(kind, optimizer, model).nan_to_num())
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state.get(parameter, {})}.items():
            values[f"{name}.{key}"] = whole(value, value)
    return torch.stack(norms), values


@functools.cache
def trained_alone(kind: str, wire: str) -> Trained:
    return run_ranks(1, trained, kind, Run(what="wide", wire=wire))[0]


OPTIMIZERS = ["torch's AdamW", "torch's AdamW, clipped by torch", "adamw", "capturable", "int8", "muon"]
FLAT, NESTED = ("no_shard", "optim", "optim_grads", "optim_grads_params"), ("hsdp", "hfsdp")
SHARDED = [
    *(((size,), strategy) for size in (1, 2, 3, 4) for strategy in FLAT),
    *((mesh, strategy) for mesh in ((2, 2), (1, 4)) for strategy in NESTED),
]
GRID = [(optimizer, wire, *sharded) for optimizer in OPTIMIZERS for wire in WIRES for sharded in SHARDED]


# `make test` runs every value once, and every optimizer on three ranks.
QUICK = list(dict.fromkeys([*covering(GRID, strength=1), *((name, "bf16", (3,), FLAT[-1]) for name in OPTIMIZERS)]))


@pytest.mark.parametrize(("optimizer", "wire", "mesh", "strategy"), nightly_but(QUICK, GRID))
def test_norms_weights_and_moments_are_those_of_one_rank_to_the_last_bit(
    optimizer: str, wire: str, mesh: tuple[int, ...], strategy: str
) -> None:
    norms, wanted = trained_alone(optimizer, wire)
    assert (norms > 0.1).all()
    run = Run(what="wide", mesh=mesh, strategy=strategy, wire=wire)
    for found, values in run_ranks(torch.Size(mesh).numel(), trained, optimizer, run):
        assert torch.equal(found, norms)
        assert differing(values, wanted) == []
