"""Scenarios: the arguments of ``fully_shard`` and ``replicate``, one each."""

import copy
import importlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.functional.compatibility import (
    SINCE_2_15,
    Outcome,
    blocks,
    layers,
    outcome,
    raises,
    scenario,
    shard,
    shows_dtensors,
    train,
)
from tests.harness.models import inputs
from tests.harness.oracle import whole

__all__: list[str] = []
BF16 = 1e-2


@scenario("fully_shard")
def plain(fsdp: Any) -> Outcome:
    model = blocks()
    returned = [fsdp.fully_shard(layer) is layer for layer in layers(model)]
    returned.append(fsdp.fully_shard(model) is model)
    names = [type(module).__name__ for module in (model, *layers(model))]
    are_both = [isinstance(layer, fsdp.FSDPModule) and isinstance(layer, nn.Module) for layer in layers(model)]
    before = shows_dtensors(model)
    losses = train(model)
    return outcome(model, losses, returned, names, are_both, before, shows_dtensors(model))


@scenario("fully_shard of a list")
def list_of_modules(fsdp: Any) -> Outcome:
    model = blocks()
    first, second, third = layers(model)
    fsdp.fully_shard(first)
    returned = fsdp.fully_shard([second, third])
    fsdp.fully_shard(model)
    return outcome(model, train(model), isinstance(returned, list), shows_dtensors(model))


@scenario("fully_shard(mesh=1-D)")
def one_axis(fsdp: Any) -> Outcome:
    model = shard(fsdp, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return outcome(model, train(model), shapes)


@scenario("fully_shard(mesh=2-D)", num_ranks=4)
def two_axes(fsdp: Any) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(fsdp, mesh=mesh)
    numel = [parameter.numel() for parameter in model.parameters()]
    return outcome(model, train(model), numel)


def between(model: nn.Module) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return what parameters are between forward and backward, and after it."""
    loss = model(inputs(dist.get_rank(), 99)).square().mean()
    after_forward = shows_dtensors(model)
    loss.backward()
    model.zero_grad()
    return after_forward, shows_dtensors(model)


for _choice in (True, False):

    @scenario(f"fully_shard(reshard_after_forward={_choice})")
    def reshards(fsdp: Any, choice: bool = _choice) -> Outcome:
        model = shard(fsdp, reshard_after_forward=choice)
        return outcome(model, train(model), between(model))


@scenario("fully_shard(reshard_after_forward=2)", num_ranks=4)
def reshards_to_two(fsdp: Any) -> Outcome:
    model = shard(fsdp, reshard_after_forward=2)
    refuses = raises(lambda: fsdp.fully_shard(blocks(), reshard_after_forward=3), ValueError)
    return outcome(model, train(model), refuses)


@scenario("fully_shard(shard_placement_fn)")
def first_dimension(fsdp: Any) -> Outcome:
    model = shard(fsdp, shard_placement_fn=lambda parameter: Shard(0) if parameter.ndim > 1 else None)
    return outcome(model, train(model))


@scenario("fully_shard(ignored_params)")
def ignored(fsdp: Any) -> Outcome:
    model = blocks()
    kept = {parameter for layer in layers(model) for parameter in layer.norm.parameters()}
    for layer in layers(model):
        fsdp.fully_shard(layer, ignored_params=kept)
    fsdp.fully_shard(model, ignored_params=kept)

    def average(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    for parameter in kept:
        parameter.register_post_accumulate_grad_hook(average)
    return outcome(model, train(model), shows_dtensors(model))


@scenario("fully_shard(offload_policy=OffloadPolicy)")
def no_offload(fsdp: Any) -> Outcome:
    model = shard(fsdp, offload_policy=fsdp.OffloadPolicy())
    return outcome(model, train(model))


@scenario("fully_shard(offload_policy=CPUOffloadPolicy)")
def offload(fsdp: Any) -> Outcome:
    model = shard(fsdp, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    devices = {parameter.device.type for parameter in model.parameters()}
    return outcome(model, train(model), devices, fsdp.CPUOffloadPolicy().pin_memory)


# ---------------------------------------------------------------- mixed precision


@scenario("MixedPrecisionPolicy(param_dtype)", tolerance=BF16)
def param_dtype(fsdp: Any) -> Outcome:
    model = shard(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    layers(model)[0].up.register_forward_hook(
        lambda module, args, output: seen.append((module.weight.dtype, output.dtype))
    )
    losses = train(model)
    kept = {parameter.dtype for parameter in model.parameters()}
    return outcome(model, losses, seen, kept)


@scenario("MixedPrecisionPolicy(reduce_dtype)", tolerance=BF16)
def reduce_dtype(fsdp: Any) -> Outcome:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(fsdp, mp_policy=policy)
    model(inputs(dist.get_rank(), 7)).float().square().mean().backward()
    gradients = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    model.zero_grad()
    return outcome(model, train(model), gradients)


@scenario("MixedPrecisionPolicy(reduce_dtype=None)", needs=SINCE_2_15, tolerance=0.0)
def no_reduce_dtype(fsdp: Any) -> Outcome:
    """Gradients of FP32 parameters that compute in bf16 are reduced in FP32; before PyTorch 2.15 in bf16."""
    module = fsdp.fully_shard(nn.Linear(7, 5), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return gradients_of(module)


def gradients_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> Outcome:
    """Return whole gradients, and what dtypes they have and may have; ``dtype`` is the inputs'."""
    module(inputs(dist.get_rank(), 1).to(dtype)).float().square().mean().backward()
    found = {name: whole(one.grad, one) for name, one in module.named_parameters()}
    dtypes = [(one.grad_dtype, one.grad.dtype) for one in module.parameters() if one.grad is not None]
    return Outcome((), found, tuple(dtypes))


@scenario("grad_dtype of parameters", needs=SINCE_2_15, tolerance=0.0)
def grad_dtype(fsdp: Any) -> Outcome:
    """Set before or after ``fully_shard``, on all parameters of a unit or on one, with and without a reduce_dtype."""
    half, whole_ones = torch.bfloat16, torch.float32
    plain, mixed = fsdp.MixedPrecisionPolicy(), fsdp.MixedPrecisionPolicy(param_dtype=half)
    asked = {
        "narrow": (whole_ones, plain, {"weight": half, "bias": half}),
        "narrow, computed in it": (whole_ones, mixed, {"weight": half, "bias": half}),
        "one of two": (whole_ones, mixed, {"weight": half}),
        "any": (whole_ones, mixed, {"weight": None, "bias": None}),
        "one of two any": (whole_ones, mixed, {"bias": None}),
        "wide": (half, plain, {"weight": whole_ones, "bias": whole_ones}),
        "reduced otherwise": (
            whole_ones,
            fsdp.MixedPrecisionPolicy(half, whole_ones),
            {"weight": half, "bias": half},
        ),
    }
    found: dict[str, torch.Tensor] = {}
    facts: list[object] = []
    for name, (own, policy, dtypes) in asked.items():
        for when in ("before", "after") if len(dtypes) > 1 else ("before",):
            torch.manual_seed(0)
            module = nn.Linear(7, 5).to(own)
            for attribute, dtype in dtypes.items() if when == "before" else ():
                getattr(module, attribute).grad_dtype = dtype
            fsdp.fully_shard(module, mp_policy=policy)
            for attribute, dtype in dtypes.items() if when == "after" else ():
                getattr(module, attribute).grad_dtype = dtype
            one = gradients_of(module, own)
            found |= {f"{name} {when} {key}": value for key, value in one.weights.items()}
            facts.append((name, when, one.facts))
    return Outcome((), found, tuple(facts))


@scenario("MixedPrecisionPolicy(param_dtype_override_fn)", needs=SINCE_2_15, tolerance=0.0)
def param_dtype_override(fsdp: Any) -> Outcome:
    """A gain keeps its own dtype between matrices in bf16."""
    asked: list[tuple[int, ...]] = []

    def own_for_gains(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(tuple(parameter.shape))
        return parameter.dtype if parameter.ndim == 1 else None

    class Gained(nn.Linear):
        def __init__(self) -> None:
            super().__init__(7, 5, bias=False)
            self.gain = nn.Parameter(torch.linspace(1, 2, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend((x.dtype, self.weight.dtype, self.gain.dtype))
            return super().forward(x) * self.gain

    seen: list[torch.dtype] = []
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=own_for_gains)
    found = gradients_of(fsdp.fully_shard(Gained(), mp_policy=policy))
    third = fsdp.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda parameter: torch.float16)
    refuses = raises(lambda: fsdp.fully_shard(nn.Linear(2, 2), mp_policy=third), ValueError)
    return Outcome((), found.weights, (*found.facts, tuple(seen), sorted(asked), refuses))


@scenario("MixedPrecisionPolicy(output_dtype)")
def output_dtype(fsdp: Any) -> Outcome:
    model = blocks()
    fsdp.fully_shard(layers(model)[1], mp_policy=fsdp.MixedPrecisionPolicy(output_dtype=torch.float64))
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(output_dtype=torch.float16))
    seen = []
    layers(model)[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    layers(model)[2].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    found = model(inputs(dist.get_rank(), 0)).dtype
    return outcome(model, [], found, seen)


@scenario("MixedPrecisionPolicy(cast_forward_inputs)")
def cast_forward_inputs(fsdp: Any) -> Outcome:
    seen = []
    for choice in (True, False):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=choice)
        module = fsdp.fully_shard(nn.Embedding(4, 4), mp_policy=policy)
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        linear = fsdp.fully_shard(nn.Linear(4, 4), mp_policy=policy)
        seen.append(linear(torch.ones(1, 4, dtype=torch.float32 if choice else torch.bfloat16)).dtype)
        seen.append(module(torch.tensor([1])).dtype)
        if not choice:
            seen.append(raises(partial(linear, torch.ones(1, 4)), RuntimeError))
    return Outcome((), {}, (tuple(seen),))


# ---------------------------------------------------------------- meshes with names


def on_a_larger_mesh(fsdp: Any, sizes: tuple[int, ...], **axes: Any) -> Outcome:
    """Shard a model of DTensors over some axes of their mesh, whose layers lay their input out like their weights."""
    names = ("outer", "dp", "tp")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model, dims = blocks(), fsdp.DataParallelMeshDims(**axes)
    for layer in layers(model):
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
                setattr(module, name, nn.Parameter(placed))
        layer.register_forward_pre_hook(like_the_weights)
        layer.register_forward_hook(lambda module, args, output: output.to_local().clone())
        fsdp.fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
    fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return outcome(model, train(model), dims.shard_names, dims.replicate_names, shapes)


def like_the_weights(layer: Any, args: tuple[torch.Tensor, ...]) -> tuple[DTensor]:
    mesh = layer.up.weight.device_mesh
    placements = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]
    return (DTensor.from_local(args[0], mesh, placements),)


NAMED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "shard": ((2, 2), {"shard": "dp"}),
    "shard and replicate": ((2, 2, 1), {"shard": "dp", "replicate": "outer"}),
    "two to shard": ((2, 2, 1), {"shard": ("outer", "dp")}),
}
for _name, (_sizes, _axes) in NAMED.items():
    _body = partial(on_a_larger_mesh, sizes=_sizes, **_axes)
    scenario(f"fully_shard(dp_mesh_dims={_name})", num_ranks=4, needs="DataParallelMeshDims")(_body)


@scenario("DataParallelMeshDims", needs="DataParallelMeshDims")
def mesh_dims(fsdp: Any) -> Outcome:
    dims = fsdp.DataParallelMeshDims(shard=("a", "b"), replicate="c")
    same = dims == fsdp.DataParallelMeshDims(("a", "b"), "c")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    unknown = fsdp.DataParallelMeshDims(shard="none")
    refuses = raises(lambda: fsdp.fully_shard(blocks(), mesh=mesh, dp_mesh_dims=unknown), ValueError)
    neither = raises(
        lambda: fsdp.fully_shard(blocks(), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims()), ValueError
    )
    return Outcome((), {}, (dims.shard_names, dims.replicate_names, same, refuses, neither))


# ---------------------------------------------------------------- replicate


def replicate_of(fsdp: Any) -> Any:
    """Return ``replicate``, which FSDP2 keeps elsewhere."""
    if fsdp.__name__ == "torch.distributed.fsdp":
        return importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    return fsdp.replicate


@scenario("replicate")
def replicas(fsdp: Any) -> Outcome:
    model = blocks()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    kept = set(layers(model)[0].norm.parameters())
    for layer in layers(model):
        replicate_of(fsdp)(layer, mesh=mesh, mp_policy=policy, ignored_params=kept)
    returned = replicate_of(fsdp)(model, mesh=mesh, offload_policy=fsdp.OffloadPolicy(), ignored_params=kept)
    for parameter in kept:
        parameter.requires_grad_(False)
    return outcome(model, train(model), returned is model, isinstance(model, fsdp.FSDPModule))


# ---------------------------------------------------------------- refusals


@scenario("fully_shard refuses")
def refusals(fsdp: Any) -> Outcome:
    """What is wrong in one engine is wrong in the other, and a ValueError where FSDP2's users may catch one."""
    mesh = init_device_mesh("cpu", (1, 1, 2))
    attempts = (
        lambda: fsdp.fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
        lambda: fsdp.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})),
        lambda: fsdp.fully_shard(Scalar()),
        lambda: fsdp.fully_shard(blocks(), mesh=mesh),
        lambda: fsdp.fully_shard(blocks(), reshard_after_forward="yes"),
    )
    found = [raises(attempt, ValueError) for attempt in attempts]
    sharded = fsdp.fully_shard(nn.Linear(2, 2))
    found.append(raises(lambda: copy.deepcopy(sharded), AssertionError, ValueError))
    return Outcome((), {}, (found,))


class Scalar(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
