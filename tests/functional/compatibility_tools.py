"""Scenarios: what PyTorch's own tools, and plain use of a module, see of a sharded model."""

import io
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

from tests.functional.compatibility import Outcome, blocks, layers, outcome, scenario, shard, shows_dtensors, train
from tests.functional.replica import Block, inputs, whole

__all__: list[str] = []


class Shifted(Block):
    """A block with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 7) for (..., 7)."""
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
