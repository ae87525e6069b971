"""Scenarios in which the engines differ, on purpose or because something is missing: what each of them does."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.functional.compatibility import SINCE_2_15, blocks, engine, layers, shard, train
from tests.harness.models import inputs
from tests.harness.oracle import whole

__all__ = ["DIFFERENCES", "Difference", "see_both"]

Body = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Difference:
    """Code that behaves differently.

    Attributes:
        body: the code; its argument has the names of ``torch.distributed.fsdp``.
        theirs, ours: what it returns; of an exception, the class and the start of its message.
        num_ranks, needs: as in ``Scenario``.
    """

    body: Body
    theirs: object
    ours: object
    num_ranks: int = 1
    needs: str = "fully_shard"


DIFFERENCES: dict[str, Difference] = {}


def difference(name: str, *, theirs: object, ours: object, **options: Any) -> Callable[[Body], Body]:
    """Enter a function under a name; ``options`` are fields of ``Difference``."""

    def enter(body: Body) -> Body:
        DIFFERENCES[name] = Difference(body, theirs, ours, **options)
        return body

    return enter


def see_both(name: str) -> tuple[object, object]:
    """Return what the code does with PyTorch's engine, and with this one; call it on every rank."""
    return see(name, "torch"), see(name, "ours")


def see(name: str, which: str) -> object:
    """Return what the code returns, or what it raises."""
    torch.manual_seed(0)
    try:
        return DIFFERENCES[name].body(engine(which))
    except (ValueError, TypeError, AssertionError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- arguments of fully_shard


@difference(
    "Shard(1)", theirs=(Shard(1),), ours="PlacementError: parameter 'weight': shard_placement_fn returned Shard(dim=1)"
)
def other_dimension(fsdp: Any) -> object:
    module = fsdp.fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1))
    return module.weight.placements


@difference(
    "a 2-D mesh without names",
    theirs="AssertionError: Please init the 2D mesh for HSDP with mesh_dim_names specified",
    ours=("ok", 14),
    num_ranks=4,
)
def no_names(fsdp: Any) -> object:
    module = nn.Linear(4, 7, bias=False)
    weight = module.weight.detach().clone().requires_grad_()
    fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (2, 2)))
    module(inputs(dist.get_rank(), 0)[:, :4]).square().mean().backward()
    for rank in range(4):
        (nn.functional.linear(inputs(rank, 0)[:, :4], weight).square().mean() / 4).backward()
    torch.testing.assert_close(whole(module.weight.grad, module.weight), weight.grad)
    held = torch.tensor([module.weight.to_local().numel()])
    dist.all_reduce(held)
    return "ok", int(held) // 4


@difference("two dtypes in one unit", theirs="AssertionError: FSDP expects uniform original", ours=torch.bfloat16)
def two_dtypes(fsdp: Any) -> object:
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))
    model[1].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    return model(torch.ones(1, 2)).dtype


@difference("a parameter that is not contiguous", theirs="NotImplementedError: FSDP does not support", ours=True)
def transposed(fsdp: Any) -> object:
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(torch.randn(3, 4).t())
    before = module.weight.detach().clone()
    return torch.equal(whole(fsdp.fully_shard(module).weight, before), before)


@difference(
    "fully_shard called twice",
    theirs="AssertionError: Each distinct composable distributed API",
    ours="ConfigError: FSDPLinear is sharded already",
)
def called_twice(fsdp: Any) -> object:
    return fsdp.fully_shard(fsdp.fully_shard(nn.Linear(2, 2)))


class Applied(nn.ModuleList):
    """A list with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


# PyTorch takes such lists in the versions that have DataParallelMeshDims.
@difference(
    "a ModuleList with a forward",
    theirs=(1, 2),
    ours=(1, 2),
    needs="DataParallelMeshDims",
)
def callable_list(fsdp: Any) -> object:
    return tuple(fsdp.fully_shard(Applied([nn.Linear(2, 2)]))(torch.ones(1, 2)).shape)


class Whole(torch.Tensor):
    """A tensor that brings an all-gather of its own."""

    def fsdp_pre_all_gather(self, *_: object) -> object:
        return (self,), None


@difference(
    "fsdp_pre_all_gather alone", theirs="Parameter", ours="ConfigError: parameter 'weight' is a Whole; wanted fsdp_pre"
)
def own_all_gather(fsdp: Any) -> object:
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Whole))
    if fsdp.__name__ == "torch.distributed.fsdp":
        return "Parameter"
    return type(fsdp.fully_shard(module).weight).__name__


@difference("gathered parameters on a larger mesh", theirs=("dp", "tp"), ours=("tp",), num_ranks=4,
            needs="DataParallelMeshDims")  # fmt: skip
def mesh_of_gathered_parameters(fsdp: Any) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module: Any = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate(), Shard(0)]))
    fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    module.unshard()
    assert isinstance(module.weight, DTensor)
    return module.weight.device_mesh.mesh_dim_names


# ---------------------------------------------------------------- parameters and gradients


@difference("a parameter that no rank used", theirs=[False, True], ours=[False, True])
def unused(fsdp: Any) -> object:
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    model[0].idle = nn.Linear(3, 3, bias=False)
    fsdp.fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    return [parameter.grad is None for parameter in model.parameters()]


@difference("hooks after accumulation", theirs=18, ours=18)
def hooks_after_accumulation(fsdp: Any) -> object:
    model = shard(fsdp)
    calls: list[object] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    train(model, steps=1)
    return len(calls)


@difference(
    "to(dtype) after sharding",
    theirs=torch.bfloat16,
    ours=torch.bfloat16,
)
def other_dtype(fsdp: Any) -> object:
    return fsdp.fully_shard(nn.Linear(3, 3)).to(torch.bfloat16).weight.dtype


@difference(
    "forward on the meta device",
    theirs="RuntimeError: FSDP parameters should be",
    ours="StateError: unit 'Linear': parameters 'weight', 'bias' are on the meta",
)
def on_meta(fsdp: Any) -> object:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    return fsdp.fully_shard(module)(torch.ones(1, 3))


@difference("a slice of a Sequential", theirs="Sequential", ours="Sequential")
def sliced(fsdp: Any) -> object:
    return type(fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[:1]).__name__


# ---------------------------------------------------------------- methods


def hsdp(fsdp: Any) -> Any:
    """Shard the blocks over two ranks, in two replicas."""
    return shard(fsdp, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def has_gradients(model: nn.Module) -> list[bool]:
    """Whether the first parameter of each layer has a gradient after a backward that can be read."""
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    return [is_readable(layer.norm.weight.grad) for layer in layers(model)]


def is_readable(gradient: torch.Tensor | None) -> bool:
    try:
        return isinstance(gradient, DTensor) and bool(gradient.to_local().isfinite().all())
    except ValueError:
        return False


@difference(
    ".grad under set_requires_gradient_sync(False)",
    theirs=None,
    ours="StateError: unit 'layers.0': the gradient of parameter 'norm.weight' is a sum under way",
    num_ranks=2,
)
def between_microbatches(fsdp: Any) -> object:
    model = shard(fsdp)
    model.set_requires_gradient_sync(False)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    gradient = layers(model)[0].norm.weight.grad
    return gradient if gradient is None else gradient.norm()


@difference(
    ".grad before finalize_backward",
    theirs=[False, True, True],
    ours=[False] * 3,
    num_ranks=2,
    needs=SINCE_2_15,
)
def before_finalization(fsdp: Any) -> object:
    model = shard(fsdp)
    model.set_manual_backward_finalization(True)
    return has_gradients(model)


@difference(
    "finalize_backward without the all-reduce",
    theirs="RuntimeError: FSDP manual backward finalization",
    ours=[False] * 3,
    num_ranks=4,
    needs=SINCE_2_15,
)
def finalize_without_all_reduce(fsdp: Any) -> object:
    model = hsdp(fsdp)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    has_gradients(model)
    model.finalize_backward()
    return [is_readable(layer.norm.weight.grad) for layer in layers(model)]


@difference("set_is_last_backward(False) on HSDP", theirs=[True] * 3, ours=[False] * 3, num_ranks=4)
def not_last(fsdp: Any) -> object:
    model = hsdp(fsdp)
    model.set_is_last_backward(False)
    return has_gradients(model)


@difference(
    "set_requires_all_reduce(recurse=False) alone", theirs=[True, False, True], ours=[True, False, True], num_ranks=4
)
def one_unit_unreduced(fsdp: Any) -> object:
    model = hsdp(fsdp)
    layers(model)[1].set_requires_all_reduce(False, recurse=False)
    return has_gradients(model)


@difference("set_all_reduce_hook on HSDP", theirs=3, ours=3, num_ranks=4)
def hook_on_two_axes(fsdp: Any) -> object:
    model = hsdp(fsdp)
    calls: list[object] = []
    for layer in layers(model):
        layer.set_all_reduce_hook(calls.append)
    has_gradients(model)
    return len(calls)


@difference(
    "set_all_reduce_hook(stream)", theirs=None, ours="ConfigError: set_all_reduce_hook(stream=...): the hook runs"
)
def stream_of_hook(fsdp: Any) -> object:
    return fsdp.fully_shard(nn.Linear(2, 2)).set_all_reduce_hook(lambda gradient: None, stream=object())


class Arena:
    """An all-gather that counts the memory it was asked for."""

    allocations = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocations += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        parts = list(output_tensor.chunk(group.size()))
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


@difference("Comm.allocate", theirs=True, ours=False, num_ranks=2)
def memory_of_comm(fsdp: Any) -> object:
    module, comm = fsdp.fully_shard(nn.Linear(4, 4)), Arena()
    module.set_custom_all_gather(comm)
    module(torch.ones(1, 4))
    return comm.allocations > 0


@difference(
    "set_reduce_scatter_max_input_buffers(max_input_buffers=)",
    theirs=None,
    ours=None,
    needs="FSDPModule.set_reduce_scatter_max_input_buffers",
)
def keyword_of_buffers(fsdp: Any) -> object:
    return fsdp.fully_shard(nn.Linear(2, 2)).set_reduce_scatter_max_input_buffers(max_input_buffers=2)


@difference(
    "an optimizer over gathered weights", theirs="not trained", ours="StateError: SGD holds the gathered weights of"
)
def step_gathered_weights(fsdp: Any) -> object:
    model = shard(fsdp)
    layers(model)[0].unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers(model)[0].reshard()
    before = whole(layers(model)[0].up.weight, torch.empty(0))
    model(inputs(0, 0)).square().mean().backward()
    optimizer.step()
    return "trained" if not torch.equal(before, whole(layers(model)[0].up.weight, before)) else "not trained"


@difference(
    "a weight kept across reshard",
    theirs=True,
    ours="StorageError: unit 'Linear': parameter 'weight': sum of its gathered weight, which was released",
    needs=SINCE_2_15,
)
def kept_across_reshard(fsdp: Any) -> object:
    module = fsdp.fully_shard(nn.Linear(2, 2))
    module.set_keep_unsharded_storage(True)
    module.unshard()
    weight = module.weight
    module.reshard()
    return bool(weight.sum().isfinite())


@difference("set_symm_mem_for_comm", theirs="symmetric", ours="StorageError: symmetric memory is memory of GPUs, found")
def symmetric_memory(fsdp: Any) -> object:
    module = fsdp.fully_shard(nn.Linear(2, 2))
    if fsdp.__name__ == "torch.distributed.fsdp":
        return "symmetric"  # it needs NCCL, and older versions lack it
    return module.set_symm_mem_for_comm("NCCL")


@difference(
    "reset_iter_state of a part",
    theirs="RuntimeError: reset_iter_state must be called on the root",
    ours=None,
    needs="FSDPModule.reset_iter_state",
)
def recover_a_part(fsdp: Any) -> object:
    model = shard(fsdp)
    model(inputs(0, 0))
    return layers(model)[0].reset_iter_state()


@difference("fully_shard.state is private", theirs=True, ours=False)
def private_state(fsdp: Any) -> object:
    return hasattr(fsdp.fully_shard.state(fsdp.fully_shard(nn.Linear(2, 2))), "_state_ctx")


@difference("replicate elsewhere", theirs=False, ours=True)
def where_replicate_is(fsdp: Any) -> object:
    importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    return hasattr(fsdp, "replicate") and bool(blocks())
