"""Small models with ugly shapes, data that differs on every rank, and the ways in which the tests shard them."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard

VOCABULARY = 23
WIDTH = 7
LENGTH = 5
BATCH = 3
NUM_BLOCKS = 2


class Block(nn.Module):
    """A residual block: a norm, three small experts in one 3-D weight, a projection, a gain of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.Parameter(torch.randn(3, 5, WIDTH) / WIDTH**0.5)
        self.project = nn.Linear(15, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(functional.linear(self.norm(hidden), self.experts.flatten(0, 1)))
        output: torch.Tensor = hidden + self.gain * self.project(inner)
        return output


class Model(nn.Module):
    """A token model: embedding, blocks, norm and head; with a frozen parameter and a buffer."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.positions.to(hidden.dtype) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def make_model(seed: int = 0, num_blocks: int = NUM_BLOCKS) -> Model:
    """Make a model whose values the seed decides, alike on every rank."""
    torch.manual_seed(seed)
    return Model(num_blocks)


def draw_tokens(rank: int, step: int = 0, microbatch: int = 0) -> torch.Tensor:
    """Draw one rank's (BATCH, LENGTH) tokens of one microbatch: no two are alike."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + microbatch)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each next token of a row, and the first after the last; 0-d FP32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, dims=1).flatten())


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh over all ranks with axes called ``axis0``, ``axis1``."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{position}" for position in range(len(shape))))


def world_mesh() -> DeviceMesh:
    """Make the mesh of one axis over all ranks."""
    return make_mesh((dist.get_world_size(),))


def shard_model(
    model: Model, mesh: DeviceMesh, strategy: str = "optim_grads_params", policy: MixedPrecisionPolicy | None = None
) -> Model:
    """Make every block a unit, and a unit of the rest; ``strategy`` names a classmethod of ``Placements``."""
    placements = getattr(Placements, strategy)(*range(mesh.ndim))
    for block in model.blocks:
        fully_shard(block, mesh, placements, mp_policy=policy)
    return fully_shard(model, mesh, placements, mp_policy=policy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: Sequence[int]) -> None:
    """Take one optimizer step per entry of ``steps`` on the mean loss over the data of ``ranks``.

    Args:
        ranks: this rank alone for a sharded model, all of them for the whole model beside it.
    """
    for step in steps:
        for rank in ranks:
            tokens = draw_tokens(rank, step)
            (loss_of(model(tokens), tokens) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all entries of the state dict as whole tensors; on a sharded model, every rank calls it."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def differing(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float = 0.0
) -> list[str]:
    """Return the names that only one side has, and those whose values are further apart than ``tolerance``."""
    return [
        name
        for name in found.keys() | wanted.keys()
        if name not in found
        or name not in wanted
        or found[name].shape != wanted[name].shape
        or not (found[name] - wanted[name]).abs().max() <= tolerance
    ]
