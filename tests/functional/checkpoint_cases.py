"""Checkpoint layouts for saving and loading, and the values that the tests compare."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from dbuffer import Block, Whole
from megatron_fsdp import AdamW, MixedPrecisionPolicy, Placements, fully_shard
from tests.harness.models import Model, make_mesh, make_model
from tests.harness.oracle import train

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to place a model on ranks: our engine's with all its choices, PyTorch's FSDP2, or none.

    Attributes:
        engine: "dbuffer", "fsdp2" or "plain".
        granularity: of parameters, for our engine. optimizer: its class.
    """

    mesh_shape: tuple[int, ...] = (3,)
    strategy: str = "optim_grads_params"
    policy: MixedPrecisionPolicy | None = None
    granularity: Any = None
    engine: str = "dbuffer"
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the mesh has."""
        return torch.Size(self.mesh_shape).numel()

    def place(self, model: Model) -> Model:
        """Shard the model, in place."""
        if self.engine == "plain":
            return model
        mesh = make_mesh(self.mesh_shape)
        if self.engine == "fsdp2":
            for block in model.blocks:
                fsdp2.fully_shard(block, mesh=mesh)
            placed: Any = fsdp2.fully_shard(model, mesh=mesh)
            return placed
        placements = getattr(Placements, self.strategy)(*range(mesh.ndim))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh, placements, mp_policy=self.policy, granularity=self.granularity)
        return model

    def build(self, seed: int) -> tuple[Model, torch.optim.Optimizer]:
        """Make a model of this layout with an optimizer of two groups; the seed decides weights and learning rate."""
        model = self.place(make_model(seed))
        return model, make_two_groups(model, 0.01 / (seed + 1), self.optimizer)


def make_two_groups(model: nn.Module, lr: float, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """Make an optimizer with weight decay for matrices alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return kind(groups, lr=lr)  # type: ignore[call-arg]


LAYOUTS: Mapping[str, Layout] = {
    "3 ranks": Layout(),
    "2 ranks, ZeRO-2": Layout((2,), "optim_grads", optimizer=AdamW),
    "4 ranks, whole tensors, bf16": Layout(
        (4,), granularity=Whole(), policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "HSDP": Layout((2, 2), "hsdp", optimizer=AdamW),
    "HFSDP, blocks of 5 rows": Layout((2, 2), "hfsdp", granularity=Block(5)),
    "ZeRO-0": Layout((2,), "no_shard"),
    "ZeRO-1": Layout((3,), "optim"),
    "FSDP2": Layout(engine="fsdp2"),
    "one process": Layout((1,), engine="plain"),
}


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's state as whole tensors in one flat dictionary; every rank calls it."""
    options = StateDictOptions(full_state_dict=True)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return {f"{name}: {key}": value.clone() for name, values in state.items() for key, value in values.items()}


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps on the data of this rank."""
    train(model, optimizer, steps, [dist.get_rank()])


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    """Return the message of the error of this exact class that the call raises, or "no error"."""
    try:
        call()
    except error as raised:
        return str(raised)
    return "no error"
