"""What cannot be sharded is refused when ``fully_shard`` is called, by name and with the cure."""

import copy
import os
import pickle
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
from tests.harness.models import Block, Stack, inputs, make_mesh
from tests.harness.oracle import shard_each


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def linear(**options: Any) -> nn.Module:
    return fully_shard(nn.Linear(3, 5), **options)


def call(model: nn.Module) -> nn.Module:
    model(torch.ones(2, 3))
    return model


def trained(model: nn.Module) -> nn.Module:
    """Shard a model and run a backward."""
    fully_shard(model)(torch.ones(2, 3)).sum().backward()
    return model


def stack() -> nn.Module:
    model = Stack(Block())
    shard_each(model)
    return model


def convert_norm(how: str) -> None:
    model = stack()
    getattr(model.layers[0].norm, how)()


def setting(model: nn.Module, name: str, value: object) -> nn.Module:
    setattr(model, name, value)
    return model


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(5, 3))


def tied(*, to_the_root: bool) -> None:
    model = Tied()
    fully_shard(model.first)
    fully_shard(model if to_the_root else model.second)


def parents_before_children() -> None:
    model = fully_shard(Stack(Block(), Block()))
    fully_shard(model.layers[0])


def other_device() -> None:
    with FakeTensorMode():
        scale = nn.Parameter(torch.empty(5, device="cuda"))
    fully_shard(Scaled(scale), make_mesh((2,)))


def meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    call(fully_shard(model))


def tensor_parallel() -> None:
    model, mesh = nn.Linear(4, 6), init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    fully_shard(model, mesh)


def optimizer_before_sharding() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)
    fully_shard_optimizer(optimizer)


def gradient_replaced_by_a_plain_tensor() -> None:
    model = trained(nn.Linear(3, 5))
    model.weight.grad_dtype = None
    with torch.no_grad():
        model.weight.grad = torch.zeros(5, 3)
    model(torch.ones(2, 3)).sum().backward()


def another_dtype_before_backward() -> None:
    model = linear()
    loss = model(torch.ones(2, 3)).sum()
    model.to(torch.float64)
    loss.backward()


def hook_before_sharding() -> None:
    model = nn.Linear(3, 5)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    fully_shard(model)


def replaced_between_forward_and_backward() -> None:
    model = linear()
    loss = model(torch.ones(2, 3)).sum()
    model.weight = ones()
    loss.backward()
    call(model)


def parametrized() -> None:
    model = trained(nn.Sequential(nn.Linear(3, 5)))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    call(model)


def tied_after_sharding(*, in_one_unit: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in () if in_one_unit else model:
        fully_shard(layer)
    trained(model) if in_one_unit else fully_shard(model)
    model[1].weight = model[0].weight
    call(model)


def added(*, behind_the_back_of_torch: bool) -> None:
    model = trained(nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
    if behind_the_back_of_torch:
        model[0]._modules["1"] = nn.Linear(3, 3)
    else:
        model[0].append(nn.Linear(3, 3))
    call(model)


def added_bias() -> None:
    model = trained(nn.Sequential(nn.Linear(3, 3, bias=False)))
    model[0].bias = nn.Parameter(torch.zeros(3))
    call(model)


def added_and_unfrozen_later() -> None:
    model = trained(nn.Sequential(nn.Linear(3, 3), nn.Sequential()))
    model[1].append(nn.Linear(3, 3).requires_grad_(False))
    call(call(model).requires_grad_(True))


def recorded_backward() -> None:
    model, x = stack(), inputs(0, 0).requires_grad_()
    torch.autograd.grad(model(x).square().mean(), x, create_graph=True)


def unfrozen_without_main_weights() -> None:
    model = nn.Linear(3, 5).to(torch.bfloat16).requires_grad_(False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32))
    model.requires_grad_(True)
    model(torch.ones(1, 3, dtype=torch.bfloat16))


def functional_loss(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, {"weight": weight}, (torch.ones(2, 3),)).sum()


def built_before_sharding() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def built_between_forward_and_backward() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    loss = model(torch.ones(2, 3)).sum()
    optimizer = torch.optim.SGD(model.parameters())
    loss.backward()
    optimizer.step()


def given_gathered_weights_later() -> None:
    model = Stack(Block(), Block())
    fully_shard(model.layers[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.layers[0].parameters())
    optimizer.step()
    model(torch.ones(2, 7))
    optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    optimizer.step()


# Each mistake, the class of the error, and words that its message must hold: what, where, and the way out.
MISTAKES: dict[str, tuple[Any, ...]] = {
    "a parameter without dimensions": (
        lambda: fully_shard(Scaled(nn.Parameter(torch.tensor(1.0)))),
        "ConfigError", "'scale'", "nn.Parameter(torch.tensor([value]))", "ignored_params",
    ),
    "a weight tied across units": (
        lambda: tied(to_the_root=False),
        "OwnershipError", "'weight'", "unit 'Linear'", "fully_shard([first, second])",
    ),
    "a weight tied to the root's": (
        lambda: tied(to_the_root=True),
        "OwnershipError", "'second.weight'", "unit 'Linear'", "fully_shard([first, second])",
    ),
    "lazy modules": (
        lambda: fully_shard(nn.Sequential(nn.LazyLinear(7), nn.LazyLinear(3))),
        "ConfigError", "Sequential", "'0.weight'", "lazy module", "model(batch)",
    ),
    "a ModuleList": (
        lambda: fully_shard(nn.ModuleList([nn.Linear(3, 3)])),
        "ConfigError", "ModuleList", "no forward", "each of its modules",
    ),
    "a ModuleDict": (
        lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(3, 3)})),
        "ConfigError", "ModuleDict", "no forward", "each of its modules",
    ),
    "a unit again": (lambda: fully_shard(linear()), "ConfigError", "Linear", "sharded already", "children first"),
    "parents before children": (
        parents_before_children, "OwnershipError", "'norm.weight'", "unit 'Stack'", "children first",
    ),
    "an empty list": (lambda: fully_shard([]), "ConfigError", "empty list"),
    "no module": (lambda: fully_shard("model"), "ConfigError", "str", "a module or a list of modules"),
    "a parameter elsewhere": (other_device, "ConfigError", "'scale'", "cuda", "'cpu'", "move the module"),
    "a forward on meta": (meta, "StateError", "'weight'", "meta device", "materialize(model)"),
    "a weight cut on a mesh without names": (
        tensor_parallel, "ConfigError", "'weight'", "DTensor", "slices of one mesh", "mesh_dim_names",
    ),
    "a dtype for a policy": (lambda: linear(mp_policy=torch.bfloat16), "ConfigError", "dtype", "MixedPrecisionPolicy"),
    "a policy with an integer dtype": (
        lambda: MixedPrecisionPolicy(param_dtype=torch.int8),
        "ConfigError", "param_dtype=torch.int8", "floating-point",
    ),
    "a policy with a string": (
        lambda: MixedPrecisionPolicy(reduce_dtype="bfloat16"), "ConfigError", "reduce_dtype='bfloat16'", "torch.dtype",
    ),
    "a smaller group that divides nothing": (
        lambda: linear(reshard_after_forward=3), "ConfigError", "reshard_after_forward=3", "must divide the 2 ranks",
    ),
    "offloading of whole weights": (
        lambda: linear(mesh=make_mesh((2,)), placements=Placements.optim(), offload_policy=CPUOffloadPolicy()),
        "ConfigError", "offload_policy", "CPUOffloadPolicy", "optim_grads_params()",
    ),
    "another dimension": (
        lambda: linear(shard_placement_fn=lambda parameter: Shard(1)),
        "PlacementError", "'weight'", "Shard(dim=1)", "granularity=",
    ),
    "a cut inside of rows": (
        lambda: linear(granularity=Element()), "ConfigError", "'weight'", "(5, 3)", "Element()", "Row()",
    ),
    "a cut inside of slices": (
        lambda: fully_shard(nn.Conv1d(3, 5, 7), granularity=Element()),
        "ConfigError", "'weight'", "(5, 3, 7)", "Element()", "Row()",
    ),
    "a cut inside of one parameter's rows": (
        lambda: linear(granularity=lambda parameter: Element() if parameter.ndim == 2 else Whole()),
        "ConfigError", "'weight'", "(5, 3)", "Element()", "Row()",
    ),
    "a mesh of three axes": (
        lambda: linear(mesh=init_device_mesh("cpu", (2, 1, 1))), "ConfigError", "3 axes", "mesh['dp']", "placements=",
    ),
    "an axis of another name": (
        lambda: linear(
            mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), placements=Placements.optim_grads_params("data")
        ),
        "ConfigError", "'data'", "'dp'",
    ),
    "an axis out of range": (
        lambda: linear(mesh=make_mesh((2,)), placements=Placements.optim_grads_params(1)), "ConfigError", "[1]",
    ),
    "partial weights": (
        lambda: Placements((0,), (Partial(),), (Partial(),), (Flat(),)),
        "PlacementError", "axis 0", "parameter placement", "Replicate or Flat",
    ),
    "replicated gradients": (
        lambda: Placements(("dp",), (Flat(),), (Replicate(),), (Flat(),)),
        "PlacementError", "axis 'dp'", "gradient placement", "Partial or Flat",
    ),
    "sharded weights and a replicated optimizer": (
        lambda: Placements(("dp",), (Flat(),), (Flat(),), (Replicate(),)),
        "PlacementError", "axis 'dp'", "optimizer=Flat()",
    ),
    "placements of different lengths": (
        lambda: Placements((0, 1), (Flat(),), (Flat(),), (Flat(),)),
        "PlacementError", "one parameter, gradient and optimizer placement", "dp_axes",
    ),
    "a dimension of a tensor for a placement": (
        lambda: Placements((0,), (Shard(0),), (Flat(),), (Flat(),)),
        "PlacementError", "axis 0", "Shard(dim=0)", "Replicate or Flat",
    ),
    "a deep copy": (
        lambda: copy.deepcopy(stack()), "StateError", "Stack", "deep-copied", "load_state_dict",
    ),
    "a deep copy of what holds a unit": (
        lambda: copy.deepcopy(nn.Sequential(stack().layers[0])),
        "StateError", "Block", "deep-copied", "load_state_dict",
    ),
    "a pickle": (lambda: pickle.dumps(stack()), "StateError", "Stack", "pickled", "save_checkpoint"),
    "an averaged model": (
        lambda: torch.optim.swa_utils.AveragedModel(linear()),
        "StateError", "Linear", "deep-copied", "average", "detach().clone()",
    ),
    "an optimizer from before sharding": (
        optimizer_before_sharding, "ConfigError", "none of the optimizer's parameters is sharded", "after fully_shard",
    ),
    "a plain gradient": (gradient_replaced_by_a_plain_tensor, "StateError", "'weight'", "plain tensor", "DTensor"),
    "another dtype beside gradients": (
        lambda: trained(nn.Linear(3, 5)).to(torch.float64), "StateError", "'weight'", "float64", "zero_grad() first",
    ),
    "another dtype before backward": (
        another_dtype_before_backward, "StateError", "'weight'", "float64", "delete its outputs",
    ),
    "another dtype inside of a unit": (
        lambda: convert_norm("half"),
        "PlacementError", "unit 'layers.0'", "'norm.weight'", "before fully_shard",
    ),
    "the same dtype inside of a unit": (
        lambda: convert_norm("float"),
        "PlacementError", "unit 'layers.0'", "'norm.weight'", "MixedPrecisionPolicy",
    ),
    "another device": (
        lambda: nn.Sequential(linear()).to("meta"),
        "StateError", "'weight'", "cpu", "move to meta", "before fully_shard",
    ),
    "shared memory": (
        lambda: nn.Sequential(linear()).share_memory(), "StateError", "'weight'", "shared memory", "state_dict()",
    ),
    "an embedding with a maximum": (
        lambda: fully_shard(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))),
        "ConfigError", "'0.weight'", "max_norm=1.0", "after optimizer.step()",
    ),
    "a hook before sharding": (hook_before_sharding, "ConfigError", "'weight'", "hooks", "after fully_shard"),
    "a hook on a sharded parameter": (
        lambda: linear().weight.register_hook(lambda gradient: 2 * gradient),
        "PlacementError", "'weight'", "register_post_accumulate_grad_hook",
    ),
    "a weight replaced after a forward": (
        lambda: call(setting(trained(nn.Linear(3, 5)), "weight", ones())),
        "StateError", "unit 'Linear'", "'weight'", "another Parameter", "load_state_dict",
    ),
    "a weight replaced before a forward": (
        lambda: call(setting(linear(), "weight", ones())),
        "StateError", "'weight'", "another Parameter", "before fully_shard",
    ),
    "a weight replaced by a sharded one": (
        lambda: call(setting(model := linear(), "weight", nn.Parameter(model.weight.detach() * 2))),
        "StateError", "'weight'", "another Parameter", "copy_",
    ),
    "a weight replaced before backward": (
        replaced_between_forward_and_backward, "StateError", "'weight'", "another Parameter",
    ),
    "a weight replaced before unshard": (
        lambda: setting(linear(), "weight", ones()).unshard(), "StateError", "'weight'", "another Parameter",
    ),
    "a weight taken away": (
        lambda: call(setting(trained(nn.Linear(3, 5)), "bias", None)),
        "StateError", "'bias'", "replaced by None", "freeze them",
    ),
    "a parametrization": (
        parametrized,
        "StateError", "'0.parametrizations.weight.original0'", "added after fully_shard", "no unit owns it",
    ),
    "weights of two units that are tied": (
        lambda: tied_after_sharding(in_one_unit=False),
        "StateError", "unit '1'", "'weight'", "of unit 'Linear'", "Tie parameters before fully_shard",
    ),
    "weights of a unit that are tied": (
        lambda: tied_after_sharding(in_one_unit=True),
        "StateError", "'1.weight'", "'0.weight'", "Tie parameters before fully_shard",
    ),
    "an added module": (
        lambda: added(behind_the_back_of_torch=False),
        "StateError", "'0.1.weight'", "added after fully_shard", "no unit owns it",
    ),
    "a module added behind the back of torch": (
        lambda: added(behind_the_back_of_torch=True),
        "StateError", "'0.1.weight'", "call fully_shard on the new module",
    ),
    "an added bias": (added_bias, "StateError", "'0.bias'", "added after fully_shard"),
    "a module added frozen": (added_and_unfrozen_later, "StateError", "'1.0.weight'", "added after fully_shard"),
    "an optimizer built before sharding": (
        built_before_sharding, "StateError", "SGD holds parameter 'weight' as it was before fully_shard", "Build the",
    ),
    "an optimizer built between forward and backward": (
        built_between_forward_and_backward, "StateError", "SGD holds the gathered weights of parameter 'weight'",
    ),
    "an optimizer given gathered weights later": (
        given_gathered_weights_later, "StateError", "gathered weights of parameter 'layers.1.norm", "reset_iter_state",
    ),
    "a recorded backward": (recorded_backward, "StateError", "create_graph=True", "unsharded"),
    "weights unfrozen that have no main weights": (
        unfrozen_without_main_weights, "StateError", "'weight'", "freeze it afterwards",
    ),
    "a functional call with gradients": (
        lambda: functional_loss(linear(), torch.ones(5, 3, requires_grad=True)),
        "StateError", "'weight'", "torch.func.functional_call", "torch.no_grad()",
    ),
    "a functional call without gradients": (
        lambda: functional_loss(linear(), torch.ones(5, 3)),
        "StateError", "'weight'", "torch.func.functional_call",
    ),
    "a transform of a functional call": (
        lambda: torch.func.grad(functional_loss, 1)(linear(), torch.ones(5, 3)),
        "StateError", "'weight'", "torch.func.functional_call",
    ),
}  # fmt: skip


@on_ranks(2)
def test_the_error_of_every_mistake_says_what_is_wrong_and_what_to_do() -> None:
    for name, (mistake, kind, *words) in MISTAKES.items():
        with pytest.raises(Exception) as met:
            mistake()
        assert type(met.value).__name__ == kind, (name, met.value)
        assert [word for word in words if word not in str(met.value)] == [], (name, met.value)


@on_ranks(2)
def test_a_refused_module_is_left_as_it_was() -> None:
    model = Scaled(nn.Parameter(torch.tensor(2.0)))
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError):
        fully_shard(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert type(model) is Scaled
    assert torch.isfinite(model(torch.ones(1, 3))).all()


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
    model = Stack(Block(), DiesOnRankOne(), Block())
    shard_each(model)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()


def test_a_rank_that_dies_ends_the_job_with_an_error_on_the_others_within_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, train_until_a_rank_dies, timeout=20, fresh=True)
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    assert kinds == {0: FailureKind.RAISED, 1: FailureKind.DIED, 2: FailureKind.RAISED}
    assert time.monotonic() - started < 40  # of which starting the processes takes a part


def test_a_call_written_for_megatron_s_function_of_the_name_points_to_ours() -> None:
    model = nn.Linear(3, 5)
    with pytest.raises(ConfigError, match=r"is fully_shard_model_and_optimizer\(module, optimizer, \.\.\.\) here"):
        fully_shard(model, torch.optim.AdamW(model.parameters()))
    assert type(model) is nn.Linear


@on_ranks(2)
def test_ddp_around_a_sharded_module_is_refused_before_it_broadcasts_shards() -> None:
    model = fully_shard(nn.Linear(4, 4))
    before = model.weight.full_tensor()
    with pytest.raises(ConfigError) as caught:
        nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model.weight.full_tensor(), before)
    message = str(caught.value)
    assert message.startswith("FSDPLinear is sharded and reduces its gradients itself")
