"""Every sharding strategy on every mesh shape, dtype policy and number of microbatches, and a run of each."""

import functools
import gc
import math
from collections import Counter
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, Flat, Partial, Replicate, memory_meter, observe_collectives
from megatron_fsdp import (
    MixedPrecisionPolicy,
    Placements,
    clip_grad_norm_,
    explain,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import MAX_NORM, History, Tolerance, whole_state

NUM_STEPS = 2

_REPLICATED, _SUMS, _CUT = (Replicate(), Replicate()), (Partial(), Partial()), (Flat(), Flat())
STRATEGIES = {
    "no_shard": Placements.no_shard(0),
    "optim": Placements.optim(0),
    "optim_grads": Placements.optim_grads(0),
    "optim_grads_params": Placements.optim_grads_params(0),
    "hsdp": Placements.hsdp(0, 1),
    "hfsdp": Placements.hfsdp(0, 1),
    "no_shard on two axes": Placements((0, 1), _REPLICATED, _SUMS, _REPLICATED),
    "optim_grads_params on two axes": Placements((0, 1), _CUT, _CUT, _CUT),
}
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")

POLICIES = {
    "fp32": None,
    "bf16 compute": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 reduction": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
}
# One rounding to bf16 is off by 2**-9 of the value at most; losses are near 3.4, norms near 0.45, and a step of AdamW
# moves a weight by its learning rate of 0.001 at most.
TOLERANCES = {
    "fp32": Tolerance(),
    "bf16 compute": Tolerance(weight=2.5e-4, norm=2**-9, loss=2**-8),
    "bf16 reduction": Tolerance(weight=2.5e-4, norm=2**-9, loss=2**-8),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: a key of ``STRATEGIES``, the shape of the mesh, a key of ``POLICIES``, microbatches per step."""

    strategy: str
    mesh: tuple[int, ...]
    policy: str
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """The number of data-parallel ranks."""
        return math.prod(self.mesh)

    def __str__(self) -> str:
        mesh, plural = "x".join(map(str, self.mesh)), "" if self.num_microbatches == 1 else "es"
        return f"{self.strategy}, mesh {mesh}, {self.policy}, {self.num_microbatches} microbatch{plural}"


MESHES = ((1,), (2,), (4,), (1, 2), (2, 1), (2, 2))
SETTINGS = tuple(
    Setting(strategy, mesh, policy, num_microbatches)
    for mesh, strategy, policy, num_microbatches in product(MESHES, STRATEGIES, POLICIES, (1, 3))
    if len(STRATEGIES[strategy].dp_axes) == len(mesh)
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw of one run.

    Attributes:
        history: losses, norms and weights.
        resting_bytes: of the buffers between steps. optimizer_bytes: of its state.
        gradient_bytes: what is there after a backward and not between steps.
        peak_bytes: the most that buffers and optimizer state took during the last step.
        traffic: count and bytes of the last step's collectives, by kind and mesh axis.
        predicted_bytes, predicted_optimizer_bytes, predicted_gradient_bytes, predicted_traffic: what ``explain`` said
            before the first step.
    """

    history: History
    resting_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    peak_bytes: int
    traffic: dict[tuple[str, str], tuple[int, int]]
    predicted_bytes: int
    predicted_optimizer_bytes: int
    predicted_gradient_bytes: int
    predicted_traffic: dict[tuple[str, str], tuple[int, int]]


def run_all(settings: tuple[Setting, ...]) -> list[Outcome]:
    """Train settings of one mesh shape, one after the other; call it on every rank."""
    mesh = make_mesh(settings[0].mesh)
    # What the imports made lives on; frozen, it costs the collection before each run nothing.
    gc.collect()
    gc.freeze()
    return [run(setting, mesh) for setting in settings]


def run(setting: Setting, mesh: DeviceMesh) -> Outcome:
    """Train one setting on this rank's data."""
    gc.collect()
    meter = memory_meter()
    before = meter.current_bytes
    model = make_model()
    for part in (*model.blocks, model.embedding, [model.norm, model.head], model):
        fully_shard(part, mesh, STRATEGIES[setting.strategy], mp_policy=POLICIES[setting.policy])
    report = explain(model, setting.num_microbatches)
    optimizer = fully_shard_optimizer(_adamw(model))
    calls: list[CollectiveCall] = []
    losses: list[float] = []
    norms: list[float] = []
    for step in range(NUM_STEPS):
        meter.reset_peak()
        calls.clear()
        with observe_collectives(calls.append):
            for index in range(setting.num_microbatches):
                with microbatch(model, index == setting.num_microbatches - 1):
                    losses.append(_backward(model, setting, dist.get_rank(), step, index))
        norms.append(clip_grad_norm_(model, MAX_NORM).item())
        with observe_collectives(calls.append):
            optimizer.step()
        trained = meter.current_bytes
        optimizer.zero_grad()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    optimizer_bytes = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tensors)
    resting, peak = meter.current_bytes - before, meter.peak_bytes - before + optimizer_bytes
    predicted: dict[tuple[str, str], tuple[int, int]] = {}
    for total in report.collectives:
        count, size = predicted.get((total.kind, total.axis), (0, 0))
        predicted[total.kind, total.axis] = count + total.count, size + total.num_bytes
    return Outcome(
        History(tuple(losses), tuple(norms), whole_state(model)),
        resting,
        optimizer_bytes,
        trained - meter.current_bytes,
        peak,
        _traffic(calls),
        report.persistent_bytes,
        report.optimizer_bytes,
        report.gradient_bytes,
        predicted,
    )


def _traffic(calls: list[CollectiveCall]) -> dict[tuple[str, str], tuple[int, int]]:
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for call in calls:
        counts[call.kind, call.axis] += 1
        sizes[call.kind, call.axis] += call.num_bytes
    return {key: (counts[key], sizes[key]) for key in counts}


@functools.cache
def replicated(num_ranks: int, policy: str, num_microbatches: int) -> History:
    """Train one whole model on the data of all ranks; FP32 weights, cast for compute where the policy asks for it."""
    setting = Setting("no_shard", (num_ranks,), policy, num_microbatches)
    model = make_model()
    optimizer = _adamw(model)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for index in range(num_microbatches):
            each = [_backward(model, setting, rank, step, index, num_ranks) for rank in range(num_ranks)]
            losses.append(sum(each) / num_ranks)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return History(tuple(losses), tuple(norms), whole_state(model))


def _backward(model: Model, setting: Setting, rank: int, step: int, index: int, num_ranks: int = 0) -> float:
    """Run one microbatch of one rank; ``num_ranks`` is 0 for a sharded model, which averages and casts itself."""
    tokens, policy = draw_tokens(rank, step, index), POLICIES[setting.policy]
    if num_ranks and policy is not None and policy.param_dtype is not None:
        cast = {name: parameter.to(policy.param_dtype) for name, parameter in model.named_parameters()}
        logits = torch.func.functional_call(model, cast, (tokens,))
    else:
        logits = model(tokens)
    assert isinstance(logits, torch.Tensor)
    loss = loss_of(logits, tokens)
    (loss / (setting.num_microbatches * max(num_ranks, 1))).backward()
    return loss.item()


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With the usual epsilon a gradient near zero whose sign is a matter of rounding would move its weight all the way.
    return torch.optim.AdamW(trained, lr=0.001, eps=0.001, weight_decay=0.1)
