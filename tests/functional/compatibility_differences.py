"""Programs on which the engines differ, on purpose or because something is missing: what each of them does."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.functional.compatibility import SINCE_2_15, Run, loss_of, program
from tests.functional.compatibility_programs import Gather, hsdp
from tests.harness.models import inputs
from tests.harness.oracle import whole

__all__: list[str] = []

# ---------------------------------------------------------------- arguments and parameters

program(
    "Shard(1)",
    num_ranks=1,
    differs=((Shard(1),), "PlacementError: parameter 'weight': shard_placement_fn returned Shard(dim=1)"),
)(
    lambda f: (
        f.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1)).weight.placements
    )
)
program(
    "fully_shard called twice",
    num_ranks=1,
    differs=("AssertionError: Each distinct composable distributed API", "ConfigError: FSDPLinear is sharded already"),
)(lambda f: f.fully_shard(f.fully_shard(nn.Linear(2, 2))))
program(
    "forward on the meta device",
    num_ranks=1,
    differs=(
        "RuntimeError: FSDP parameters should be",
        "StateError: unit 'Linear': parameters 'weight', 'bias' are on the meta",
    ),
)(lambda f: f.fully_shard(nn.Linear(3, 3, device="meta"))(torch.ones(1, 3)))
program(
    "set_all_reduce_hook(stream)",
    num_ranks=1,
    differs=(None, "ConfigError: set_all_reduce_hook(stream=...): the hook runs"),
)(lambda f: f.fully_shard(nn.Linear(2, 2)).set_all_reduce_hook(lambda gradient: None, stream=object()))
program("fully_shard.state is private", num_ranks=1, differs=(True, False))(
    lambda f: hasattr(f.fully_shard.state(f.fully_shard(nn.Linear(2, 2))), "_state_ctx")
)
program("replicate elsewhere", num_ranks=1, differs=(False, True))(lambda f: hasattr(f, "replicate"))
# FSDP2's needs NCCL, and older versions lack it.
program(
    "set_symm_mem_for_comm",
    num_ranks=1,
    differs=("symmetric", "StorageError: symmetric memory is memory of GPUs, found"),
)(lambda f: "symmetric" if f.engine == "torch" else f.fully_shard(nn.Linear(2, 2)).set_symm_mem_for_comm("NCCL"))


@program(
    "a 2-D mesh without names",
    num_ranks=4,
    differs=("AssertionError: Please init the 2D mesh for HSDP with mesh_dim_names specified", 14),
)
def _(f: Run) -> object:
    module = nn.Linear(4, 7, bias=False)
    weight = module.weight.detach().clone().requires_grad_()
    f.fully_shard(module, mesh=init_device_mesh("cpu", (2, 2)))
    module(inputs(dist.get_rank(), 0, 3, 4)).square().mean().backward()
    for rank in range(4):
        (nn.functional.linear(inputs(rank, 0, 3, 4), weight).square().mean() / 4).backward()
    torch.testing.assert_close(whole(module.weight.grad, weight), weight.grad)
    held = torch.tensor([module.weight.to_local().numel()])
    dist.all_reduce(held)
    return int(held) // 4


@program(
    "two dtypes in one unit", num_ranks=1, differs=("AssertionError: FSDP expects uniform original", torch.bfloat16)
)
def _(f: Run) -> object:
    model = f.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))
    model[1].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    return model(torch.ones(1, 2)).dtype


@program(
    "a parameter that is not contiguous", num_ranks=1, differs=("NotImplementedError: FSDP does not support", True)
)
def _(f: Run) -> object:
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(torch.randn(3, 4).t())
    before = module.weight.detach().clone()
    return torch.equal(whole(f.fully_shard(module).weight, before), before)


class Whole(torch.Tensor):
    """A tensor that brings an all-gather of its own."""

    def fsdp_pre_all_gather(self, *_: object) -> object:
        return (self,), None


@program(
    "fsdp_pre_all_gather alone",
    num_ranks=1,
    differs=("Parameter", "ConfigError: parameter 'weight' is a Whole; wanted fsdp_pre"),
)
def _(f: Run) -> object:
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Whole))
    return "Parameter" if f.engine == "torch" else f.fully_shard(module)


@program(
    "gathered parameters on a larger mesh", num_ranks=4, needs="DataParallelMeshDims", differs=(("dp", "tp"), ("tp",))
)
def _(f: Run) -> object:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module: Any = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), grid, [Replicate(), Shard(0)]))
    f.fully_shard(module, mesh=grid, dp_mesh_dims=f.DataParallelMeshDims(shard="dp"))
    module.unshard()
    return module.weight.device_mesh.mesh_dim_names


# ---------------------------------------------------------------- methods


def readable_gradients(model: Any) -> list[bool]:
    """Whether the first parameter of each layer has a gradient that can be read."""
    found = []
    for layer in model.layers:
        try:
            gradient = layer.norm.weight.grad
            found.append(isinstance(gradient, DTensor) and bool(gradient.to_local().isfinite().all()))
        except ValueError:
            found.append(False)
    return found


@program(
    ".grad under set_requires_gradient_sync(False)",
    differs=(None, "StateError: unit 'layers.0': the gradient of parameter 'norm.weight' is a sum under way"),
)
def _(f: Run) -> object:
    model = f.shard()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    gradient = model.layers[0].norm.weight.grad
    return gradient if gradient is None else gradient.norm()


@program(".grad before finalize_backward", needs=SINCE_2_15, differs=([False, True, True], [False] * 3))
def _(f: Run) -> object:
    model = f.shard()
    model.set_manual_backward_finalization(True)
    loss_of(model, 0).backward()
    return readable_gradients(model)


@program(
    "finalize_backward without the all-reduce",
    num_ranks=4,
    needs=SINCE_2_15,
    differs=("RuntimeError: FSDP manual backward finalization", [False] * 3),
)
def _(f: Run) -> object:
    model = hsdp(f)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    loss_of(model, 0).backward()
    model.finalize_backward()
    return readable_gradients(model)


@program("set_is_last_backward(False) on HSDP", num_ranks=4, differs=([True] * 3, [False] * 3))
def _(f: Run) -> object:
    model = hsdp(f)
    model.set_is_last_backward(False)
    loss_of(model, 0).backward()
    return readable_gradients(model)


@program("Comm.allocate", differs=(True, False))
def _(f: Run) -> object:
    module, comm = f.fully_shard(nn.Linear(4, 4)), Gather()
    module.set_custom_all_gather(comm)
    module(torch.ones(1, 4))
    return comm.allocations > 0


@program(
    "an optimizer over gathered weights",
    num_ranks=1,
    differs=("not trained", "StateError: SGD holds the gathered weights of"),
)
def _(f: Run) -> object:
    model = f.shard()
    layer = model.layers[0]
    layer.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer.reshard()
    before = whole(layer.up.weight, layer.up.weight)
    loss_of(model, 0).backward()
    optimizer.step()
    return "not trained" if torch.equal(before, whole(layer.up.weight, before)) else "trained"


@program(
    "a weight kept across reshard",
    num_ranks=1,
    needs=SINCE_2_15,
    differs=(True, "StorageError: unit 'Linear': parameter 'weight': sum of its gathered weight, which was released"),
)
def _(f: Run) -> object:
    module = f.fully_shard(nn.Linear(2, 2))
    module.set_keep_unsharded_storage(True)
    module.unshard()
    weight = module.weight
    module.reshard()
    return bool(weight.sum().isfinite())


@program(
    "reset_iter_state of a part",
    num_ranks=1,
    needs="FSDPModule.reset_iter_state",
    differs=("RuntimeError: reset_iter_state must be called on the root", None),
)
def _(f: Run) -> object:
    model = f.shard()
    model(inputs(0, 0))
    return model.layers[0].reset_iter_state()
