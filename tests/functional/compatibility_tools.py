"""Scenarios: what PyTorch's own tools, and plain use of a module, see of a sharded model."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint

from tests.functional.compatibility import (
    SINCE_2_15,
    Outcome,
    blocks,
    layers,
    outcome,
    scenario,
    shard,
    shows_dtensors,
    train,
)
from tests.functional.wire_tensor import ReleasingTensor
from tests.harness.models import Block, inputs
from tests.harness.oracle import whole

__all__: list[str] = []


class Shifted(Block):
    """A block with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.shift, torch.Tensor)
        return super().forward(x + self.shift.to(x.dtype))


@scenario("names, shapes and buffers")
def names(fsdp: Any) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(Shifted(), Shifted())
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float64)
    for module in (*model, model):
        fsdp.fully_shard(module, mp_policy=policy)
    parameters = [(name, tuple(value.shape), value.requires_grad) for name, value in model.named_parameters()]
    buffers = [(name, value.dtype, type(value).__name__) for name, value in model.named_buffers()]
    return outcome(model, train(model), parameters, buffers, list(model.state_dict()))


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "layer": (lambda: nn.LayerNorm(6), False),
    "rms": (lambda: nn.RMSNorm(6), False),
    "group": (lambda: nn.GroupNorm(3, 6), True),
    "batch": (lambda: nn.BatchNorm2d(6), True),
    "batch 1-d": (lambda: nn.BatchNorm1d(6), False),
}


def through_norm(fsdp: Any, name: str, dtype: torch.dtype, options: dict[str, Any]) -> Outcome:
    """Train layers around a norm that is a unit of its own, whose policy has ``options``."""
    make, is_image = NORMS[name]
    ends = (nn.Conv2d(1, 6, 3), nn.Conv2d(6, 2, 3)) if is_image else (nn.Linear(8, 6), nn.Linear(6, 5))
    model = nn.Sequential(ends[0], make(), ends[1])
    for index, module in enumerate((*model, model)):
        policy = fsdp.MixedPrecisionPolicy(**(options if index == 1 else {"param_dtype": dtype}))
        fsdp.fully_shard(module, mp_policy=policy)
    seen: list[torch.dtype] = []
    for module in model:
        module.register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, out.dtype)))
    gradients, losses = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn((4, 1, 6, 6) if is_image else (4, 8), generator=generator)
        try:
            loss = model(x).float().square().mean()
        except RuntimeError as error:
            return Outcome((), {}, (str(error),))
        loss.backward()
        gradients += [whole(p.grad, p) for p in model.parameters()]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    entries = dict(enumerate(gradients)) | dict(model.named_buffers())
    return Outcome(tuple(losses), {str(name): value for name, value in entries.items()}, (seen,))


@scenario("norm layers that are units, in bf16 and fp16", tolerance=0.0)
def norms(fsdp: Any) -> Outcome:
    """Their inputs are cast like others'; statistics stay FP32, so BatchNorm on CPU wants a policy of its own."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        own = ({"param_dtype": dtype}, {"output_dtype": dtype}, {"param_dtype": torch.float32, "output_dtype": dtype})
        for name in NORMS:
            # PyTorch warns that RMSNorm of bf16 with FP32 weights is slow.
            for index, options in enumerate(own if name != "rms" else own[::2]):
                torch.manual_seed(0)
                found[f"{name} {dtype} {index}"] = through_norm(fsdp, name, dtype, options)
    weights = {f"{case}: {key}": value for case, each in found.items() for key, value in each.weights.items()}
    facts = tuple(each.facts for each in found.values())
    assert sum(isinstance(each.facts[0], str) for each in found.values()) == 4
    return Outcome(tuple(loss for each in found.values() for loss in each.losses), weights, facts)


@scenario("evaluation")
def evaluation(fsdp: Any) -> Outcome:
    model = shard(fsdp).eval()
    with torch.no_grad():
        losses = [model(inputs(dist.get_rank(), step)).square().mean().item() for step in range(2)]
    after = shows_dtensors(layers(model)[0])
    with torch.inference_mode():
        losses.append(model(inputs(dist.get_rank(), 3)).square().mean().item())
    return outcome(model, losses + train(model.train()), after)


@scenario("clip_grad_norm_")
def clip(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    norms = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        model(inputs(dist.get_rank(), step)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(whole(norm, norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, norms)


@scenario("activation checkpointing")
def recompute(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    for layer in layers(model):
        layer.feed = layer.forward
        layer.forward = lambda x, layer=layer: checkpoint(layer.feed, x, use_reentrant=False)
    return outcome(model, train(model))


@scenario("frozen parameters")
def frozen(fsdp: Any) -> Outcome:
    model = blocks()
    layers(model)[0].requires_grad_(False)
    layers(model)[1].up.weight.requires_grad_(False)
    for layer in layers(model):
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    return outcome(model, train(model), [parameter.requires_grad for parameter in model.parameters()])


@scenario("state dicts of model and optimizer")
def resume(fsdp: Any) -> Outcome:
    """Two steps, whole state dicts through a file, and two steps of another model that takes them."""
    model = shard(fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = train(model, steps=2, optimizer=optimizer)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = [get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = shard(fsdp)
    part = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if dist.get_rank() == 0:
        assert list(state[0]) == list(other.state_dict())
    set_model_state_dict(other, state[0], options=part)
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    set_optimizer_state_dict(other, second, state[1], options=part)
    return outcome(other, losses + train(other, steps=2, optimizer=second))


@scenario("fsdp_should_release_all_gather_outputs_after_post_all_gather", needs=SINCE_2_15, tolerance=0.0)
def release_what_was_gathered(fsdp: Any) -> Outcome:
    """Losses, and what has memory when weights are gathered and when they are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 7))
    model[0].weight = nn.Parameter(ReleasingTensor(model[0].weight.detach()))
    fsdp.fully_shard(model[0])
    fsdp.fully_shard(model)
    held = []
    losses = train(model)
    for _ in range(2):
        model[0].unshard()
        held.append(ReleasingTensor.held())
        model[0].reshard()
        held.append(ReleasingTensor.held())
    return Outcome(tuple(losses), {}, tuple(held))
