"""Programs on which the engines agree: the arguments of ``fully_shard``, methods of ``FSDPModule``, and other names.

Programs are written as a user would write them, with the names of either engine and of this file; ``run`` is the
``Run``.
"""

import copy
import importlib
import io
import warnings
from collections.abc import Callable
from functools import partial
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.functional.compatibility.program import SINCE_2_15, Program, Run, blocks, enter, loss_of, mesh, shows
from tests.functional.megatron_fsdp.variants.wire_tensor import ReleasingTensor
from tests.harness.models import Block, Made, inputs
from tests.harness.oracle import whole

# Imports for the programs; this file itself uses only a few.
# ruff: noqa: F401
__all__ = ["PROGRAMS", "Gather"]
BF16, FP32 = torch.bfloat16, torch.float32
LOUD = (RuntimeError, ValueError)


def hsdp(run: Run, **options: Any) -> Any:
    """Shard the blocks over two ranks, in two replicas."""
    return run.shard(mesh=mesh(2, 2), **options)


def between(run: Run, model: Any) -> Any:
    """Record the class of parameters between forward and backward, and after backward."""
    loss = loss_of(model, 99)
    run.see(shows(model))
    loss.backward()
    run.see(shows(model))
    model.zero_grad()
    return model


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")


class Applied(nn.ModuleList):
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential.forward(self, x)


class Shifted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift.to(x.dtype))


class Encoder(nn.Module):
    """A model with a second forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Encode (..., 7) as (..., 13)."""
        return torch.tanh(self.up(x)) * scale


def with_policy(f: Run, *dtypes: torch.dtype) -> None:
    model = f.shard(mp_policy=f.MixedPrecisionPolicy(*dtypes))
    first = model.layers[0].up
    first.register_forward_hook(lambda module, args, out: f.see(module.weight.dtype, args[0].dtype, out.dtype))
    loss_of(model, 7).backward()
    f.see([parameter.grad.dtype for parameter in model.parameters()])
    model.zero_grad()
    f.train(model)


def gradients_of(f: Run, module: nn.Module, dtype: torch.dtype = FP32) -> None:
    """Record whole gradients, their dtypes and the allowed ``grad_dtype``; ``dtype`` is the inputs'."""
    module(inputs(dist.get_rank(), 1).to(dtype)).float().square().mean().backward()
    f.keep_gradients(module)
    f.see([parameter.grad_dtype for parameter in module.parameters()])


# The parameters' dtype, the dtypes of the policy, and the grad_dtype of some parameters.
GRAD_DTYPES: tuple[tuple[torch.dtype, tuple[torch.dtype, ...], dict[str, torch.dtype | None]], ...] = (
    (FP32, (), {"weight": BF16, "bias": BF16}),
    (FP32, (BF16,), {"weight": BF16, "bias": BF16}),
    (FP32, (BF16,), {"weight": BF16}),
    (FP32, (BF16,), {"weight": None, "bias": None}),
    (FP32, (BF16,), {"bias": None}),
    (BF16, (), {"weight": FP32, "bias": FP32}),
    (FP32, (BF16, FP32), {"weight": BF16, "bias": BF16}),
)


def grad_dtypes(f: Run) -> None:
    """Set ``grad_dtype`` before or after ``fully_shard``, on all or one parameter, with and without reduce_dtype."""
    for own, policy, dtypes in GRAD_DTYPES:
        for is_late in (False, True) if len(dtypes) > 1 else (False,):
            torch.manual_seed(0)
            module = nn.Linear(7, 5).to(own)
            if is_late:
                f.fully_shard(module, mp_policy=f.MixedPrecisionPolicy(*policy))
            for attribute, dtype in dtypes.items():
                getattr(module, attribute).grad_dtype = dtype
            if not is_late:
                f.fully_shard(module, mp_policy=f.MixedPrecisionPolicy(*policy))
            gradients_of(f, module, own)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(6), "rms": lambda: nn.RMSNorm(6), "group": lambda: nn.GroupNorm(3, 6),
    "batch": lambda: nn.BatchNorm2d(6), "batch 1-d": lambda: nn.BatchNorm1d(6),
}  # fmt: skip


def narrow(dtype: torch.dtype) -> dict[str, Any]:
    """Return a policy's options for one dtype; before PyTorch 2.15, FSDP2 reduced in ``param_dtype`` by default."""
    return {"param_dtype": dtype, "reduce_dtype": dtype}


def through_norm(f: Run, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Train layers around a norm that is its own unit, with a policy of these ``options``."""
    is_image = name in ("group", "batch")
    torch.manual_seed(0)
    ends = (nn.Conv2d(1, 6, 3), nn.Conv2d(6, 2, 3)) if is_image else (nn.Linear(8, 6), nn.Linear(6, 5))
    model = nn.Sequential(ends[0], NORMS[name](), ends[1])
    for index, module in enumerate((*model, model)):
        f.fully_shard(module, mp_policy=f.MixedPrecisionPolicy(**(options if index == 1 else narrow(dtype))))
        module.register_forward_hook(lambda module, args, out: f.see(args[0].dtype, out.dtype))

    def loss(model: Any, step: int) -> torch.Tensor:
        return model(inputs(dist.get_rank(), step, *((4, 1, 6, 6) if is_image else (4, 8)))).float().square().mean()

    try:
        f.train(model, 2, loss=loss, after=lambda: f.keep_gradients(model))
    except RuntimeError as error:
        f.see(str(error))
    f.tensors |= {f"{len(f.tensors)}, {key}": value.clone() for key, value in model.named_buffers()}


def norms(f: Run) -> None:
    """Inputs of norms are cast like all inputs. Statistics stay FP32, so BatchNorm on CPU needs its own policy."""
    for dtype in (BF16, torch.float16):
        own = (narrow(dtype), {"output_dtype": dtype}, {"param_dtype": FP32, "output_dtype": dtype})
        for name in NORMS:
            # PyTorch warns that RMSNorm of bf16 with FP32 weights is slow.
            for options in own if name != "rms" else own[::2]:
                through_norm(f, name, dtype, options)
    assert sum(isinstance(fact, str) for fact in f.facts) == 4


# ---------------------------------------------------------------- meshes with names


def like_the_weights(layer: Any, args: tuple[torch.Tensor, ...]) -> tuple[DTensor]:
    axes = layer.up.weight.device_mesh
    return (DTensor.from_local(args[0], axes, [Replicate() if n == "tp" else Shard(0) for n in axes.mesh_dim_names]),)


def on_a_larger_mesh(f: Run, sizes: dict[str, int], **axes: Any) -> None:
    """Shard a model of DTensors over some axes of their mesh; its layers place their inputs like their weights.

    Each program has axes of its own: FSDP2 refuses weights on a mesh that is equal but another object, and PyTorch's
    cache of operators gives results the first of all equal meshes.
    """
    grid = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model, dims = blocks(), f.DataParallelMeshDims(**axes)
    for layer in model.layers:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), grid, [Replicate()] * grid.ndim)
                setattr(module, name, nn.Parameter(placed))
        layer.register_forward_pre_hook(like_the_weights)
        layer.register_forward_hook(lambda module, args, output: output.to_local().clone())
    f.see(dims.shard_names, dims.replicate_names)
    f.train(f.shard(model, mesh=grid, dp_mesh_dims=dims))


# ---------------------------------------------------------------- switches, told before each microbatch


def one_unit_and_the_root(model: Any, is_last: bool) -> None:
    for part in (model.layers[1], model):
        part.set_requires_gradient_sync(is_last, recurse=False)


def reshard_and_sync(model: Any, is_last: bool) -> None:
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


class Event:
    """Stand-in for an event on a device without streams."""

    def record(self) -> None:
        """Return at once."""

    wait = synchronize = record


Switch = Callable[[Any, bool], object]


def sync(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def switched(f: Run, model: Any, microbatches: int, before: Switch | None = None) -> None:
    """Train a model, and set before each microbatch whether it is the last one of a step."""
    f.train(model, microbatches=microbatches, before=before, after=lambda: f.keep_gradients(model))


def finalized(f: Run, model: Any, *, async_op: bool, microbatches: int = 2) -> None:
    """Train with gradients that are finalized by hand; only the last microbatch is synchronized."""
    f.see(model.finalize_backward())
    model.set_manual_backward_finalization(True)

    def finalize() -> None:
        handle = model.finalize_backward(async_op=async_op)
        f.see(handle is None)
        if handle is not None:
            f.see(isinstance(handle, f.GradientReductionHandle))
            f.refuses(model.finalize_backward, *LOUD)
            handle.wait()
            handle.wait()
        f.keep_gradients(model)

    f.train(model, microbatches=microbatches, before=sync, after=finalize)


# ---------------------------------------------------------------- communication


def divided(f: Run, setter: str) -> None:
    model = f.shard()
    for module in (model, *model.layers):
        # gloo has no op that multiplies before it sums.
        module.set_force_sum_reduction_for_comms(enable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        getattr(model.layers[0], setter)(5.0)
        getattr(model.layers[2], setter)(0.5)
    f.train(model)


class Gather:
    """FSDP2's ``AllGather`` with a list of tensors; counts its calls."""

    calls = allocations = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocations += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        parts = list(output_tensor.chunk(group.size()))
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


class Reduce(Gather):
    """FSDP2's ``ReduceScatter``, which reduces the whole input on every rank."""

    def __call__(  # type: ignore[override]  # FSDP2 calls a reduction with one more argument
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.calls += 1
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def with_comm(f: Run, setter: str, make: type[Gather]) -> None:
    model, comm = f.shard(), make()
    for layer in model.layers:
        getattr(layer, setter)(comm)
    f.train(model)
    f.see(comm.calls > 0)


def on_then_off(f: Run, setter: str, **options: Any) -> None:
    model = f.shard()
    getattr(model, setter)(True)
    f.train(model, steps=2)
    getattr(model, setter)(False, **options)
    f.train(model, steps=1)


def headed(f: Run, **options: Any) -> Any:
    """Shard each layer, norm and head together, and the model; the caller runs the head."""
    layers = blocks().layers
    model = Made(
        lambda m, x: m.norm(m.body(x)), body=nn.Sequential(*layers), norm=nn.LayerNorm(7), head=nn.Linear(7, 5)
    )
    for unit in (*layers, [model.norm, model.head], model):
        f.fully_shard(unit, **options)
    return model


def in_chunks(run: Run, model: Any, step: int) -> torch.Tensor:
    hidden = model(inputs(dist.get_rank(), step))
    run.see(shows(model.head))
    leaf = hidden.detach().requires_grad_()
    model.set_requires_gradient_sync(False)
    for chunk in leaf.chunk(2):
        loss = model.head(chunk).square().mean()
        run.see(shows(model.head))
        loss.backward()
    model.set_requires_gradient_sync(True)
    # The gradient of the leaf is that of the chunks.
    return (hidden * leaf.grad).sum()


# fmt: off
PROGRAMS = {
    # ------------------------------------------------------------ arguments
    "fully_shard": Program("""
        model = blocks()
        see([fully_shard(part) is part for part in (*model.layers, model)], shows(model))
        see([(type(part).__name__, isinstance(part, FSDPModule), isinstance(part, nn.Module)) for part in model.layers])
        between(run, train(model))
    """),
    "fully_shard of a list": Program("""
        model = blocks()
        first, second, third = model.layers
        fully_shard(first)
        see(isinstance(fully_shard([second, third]), list))
        train(fully_shard(model))
    """),
    "fully_shard(mesh=1-D)": Program("train(shard(mesh=mesh(2)))"),
    "fully_shard(mesh=2-D)": Program("train(hsdp(run))", 4),
    "fully_shard(reshard_after_forward=True)": Program("between(run, train(shard(reshard_after_forward=True)))"),
    "fully_shard(reshard_after_forward=False)": Program("between(run, train(shard(reshard_after_forward=False)))"),
    "fully_shard(reshard_after_forward=2)": Program("""
        refuses(lambda: fully_shard(blocks(), reshard_after_forward=3), ValueError)
        train(shard(reshard_after_forward=2))
    """, 4),
    "fully_shard(shard_placement_fn)": Program("""
        train(shard(shard_placement_fn=lambda one: Shard(0) if one.ndim > 1 else None))
    """),
    "fully_shard(offload_policy=OffloadPolicy)": Program("train(shard(offload_policy=OffloadPolicy()))"),
    "fully_shard(offload_policy=CPUOffloadPolicy)": Program("""
        see(CPUOffloadPolicy().pin_memory)
        train(shard(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    """),
    "fully_shard(ignored_params)": Program("""
        model = blocks()
        kept = {parameter for layer in model.layers for parameter in layer.norm.parameters()}
        for parameter in kept:
            parameter.register_post_accumulate_grad_hook(lambda one: dist.all_reduce(one.grad.div_(2)))
        train(shard(model, ignored_params=kept))
    """),
    # Both engines refuse the same calls.
    "fully_shard refuses": Program("""
        refuses(lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError)
        refuses(lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), ValueError)
        refuses(lambda: fully_shard(Made(abs, scale=nn.Parameter(torch.tensor(1.0)))), ValueError)
        refuses(lambda: fully_shard(blocks(), mesh=init_device_mesh("cpu", (1, 1, 2))), ValueError)
        refuses(lambda: fully_shard(blocks(), reshard_after_forward="yes"), ValueError)
        refuses(lambda: copy.deepcopy(fully_shard(nn.Linear(2, 2))), ValueError, AssertionError)
    """),
    # Versions of PyTorch with DataParallelMeshDims accept such lists.
    "a ModuleList with a forward": Program("""
        see(fully_shard(Applied([nn.Linear(2, 2)]))(torch.ones(1, 2)).shape)
    """, 1, "DataParallelMeshDims"),
    "DataParallelMeshDims": Program("""
        dims = DataParallelMeshDims(shard=("a", "b"), replicate="c")
        see(dims.shard_names, dims.replicate_names, dims == DataParallelMeshDims(("a", "b"), "c"))
        refuses(lambda: fully_shard(blocks(), mesh=mesh(2), dp_mesh_dims=DataParallelMeshDims("none")), ValueError)
        refuses(lambda: fully_shard(blocks(), mesh=mesh(2), dp_mesh_dims=DataParallelMeshDims()), ValueError)
    """, needs="DataParallelMeshDims"),
    "fully_shard(dp_mesh_dims=shard)": Program("""
        on_a_larger_mesh(run, {"dp": 2, "tp": 2}, shard="dp")
    """, 4, "DataParallelMeshDims"),
    "fully_shard(dp_mesh_dims=shard and replicate)": Program("""
        on_a_larger_mesh(run, {"replica": 2, "dp": 2, "tp": 1}, shard="dp", replicate="replica")
    """, 4, "DataParallelMeshDims"),
    "fully_shard(dp_mesh_dims=two to shard)": Program("""
        on_a_larger_mesh(run, {"outer": 2, "inner": 2, "tp": 1}, shard=("outer", "inner"))
    """, 4, "DataParallelMeshDims"),
    # FSDP2 keeps this setting in another place.
    "replicate around sharded parts": Program("""
        model = blocks()
        fully_shard(model.layers[1])
        importlib.import_module("torch.distributed._composable").replicate(model)
        train(model)
    """),
    "replicate": Program("""
        place = "torch.distributed._composable.replicate_with_fsdp" if run.engine == "torch" else "megatron_fsdp"
        replicate, model = importlib.import_module(place).replicate, blocks()
        axis = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
        policy, kept = MixedPrecisionPolicy(reduce_dtype=torch.float64), set(model.layers[0].norm.parameters())
        for layer in model.layers:
            replicate(layer, mesh=axis, mp_policy=policy, ignored_params=kept)
        see(replicate(model, mesh=axis, offload_policy=OffloadPolicy(), ignored_params=kept) is model)
        see(isinstance(model, FSDPModule))
        for parameter in kept:
            parameter.requires_grad_(False)
        train(model)
    """),
    # ------------------------------------------------------------ precision
    "MixedPrecisionPolicy(output_dtype)": Program("""
        model = blocks()
        fully_shard(model.layers[1], mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float16))
        model.layers[1].register_forward_hook(lambda module, args, output: see(output.dtype))
        model.layers[2].register_forward_pre_hook(lambda module, args: (args[0].float(),))
        see(model(inputs(dist.get_rank(), 0)).dtype)
    """),
    "MixedPrecisionPolicy(cast_forward_inputs)": Program("""
        for choice in (True, False):
            policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=choice)
            table = fully_shard(nn.Embedding(4, 4), mp_policy=policy)
            table.register_forward_pre_hook(lambda module, args: see(args[0].dtype))
            linear = fully_shard(nn.Linear(4, 4), mp_policy=policy)
            see(linear(torch.ones(1, 4, dtype=FP32 if choice else BF16)).dtype, table(torch.tensor([1])).dtype)
        refuses(lambda: linear(torch.ones(1, 4)), RuntimeError)
    """),
    "MixedPrecisionPolicy(param_dtype)": Program("with_policy(run, BF16)", tolerance=1e-2),
    "MixedPrecisionPolicy(reduce_dtype)": Program("with_policy(run, BF16, FP32)", tolerance=1e-2),
    "grad_dtype of parameters": Program("grad_dtypes(run)", needs=SINCE_2_15, tolerance=0.0),
    "norm layers that are units, in bf16 and fp16": Program("norms(run)", tolerance=0.0),
    # Gradients of FP32 parameters that compute in bf16 are reduced in FP32; before PyTorch 2.15 in bf16.
    "MixedPrecisionPolicy(reduce_dtype=None)": Program("""
        gradients_of(run, fully_shard(nn.Linear(7, 5), mp_policy=MixedPrecisionPolicy(param_dtype=BF16)))
    """, needs=SINCE_2_15, tolerance=0.0),
    # A gain keeps its own dtype between matrices in bf16.
    "MixedPrecisionPolicy(param_dtype_override_fn)": Program("""
        asked = []

        def own_for_gains(parameter):
            asked.append(tuple(parameter.shape))
            return parameter.dtype if parameter.ndim == 1 else None

        def forward(module, x):
            see(x.dtype, module.linear.weight.dtype, module.gain.dtype)
            return module.linear(x) * module.gain

        module = Made(forward, linear=nn.Linear(7, 5, bias=False), gain=nn.Parameter(torch.linspace(1, 2, 5)))
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=own_for_gains)
        gradients_of(run, fully_shard(module, mp_policy=policy))
        see(sorted(asked))
        third = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: torch.float16)
        refuses(lambda: fully_shard(nn.Linear(2, 2), mp_policy=third), ValueError)
    """, needs=SINCE_2_15, tolerance=0.0),
    "to(dtype) after sharding": Program("see(fully_shard(nn.Linear(3, 3)).to(BF16).weight.dtype)", 1),
    # ------------------------------------------------------------ unshard, reshard
    "unshard, reshard": Program("""
        model = shard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layer = model.layers[0]
        see(layer.unshard(), shows(layer), layer.up.weight.shape, shows(model.layers[1]))
        weight = layer.up.weight.detach().clone()
        layer.reshard()
        see(shows(layer), torch.equal(weight, whole(layer.up.weight, weight)))
        layer.unshard()
        train(model, optimizer=optimizer)
    """),
    "unshard(async_op=True), UnshardHandle.wait": Program("""
        def gather_all(model, is_last):
            handle, *_ = [layer.unshard(async_op=True) for layer in model.layers]
            handle.wait()
            handle.wait()
            see(isinstance(handle, UnshardHandle), shows(model.layers[0]))

        train(shard(), before=gather_all)
    """),
    "unshard under MixedPrecisionPolicy": Program("""
        layer = fully_shard(nn.Linear(3, 5), mp_policy=MixedPrecisionPolicy(BF16))
        for move in (layer.unshard, layer.reshard):
            move()
            see(layer.weight.dtype)
    """),
    # A forward that raised leaves nothing behind, nor does a backward.
    "reset_iter_state": Program("""
        model = shard()
        handle = model.layers[1].up.register_forward_hook(fail)
        refuses(lambda: loss_of(model, 0), RuntimeError)
        handle.remove()
        model.reset_iter_state()
        handle = model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        loss = loss_of(model, 0)
        handle.remove()
        refuses(loss.backward, RuntimeError)
        model.reset_iter_state()
        model.zero_grad()
        train(model)
    """, needs="FSDPModule.reset_iter_state"),
    # ------------------------------------------------------------ resharding Another test checks that addresses stay.
    "set_keep_unsharded_storage": Program("""
        model = shard(reshard_after_forward=True)
        model.set_keep_unsharded_storage(True)
        train(model)
        model.set_keep_unsharded_storage(False)
        train(model)
    """, needs=SINCE_2_15),
    "set_keep_unsharded_storage(recurse=False)": Program("""
        model, seen = shard(), set()
        model.layers[0].set_keep_unsharded_storage(True, recurse=False)
        model.layers[0].register_forward_hook(lambda module, args, out: seen.add(module.up.weight.data_ptr()))
        train(model)
        see(len(seen))
    """, needs=SINCE_2_15),
    "set_reshard_after_forward": Program("""
        model = shard(reshard_after_forward=True)
        for choice, recurse in ((False, False), (False, True), (True, True)):
            model.set_reshard_after_forward(choice, recurse)
            between(run, model)
        model.layers[0].set_reshard_after_forward(reshard_after_forward=False, recurse=False)
        refuses(lambda: model.set_reshard_after_forward("no"), ValueError)
        train(model)
    """),
    # model.zero_grad() leaves the sharded gradients of a gathered layer in FSDP2.
    "set_reshard_after_backward(recurse=False)": Program("""
        model = shard()
        optimizer, layer = torch.optim.SGD(model.parameters(), lr=0.1), model.layers[1]
        layer.set_reshard_after_backward(False, recurse=False)
        loss_of(model, 1).backward()
        layer.set_reshard_after_backward(True)
        optimizer.zero_grad()
        train(model, optimizer=optimizer)
    """),
    "set_unshard_in_backward": Program("""
        table = nn.Embedding(11, 7)
        model = nn.Sequential(table, *blocks().layers)
        for module in (*model, model):
            fully_shard(module)
        table.set_unshard_in_backward(False)
        tokens = torch.arange(5) * (dist.get_rank() + 2)
        train(model, loss=lambda model, step: model((tokens + step) % 11).square().mean())
    """),
    # ------------------------------------------------------------ switches, told before each microbatch
    "gradients accumulate without a switch": Program("switched(run, shard(), 2)"),
    "set_requires_gradient_sync": Program("switched(run, shard(), 3, sync)"),
    "set_requires_gradient_sync on HSDP": Program("switched(run, hsdp(run), 2, sync)", 4),
    "set_requires_gradient_sync(recurse=False)": Program("switched(run, shard(), 2, one_unit_and_the_root)"),
    "set_requires_all_reduce": Program("""
        switched(run, hsdp(run), 2, lambda model, is_last: model.set_requires_all_reduce(is_last))
    """, 4),
    "set_requires_all_reduce(recurse=False)": Program("""
        model = hsdp(run)
        switched(run, model, 2, lambda _, is_last: model.layers[1].set_requires_all_reduce(is_last, recurse=False))
    """, 4),
    "set_is_last_backward": Program("""
        switched(run, shard(), 3, lambda model, is_last: model.set_is_last_backward(is_last))
    """),
    "set_is_last_backward on HSDP": Program("""
        switched(run, hsdp(run), 2, lambda model, is_last: model.set_is_last_backward(is_last))
    """, 4),
    "set_reshard_after_backward": Program("switched(run, shard(), 2, reshard_and_sync)"),
    "set_post_optim_event": Program("""
        switched(run, shard(), 1, lambda model, is_last: model.set_post_optim_event(Event()))
    """),
    # ------------------------------------------------------------ gradients and who communicates
    "set_gradient_divide_factor, set_force_sum_reduction_for_comms": Program("""
        divided(run, "set_gradient_divide_factor")
    """),
    "set_reduce_scatter_divide_factor": Program("divided(run, 'set_reduce_scatter_divide_factor')"),
    "set_custom_all_gather": Program("with_comm(run, 'set_custom_all_gather', Gather)"),
    "set_custom_reduce_scatter": Program("with_comm(run, 'set_custom_reduce_scatter', Reduce)"),
    "_set_unshard_async_op": Program("on_then_off(run, '_set_unshard_async_op')"),
    "set_allocate_memory_from_process_group_for_comm(True)": Program("""
        on_then_off(run, "set_allocate_memory_from_process_group_for_comm")
    """),
    "set_separate_reduce_scatter_group": Program("""
        on_then_off(run, "set_separate_reduce_scatter_group", recurse=True)
    """, needs="FSDPModule.set_separate_reduce_scatter_group"),
    "set_requires_all_reduce(recurse=False) alone": Program("""
        model = hsdp(run)
        model.layers[1].set_requires_all_reduce(False, recurse=False)
        loss_of(model, 0).backward()
        for layer in (model.layers[0], model.layers[2]):
            keep_gradients(layer)
    """, 4),
    "set_all_reduce_hook": Program("""
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model, group = shard(mesh=grid["inner"]), grid.get_group("outer")
        for layer in model.layers:
            layer.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient.div_(2), group=group))
        train(model)
    """, 4),
    "set_all_reduce_hook on HSDP": Program("""
        model = hsdp(run)
        for layer in model.layers:
            layer.set_all_reduce_hook(lambda gradient: see("called"))
        loss_of(model, 0).backward()
    """, 4),
    "hooks after accumulation": Program("""
        model = shard()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: see("called"))
        train(model, steps=1)
    """, 1),
    "set_reduce_scatter_max_input_buffers": Program("""
        model = shard()
        model.set_reduce_scatter_max_input_buffers(max_input_buffers=2)
        model.layers[0].set_reduce_scatter_max_input_buffers(3, recurse=False)
        refuses(lambda: model.set_reduce_scatter_max_input_buffers(0), ValueError)
        refuses(lambda: model.set_reduce_scatter_max_input_buffers(2.5), TypeError)
        refuses(lambda: model.set_reduce_scatter_max_input_buffers(True), TypeError)
        train(model)
    """, needs="FSDPModule.set_reduce_scatter_max_input_buffers"),
    # Each rank may run other layers.
    "set_reduce_scatter_unused_params": Program("""
        branches = {"left": nn.Linear(7, 7), "right": nn.Linear(7, 7)}
        model = fully_shard(Made(lambda module, x, way: torch.tanh(getattr(module, way)(x)), **branches))
        model.set_reduce_scatter_unused_params(True)
        rank, ways = dist.get_rank(), ("left", "right")
        train(model, loss=lambda m, step: m(inputs(rank, step), ways[(rank + step) % 2]).square().mean())
    """, needs="FSDPModule.set_reduce_scatter_unused_params"),
    "set_modules_to_forward_prefetch": Program("""
        model = shard(reshard_after_forward=True)
        first, second, third = model.layers
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        second.set_modules_to_forward_prefetch([])
        refuses(lambda: model.set_modules_to_forward_prefetch([nn.Linear(2, 2)]), ValueError)
        train(model)
    """),
    "set_modules_to_backward_prefetch": Program("""
        model = shard(reshard_after_forward=True)
        first, second, third = model.layers
        third.set_modules_to_backward_prefetch([second, first])
        second.set_modules_to_backward_prefetch([first])
        refuses(lambda: model.set_modules_to_backward_prefetch([nn.Linear(2, 2)]), ValueError)
        train(model)
    """),
    # ------------------------------------------------------------ finalization
    "set_manual_backward_finalization, finalize_backward": Program("""
        finalized(run, shard(), async_op=False)
    """, needs=SINCE_2_15),
    "finalize_backward(async_op=True), GradientReductionHandle.wait": Program("""
        finalized(run, shard(), async_op=True)
    """, needs=SINCE_2_15),
    "finalize_backward on HSDP": Program("""
        finalized(run, hsdp(run), async_op=True, microbatches=1)
    """, 4, SINCE_2_15),
    # These calls fail: on parts of the model, in a backward, without manual finalization, and on a handle after a
    # reset.
    "finalize_backward is refused": Program("""
        model = shard()
        first, _, third = model.layers
        loss_of(model, 0).backward()
        refuses(model.finalize_backward, *LOUD)
        model.zero_grad()
        model.set_manual_backward_finalization(True)
        refuses(lambda: first.set_manual_backward_finalization(True), *LOUD)
        refuses(first.finalize_backward, *LOUD)
        early = lambda gradient: refuses(model.finalize_backward, *LOUD)
        third.register_forward_hook(lambda module, args, out: out.register_hook(early) and None)
        loss_of(model, 0).backward()
        refuses(lambda: model.set_manual_backward_finalization(False), *LOUD)
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        refuses(handle.wait, *LOUD)
        loss_of(model, 0).backward()
        model.finalize_backward()
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
        keep_gradients(model)
    """, needs=SINCE_2_15),
    # Run the head for one chunk after the other: a backward for each, synchronized only in the last.
    "units of which a forward runs some modules": Program("""
        model = headed(run)
        train(model, loss=partial(in_chunks, run), after=lambda: keep_gradients(model))
    """, needs=SINCE_2_15),
    # ------------------------------------------------------------ functions other than fully_shard
    "register_fsdp_forward_method": Program("""
        model = fully_shard(Encoder())
        refuses(lambda: register_fsdp_forward_method(model, "no_such_method"), ValueError)
        register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")
        register_fsdp_forward_method(model, "encode")
        train(model, loss=lambda m, step: m.encode(inputs(dist.get_rank(), step), scale=2.0).square().mean())
    """),
    "share_comm_ctx": Program("""
        model = blocks()
        see(share_comm_ctx([fully_shard(layer) for layer in model.layers]))
        refuses(lambda: share_comm_ctx([nn.Linear(2, 2)]), ValueError)
        share_comm_ctx([])
        train(model)
    """),
    "fully_shard.state, _get_fsdp_state": Program("""
        model = shard()
        see(fully_shard.state(model) is model._get_fsdp_state())
        see(len({id(fully_shard.state(part)) for part in (model, *model.layers)}))
    """),
    # ------------------------------------------------------------ PyTorch's own tools, and plain use of a module
    "names, shapes and buffers": Program("""
        model = nn.Sequential(Shifted(), Shifted())
        for module in (*model, model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
        see([(name, value.dtype, type(value).__name__) for name, value in model.named_buffers()], [*model.state_dict()])
        train(model)
    """),
    "a slice of a Sequential": Program("""
        see(type(fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[:1]).__name__)
    """, 1),
    "evaluation": Program("""
        model = shard().eval()
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                run.losses += [loss_of(model, step).item() for step in range(2)]
            see(shows(model.layers[0]))
        train(model.train())
    """),
    "clip_grad_norm_": Program("""
        model = shard()

        def clip():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            run.losses.append(whole(norm, norm).item())

        train(model, after=clip, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    """),
    "activation checkpointing": Program("""
        model = shard()
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        train(model)
    """),
    "frozen parameters": Program("""
        model = blocks()
        model.layers[0].requires_grad_(False)
        model.layers[1].up.weight.requires_grad_(False)
        train(shard(model))
    """),
    "a parameter that no rank used": Program("""
        model = fully_shard(Made(lambda m, x: m.used(x), used=nn.Linear(3, 3), idle=nn.Linear(3, 3)))
        model(torch.ones(1, 3)).sum().backward()
        keep_gradients(model)
    """, 1),
    # Two steps, whole state dicts through a file, and two steps of another model that loads them.
    "state dicts of model and optimizer": Program("""
        model = shard()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, 2, optimizer=optimizer)
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = [get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = shard()
        part = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        assert dist.get_rank() or list(state[0]) == list(other.state_dict())
        set_model_state_dict(other, state[0], options=part)
        second = torch.optim.AdamW(other.parameters(), lr=1e-3)
        set_optimizer_state_dict(other, second, state[1], options=part)
        train(other, 2, optimizer=second)
    """),
    # Losses, and which gathered weights have memory before and after a reshard.
    "fsdp_should_release_all_gather_outputs_after_post_all_gather": Program("""
        model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 7))
        model[0].weight = nn.Parameter(ReleasingTensor(model[0].weight.detach()))
        fully_shard(model[0])
        train(fully_shard(model), keeps=False)
        for move in (model[0].unshard, model[0].reshard) * 2:
            move()
            see(ReleasingTensor.held())
    """, needs=SINCE_2_15, tolerance=0.0),
}
# fmt: on
enter(PROGRAMS, globals())
