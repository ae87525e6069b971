"""Programs on which the engines agree: the arguments of ``fully_shard``, methods of ``FSDPModule``, and other names."""

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

from tests.functional.compatibility import SINCE_2_15, Run, blocks, loss_of, mesh, program, shows
from tests.functional.wire_tensor import ReleasingTensor
from tests.harness.models import Block, Made, inputs
from tests.harness.oracle import whole

__all__: list[str] = []
BF16, FP32 = torch.bfloat16, torch.float32
PLACE = "set_allocate_memory_from_process_group_for_comm"

# ---------------------------------------------------------------- arguments


@program("fully_shard")
def _(f: Run) -> object:
    model = blocks()
    f.see([f.fully_shard(part) is part for part in (*model.layers, model)], shows(model))
    f.see([(type(part).__name__, isinstance(part, f.FSDPModule), isinstance(part, nn.Module)) for part in model.layers])
    return f.train(model)


@program("fully_shard of a list")
def _(f: Run) -> object:
    model = blocks()
    first, second, third = model.layers
    f.fully_shard(first)
    f.see(isinstance(f.fully_shard([second, third]), list))
    return f.train(f.fully_shard(model))


def hsdp(f: Run, **options: Any) -> Any:
    """Shard the blocks over two ranks, in two replicas."""
    return f.shard(mesh=mesh(2, 2), **options)


def between(f: Run, model: Any) -> Any:
    """Note what parameters are between forward and backward, and after it."""
    loss = loss_of(model, 99)
    f.see(shows(model))
    loss.backward()
    f.see(shows(model))
    model.zero_grad()
    return model


OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mesh=1-D": lambda f: {"mesh": mesh(2)},
    "reshard_after_forward=True": lambda f: {"reshard_after_forward": True},
    "reshard_after_forward=False": lambda f: {"reshard_after_forward": False},
    "shard_placement_fn": lambda f: {"shard_placement_fn": lambda one: Shard(0) if one.ndim > 1 else None},
    "offload_policy=OffloadPolicy": lambda f: {"offload_policy": f.OffloadPolicy()},
    "offload_policy=CPUOffloadPolicy": lambda f: {"offload_policy": f.CPUOffloadPolicy(pin_memory=False)},
}
for _name, _options in OPTIONS.items():
    program(f"fully_shard({_name})")(lambda f, options=_options: between(f, f.train(f.shard(**options(f)))))
program("fully_shard(mesh=2-D)", num_ranks=4)(lambda f: f.train(hsdp(f)))


@program("fully_shard(reshard_after_forward=2)", num_ranks=4)
def _(f: Run) -> object:
    f.refuses(lambda: f.fully_shard(blocks(), reshard_after_forward=3))
    return f.train(f.shard(reshard_after_forward=2))


@program("fully_shard(ignored_params)")
def _(f: Run) -> object:
    model = blocks()
    kept = {parameter for layer in model.layers for parameter in layer.norm.parameters()}

    def average(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    for parameter in kept:
        parameter.register_post_accumulate_grad_hook(average)
    return f.train(f.shard(model, ignored_params=kept))


@program("fully_shard refuses")
def _(f: Run) -> None:
    """What is wrong in one engine is wrong in the other."""
    f.refuses(lambda: f.fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError)
    f.refuses(lambda: f.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), ValueError)
    f.refuses(lambda: f.fully_shard(Made(abs, scale=nn.Parameter(torch.tensor(1.0)))), ValueError)
    f.refuses(lambda: f.fully_shard(blocks(), mesh=init_device_mesh("cpu", (1, 1, 2))), ValueError)
    f.refuses(lambda: f.fully_shard(blocks(), reshard_after_forward="yes"), ValueError)
    f.refuses(lambda: copy.deepcopy(f.fully_shard(nn.Linear(2, 2))))


class Applied(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential.forward(self, x)


# PyTorch takes such lists in the versions that have DataParallelMeshDims.
@program("a ModuleList with a forward", num_ranks=1, needs="DataParallelMeshDims")
def _(f: Run) -> None:
    f.see(f.fully_shard(Applied([nn.Linear(2, 2)]))(torch.ones(1, 2)).shape)


# ---------------------------------------------------------------- precision


def with_policy(f: Run, *dtypes: torch.dtype, **options: Any) -> Any:
    model = f.shard(mp_policy=f.MixedPrecisionPolicy(*dtypes, **options))
    first = model.layers[0].up
    first.register_forward_hook(lambda module, args, out: f.see(module.weight.dtype, args[0].dtype, out.dtype))
    loss_of(model, 7).backward()
    f.see([parameter.grad.dtype for parameter in model.parameters()])
    model.zero_grad()
    return f.train(model)


program("MixedPrecisionPolicy(param_dtype)", tolerance=1e-2)(partial(with_policy, param_dtype=BF16))
program("MixedPrecisionPolicy(reduce_dtype)", tolerance=1e-2)(partial(with_policy, param_dtype=BF16, reduce_dtype=FP32))


def gradients_of(f: Run, module: nn.Module, dtype: torch.dtype = FP32) -> None:
    """Note whole gradients, and what dtypes they have and may have; ``dtype`` is the inputs'."""
    module(inputs(dist.get_rank(), 1).to(dtype)).float().square().mean().backward()
    f.keep_gradients(module)
    f.see([parameter.grad_dtype for parameter in module.parameters()])


@program("MixedPrecisionPolicy(reduce_dtype=None)", needs=SINCE_2_15, tolerance=0.0)
def _(f: Run) -> None:
    """Gradients of FP32 parameters that compute in bf16 are reduced in FP32; before PyTorch 2.15 in bf16."""
    gradients_of(f, f.fully_shard(nn.Linear(7, 5), mp_policy=f.MixedPrecisionPolicy(param_dtype=BF16)))


# What parameters are, the dtypes of the policy, and the grad_dtype of some of them.
GRAD_DTYPES: tuple[tuple[torch.dtype, tuple[torch.dtype, ...], dict[str, torch.dtype | None]], ...] = (
    (FP32, (), {"weight": BF16, "bias": BF16}),
    (FP32, (BF16,), {"weight": BF16, "bias": BF16}),
    (FP32, (BF16,), {"weight": BF16}),
    (FP32, (BF16,), {"weight": None, "bias": None}),
    (FP32, (BF16,), {"bias": None}),
    (BF16, (), {"weight": FP32, "bias": FP32}),
    (FP32, (BF16, FP32), {"weight": BF16, "bias": BF16}),
)


@program("grad_dtype of parameters", needs=SINCE_2_15, tolerance=0.0)
def _(f: Run) -> None:
    """Set before or after ``fully_shard``, on all parameters of a unit or on one, with and without a reduce_dtype."""
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


@program("MixedPrecisionPolicy(param_dtype_override_fn)", needs=SINCE_2_15, tolerance=0.0)
def _(f: Run) -> None:
    """A gain keeps its own dtype between matrices in bf16."""
    asked: list[tuple[int, ...]] = []

    def own_for_gains(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(tuple(parameter.shape))
        return parameter.dtype if parameter.ndim == 1 else None

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        f.see(x.dtype, module.linear.weight.dtype, module.gain.dtype)
        return module.linear(x) * module.gain

    module = Made(forward, linear=nn.Linear(7, 5, bias=False), gain=nn.Parameter(torch.linspace(1, 2, 5)))
    policy = f.MixedPrecisionPolicy(BF16, param_dtype_override_fn=own_for_gains)
    gradients_of(f, f.fully_shard(module, mp_policy=policy))
    f.see(sorted(asked))
    third = f.MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: torch.float16)
    f.refuses(lambda: f.fully_shard(nn.Linear(2, 2), mp_policy=third), ValueError)


@program("MixedPrecisionPolicy(output_dtype)")
def _(f: Run) -> object:
    model = blocks()
    f.fully_shard(model.layers[1], mp_policy=f.MixedPrecisionPolicy(output_dtype=torch.float64))
    f.fully_shard(model, mp_policy=f.MixedPrecisionPolicy(output_dtype=torch.float16))
    model.layers[1].register_forward_hook(lambda module, args, output: f.see(output.dtype))
    model.layers[2].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    f.see(model(inputs(dist.get_rank(), 0)).dtype)
    return model


@program("MixedPrecisionPolicy(cast_forward_inputs)")
def _(f: Run) -> None:
    for choice in (True, False):
        policy = f.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=choice)
        table = f.fully_shard(nn.Embedding(4, 4), mp_policy=policy)
        table.register_forward_pre_hook(lambda module, args: f.see(args[0].dtype))
        linear = f.fully_shard(nn.Linear(4, 4), mp_policy=policy)
        f.see(linear(torch.ones(1, 4, dtype=FP32 if choice else BF16)).dtype, table(torch.tensor([1])).dtype)
    f.refuses(lambda: linear(torch.ones(1, 4)), RuntimeError)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(6), "rms": lambda: nn.RMSNorm(6), "group": lambda: nn.GroupNorm(3, 6),
    "batch": lambda: nn.BatchNorm2d(6), "batch 1-d": lambda: nn.BatchNorm1d(6),
}  # fmt: skip


def through_norm(f: Run, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Train layers around a norm that is a unit of its own, whose policy has ``options``."""
    is_image = name in ("group", "batch")
    torch.manual_seed(0)
    ends = (nn.Conv2d(1, 6, 3), nn.Conv2d(6, 2, 3)) if is_image else (nn.Linear(8, 6), nn.Linear(6, 5))
    model = nn.Sequential(ends[0], NORMS[name](), ends[1])
    for index, module in enumerate((*model, model)):
        f.fully_shard(module, mp_policy=f.MixedPrecisionPolicy(**(options if index == 1 else {"param_dtype": dtype})))
        module.register_forward_hook(lambda module, args, out: f.see(args[0].dtype, out.dtype))

    def loss(model: Any, step: int) -> torch.Tensor:
        return model(inputs(dist.get_rank(), step, *((4, 1, 6, 6) if is_image else (4, 8)))).float().square().mean()

    try:
        f.train(model, 2, loss=loss, after=lambda: f.keep_gradients(model))
    except RuntimeError as error:
        f.see(str(error))
    f.tensors |= {f"{len(f.tensors)}, {key}": value.clone() for key, value in model.named_buffers()}


@program("norm layers that are units, in bf16 and fp16", tolerance=0.0)
def _(f: Run) -> None:
    """Their inputs are cast like others'; statistics stay FP32, so BatchNorm on CPU wants a policy of its own."""
    for dtype in (BF16, torch.float16):
        own = ({"param_dtype": dtype}, {"output_dtype": dtype}, {"param_dtype": FP32, "output_dtype": dtype})
        for name in NORMS:
            # PyTorch warns that RMSNorm of bf16 with FP32 weights is slow.
            for options in own if name != "rms" else own[::2]:
                through_norm(f, name, dtype, options)
    assert sum(isinstance(fact, str) for fact in f.facts) == 4


@program("to(dtype) after sharding", num_ranks=1)
def _(f: Run) -> None:
    f.see(f.fully_shard(nn.Linear(3, 3)).to(BF16).weight.dtype)


# ---------------------------------------------------------------- meshes with names


def like_the_weights(layer: Any, args: tuple[torch.Tensor, ...]) -> tuple[DTensor]:
    axes = layer.up.weight.device_mesh
    return (DTensor.from_local(args[0], axes, [Replicate() if n == "tp" else Shard(0) for n in axes.mesh_dim_names]),)


def on_a_larger_mesh(f: Run, sizes: tuple[int, ...], **axes: Any) -> object:
    """Shard a model of DTensors over some axes of their mesh, whose layers lay their input out like their weights."""
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "dp", "tp")[-len(sizes) :])
    model, dims = blocks(), f.DataParallelMeshDims(**axes)
    for layer in model.layers:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), grid, [Replicate()] * grid.ndim)
                setattr(module, name, nn.Parameter(placed))
        layer.register_forward_pre_hook(like_the_weights)
        layer.register_forward_hook(lambda module, args, output: output.to_local().clone())
    f.see(dims.shard_names, dims.replicate_names)
    return f.train(f.shard(model, mesh=grid, dp_mesh_dims=dims))


NAMED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "shard": ((2, 2), {"shard": "dp"}),
    "shard and replicate": ((2, 2, 1), {"shard": "dp", "replicate": "outer"}),
    "two to shard": ((2, 2, 1), {"shard": ("outer", "dp")}),
}
for _name, (_sizes, _axes) in NAMED.items():
    program(f"fully_shard(dp_mesh_dims={_name})", num_ranks=4, needs="DataParallelMeshDims")(
        partial(on_a_larger_mesh, sizes=_sizes, **_axes)
    )


@program("DataParallelMeshDims", needs="DataParallelMeshDims")
def _(f: Run) -> None:
    dims = f.DataParallelMeshDims(shard=("a", "b"), replicate="c")
    f.see(dims.shard_names, dims.replicate_names, dims == f.DataParallelMeshDims(("a", "b"), "c"))
    wrong: dict[str, str]
    for wrong in ({"shard": "none"}, {}):
        f.refuses(partial(on_a_larger_mesh, f, (2, 1), **wrong), ValueError)


@program("replicate")
def _(f: Run) -> object:
    # FSDP2 keeps it elsewhere.
    place = "torch.distributed._composable.replicate_with_fsdp" if f.engine == "torch" else "megatron_fsdp"
    replicate, model = importlib.import_module(place).replicate, blocks()
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    policy, kept = f.MixedPrecisionPolicy(reduce_dtype=torch.float64), set(model.layers[0].norm.parameters())
    for layer in model.layers:
        replicate(layer, mesh=axis, mp_policy=policy, ignored_params=kept)
    f.see(replicate(model, mesh=axis, offload_policy=f.OffloadPolicy(), ignored_params=kept) is model)
    f.see(isinstance(model, f.FSDPModule))
    for parameter in kept:
        parameter.requires_grad_(False)
    return f.train(model)


# ---------------------------------------------------------------- unshard, reshard


@program("unshard, reshard")
def _(f: Run) -> object:
    model = f.shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = model.layers[0]
    f.see(layer.unshard(), shows(layer), layer.up.weight.shape, shows(model.layers[1]))
    weight = layer.up.weight.detach().clone()
    layer.reshard()
    f.see(shows(layer), torch.equal(weight, whole(layer.up.weight, weight)))
    layer.unshard()
    return f.train(model, optimizer=optimizer)


@program("unshard(async_op=True), UnshardHandle.wait")
def _(f: Run) -> object:
    def gather_all(model: Any, is_last: bool) -> None:
        handle, *_ = [layer.unshard(async_op=True) for layer in model.layers]
        handle.wait()
        handle.wait()
        f.see(isinstance(handle, f.UnshardHandle), shows(model.layers[0]))

    return f.train(f.shard(), before=gather_all)


@program("unshard under MixedPrecisionPolicy")
def _(f: Run) -> None:
    layer = f.fully_shard(nn.Linear(3, 5), mp_policy=f.MixedPrecisionPolicy(BF16))
    for move in (layer.unshard, layer.reshard):
        move()
        f.see(layer.weight.dtype)


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")


@program("reset_iter_state", needs="FSDPModule.reset_iter_state")
def _(f: Run) -> object:
    """A forward that raised leaves nothing behind, nor does a backward."""
    model = f.shard()
    handle = model.layers[1].up.register_forward_hook(fail)
    f.refuses(lambda: loss_of(model, 0), RuntimeError)
    handle.remove()
    model.reset_iter_state()
    handle = model.layers[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    loss = loss_of(model, 0)
    handle.remove()
    f.refuses(loss.backward, RuntimeError)
    model.reset_iter_state()
    model.zero_grad()
    return f.train(model)


# ---------------------------------------------------------------- switches, told before each microbatch


def one_unit_and_the_root(model: Any, is_last: bool) -> None:
    for part in (model.layers[1], model):
        part.set_requires_gradient_sync(is_last, recurse=False)


def reshard_and_sync(model: Any, is_last: bool) -> None:
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


SWITCHES: dict[str, tuple[int, Callable[[Any, bool], object] | None]] = {
    "set_requires_gradient_sync": (3, lambda m, is_last: m.set_requires_gradient_sync(is_last)),
    "set_requires_gradient_sync(recurse=False)": (2, one_unit_and_the_root),
    "set_requires_gradient_sync on HSDP": (2, lambda m, is_last: m.set_requires_gradient_sync(is_last)),
    "set_requires_all_reduce": (2, lambda m, is_last: m.set_requires_all_reduce(is_last)),
    "set_requires_all_reduce(recurse=False)": (
        2, lambda m, is_last: m.layers[1].set_requires_all_reduce(is_last, recurse=False),
    ),
    "set_is_last_backward": (3, lambda m, is_last: m.set_is_last_backward(is_last)),
    "set_is_last_backward on HSDP": (2, lambda m, is_last: m.set_is_last_backward(is_last)),
    "set_reshard_after_backward": (2, reshard_and_sync),
    "gradients accumulate without a switch": (2, None),
    "set_post_optim_event": (1, lambda m, is_last: m.set_post_optim_event(Event())),
}  # fmt: skip


class Event:
    """Stands for an event on a device without streams."""

    def record(self) -> None:
        """Nothing is waited for."""

    wait = synchronize = record


def switched(f: Run, name: str) -> object:
    microbatches, before = SWITCHES[name]
    model = hsdp(f) if "HSDP" in name or "all_reduce" in name else f.shard()
    return f.train(model, microbatches=microbatches, before=before, after=lambda: f.keep_gradients(model))


for _name in SWITCHES:
    program(_name, num_ranks=4 if "HSDP" in _name or "all_reduce" in _name else 2)(partial(switched, name=_name))


@program("set_requires_all_reduce(recurse=False) alone", num_ranks=4)
def _(f: Run) -> None:
    model = hsdp(f)
    model.layers[1].set_requires_all_reduce(False, recurse=False)
    loss_of(model, 0).backward()
    for layer in (model.layers[0], model.layers[2]):
        f.keep_gradients(layer)


# ---------------------------------------------------------------- finalization

LOUD = (RuntimeError, ValueError)


def finalized(f: Run, model: Any, *, async_op: bool, microbatches: int = 2) -> object:
    """Train with gradients that are finalized by hand, unsynchronized but for the last microbatch."""
    f.see(model.finalize_backward())
    model.set_manual_backward_finalization(True)

    def finalize() -> None:
        handle = model.finalize_backward(async_op=async_op)
        f.see(handle is None)
        if handle is not None:
            f.see(isinstance(handle, f.GradientReductionHandle))
            f.refuses(lambda: model(inputs(0, 0)), *LOUD)
            f.refuses(model.finalize_backward, *LOUD)
            handle.wait()
            handle.wait()
        f.keep_gradients(model)

    sync = SWITCHES["set_requires_gradient_sync"][1]
    return f.train(model, microbatches=microbatches, before=sync, after=finalize)


program("set_manual_backward_finalization, finalize_backward", needs=SINCE_2_15)(
    lambda f: finalized(f, f.shard(), async_op=False)
)
program("finalize_backward(async_op=True), GradientReductionHandle.wait", needs=SINCE_2_15)(
    lambda f: finalized(f, f.shard(), async_op=True)
)
program("finalize_backward on HSDP", needs=SINCE_2_15, num_ranks=4)(
    lambda f: finalized(f, hsdp(f), async_op=True, microbatches=1)
)


@program("finalize_backward is refused", needs=SINCE_2_15)
def _(f: Run) -> object:
    """By parts of the model, in a backward, without manual finalization; and a handle that was reset."""
    model = f.shard()
    first, _, third = model.layers
    loss_of(model, 0).backward()
    f.refuses(model.finalize_backward, *LOUD)
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    f.refuses(lambda: first.set_manual_backward_finalization(True), *LOUD)
    f.refuses(first.finalize_backward, *LOUD)

    def finalize_early(gradient: torch.Tensor) -> None:
        f.refuses(model.finalize_backward, *LOUD)

    third.register_forward_hook(lambda module, args, out: out.register_hook(finalize_early) and None)
    loss_of(model, 0).backward()
    f.refuses(lambda: model.set_manual_backward_finalization(False), *LOUD)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    f.refuses(handle.wait, *LOUD)
    loss_of(model, 0).backward()
    model.finalize_backward()
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    f.keep_gradients(model)
    return model


# ---------------------------------------------------------------- resharding


@program("set_keep_unsharded_storage", needs=SINCE_2_15)
def _(f: Run) -> object:
    """Weights are those of the last step; that their addresses stay has a test of its own."""
    model = f.shard(reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    f.train(model)
    model.set_keep_unsharded_storage(False)
    return f.train(model)


@program("set_keep_unsharded_storage(recurse=False)", needs=SINCE_2_15)
def _(f: Run) -> object:
    model = f.shard()
    layer, seen = model.layers[0], set()
    layer.set_keep_unsharded_storage(True, recurse=False)
    layer.register_forward_hook(lambda module, args, out: seen.add(module.up.weight.data_ptr()))
    f.train(model)
    f.see(len(seen))
    return model


@program("set_reshard_after_forward")
def _(f: Run) -> object:
    model = f.shard(reshard_after_forward=True)
    for choice, recurse in ((False, False), (False, True), (True, True)):
        model.set_reshard_after_forward(choice, recurse)
        between(f, model)
    model.layers[0].set_reshard_after_forward(reshard_after_forward=False, recurse=False)
    f.refuses(lambda: model.set_reshard_after_forward("no"), ValueError)
    return f.train(model)


@program("set_reshard_after_backward(recurse=False)")
def _(f: Run) -> object:
    model = f.shard()
    optimizer, layer = torch.optim.SGD(model.parameters(), lr=0.1), model.layers[1]
    layer.set_reshard_after_backward(False, recurse=False)
    loss_of(model, 1).backward()
    layer.set_reshard_after_backward(True)
    # model.zero_grad() leaves the sharded gradients of a gathered layer in FSDP2.
    optimizer.zero_grad()
    return f.train(model, optimizer=optimizer)


@program("set_unshard_in_backward")
def _(f: Run) -> object:
    table: Any = nn.Embedding(11, 7)
    model = nn.Sequential(table, *blocks().layers)
    for module in (*model, model):
        f.fully_shard(module)
    table.set_unshard_in_backward(False)

    def looked_up(model: Any, step: int) -> torch.Tensor:
        return model((torch.arange(5) * (dist.get_rank() + 2) + step) % 11).square().mean()

    return f.train(model, loss=looked_up)


# ---------------------------------------------------------------- communication


def divided(f: Run, setter: str) -> object:
    model = f.shard()
    for module in (model, *model.layers):
        # gloo has no op that multiplies before it sums.
        module.set_force_sum_reduction_for_comms(enable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        getattr(model.layers[0], setter)(5.0)
        getattr(model.layers[2], setter)(0.5)
    return f.train(model)


program("set_gradient_divide_factor, set_force_sum_reduction_for_comms")(
    partial(divided, setter="set_gradient_divide_factor")
)
program("set_reduce_scatter_divide_factor")(partial(divided, setter="set_reduce_scatter_divide_factor"))


@program("set_all_reduce_hook", num_ranks=4)
def _(f: Run) -> object:
    """The all-reduce of hybrid sharding by hand."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, group = f.shard(mesh=grid["inner"]), grid.get_group("outer")

    def average(gradient: torch.Tensor) -> None:
        f.see(gradient.ndim)
        dist.all_reduce(gradient, group=group)
        gradient.div_(2)

    for layer in model.layers:
        layer.set_all_reduce_hook(average)
    return f.train(model)


@program("set_all_reduce_hook on HSDP", num_ranks=4)
def _(f: Run) -> None:
    model = hsdp(f)
    for layer in model.layers:
        layer.set_all_reduce_hook(lambda gradient: f.see("called"))
    loss_of(model, 0).backward()


@program("hooks after accumulation", num_ranks=1)
def _(f: Run) -> object:
    model = f.shard()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: f.see("called"))
    return f.train(model, steps=1)


def comm_base(kind: str) -> type:
    """Return FSDP2's ``AllGather`` or ``ReduceScatter``."""
    found: type = getattr(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_api"), kind)
    return found


class Allocating:
    """The allocating half of FSDP2's ``Comm``; counts what it is asked for."""

    calls = allocations = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocations += 1
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Allocating, comm_base("AllGather")):
    """Gathers with a list of tensors."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.all_gather(
            list(output_tensor.chunk(group.size())), input_tensor.clone(), group=group, async_op=async_op
        )


class Reduce(Allocating, comm_base("ReduceScatter")):
    """Reduces everything everywhere."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.calls += 1
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def with_comm(f: Run, setter: str, make: Callable[[], Allocating]) -> object:
    model, comm = f.shard(), make()
    for layer in model.layers:
        getattr(layer, setter)(comm)
    f.train(model)
    f.see(comm.calls > 0)
    return model


program("set_custom_all_gather")(partial(with_comm, setter="set_custom_all_gather", make=Gather))
program("set_custom_reduce_scatter")(partial(with_comm, setter="set_custom_reduce_scatter", make=Reduce))


def on_then_off(f: Run, setter: str, **options: Any) -> object:
    model = f.shard()
    getattr(model, setter)(True)
    f.train(model, steps=2)
    getattr(model, setter)(False, **options)
    return f.train(model, steps=1)


program("_set_unshard_async_op")(partial(on_then_off, setter="_set_unshard_async_op"))
program(f"{PLACE}(True)")(partial(on_then_off, setter=PLACE))
program("set_separate_reduce_scatter_group", needs="FSDPModule.set_separate_reduce_scatter_group")(
    partial(on_then_off, setter="set_separate_reduce_scatter_group", recurse=True)
)


@program("set_reduce_scatter_max_input_buffers", needs="FSDPModule.set_reduce_scatter_max_input_buffers")
def _(f: Run) -> object:
    model = f.shard()
    model.set_reduce_scatter_max_input_buffers(max_input_buffers=2)
    model.layers[0].set_reduce_scatter_max_input_buffers(3, recurse=False)
    f.refuses(lambda: model.set_reduce_scatter_max_input_buffers(0), ValueError)
    return f.train(model)


@program("set_reduce_scatter_unused_params", needs="FSDPModule.set_reduce_scatter_unused_params")
def _(f: Run) -> object:
    """Each rank may take another way through the model."""
    branches = {"left": nn.Linear(7, 7), "right": nn.Linear(7, 7)}
    model = f.fully_shard(Made(lambda module, x, way: torch.tanh(getattr(module, way)(x)), **branches))
    model.set_reduce_scatter_unused_params(True)

    def uneven(model: Any, step: int) -> torch.Tensor:
        rank = dist.get_rank()
        return model(inputs(rank, step), ("left", "right")[(rank + step) % 2]).square().mean()

    return f.train(model, loss=uneven)


def prefetching(f: Run, direction: str, orders: tuple[tuple[int, tuple[int, ...]], ...]) -> object:
    model = f.shard(reshard_after_forward=True)
    for at, then in orders:
        part = model if at < 0 else model.layers[at]
        getattr(part, f"set_modules_to_{direction}_prefetch")([model.layers[index] for index in then])
    f.refuses(lambda: getattr(model, f"set_modules_to_{direction}_prefetch")([nn.Linear(2, 2)]), ValueError)
    return f.train(model)


program("set_modules_to_forward_prefetch")(
    partial(prefetching, direction="forward", orders=((-1, (0, 1)), (0, (1, 2)), (1, ())))
)
program("set_modules_to_backward_prefetch")(partial(prefetching, direction="backward", orders=((2, (1, 0)), (1, (0,)))))


# ---------------------------------------------------------------- units of several modules


def headed(f: Run, **options: Any) -> Any:
    """Shard each layer, norm and head together, and the model; the head is for others to call."""
    layers = blocks().layers
    model = Made(
        lambda m, x: m.norm(m.body(x)), body=nn.Sequential(*layers), norm=nn.LayerNorm(7), head=nn.Linear(7, 5)
    )
    for unit in (*layers, [model.norm, model.head], model):
        f.fully_shard(unit, **options)
    return model


@program("units of which a forward runs some modules", needs=SINCE_2_15)
def _(f: Run) -> object:
    """The head for one chunk after the other: a backward for each, without synchronization but in the last."""
    model = headed(f)

    def in_chunks(model: Any, step: int) -> torch.Tensor:
        hidden = model(inputs(dist.get_rank(), step))
        f.see(shows(model.head))
        leaf = hidden.detach().requires_grad_()
        model.set_requires_gradient_sync(False)
        for chunk in leaf.chunk(2):
            loss = model.head(chunk).square().mean()
            f.see(shows(model.head))
            loss.backward()
        model.set_requires_gradient_sync(True)
        # Its gradient is that of the chunks.
        return (hidden * leaf.grad).sum()

    def seen() -> None:
        f.see(shows(model.head))
        f.keep_gradients(model)

    return f.train(model, loss=in_chunks, after=seen)


# ---------------------------------------------------------------- functions beside fully_shard


class Encoder(nn.Module):
    """A model with a second way in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Return (..., 13) for (..., 7)."""
        return torch.tanh(self.up(x)) * scale


@program("register_fsdp_forward_method")
def _(f: Run) -> object:
    model = f.fully_shard(Encoder())
    f.refuses(lambda: f.register_fsdp_forward_method(model, "no_such_method"), ValueError)
    f.register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")
    f.register_fsdp_forward_method(model, "encode")
    return f.train(model, loss=lambda m, step: m.encode(inputs(dist.get_rank(), step), scale=2.0).square().mean())


@program("share_comm_ctx")
def _(f: Run) -> object:
    model = blocks()
    f.see(f.share_comm_ctx([f.fully_shard(layer) for layer in model.layers]))
    f.refuses(lambda: f.share_comm_ctx([nn.Linear(2, 2)]), ValueError)
    f.share_comm_ctx([])
    return f.train(model)


@program("fully_shard.state, _get_fsdp_state")
def _(f: Run) -> None:
    model = f.shard()
    f.see(f.fully_shard.state(model) is model._get_fsdp_state())
    f.see(len({id(f.fully_shard.state(part)) for part in (model, *model.layers)}))


# ---------------------------------------------------------------- PyTorch's own tools, and plain use of a module


class Shifted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift.to(x.dtype))


@program("names, shapes and buffers")
def _(f: Run) -> object:
    model = nn.Sequential(Shifted(), Shifted())
    for module in (*model, model):
        f.fully_shard(module, mp_policy=f.MixedPrecisionPolicy(param_dtype=torch.float64))
    f.see([(name, value.dtype, type(value).__name__) for name, value in model.named_buffers()], [*model.state_dict()])
    return f.train(model)


@program("a slice of a Sequential", num_ranks=1)
def _(f: Run) -> None:
    f.see(type(f.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[:1]).__name__)


@program("evaluation")
def _(f: Run) -> object:
    model = f.shard().eval()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            f.losses += [loss_of(model, step).item() for step in range(2)]
        f.see(shows(model.layers[0]))
    return f.train(model.train())


@program("clip_grad_norm_")
def _(f: Run) -> object:
    model = f.shard()

    def clip() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        f.losses.append(whole(norm, norm).item())

    return f.train(model, after=clip, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


@program("activation checkpointing")
def _(f: Run) -> object:
    model = f.shard()
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return f.train(model)


@program("frozen parameters")
def _(f: Run) -> object:
    model = blocks()
    model.layers[0].requires_grad_(False)
    model.layers[1].up.weight.requires_grad_(False)
    return f.train(f.shard(model))


@program("a parameter that no rank used", num_ranks=1)
def _(f: Run) -> None:
    model = f.fully_shard(Made(lambda m, x: m.used(x), used=nn.Linear(3, 3), idle=nn.Linear(3, 3)))
    model(torch.ones(1, 3)).sum().backward()
    f.keep_gradients(model)


@program("state dicts of model and optimizer")
def _(f: Run) -> object:
    """Two steps, whole state dicts through a file, and two steps of another model that takes them."""
    model = f.shard()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    f.train(model, 2, optimizer=optimizer)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = [get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = f.shard()
    part = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if dist.get_rank() == 0:
        assert list(state[0]) == list(other.state_dict())
    set_model_state_dict(other, state[0], options=part)
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    set_optimizer_state_dict(other, second, state[1], options=part)
    return f.train(other, 2, optimizer=second)


@program("fsdp_should_release_all_gather_outputs_after_post_all_gather", needs=SINCE_2_15, tolerance=0.0)
def _(f: Run) -> None:
    """Losses, and what has memory when weights are gathered and when they are not."""
    model: Any = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 7))
    model[0].weight = nn.Parameter(ReleasingTensor(model[0].weight.detach()))
    f.fully_shard(model[0])
    f.train(f.fully_shard(model))
    for move in (model[0].unshard, model[0].reshard) * 2:
        move()
        f.see(ReleasingTensor.held())
