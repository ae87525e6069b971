"""``MixedPrecisionPolicy(reduction="invariant")`` under the optimizers over flat memory, which clip in their step."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megatron_fsdp import AdamW, MixedPrecisionPolicy, Muon, Placements, fully_shard
from megatron_fsdp.optim.param_groups import muon_param_groups
from tests.functional.test_invariance import NUM_MICROBATCHES, accumulate, assert_equal, wholes
from tests.harness import run_ranks
from tests.harness.models import make_mesh
from tests.harness.oracle import units_of

NUM_STEPS, SKIPPED = 20, 7


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
    """Which optimizer trains on which mesh, by which strategy."""

    optimizer: str
    mesh: tuple[int, ...] = (1,)
    strategy: str = "optim_grads_params"


def made(kind: str, model: nn.Module) -> AdamW | Muon:
    if kind == "muon":
        groups = muon_param_groups(model)
        return Muon(groups, lr=0.02, adamw={"lr": 1e-2}, max_norm=0.1, nonfinite="skip")
    moments = "int8" if "int8" in kind else None
    seed = 5 if kind == "stochastic int8" else None
    return AdamW(
        model.parameters(),
        lr=1e-2,
        capturable=kind == "capturable",
        max_norm=0.1,
        nonfinite="skip",
        moments=moments,
        rounding_seed=seed,
    )


def trained(run: Run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the norms of all steps, of which one is skipped, weights and moments."""
    torch.manual_seed(7)
    model = Model()
    axes = (0, 1) if len(run.mesh) == 2 else (0,)
    policy = MixedPrecisionPolicy(reduction="invariant", moments="int8" if "int8" in run.optimizer else None)
    for part in (model.wide, model):
        fully_shard(part, make_mesh(run.mesh), getattr(Placements, run.strategy)(*axes), mp_policy=policy)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(NUM_MICROBATCHES)
    optimizer = made(run.optimizer, model)
    norms = []
    for step in range(NUM_STEPS):
        accumulate(model, step)
        if step == SKIPPED:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.mul_(torch.inf)
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm.nan_to_num())
        optimizer.zero_grad()
    return torch.stack(norms), wholes(model, optimizer)


SHARDED = [((2,), "optim_grads_params"), ((3,), "optim_grads_params"), ((4,), "optim_grads_params"),
           ((3,), "no_shard"), ((4,), "optim"), ((2, 2), "hsdp"), ((2, 2), "hfsdp")]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "int8", "stochastic int8", "muon", "capturable"])
def test_norms_weights_and_moments_are_those_of_one_rank_to_the_last_bit(optimizer: str) -> None:
    norms, wanted = run_ranks(1, trained, Run(optimizer))[0]
    assert (norms > 0.1).any()
    for mesh, strategy in SHARDED:
        for found, values in run_ranks(torch.Size(mesh).numel(), trained, Run(optimizer, mesh, strategy)):
            assert torch.equal(found, norms), (mesh, strategy)
            assert_equal(values, wanted)
