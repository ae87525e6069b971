"""Programs for which the engines differ, on purpose or because a feature is missing: the result of each engine."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.functional.compatibility.agreements import Gather, hsdp
from tests.functional.compatibility.program import SINCE_2_15, Program, enter, loss_of
from tests.harness.models import inputs
from tests.harness.oracle import whole

# Imports for the programs; this file itself uses only a few.
# ruff: noqa: F401
__all__ = ["PROGRAMS"]


class Whole(torch.Tensor):
    """A tensor that defines its own all-gather."""

    def fsdp_pre_all_gather(self, *_: object) -> object:
        return (self,), None


def readable_gradients(model: Any) -> list[bool]:
    """Run a backward; return for each layer whether its first parameter has a readable gradient then."""
    loss_of(model, 0).backward()
    return [is_readable(layer.norm.weight) for layer in model.layers]


def is_readable(parameter: nn.Parameter) -> bool:
    try:
        gradient = parameter.grad
        return isinstance(gradient, DTensor) and bool(gradient.to_local().isfinite().all())
    except ValueError:
        return False


# fmt: off
PROGRAMS = {
    # ------------------------------------------------------------ arguments and parameters
    "Shard(1)": Program("""
        fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1)).weight.placements
    """, 1, differs=((Shard(1),), "PlacementError: parameter 'weight': shard_placement_fn returned Shard(dim=1)")),
    "a 2-D mesh without names": Program("""
        module = nn.Linear(4, 7, bias=False)
        weight = module.weight.detach().clone().requires_grad_()
        fully_shard(module, mesh=init_device_mesh("cpu", (2, 2)))
        module(inputs(dist.get_rank(), 0, 3, 4)).square().mean().backward()
        for rank in range(4):
            (nn.functional.linear(inputs(rank, 0, 3, 4), weight).square().mean() / 4).backward()
        torch.testing.assert_close(whole(module.weight.grad, weight), weight.grad)
        held = torch.tensor([module.weight.to_local().numel()])
        dist.all_reduce(held)
        int(held) // 4
    """, 4, differs=("AssertionError: Please init the 2D mesh for HSDP with mesh_dim_names specified", 14)),
    "two dtypes in one unit": Program("""
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))
        model[1].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        model(torch.ones(1, 2)).dtype
    """, 1, differs=("AssertionError: FSDP expects uniform original", torch.bfloat16)),
    "a parameter that is not contiguous": Program("""
        module = nn.Linear(3, 4)
        module.weight = nn.Parameter(torch.randn(3, 4).t())
        before = module.weight.detach().clone()
        torch.equal(whole(fully_shard(module).weight, before), before)
    """, 1, differs=("NotImplementedError: FSDP does not support", True)),
    "fully_shard called twice": Program("fully_shard(fully_shard(nn.Linear(2, 2)))", 1, differs=(
        "AssertionError: Each distinct composable distributed API", "ConfigError: FSDPLinear is sharded already",
    )),
    "fsdp_pre_all_gather alone": Program("""
        module = nn.Linear(2, 2, bias=False)
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Whole))
        "Parameter" if run.engine == "torch" else fully_shard(module)
    """, 1, differs=("Parameter", "ConfigError: parameter 'weight' is a Whole; wanted fsdp_pre")),
    "gathered parameters on a larger mesh": Program("""
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), grid, [Replicate(), Shard(0)]))
        fully_shard(module, mesh=grid, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        module.unshard()
        module.weight.device_mesh.mesh_dim_names
    """, 4, "DataParallelMeshDims", differs=(("dp", "tp"), ("tp",))),
    "forward on the meta device": Program("fully_shard(nn.Linear(3, 3, device='meta'))(torch.ones(1, 3))", 1, differs=(
        "RuntimeError: FSDP parameters should be",
        "StateError: unit 'Linear': parameters 'weight', 'bias' are on the meta",
    )),
    # ------------------------------------------------------------ methods
    ".grad under set_requires_gradient_sync(False)": Program("""
        model = shard()
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        gradient = model.layers[0].norm.weight.grad
        gradient if gradient is None else gradient.norm()
    """, differs=(None, "StateError: unit 'layers.0': the gradient of parameter 'norm.weight' is a sum under way")),
    ".grad before finalize_backward": Program("""
        model = shard()
        model.set_manual_backward_finalization(True)
        readable_gradients(model)
    """, 2, SINCE_2_15, differs=([False, True, True], [False] * 3)),
    "finalize_backward without the all-reduce": Program("""
        model = hsdp(run)
        model.set_manual_backward_finalization(True)
        model.set_requires_all_reduce(False)
        loss_of(model, 0).backward()
        model.finalize_backward()
        [is_readable(layer.norm.weight) for layer in model.layers]
    """, 4, SINCE_2_15, differs=("RuntimeError: FSDP manual backward finalization", [False] * 3)),
    "set_is_last_backward(False) on HSDP": Program("""
        model = hsdp(run)
        model.set_is_last_backward(False)
        readable_gradients(model)
    """, 4, differs=([True] * 3, [False] * 3)),
    "set_all_reduce_hook(stream)": Program("""
        fully_shard(nn.Linear(2, 2)).set_all_reduce_hook(lambda gradient: None, stream=object())
    """, 1, differs=(None, "ConfigError: set_all_reduce_hook(stream=...): the hook runs")),
    "Comm.allocate": Program("""
        module, comm = fully_shard(nn.Linear(4, 4)), Gather()
        module.set_custom_all_gather(comm)
        module(torch.ones(1, 4))
        comm.allocations > 0
    """, differs=(True, False)),
    "an optimizer over gathered weights": Program("""
        model = shard()
        layer = model.layers[0]
        layer.unshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layer.reshard()
        before = whole(layer.up.weight, layer.up.weight)
        loss_of(model, 0).backward()
        optimizer.step()
        "not trained" if torch.equal(before, whole(layer.up.weight, before)) else "trained"
    """, 1, differs=("not trained", "StateError: SGD holds the gathered weights of")),
    "padded positions of TransformerEncoder": Program("""
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2).eval()
        for part in (*encoder.layers, encoder):
            fully_shard(part)
        padding = torch.tensor([[False, False, False], [False, True, True]])
        with torch.no_grad():
            output = encoder(inputs(0, 0, 2, 3, 6), src_key_padding_mask=padding)
        bool(output[~padding].all()), bool(output[padding].any())
    """, 1, differs=((True, False), (True, True))),
    "a weight kept across reshard": Program("""
        module = fully_shard(nn.Linear(2, 2))
        module.set_keep_unsharded_storage(True)
        module.unshard()
        weight = module.weight
        module.reshard()
        bool(weight.sum().isfinite())
    """, 1, SINCE_2_15, differs=(
        True, "StorageError: unit 'Linear': parameter 'weight': sum of its gathered weight, which was released",
    )),
    # FSDP2's version needs NCCL, and older versions of PyTorch lack it.
    "set_symm_mem_for_comm": Program("""
        "symmetric" if run.engine == "torch" else fully_shard(nn.Linear(2, 2)).set_symm_mem_for_comm("NCCL")
    """, 1, differs=("symmetric", "StorageError: symmetric memory is memory of GPUs, found")),
    "reset_iter_state of a part": Program("""
        model = shard()
        model(inputs(0, 0))
        model.layers[0].reset_iter_state()
    """, 1, "FSDPModule.reset_iter_state", differs=(
        "RuntimeError: reset_iter_state must be called on the root", None,
    )),
    "fully_shard.state is private": Program("""
        hasattr(fully_shard.state(fully_shard(nn.Linear(2, 2))), "_state_ctx")
    """, 1, differs=(True, False)),
    "replicate with CPU offload": Program("""
        place = "torch.distributed._composable.replicate_with_fsdp" if run.engine == "torch" else "megatron_fsdp"
        replicate = importlib.import_module(place).replicate
        axis = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
        isinstance(replicate(blocks(), mesh=axis, offload_policy=CPUOffloadPolicy(pin_memory=False)), nn.Module)
    """, differs=(True, "ConfigError: offload_policy=CPUOffloadPolicy")),
    "replicate elsewhere": Program("hasattr(run, 'replicate')", 1, differs=(False, True)),
}
# fmt: on
enter(PROGRAMS, globals())
