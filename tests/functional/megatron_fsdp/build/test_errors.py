"""fully_shard refuses parameters that it cannot shard, with an error that names the parameter and the fix."""

import copy
import os
import pickle
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from dbuffer import Element, Flat, MeshError, Partial, Replicate, Whole
from megatron_fsdp import ConfigError, MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from tests.harness import FailureKind, RankError, on_ranks, run_ranks
from tests.harness.models import Block, Made, Stack, inputs, make_mesh
from tests.harness.oracle import sharded

# Names for the mistakes below; some are used there alone.
__all__ = [
    "CPUOffloadPolicy", "Element", "FakeTensorMode", "Flat", "MixedPrecisionPolicy", "Partial", "Placements",
    "Replicate", "Shard", "Whole", "copy", "distribute_tensor", "fully_shard_optimizer", "init_device_mesh",
    "make_mesh", "pickle",
]  # fmt: skip


def scaled(scale: nn.Parameter) -> nn.Module:
    return Made(lambda m, x: m.linear(x) * m.scale, linear=nn.Linear(3, 5), scale=scale)


def linear(**options: Any) -> nn.Module:
    return fully_shard(nn.Linear(3, 5), **options)


def call(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 3)).sum()


def trained(model: nn.Module | None = None) -> nn.Module:
    """Shard a model and run a backward."""
    model = fully_shard(model or nn.Linear(3, 5))
    call(model).backward()
    return model


def stack() -> nn.Module:
    model = sharded(Stack(Block()))
    return model


def two_layers(*, are_tied: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if are_tied:
        model[1].weight = model[0].weight
    return model


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(5, 3))


def functional_loss(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, {"weight": weight}, (torch.ones(2, 3),)).sum()


# Each mistake, the class of the error, and words of its message: the problem, the place, and the fix.
MISTAKES: dict[str, tuple[str, ...]] = {
    "a parameter without dimensions": (
        "fully_shard(scaled(nn.Parameter(torch.tensor(1.0))))",
        "ConfigError", "'scale'", "nn.Parameter(torch.tensor([value]))", "ignored_params",
    ),
    "a weight tied across units": (
        """
        model = two_layers(are_tied=True)
        fully_shard(model[0])
        fully_shard(model[1])
        """,
        "OwnershipError", "'weight'", "unit 'Linear'", "fully_shard([first, second])",
    ),
    "a weight tied to the root's": (
        """
        model = two_layers(are_tied=True)
        fully_shard(model[0])
        fully_shard(model)
        """,
        "OwnershipError", "'1.weight'", "unit 'Linear'", "fully_shard([first, second])",
    ),
    "lazy modules": (
        "fully_shard(nn.Sequential(nn.LazyLinear(7), nn.LazyLinear(3)))",
        "ConfigError", "Sequential", "'0.weight'", "lazy module", "model(batch)",
    ),
    "a ModuleList": (
        "fully_shard(nn.ModuleList([nn.Linear(3, 3)]))",
        "ConfigError", "ModuleList", "no forward", "each of its modules",
    ),
    "a unit again": ("fully_shard(linear())", "ConfigError", "Linear", "sharded already", "children first"),
    "parents before children": (
        "fully_shard(fully_shard(Stack(Block(), Block())).layers[0])",
        "OwnershipError", "'norm.weight'", "unit 'Stack'", "children first",
    ),
    "an empty list": ("fully_shard([])", "ConfigError", "empty list"),
    "no module": ("fully_shard('model')", "ConfigError", "str", "an nn.Module or a list"),
    "a parameter elsewhere": (
        """
        with FakeTensorMode():
            scale = nn.Parameter(torch.empty(5, device="cuda"))
        fully_shard(scaled(scale), make_mesh((2,)))
        """,
        "ConfigError", "'scale'", "cuda", "fix: module.to('cpu')",
    ),
    "a forward on meta": (
        "call(fully_shard(nn.Linear(3, 5, device='meta')))",
        "StateError", "'weight'", "meta device", "materialize(model)",
    ),
    "a weight cut on a mesh without names": (
        """
        model, mesh = nn.Linear(4, 6), init_device_mesh("cpu", (2,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        fully_shard(model, mesh)
        """,
        "ConfigError", "'weight'", "DTensor", "slices of one mesh", "mesh_dim_names",
    ),
    "a dtype for a policy": ("linear(mp_policy=torch.bfloat16)", "ConfigError", "dtype", "MixedPrecisionPolicy"),
    "a policy with an integer dtype": (
        "MixedPrecisionPolicy(param_dtype=torch.int8)", "ConfigError", "param_dtype=torch.int8", "floating-point",
    ),
    "a policy with a string": (
        "MixedPrecisionPolicy(reduce_dtype='bfloat16')", "ConfigError", "reduce_dtype='bfloat16'", "torch.dtype",
    ),
    "a smaller group that divides nothing": (
        "linear(reshard_after_forward=3)", "ConfigError", "reshard_after_forward=3", "does not divide the 2 ranks",
    ),
    "offloading of whole weights": (
        "linear(mesh=make_mesh((2,)), placements=Placements.optim(), offload_policy=CPUOffloadPolicy())",
        "ConfigError", "offload_policy", "CPUOffloadPolicy", "optim_grads_params()",
    ),
    "another dimension": (
        "linear(shard_placement_fn=lambda parameter: Shard(1))",
        "PlacementError", "'weight'", "Shard(dim=1)", "granularity=",
    ),
    "a cut inside of rows": (
        "linear(granularity=Element())", "ConfigError", "'weight'", "(5, 3)", "Element()", "Row()",
    ),
    "a cut inside of one parameter's slices": (
        "fully_shard(nn.Conv1d(3, 5, 7), granularity=lambda one: Element() if one.ndim == 3 else Whole())",
        "ConfigError", "'weight'", "(5, 3, 7)", "Element()", "Row()",
    ),
    "a mesh of three axes": (
        "linear(mesh=init_device_mesh('cpu', (2, 1, 1)))", "ConfigError", "3 axes", "mesh['dp']", "placements=",
    ),
    "an axis of another name": (
        """
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        linear(mesh=mesh, placements=Placements.optim_grads_params("data"))
        """,
        "ConfigError", "'data'", "'dp'",
    ),
    "an axis out of range": (
        "linear(mesh=make_mesh((2,)), placements=Placements.optim_grads_params(1))", "ConfigError", "[1]",
    ),
    "partial weights": (
        "Placements((0,), (Partial(),), (Partial(),), (Flat(),))",
        "PlacementError", "axis 0", "parameter placement", "Replicate or Flat",
    ),
    "replicated gradients": (
        "Placements(('dp',), (Flat(),), (Replicate(),), (Flat(),))",
        "PlacementError", "axis 'dp'", "gradient placement", "Partial or Flat",
    ),
    "sharded weights and a replicated optimizer": (
        "Placements(('dp',), (Flat(),), (Flat(),), (Replicate(),))", "PlacementError", "axis 'dp'", "optimizer=Flat()",
    ),
    "placements of different lengths": (
        "Placements((0, 1), (Flat(),), (Flat(),), (Flat(),))",
        "PlacementError", "one parameter, gradient and optimizer placement", "dp_axes",
    ),
    "a dimension of a tensor for a placement": (
        "Placements((0,), (Shard(0),), (Flat(),), (Flat(),))",
        "PlacementError", "axis 0", "Shard(dim=0)", "Replicate or Flat",
    ),
    "a deep copy of what holds a unit": (
        "copy.deepcopy(nn.Sequential(stack().layers[0]))",
        "StateError", "Block", "deep-copied", "load_state_dict", "average", "detach().clone()",
    ),
    "a pickle": ("pickle.dumps(stack())", "StateError", "Stack", "pickled", "save_checkpoint"),
    "an optimizer from before sharding": (
        """
        model = nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters())
        fully_shard(model)
        fully_shard_optimizer(optimizer)
        """,
        "ConfigError", "none of the optimizer's parameters is sharded", "after fully_shard",
    ),
    "a plain gradient": (
        """
        model = trained()
        model.weight.grad_dtype = None
        with torch.no_grad():
            model.weight.grad = torch.zeros(5, 3)
        call(model).backward()
        """,
        "StateError", "'weight'", "plain tensor", "DTensor",
    ),
    "another dtype beside gradients": (
        "trained().to(torch.float64)", "StateError", "'weight'", "float64", "zero_grad() first",
    ),
    "another dtype before backward": (
        """
        model = linear()
        loss = call(model)
        model.to(torch.float64)
        """,
        "StateError", "'weight'", "float64", "delete its outputs",
    ),
    "another dtype inside of a unit": (
        "(model := stack()).layers[0].norm.half()",
        "StateError", "unit 'layers.0'", "parameter 'norm.weight'", "before fully_shard", "MixedPrecisionPolicy",
    ),
    "another device inside of a unit": (
        "(model := stack()).layers[0].norm.to('meta')",
        "StateError", "unit 'layers.0'", "parameter 'norm.weight'", "meta", "CPUOffloadPolicy",
    ),
    "another device": (
        "nn.Sequential(linear()).to('meta')", "StateError", "'weight'", "cpu", "move to meta", "before fully_shard",
    ),
    "shared memory": (
        "nn.Sequential(linear()).share_memory()", "StateError", "'weight'", "shared memory", "state_dict()",
    ),
    "an embedding with a maximum": (
        "fully_shard(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)))",
        "ConfigError", "'0.weight'", "max_norm=1.0", "after optimizer.step()",
    ),
    "a hook before sharding": (
        """
        model = nn.Linear(3, 5)
        model.weight.register_hook(lambda gradient: 2 * gradient)
        fully_shard(model)
        """,
        "ConfigError", "'weight'", "hooks", "after fully_shard",
    ),
    "a hook on a sharded parameter": (
        "linear().weight.register_hook(lambda gradient: 2 * gradient)",
        "PlacementError", "'weight'", "register_post_accumulate_grad_hook",
    ),
    "a weight replaced after a forward": (
        """
        model = trained()
        model.weight = ones()
        call(model)
        """,
        "StateError", "unit 'Linear'", "'weight'", "another Parameter", "load_state_dict",
    ),
    "a weight replaced by a sharded one": (
        """
        model = linear()
        model.weight = nn.Parameter(model.weight.detach() * 2)
        call(model)
        """,
        "StateError", "'weight'", "another Parameter", "copy_",
    ),
    "a weight replaced before backward": (
        """
        model = linear()
        loss = call(model)
        model.weight = ones()
        loss.backward()
        call(model)
        """,
        "StateError", "'weight'", "another Parameter",
    ),
    "a weight replaced before unshard": (
        """
        model = linear()
        model.weight = ones()
        model.unshard()
        """,
        "StateError", "'weight'", "another Parameter", "before fully_shard",
    ),
    "a weight taken away": (
        """
        model = trained()
        model.bias = None
        call(model)
        """,
        "StateError", "'bias'", "replaced by None", "freeze them",
    ),
    "a parametrization": (
        """
        model = trained(nn.Sequential(nn.Linear(3, 5)))
        torch.nn.utils.parametrizations.weight_norm(model[0])
        call(model)
        """,
        "StateError", "'0.parametrizations.weight.original0'", "added after fully_shard", "no unit owns it",
    ),
    "weights of two units that are tied": (
        """
        model = two_layers()
        for layer in (*model, model):
            fully_shard(layer)
        model[1].weight = model[0].weight
        call(model)
        """,
        "StateError", "unit '1'", "'weight'", "of unit 'Linear'", "tie parameters before fully_shard",
    ),
    "weights of a unit that are tied": (
        """
        model = trained(two_layers())
        model[1].weight = model[0].weight
        call(model)
        """,
        "StateError", "'1.weight'", "'0.weight'", "tie parameters before fully_shard",
    ),
    "a module added behind the back of torch": (
        """
        model = trained(nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
        model[0]._modules["1"] = nn.Linear(3, 3)
        call(model)
        """,
        "StateError", "'0.1.weight'", "added after fully_shard", "call fully_shard on the new module",
    ),
    "an added bias": (
        """
        model = trained(nn.Sequential(nn.Linear(3, 3, bias=False)))
        model[0].bias = nn.Parameter(torch.zeros(3))
        call(model)
        """,
        "StateError", "'0.bias'", "added after fully_shard",
    ),
    "a module added frozen": (
        """
        model = trained(nn.Sequential(nn.Linear(3, 3), nn.Sequential()))
        model[1].append(nn.Linear(3, 3).requires_grad_(False))
        call(model)
        model.requires_grad_(True)
        call(model)
        """,
        "StateError", "'1.0.weight'", "added after fully_shard",
    ),
    "an optimizer built before sharding": (
        """
        model = nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters())
        trained(model)
        optimizer.step()
        """,
        "StateError", "SGD holds parameter 'weight' as it was before fully_shard", "build the",
    ),
    "an optimizer given gathered weights later": (
        """
        model = Stack(Block(), Block())
        fully_shard(model.layers[0])
        fully_shard(model)
        optimizer = torch.optim.SGD(model.layers[0].parameters())
        optimizer.step()
        model(torch.ones(2, 7))
        optimizer.add_param_group({"params": list(model.layers[1].parameters())})
        optimizer.step()
        """,
        "StateError", "gathered weights of parameter 'layers.1.norm", "reset_iter_state",
    ),
    "a recorded backward": (
        """
        model, x = stack(), inputs(0, 0).requires_grad_()
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        """,
        "StateError", "create_graph=True", "unsharded",
    ),
    "weights unfrozen that have no main weights": (
        """
        model = nn.Linear(3, 5).to(torch.bfloat16).requires_grad_(False)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32))
        model.requires_grad_(True)
        model(torch.ones(1, 3, dtype=torch.bfloat16))
        """,
        "StateError", "'weight'", "freeze it afterwards",
    ),
    "a functional call": (
        "functional_loss(linear(), ones())", "StateError", "'weight'", "torch.func.functional_call", "torch.no_grad()",
    ),
    "a transform of a functional call": (
        "torch.func.grad(functional_loss, 1)(linear(), torch.ones(5, 3))",
        "StateError", "'weight'", "torch.func.functional_call",
    ),
}  # fmt: skip


@on_ranks(2)
def test_the_error_of_every_mistake_says_what_is_wrong_and_what_to_do() -> None:
    for name, (mistake, kind, *words) in MISTAKES.items():
        with pytest.raises(Exception) as met:
            exec(textwrap.dedent(mistake), dict(globals()))
        assert type(met.value).__name__ == kind, (name, met.value)
        assert [word for word in words if word not in str(met.value)] == [], (name, met.value)


DISAGREEMENTS: dict[str, Callable[[int], nn.Module]] = {
    "shape": lambda rank: nn.Linear(3, 5 + rank),
    "dtype": lambda rank: nn.Linear(3, 5, dtype=(torch.float32, torch.bfloat16)[rank]),
    "frozen": lambda rank: nn.Linear(3, 5).requires_grad_(rank == 0),
    "number": lambda rank: nn.Linear(3, 5, bias=rank == 0),
    "name": lambda rank: (nn.Sequential(nn.Linear(3, 3)), nn.ModuleDict({"other": nn.Linear(3, 3)}))[rank],
}


@on_ranks(2)
def test_ranks_that_lay_a_unit_out_differently_all_raise_naming_it() -> None:
    for make in DISAGREEMENTS.values():
        model = nn.Sequential()
        model.add_module("part", make(dist.get_rank()))
        with pytest.raises(MeshError, match=r"unit 'Sequential': the ranks of its mesh lay it out diff.*'part\."):
            fully_shard(model)


class DiesOnRankOne(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            os._exit(7)
        return super().forward(x)


def train_until_a_rank_dies() -> None:
    model = sharded(Stack(Block(), DiesOnRankOne(), Block()))
    model(inputs(dist.get_rank(), 0)).square().mean().backward()


def test_if_a_rank_dies_the_others_raise_an_error_within_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, train_until_a_rank_dies, timeout=20, fresh=True)
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    assert kinds == {0: FailureKind.RAISED, 1: FailureKind.DIED, 2: FailureKind.RAISED}
    assert time.monotonic() - started < 40  # starting the processes takes part of it


def test_a_call_written_for_megatron_s_function_of_the_name_points_to_ours() -> None:
    model = nn.Linear(3, 5)
    with pytest.raises(ConfigError, match=r"call megatron_fsdp\.megatron\.fully_shard_model_and_optimizer\("):
        fully_shard(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]  # refused
    assert type(model) is nn.Linear


@on_ranks(2)
def test_ddp_around_a_sharded_module_is_refused_before_it_broadcasts_shards() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    before = model.weight.full_tensor()
    with pytest.raises(ConfigError) as caught:
        nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model.weight.full_tensor(), before)
    message = str(caught.value)
    assert message.startswith("FSDPLinear is sharded and reduces its gradients itself")
