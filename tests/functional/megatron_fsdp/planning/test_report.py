"""explain() predicts the bytes at rest, the transient peaks and the collectives of real training steps."""

import functools
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    Report,
    explain,
    fsdp_no_shard,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import VOCABULARY, WIDTH, Block, draw_tokens, loss_of, make_mesh
from tests.harness.oracle import STRATEGIES, ZERO

Call = tuple[str, str, str, int, int]


class Model(nn.Module):
    def __init__(self, hidden: tuple[int, ...] = (13, 31, 5, 29)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden=width) for width in hidden)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Shard = Callable[..., object]


def every_part_a_unit(shard: Shard) -> nn.Module:
    """The root owns no parameter; the largest unit is in the middle."""
    return in_parts(Model(), shard)


def in_parts(model: Model, shard: Shard, *, has_root: bool = True, **options: Any) -> Model:
    for part in (*model.blocks, model.embedding, [model.norm, model.head]):
        shard(part, **options)
    if has_root:
        shard(model)
    return model


def root_with_parameters(shard: Shard) -> nn.Module:
    """The root owns the embedding, the norm and a head that is tied to the embedding."""
    model = Model()
    model.head.weight = model.embedding.weight
    for part in (*model.blocks, model):
        shard(part)
    return model


def partly_frozen(shard: Shard) -> nn.Module:
    """Units without a gradient at the start and in the middle, and one with frozen and trained parameters."""
    model = Model()
    for frozen in (model.embedding, model.blocks[0], model.blocks[2]):
        frozen.requires_grad_(False)
    model.blocks[3].get_parameter("up.weight").requires_grad_(False)
    for part in (*model.blocks, model.embedding, model):
        shard(part)
    return model


def nested_units(shard: Shard) -> nn.Module:
    """A unit inside a unit, a unit of two modules with others between them, and kept weights."""
    model = Model()
    shard(model.blocks[1].get_submodule("up"))
    for part in (*list(model.blocks)[:3], [model.embedding, model.head]):
        shard(part)
    shard(model, reshard_after_forward=True)
    kept = model.blocks[2]
    kept.set_reshard_after_forward(False)
    return model


def released_at_once(shard: Shard) -> nn.Module:
    """No unit waits for the next one, so the last unit is gathered again for its backward."""
    return in_parts(Model(), shard, reshard_after_forward=True)


def part_kept_for_backward(shard: Shard) -> nn.Module:
    """In some units, pairs of neighbouring ranks hold weights between forward and backward."""
    model = Model()
    for number, block in enumerate(model.blocks):
        shard(block, reshard_after_forward=2 if number != 1 else None)
    for part in ([model.embedding, model.head], model):
        shard(part, reshard_after_forward=2)
    return model


def partly_replicated(shard: Shard) -> nn.Module:
    """Groups of two placements in one unit, and a unit without sharded parameters."""
    model = Model()
    for whole in (*(block.get_submodule("norm") for block in model.blocks), model.norm):
        fsdp_no_shard(whole)
    fsdp_no_shard(model.blocks[2].get_parameter("up.bias"))
    return in_parts(model, shard)


def frozen_after_sharding(shard: Shard) -> nn.Module:
    """Units and single parameters that are frozen after sharding, and so have gradient accumulators."""
    model = every_part_a_unit(shard)
    model.get_submodule("blocks.1").requires_grad_(False)
    for name in ("blocks.3.up.weight", "head.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


def no_common_root(shard: Shard) -> nn.Module:
    return in_parts(Model(), shard, has_root=False)


def explicit_prefetch(shard: Shard) -> nn.Module:
    model = every_part_a_unit(shard)
    blocks = [block for block in model.get_submodule("blocks").children() if isinstance(block, FsdpModule)]
    for position, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
        block.set_modules_to_backward_prefetch(blocks[max(position - 2, 0) : position][::-1])
    return model


def with_setting(method: str, value: object) -> Callable[[Shard], nn.Module]:
    """Return a builder of a model that calls a method of the root."""

    def build(shard: Shard) -> nn.Module:
        model = every_part_a_unit(shard)
        getattr(model, method)(value)
        return model

    return build


MODELS: dict[str, Callable[[Shard], nn.Module]] = {
    **{
        build.__name__: build
        for build in (
            every_part_a_unit,
            root_with_parameters,
            released_at_once,
            partly_replicated,
            frozen_after_sharding,
        )
    },
    # Gradients of one unit are packed while those of another are still being reduced.
    "two_packed_buffers": with_setting("set_reduce_scatter_max_input_buffers", 2),
    "prefetch_by_bytes": with_setting("set_prefetch_bytes", 3000),
    "prefetch_of_everything": with_setting("set_prefetch_bytes", 1 << 30),
    **{build.__name__: build for build in (partly_frozen, nested_units, no_common_root, explicit_prefetch)},
    "weights_kept_after_backward": with_setting("set_reshard_after_backward", False),
    "memory_kept_after_reshard": with_setting("set_keep_unsharded_storage", True),
}
MODELS_OF_FOUR_RANKS = {part_kept_for_backward.__name__: part_kept_for_backward}
POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 on the wire": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, main_params_dtype=torch.float32),
    "bf16 gradients": MixedPrecisionPolicy(torch.bfloat16, main_grads_dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Setting:
    model: str = "every_part_a_unit"
    mesh: tuple[int, ...] = (2,)
    strategy: str = "optim_grads_params"
    policy: str = "fp32"
    num_microbatches: int = 1

    def __str__(self) -> str:
        ranks = "x".join(map(str, self.mesh))
        return f"{self.model}, {ranks} ranks, {self.strategy}, {self.policy}, {self.num_microbatches} microbatches"


def settings(choose: Callable[[Iterable[tuple[Any, ...]]], Iterable[tuple[Any, ...]]] = covering) -> list[Setting]:
    """Every strategy, precision and number of microbatches on one to three ranks; every model; meshes of two axes.

    Args:
        choose: leaves out some of a grid.
    """
    one_axis = [name for name, placements in STRATEGIES.items() if len(placements.dp_axes) == 1]
    two_axes = [name for name, placements in STRATEGIES.items() if len(placements.dp_axes) == 2]
    strategies = product(((1,), (2,), (3,)), one_axis, ("fp32", "bf16", "bf16 on the wire"), (1, 2))
    chosen = [Setting("every_part_a_unit", *entry) for entry in choose(strategies)]
    models = product(MODELS, ((2,), (3,)), ("optim_grads", "optim_grads_params"), ("fp32", "bf16 gradients"), (2,))
    chosen += [Setting(*entry) for entry in choose(models)]
    chosen += [Setting("part_kept_for_backward", (4,), "optim_grads_params", "bf16 gradients", 2)]
    chosen += [Setting("part_kept_for_backward", (2, 2), "hsdp", "bf16")]
    models = product(MODELS, ((3,),), ("optim",), ("bf16 on the wire",), (2,))
    chosen += [Setting(*entry) for entry in choose(models)]
    wires = product(("root_with_parameters", "partly_replicated"), two_axes, ("bf16", "bf16 on the wire"), (1, 2))
    chosen += [Setting(model, (2, 2), *entry) for model, *entry in choose(wires)]
    return list(dict.fromkeys(chosen))


@dataclass
class Step:
    """Measurements of a run on one rank: bytes at rest, the peaks above them and the second step's collectives."""

    report: Report
    persistent_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    calls: Counter[Call] = field(default_factory=Counter)


def run_all(chosen: list[Setting]) -> list[Step]:
    mesh = make_mesh(chosen[0].mesh)
    return [run(setting, mesh) for setting in chosen]


def run(setting: Setting, mesh: DeviceMesh) -> Step:
    """Train two steps; return the second step's measurements and the prediction made before the first."""
    gc.collect()
    meter = memory_meter()
    before = meter.current_bytes
    mesh, policy = make_mesh(setting.mesh), POLICIES[setting.policy]
    model = {**MODELS, **MODELS_OF_FOUR_RANKS}[setting.model](
        partial(fully_shard, mesh=mesh, placements=STRATEGIES[setting.strategy], mp_policy=policy)
    )
    seen = Step(explain(model, setting.num_microbatches), meter.current_bytes - before)
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trained, lr=0.01))
    for step in range(2):
        seen.forward_peak = seen.backward_peak = 0
        seen.calls.clear()
        for index in range(setting.num_microbatches):
            with microbatch(model, index == setting.num_microbatches - 1):
                _run_microbatch(model, seen, before, draw_tokens(dist.get_rank(), step, index))
        with observe_collectives(lambda call: seen.calls.update([_key("step", call)])):
            optimizer.step()
        trained = meter.current_bytes
        optimizer.zero_grad()
        seen.gradient_bytes = trained - meter.current_bytes
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    seen.optimizer_bytes = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tensors)
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


QUICK = settings()


@functools.cache
def steps_on(mesh: tuple[int, ...], is_quick: bool) -> dict[Setting, list[Step]]:
    """Run the quick settings of a mesh shape, or the others, and return every rank's measurements."""
    chosen = [setting for setting in settings(list) if setting.mesh == mesh and (setting in QUICK) is is_quick]
    ranks = run_ranks(math.prod(mesh), run_all, chosen, timeout=300.0)
    return {setting: [rank[position] for rank in ranks] for position, setting in enumerate(chosen)}


def predicted_calls(report: Report) -> Counter[Call]:
    each = ((one.phase, one.kind, one.axis, one.num_ranks, one.num_bytes // one.count) for one in report.collectives)
    return Counter(dict(zip(each, (one.count for one in report.collectives), strict=True)))


@pytest.mark.parametrize("setting", nightly_but(QUICK, settings(list)), ids=str)
def test_memory_and_collectives_are_predicted_exactly_and_peaks_within_a_percent(
    setting: Setting,
) -> None:
    for seen in steps_on(setting.mesh, setting in QUICK)[setting]:
        report = seen.report
        assert report.persistent_bytes == seen.persistent_bytes > 0
        assert report.optimizer_bytes == seen.optimizer_bytes
        assert report.gradient_bytes == seen.gradient_bytes
        assert predicted_calls(report) == seen.calls
        assert sum(total.count for total in report.collectives) == seen.calls.total()
        num_bytes = sum(call[-1] * count for call, count in seen.calls.items())
        assert sum(total.num_bytes for total in report.collectives) == num_bytes
        assert seen.forward_peak <= report.forward_peak.num_bytes <= 1.01 * seen.forward_peak
        assert seen.backward_peak <= report.backward_peak.num_bytes <= 1.01 * seen.backward_peak


def stages(num_microbatches: int) -> list[Report]:
    """Return the report of ``explain`` for a model under each ZeRO stage, in bf16."""
    shard = partial(fully_shard, mesh=make_mesh((2,)), mp_policy=POLICIES["bf16"])
    return [explain(every_part_a_unit(partial(shard, placements=STRATEGIES[one])), num_microbatches) for one in ZERO]


@on_ranks(2)
def test_each_zero_stage_keeps_less_than_the_one_before_and_none_peaks_above_it() -> None:
    kept = [each.persistent_bytes + each.optimizer_bytes + each.gradient_bytes for each in stages(1)]
    assert all(earlier > later for earlier, later in pairwise(kept)), kept
    peaks = [
        each.persistent_bytes + each.optimizer_bytes + max(each.forward_peak.num_bytes, each.backward_peak.num_bytes)
        for each in stages(3)[:3]
    ]
    assert all(earlier >= later for earlier, later in pairwise(peaks)), peaks
