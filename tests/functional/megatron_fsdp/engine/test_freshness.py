"""Forward uses the current weights, for each way to change them since the last forward."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dbuffer_kernels import AdamWBuffers, adamw
from megatron_fsdp import AdamW, FsdpModule, MixedPrecisionPolicy, StateError, fully_shard, fully_shard_optimizer
from megatron_fsdp.optim.adamw import update as adamw_update
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import Block, Stack, inputs
from tests.harness.oracle import whole
from tests.harness.twins import sharded

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16 compute": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=True),
}


def made(policy: MixedPrecisionPolicy, strategy: str = "optim_grads_params") -> Stack:
    torch.manual_seed(0)
    return sharded(Stack(Block(), Block(hidden=5)), strategy, mp_policy=policy)


def output_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(dist.get_rank(), step))


def wanted_output(model: nn.Module, policy: MixedPrecisionPolicy, step: int) -> torch.Tensor:
    dtype = policy.param_dtype or torch.float32
    plain = Stack(Block(), Block(hidden=5)).to(dtype)
    weights = {name: whole(parameter, parameter).to(dtype) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        output: torch.Tensor = torch.func.functional_call(plain, weights, (inputs(dist.get_rank(), step).to(dtype),))
    return output


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    output_of(model, step).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def halve(module: nn.Module, *, recurse: bool = False) -> None:
    for parameter in module.parameters(recurse):
        parameter.mul_(0.5)


def halved_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value).copy_(value).mul_(0.5) for name, value in model.state_dict().items()}


@torch.no_grad()
def halve_shards(model: nn.Module) -> None:
    parameter: Any
    for parameter in model.parameters():
        parameter.to_local().mul_(0.5)


# The outermost unit's weights may be gathered during the change: a forward without backward leaves them gathered.
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: halve(model, recurse=True),
    "on .data": lambda model: [parameter.data.mul_(0.5) for parameter in model.parameters()],
    "on the local shards": halve_shards,
    "foreach": lambda model: torch.no_grad()(torch._foreach_mul_)(list(model.parameters()), 0.5),
    "load_state_dict": lambda model: model.load_state_dict(halved_state(model)),
    "load_state_dict with assign": lambda model: model.load_state_dict(halved_state(model), assign=True),
    "model.to": lambda model: (halve(model, recurse=True), model.to("cpu")),
    "model.apply": lambda model: model.apply(halve),
    "in place after a forward without backward": lambda model: (output_of(model, 8), halve(model, recurse=True)),
}


def assert_followed(policy_name: str, *, is_training: bool = False, adapted: bool = True, strategy: str) -> None:
    """Train, change the weights in each way, and check that a forward uses the changed weights."""
    policy = POLICIES[policy_name]
    for change, act in CHANGES.items():
        model = made(policy, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        if adapted:
            fully_shard_optimizer(optimizer)
        train_once(model, optimizer)
        before = wanted_output(model, policy, 1)
        act(model)
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            found = output_of(model, 1).detach()
        wanted = wanted_output(model, policy, 1)
        assert torch.equal(found, wanted), change
        assert (before - wanted).abs().max() > 0.05, change


RUNS = list(product(POLICIES, (True, False), (True, False)))


@pytest.mark.parametrize(("policy", "is_training", "adapted"), nightly_but(covering(RUNS, strength=1), RUNS))
@on_ranks(2)
def test_the_next_forward_uses_weights_however_they_were_changed(policy: str, is_training: bool, adapted: bool) -> None:
    assert_followed(policy, is_training=is_training, adapted=adapted, strategy="optim_grads_params")


@pytest.mark.parametrize("strategy", nightly_but(["no_shard", "optim_grads"], ["no_shard", "optim", "optim_grads"]))
@on_ranks(2)
def test_unsharded_weights_are_current_in_evaluation_too(strategy: str) -> None:
    assert_followed("bf16 compute", strategy=strategy)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "AdamW one by one": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.5, "foreach": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.1, "fused": True}),
}
STEPPED = list(product(OPTIMIZERS, (True, False)))


@pytest.mark.parametrize(("name", "adapted"), nightly_but(STEPPED[::3], STEPPED))
@on_ranks(2)
def test_the_next_training_forward_uses_weights_stepped_by(name: str, adapted: bool) -> None:
    policy, (kind, options) = POLICIES["bf16 compute"], OPTIMIZERS[name]
    model = made(policy)
    optimizer = kind(model.parameters(), **options)
    if adapted:
        fully_shard_optimizer(optimizer)
    for step in range(2):
        before = wanted_output(model, policy, 7)
        train_once(model, optimizer, step)
        found, wanted = output_of(model, 7).detach(), wanted_output(model, policy, 7)
        assert torch.equal(found, wanted)
        assert float((before - wanted).abs().max()) > 0.01


@on_ranks(2)
def test_gathered_weights_are_the_loaded_ones_after_load_state_dict() -> None:
    model = made(POLICIES["bf16 compute"])
    state = halved_state(model)
    model.load_state_dict(state)
    for index, layer in enumerate(model.layers):
        layer.unshard()
        for name, parameter in layer.named_parameters():
            full = whole(state[f"layers.{index}.{name}"], parameter)
            assert torch.equal(parameter.detach(), full.to(torch.bfloat16)), name
        layer.reshard()


class Moves(nn.Linear):
    """A layer that moves its weight to a device where it may be already, like routers of Megatron in each forward."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.to(device=x.device)
        if self.factor != 1:
            self.weight.data = self.weight.data * self.factor
        return super().forward(x)


@on_ranks(2)
def test_a_gathered_weight_may_be_assigned_its_own_memory_and_nothing_else() -> None:
    layer = Moves(7, 5)
    weight, bias = layer.weight.detach().clone().requires_grad_(), layer.bias.detach().clone()
    fully_shard(layer)
    layer(inputs(dist.get_rank(), 0)).square().mean().backward()
    for rank in range(dist.get_world_size()):
        (nn.functional.linear(inputs(rank, 0), weight, bias).square().mean() / dist.get_world_size()).backward()
    assert (whole(layer.weight.grad, layer.weight) - weight.grad).abs().max() < 1e-6
    layer.factor = 0.5
    with pytest.raises(StateError, match=r"parameter 'weight' was changed in place while it was gathered"):
        layer(inputs(dist.get_rank(), 0))


@on_ranks(2)
def test_reshard_finds_changed_gathered_weights_and_keeps_an_error_being_handled() -> None:
    layer = fully_shard(nn.Linear(7, 5))

    def reshard_and_raise() -> None:
        try:
            raise RuntimeError("of the user")
        except RuntimeError:
            layer.reshard()
            raise

    changed = "parameter 'weight' was changed in place"
    with torch.no_grad():
        layer.unshard()
        layer.weight.data.mul_(0.5)
        with pytest.raises(StateError, match=changed):
            layer.reshard()
        layer(inputs(0, 0))
        layer.unshard()
        layer.weight.data.mul_(0.5)
        with pytest.raises(RuntimeError, match="of the user"):
            reshard_and_raise()
        with pytest.raises(StateError, match=changed):
            layer(inputs(0, 0))


def step_unseen(policy_name: str) -> list[torch.Tensor]:
    """Step with a kernel that changes no version counter, like Triton's; return the weights that forward uses then."""
    model = made(POLICIES[policy_name], "optim")
    optimizer = AdamW(model.parameters(), lr=0.1)
    train_once(model, optimizer)
    output_of(model, 0).square().mean().backward()

    def unseen(buffers: AdamWBuffers, *args: Any, **options: Any) -> None:
        tensors = [buffers.weight, *([] if buffers.model_weight is None else [buffers.model_weight])]
        with _unsafe_preserve_version_counter(tuple(tensors)):
            adamw(buffers, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_update, "adamw", unseen)
        optimizer.step()
    output_of(model, 0)
    units = [module for module in model.modules() if isinstance(module, FsdpModule)]
    return [group.model_weight.local_buffer.clone() for unit in units for group in unit.parameter_groups]


@pytest.mark.parametrize("policy", POLICIES)
def test_unsharded_weights_are_equal_on_all_ranks_after_a_kernels_step(policy: str) -> None:
    first, second = run_ranks(2, step_unseen, policy)
    assert len(first) == 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
