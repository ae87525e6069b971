"""A model whose gradients have the same bits on any number of ranks, and its run with whole matrices.

A weight's gradient is a dyadic number drawn for the rank, step and microbatch, plus the weight rounded to one: sums of
such numbers are exact in any order, and the optimizer's every bit shows in the next gradient. Gradients are divided by
4 on any number of ranks, which is exact too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, Placements, fully_shard, microbatch
from megatron_fsdp.muon import MatrixView

DIVISOR = 4.0
NUM_MICROBATCHES = 2
HEADS, HEAD_DIM, WIDTH = 3, 4, 7
EXPERTS = MatrixView(batch_dims=1)
QKV = MatrixView(row_splits=(HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM), is_joined=True)
HEAD_ROWS = MatrixView(row_splits=(HEAD_DIM,))
GATE_UP = MatrixView(row_splits=(5, 5))

VIEWS = {
    "qkv": QKV, "queries": HEAD_ROWS, "output": MatrixView(), "experts": EXPERTS, "gate_up": GATE_UP,
    "tall": MatrixView(), "wide": MatrixView(),
}  # fmt: skip


class Layer(nn.Module):
    """Matrices of odd sizes, and vectors between them."""

    def __init__(self) -> None:
        super().__init__()
        rows = HEADS * HEAD_DIM
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Parameter(torch.randn(2 * (rows + 2 * HEAD_DIM), WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(5) / 4)
        self.queries = nn.Parameter(torch.randn(rows, WIDTH) / 4)
        self.output = nn.Parameter(torch.randn(WIDTH, rows) / 4)
        self.experts = nn.Parameter(torch.randn(3, 5, WIDTH) / 4)
        self.gain = nn.Parameter(torch.ones(1))
        self.gate_up = nn.Parameter(torch.randn(10, WIDTH) / 4)
        self.tall = nn.Parameter(torch.randn(17, 3) / 4)
        self.wide = nn.Parameter(torch.randn(2, 13) / 4)

    def forward(self, seed: int) -> torch.Tensor:
        return dyadic_loss(self.parameters(), seed)


class Matrices(nn.Module):
    """Layers below an embedding that AdamW steps."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(11, WIDTH) / 4)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, seed: int) -> torch.Tensor:
        total = dyadic_loss([self.embedding], seed)
        for number, layer in enumerate(self.layers):
            total = total + layer(seed + 17 * number + 1)
        return total


def dyadic_loss(parameters: Iterable[torch.Tensor], seed: int) -> torch.Tensor:
    """Return a sum whose gradient by each weight is a multiple of 1/64 below 16."""
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for parameter in parameters:
        drawn = torch.randint(-256, 256, parameter.shape, generator=generator) / 64
        drawn = drawn + (parameter.detach() * 64).round() / 64
        terms.append((parameter * drawn).sum())
    return torch.stack(terms).sum()


def make_matrices(num_layers: int = 2) -> Matrices:
    """Make the model, alike on every rank."""
    torch.manual_seed(0)
    return Matrices(num_layers)


def shard_matrices(
    model: Matrices,
    mesh: DeviceMesh,
    placements: Placements,
    policy: MixedPrecisionPolicy | None = None,
    offload: CPUOffloadPolicy | None = None,
) -> Matrices:
    """Shard every layer and the rest, with gradients divided by 4."""
    for part in (*model.layers, model):
        fully_shard(part, mesh, placements, mp_policy=policy, offload_policy=offload, grad_divisor=1)
        part.set_gradient_divide_factor(DIVISOR)
    return model


def param_groups(model: nn.Module, options: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return a param group for each view, and one of what AdamW steps."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for name, view in VIEWS.items():
        members = [parameter for key, parameter in named.items() if key.rpartition(".")[2] == name]
        groups.append({"params": members, "view": view, **(options or {})})
    rest = [parameter for key, parameter in named.items() if key.rpartition(".")[2] not in VIEWS]
    return [*groups, {"params": rest, "use_muon": False, "lr": 0.01, "weight_decay": 0.05}]


def seed_of(rank: int, step: int, index: int) -> int:
    """Return the seed of one microbatch of one rank."""
    return 10_000 * rank + 100 * step + 50 * index


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    """Take steps of two microbatches each on this rank's numbers."""
    for step in steps:
        for index in range(NUM_MICROBATCHES):
            with microbatch(model, index == NUM_MICROBATCHES - 1):
                model(seed_of(rank, step, index)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Whole:
    """The run in one process: ``torch.optim.Muon`` over a parameter for each matrix, and ``torch.optim.AdamW``.

    Args:
        muon: options of ``torch.optim.Muon``. num_layers: of the model.
    """

    def __init__(self, muon: Mapping[str, Any], num_layers: int = 2) -> None:
        self.model = make_matrices(num_layers)
        self._matrices: list[tuple[Callable[[torch.Tensor], torch.Tensor], nn.Parameter, nn.Parameter]] = []
        rest = []
        for key, parameter in self.model.named_parameters():
            name = key.rpartition(".")[2]
            if name not in VIEWS:
                rest.append(parameter)
            for cut in cuts_of(name):
                self._matrices.append((cut, parameter, nn.Parameter(cut(parameter.detach()).clone())))
        self.muon = torch.optim.Muon([matrix for *_, matrix in self._matrices], **muon)
        self.adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.05, foreach=False)

    def train(self, steps: range, ranks: Sequence[int]) -> None:
        """Take steps on the numbers of all ranks."""
        for step in steps:
            for rank in ranks:
                for index in range(NUM_MICROBATCHES):
                    self.model(seed_of(rank, step, index)).backward()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= DIVISOR
            for cut, parameter, matrix in self._matrices:
                assert parameter.grad is not None
                matrix.grad = cut(parameter.grad).clone()
            self.muon.step()
            self.adamw.step()
            with torch.no_grad():
                for cut, parameter, matrix in self._matrices:
                    put_back(cut, parameter, matrix)
            self.model.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by name."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def put_back(cut: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor, matrix: torch.Tensor) -> None:
    """Write a matrix back to its place in the parameter."""
    places = cut(torch.arange(parameter.numel()).view(parameter.shape))
    parameter.view(-1)[places.reshape(-1)] = matrix.reshape(-1)


def cuts_of(name: str) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield a function for each matrix of a parameter, written without the views that are tested."""
    rows = HEADS * HEAD_DIM
    sizes = (rows, HEAD_DIM, HEAD_DIM)
    if name == "qkv":
        # Two groups of queries, keys and values, interleaved as in Megatron.
        for first, size in zip((0, rows, rows + HEAD_DIM), sizes, strict=True):

            def both_groups(p: torch.Tensor, first: int = first, size: int = size) -> torch.Tensor:
                return torch.cat([p[first + g : first + g + size] for g in (0, sum(sizes))])

            yield both_groups
    elif name == "queries":
        yield from (lambda p, h=h: p[HEAD_DIM * h : HEAD_DIM * (h + 1)] for h in range(HEADS))
    elif name == "experts":
        yield from (lambda p, e=e: p[e] for e in range(3))
    elif name == "gate_up":
        yield from (lambda p, half=half: p[5 * half : 5 * half + 5] for half in range(2))
    elif name in ("output", "tall", "wide"):
        yield lambda p: p
