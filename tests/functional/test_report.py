"""What explain() predicts is what happens: bytes at rest, transient peaks and collectives of real training steps."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import FsdpModule, MixedPrecisionPolicy, Placements, Report, explain, fully_shard
from megatron_fsdp import fully_shard_optimizer, microbatch
from tests.functional.models import draw_tokens, loss_of, make_mesh
from tests.harness import run_ranks

VOCABULARY = 23
WIDTH = 7

Call = tuple[str, str, str, int, int]


class Block(nn.Module):
    """A residual block whose widths share no factor with the number of ranks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    """Embedding, blocks of different sizes, norm and head."""

    def __init__(self, hidden: tuple[int, ...] = (13, 31, 5, 29)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(width) for width in hidden)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


Shard = Callable[..., object]


def every_part_a_unit(shard: Shard) -> nn.Module:
    """The root has nothing left to own; the largest unit is in the middle."""
    model = Model()
    for block in model.blocks:
        shard(block)
    shard(model.embedding)
    shard([model.norm, model.head])
    shard(model)
    return model


def root_with_parameters(shard: Shard) -> nn.Module:
    """The root owns the embedding, the norm and a head that is tied to the embedding."""
    model = Model()
    model.head.weight = model.embedding.weight
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


def partly_frozen(shard: Shard) -> nn.Module:
    """Units without a gradient at the start and in the middle, and one with frozen and trained parameters."""
    model = Model()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    model.blocks[3].get_parameter("up.weight").requires_grad_(False)
    for block in model.blocks:
        shard(block)
    shard(model.embedding)
    shard(model)
    return model


def nested_units(shard: Shard) -> nn.Module:
    """A unit inside a unit, a unit of two modules with others between them, and kept weights."""
    model = Model()
    shard(model.blocks[1].get_submodule("up"))
    for block in list(model.blocks)[:3]:
        shard(block)
    shard([model.embedding, model.head])
    shard(model, reshard_after_forward=True)
    kept = model.blocks[2]
    assert isinstance(kept, FsdpModule)
    kept.set_reshard_after_forward(False)
    return model


def no_common_root(shard: Shard) -> nn.Module:
    """Units that nothing joins: each has a schedule of its own."""
    model = Model()
    for block in model.blocks:
        shard(block)
    shard(model.embedding)
    shard([model.norm, model.head])
    return model


def explicit_prefetch(shard: Shard) -> nn.Module:
    """Two units gathered ahead in both directions."""
    model = every_part_a_unit(shard)
    blocks = [block for block in model.get_submodule("blocks").children() if isinstance(block, FsdpModule)]
    for position, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
        block.set_modules_to_backward_prefetch(blocks[max(position - 2, 0) : position][::-1])
    return model


def weights_kept_after_backward(shard: Shard) -> nn.Module:
    """Later microbatches find weights gathered."""
    model = every_part_a_unit(shard)
    assert isinstance(model, FsdpModule)
    model.set_reshard_after_backward(False)
    return model


MODELS: dict[str, Callable[[Shard], nn.Module]] = {
    build.__name__: build
    for build in (
        every_part_a_unit,
        root_with_parameters,
        partly_frozen,
        nested_units,
        no_common_root,
        explicit_prefetch,
        weights_kept_after_backward,
    )
}
POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 gradients": MixedPrecisionPolicy(torch.bfloat16, main_grads_dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Setting:
    """One run to predict."""

    model: str = "every_part_a_unit"
    mesh: tuple[int, ...] = (2,)
    strategy: str = "optim_grads_params"
    policy: str = "fp32"
    num_microbatches: int = 1

    def __str__(self) -> str:
        ranks = "x".join(map(str, self.mesh))
        return f"{self.model}-{ranks}-{self.strategy}-{self.policy}-{self.num_microbatches}"


@dataclass
class Step:
    """What one rank saw of one run: bytes at rest, the peaks above them and the collectives of the third step."""

    report: Report
    persistent_bytes: int = 0
    optimizer_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    calls: Counter[Call] = field(default_factory=Counter)


def run(setting: Setting) -> Step:
    """Train three steps and return what the last one took, beside what was predicted before the first."""
    mesh = make_mesh(setting.mesh)
    placements = getattr(Placements, setting.strategy)(*range(mesh.ndim))
    shard = functools.partial(fully_shard, mesh=mesh, placements=placements, mp_policy=POLICIES[setting.policy])
    meter = memory_meter()
    before = meter.current_bytes
    model = MODELS[setting.model](shard)
    seen = Step(explain(model, setting.num_microbatches), meter.current_bytes - before)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trained, lr=0.01))
    for step in range(3):
        seen.forward_peak = seen.backward_peak = 0
        seen.calls.clear()
        for index in range(setting.num_microbatches):
            with microbatch(model, index == setting.num_microbatches - 1):
                _run_microbatch(model, seen, before, draw_tokens(dist.get_rank(), step, index))
        with observe_collectives(lambda call: seen.calls.update([_key("step", call)])):
            optimizer.step()
            optimizer.zero_grad()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    seen.optimizer_bytes = sum(value.nbytes for value in local)
    return seen


def _run_microbatch(model: nn.Module, seen: Step, before: int, tokens: torch.Tensor) -> None:
    meter = memory_meter()
    meter.reset_peak()
    with observe_collectives(lambda call: seen.calls.update([_key("forward", call)])):
        loss = loss_of(model(tokens), tokens)
    seen.forward_peak = max(seen.forward_peak, meter.peak_bytes - before - seen.persistent_bytes)
    meter.reset_peak()
    with observe_collectives(lambda call: seen.calls.update([_key("backward", call)])):
        loss.backward()
    seen.backward_peak = max(seen.backward_peak, meter.peak_bytes - before - seen.persistent_bytes)


def _key(phase: str, call: CollectiveCall) -> Call:
    return phase, call.kind, call.axis, call.num_ranks, call.num_bytes
