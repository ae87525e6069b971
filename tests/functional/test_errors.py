"""What cannot be sharded is refused when ``fully_shard`` is called, by name and with the cure."""

import copy
import os
import pickle
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from dbuffer import Element, Flat, Partial, Replicate, Whole
from megatron_fsdp import ConfigError, MixedPrecisionPolicy, Placements, fully_shard, fully_shard_optimizer
from tests.harness import FailureKind, RankError, on_ranks, run_ranks
from tests.harness.models import Block, Stack, inputs
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


def zero_dimensional() -> None:
    fully_shard(Scaled(nn.Parameter(torch.tensor(1.0))))


def lazy() -> None:
    fully_shard(nn.Sequential(nn.LazyLinear(7), nn.LazyLinear(3)))


def tied_across_units() -> None:
    model = Tied()
    fully_shard(model.first)
    fully_shard(model.second)


def tied_to_the_root() -> None:
    model = Tied()
    fully_shard(model.first)
    fully_shard(model)


def module_list() -> None:
    fully_shard(nn.ModuleList([nn.Linear(3, 3)]))


def module_dict() -> None:
    fully_shard(nn.ModuleDict({"a": nn.Linear(3, 3)}))


def sharded_twice() -> None:
    model = nn.Linear(3, 3)
    fully_shard(model)
    fully_shard(model)


def parents_before_children() -> None:
    model = Stack(Block(), Block())
    fully_shard(model)
    fully_shard(model.layers[0])


def empty_list() -> None:
    fully_shard([])


def no_module() -> None:
    fully_shard("model")


def other_device() -> None:
    with FakeTensorMode():
        scale = nn.Parameter(torch.empty(5, device="cuda"))
    fully_shard(Scaled(scale), init_device_mesh("cpu", (2,)))


def meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    fully_shard(model)
    model(torch.ones(2, 3))


def tensor_parallel() -> None:
    model = nn.Linear(4, 6)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    fully_shard(model, mesh)


def unknown_policy() -> None:
    fully_shard(nn.Linear(3, 5), mp_policy=torch.bfloat16)


def policy_with_an_integer_dtype() -> None:
    MixedPrecisionPolicy(param_dtype=torch.int8)


def policy_with_a_string() -> None:
    MixedPrecisionPolicy(reduce_dtype="bfloat16")


def smaller_group() -> None:
    fully_shard(nn.Linear(3, 5), reshard_after_forward=3)


def offload() -> None:
    fully_shard(nn.Linear(3, 5), init_device_mesh("cpu", (2,)), Placements.optim(), offload_policy=CPUOffloadPolicy())


def other_dimension() -> None:
    fully_shard(nn.Linear(3, 5), shard_placement_fn=lambda parameter: Shard(1))


def cut_inside_rows() -> None:
    fully_shard(nn.Linear(3, 5), granularity=Element())


def cut_inside_slices() -> None:
    fully_shard(nn.Conv1d(3, 5, 7), granularity=Element())


def granularity_of_one_parameter() -> None:
    fully_shard(nn.Linear(3, 5), granularity=lambda parameter: Element() if parameter.ndim == 2 else Whole())


def mesh_of_three_axes() -> None:
    fully_shard(nn.Linear(3, 5), init_device_mesh("cpu", (2, 1, 1)))


def unknown_axis() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(nn.Linear(3, 5), mesh, Placements.optim_grads_params("data"))


def axis_out_of_range() -> None:
    fully_shard(nn.Linear(3, 5), init_device_mesh("cpu", (2,)), Placements.optim_grads_params(1))


def partial_weights() -> None:
    Placements((0,), (Partial(),), (Partial(),), (Flat(),))


def replicated_gradients() -> None:
    Placements(("dp",), (Flat(),), (Replicate(),), (Flat(),))


def sharded_weights_with_a_replicated_optimizer() -> None:
    Placements(("dp",), (Flat(),), (Flat(),), (Replicate(),))


def placements_of_different_lengths() -> None:
    Placements((0, 1), (Flat(),), (Flat(),), (Flat(),))


def tensor_dimension() -> None:
    Placements((0,), (Shard(0),), (Flat(),), (Flat(),))


def deep_copy() -> None:
    model = Stack(Block())
    shard_each(model)
    copy.deepcopy(model)


def deep_copy_of_a_unit() -> None:
    model = Stack(Block())
    shard_each(model)
    copy.deepcopy(nn.Sequential(model.layers[0]))


def pickled() -> None:
    model = Stack(Block())
    shard_each(model)
    pickle.dumps(model)


def optimizer_before_sharding() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)
    fully_shard_optimizer(optimizer)


def gradient_replaced_by_a_plain_tensor() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    model.weight.grad_dtype = None
    with torch.no_grad():
        model.weight.grad = torch.zeros(5, 3)
    model(torch.ones(2, 3)).sum().backward()


def another_dtype_beside_gradients() -> None:
    model = trained_once(nn.Linear(3, 5))
    model.to(torch.float64)


def another_dtype_before_backward() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    loss = model(torch.ones(2, 3)).sum()
    model.to(torch.float64)
    loss.backward()


def another_dtype_inside_of_a_unit() -> None:
    model = Stack(Block())
    shard_each(model)
    model.layers[0].norm.half()


def the_same_dtype_inside_of_a_unit() -> None:
    model = Stack(Block())
    shard_each(model)
    model.layers[0].norm.float()


def another_device() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    nn.Sequential(model).to("meta")


def shared_memory() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    nn.Sequential(model).share_memory()


def averaged_model() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    torch.optim.swa_utils.AveragedModel(model)


def embedding_with_a_maximum() -> None:
    fully_shard(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)))


def hook_before_sharding() -> None:
    model = nn.Linear(3, 5)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    fully_shard(model)


def hook_on_a_sharded_parameter() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    model.weight.register_hook(lambda gradient: 2 * gradient)


def trained_once(model: nn.Module) -> nn.Module:
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    return model


def replaced_after_a_forward() -> None:
    model = trained_once(nn.Linear(3, 5))
    model.weight = nn.Parameter(torch.ones(5, 3))
    model(torch.ones(2, 3))


def replaced_by_a_whole_tensor_before_forward() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    model.weight = nn.Parameter(torch.ones(5, 3))
    model(torch.ones(2, 3))


def replaced_by_a_sharded_tensor_after_a_forward() -> None:
    model = trained_once(nn.Linear(3, 5))
    model.weight = nn.Parameter(model.weight.detach() * 2)
    model(torch.ones(2, 3))


def replaced_between_forward_and_backward() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    loss = model(torch.ones(2, 3)).sum()
    model.weight = nn.Parameter(torch.ones(5, 3))
    loss.backward()
    model(torch.ones(2, 3))


def replaced_and_unsharded() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    model.weight = nn.Parameter(torch.ones(5, 3))
    model.unshard()


def taken_away() -> None:
    model = trained_once(nn.Linear(3, 5))
    model.bias = None
    model(torch.ones(2, 3))


def parametrized() -> None:
    model = trained_once(nn.Sequential(nn.Linear(3, 5)))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    model(torch.ones(2, 3))


def tied_after_sharding() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[1].weight = model[0].weight
    model(torch.ones(2, 3))


def tied_after_sharding_in_one_unit() -> None:
    model = trained_once(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model[1].weight = model[0].weight
    model(torch.ones(2, 3))


def added_module() -> None:
    model = trained_once(nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
    model[0].append(nn.Linear(3, 3))
    model(torch.ones(2, 3))


def added_behind_the_back_of_torch() -> None:
    model = trained_once(nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
    model[0]._modules["1"] = nn.Linear(3, 3)
    model(torch.ones(2, 3))


def added_bias() -> None:
    model = trained_once(nn.Sequential(nn.Linear(3, 3, bias=False)))
    model[0].bias = nn.Parameter(torch.zeros(3))
    model(torch.ones(2, 3))


def added_and_unfrozen_later() -> None:
    model = trained_once(nn.Sequential(nn.Linear(3, 3), nn.Sequential()))
    model[1].append(nn.Linear(3, 3).requires_grad_(False))
    model(torch.ones(2, 3))
    model.requires_grad_(True)
    model(torch.ones(2, 3))


def functional_call_with_gradients() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    torch.func.functional_call(model, {"weight": torch.ones(5, 3, requires_grad=True)}, (torch.ones(2, 3),))


def transform_of_a_functional_call() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"weight": weight}, (torch.ones(2, 3),)).sum()

    torch.func.grad(loss)(torch.ones(5, 3))


# For each mistake: the class of the error, and words that its message must hold: what, where, and the way out.
MISTAKES: dict[Callable[[], None], tuple[str, ...]] = {
    zero_dimensional: ("ConfigError", "'scale'", "nn.Parameter(torch.tensor([value]))", "ignored_params"),
    tied_across_units: ("OwnershipError", "'weight'", "unit 'Linear'", "fully_shard([first, second])"),
    lazy: ("ConfigError", "Sequential", "'0.weight'", "lazy module", "model(batch)"),
    tied_to_the_root: ("OwnershipError", "'second.weight'", "unit 'Linear'", "fully_shard([first, second])"),
    module_list: ("ConfigError", "ModuleList", "no forward", "each of its modules"),
    module_dict: ("ConfigError", "ModuleDict", "no forward", "each of its modules"),
    sharded_twice: ("ConfigError", "Linear", "sharded already", "children first"),
    parents_before_children: ("OwnershipError", "'norm.weight'", "unit 'Stack'", "children first"),
    empty_list: ("ConfigError", "empty list"),
    no_module: ("ConfigError", "str", "a module or a list of modules"),
    other_device: ("ConfigError", "'scale'", "cuda", "'cpu'", "move the module"),
    meta: ("StateError", "'weight'", "meta device", "materialize(model)"),
    tensor_parallel: ("ConfigError", "'weight'", "DTensor", "slices of one mesh", "mesh_dim_names"),
    unknown_policy: ("ConfigError", "dtype", "MixedPrecisionPolicy"),
    policy_with_an_integer_dtype: ("ConfigError", "param_dtype=torch.int8", "floating-point"),
    policy_with_a_string: ("ConfigError", "reduce_dtype='bfloat16'", "torch.dtype"),
    smaller_group: ("ConfigError", "reshard_after_forward=3", "must divide the 2 ranks"),
    offload: ("ConfigError", "offload_policy", "CPUOffloadPolicy", "optim_grads_params()"),
    other_dimension: ("PlacementError", "'weight'", "Shard(dim=1)", "granularity="),
    cut_inside_rows: ("ConfigError", "'weight'", "(5, 3)", "Element()", "Row()"),
    cut_inside_slices: ("ConfigError", "'weight'", "(5, 3, 7)", "Element()", "Row()"),
    granularity_of_one_parameter: ("ConfigError", "'weight'", "(5, 3)", "Element()", "Row()"),
    mesh_of_three_axes: ("ConfigError", "3 axes", "mesh['dp']", "placements="),
    unknown_axis: ("ConfigError", "'data'", "'dp'"),
    axis_out_of_range: ("ConfigError", "[1]"),
    partial_weights: ("PlacementError", "axis 0", "parameter placement", "Replicate or Flat"),
    replicated_gradients: ("PlacementError", "axis 'dp'", "gradient placement", "Partial or Flat"),
    sharded_weights_with_a_replicated_optimizer: ("PlacementError", "axis 'dp'", "optimizer=Flat()"),
    placements_of_different_lengths: ("PlacementError", "one parameter, gradient and optimizer placement", "dp_axes"),
    tensor_dimension: ("PlacementError", "axis 0", "Shard(dim=0)", "Replicate or Flat"),
    deep_copy: ("StateError", "Stack", "deep-copied", "load_state_dict"),
    deep_copy_of_a_unit: ("StateError", "Block", "deep-copied", "load_state_dict"),
    pickled: ("StateError", "Stack", "pickled", "save_checkpoint"),
    optimizer_before_sharding: ("ConfigError", "none of the optimizer's parameters is sharded", "after fully_shard"),
    gradient_replaced_by_a_plain_tensor: ("StateError", "'weight'", "plain tensor", "DTensor"),
    another_dtype_beside_gradients: ("StateError", "'weight'", "float64", "zero_grad() first"),
    another_dtype_before_backward: ("StateError", "'weight'", "float64", "delete its outputs"),
    another_dtype_inside_of_a_unit: ("PlacementError", "unit 'layers.0'", "'norm.weight'", "before fully_shard"),
    the_same_dtype_inside_of_a_unit: ("PlacementError", "unit 'layers.0'", "'norm.weight'", "MixedPrecisionPolicy"),
    another_device: ("StateError", "'weight'", "cpu", "move to meta", "before fully_shard"),
    shared_memory: ("StateError", "'weight'", "shared memory", "state_dict()"),
    averaged_model: ("StateError", "Linear", "deep-copied", "average", "detach().clone()"),
    embedding_with_a_maximum: ("ConfigError", "'0.weight'", "max_norm=1.0", "after optimizer.step()"),
    hook_before_sharding: ("ConfigError", "'weight'", "hooks", "after fully_shard"),
    hook_on_a_sharded_parameter: ("PlacementError", "'weight'", "register_post_accumulate_grad_hook"),
    replaced_after_a_forward: ("StateError", "unit 'Linear'", "'weight'", "another Parameter", "load_state_dict"),
    replaced_by_a_whole_tensor_before_forward: ("StateError", "'weight'", "another Parameter", "before fully_shard"),
    replaced_by_a_sharded_tensor_after_a_forward: ("StateError", "'weight'", "another Parameter", "copy_"),
    replaced_between_forward_and_backward: ("StateError", "'weight'", "another Parameter"),
    replaced_and_unsharded: ("StateError", "'weight'", "another Parameter"),
    taken_away: ("StateError", "'bias'", "taken out", "freeze them"),
    parametrized: ("StateError", "'0.parametrizations.weight.original0'", "added after fully_shard", "no unit owns it"),
    tied_after_sharding: (
        "StateError",
        "unit '1'",
        "'weight'",
        "of unit 'Linear'",
        "Tie parameters before fully_shard",
    ),
    tied_after_sharding_in_one_unit: ("StateError", "'1.weight'", "'0.weight'", "Tie parameters before fully_shard"),
    added_module: ("StateError", "'0.1.weight'", "added after fully_shard", "no unit owns it"),
    added_behind_the_back_of_torch: ("StateError", "'0.1.weight'", "call fully_shard on the new module"),
    added_bias: ("StateError", "'0.bias'", "added after fully_shard"),
    added_and_unfrozen_later: ("StateError", "'1.0.weight'", "added after fully_shard"),
    functional_call_with_gradients: ("StateError", "'weight'", "requires a gradient", "torch.no_grad()"),
    transform_of_a_functional_call: ("StateError", "'weight'", "torch.func transform"),
}


def make_mistakes() -> dict[str, str]:
    met = {}
    for mistake in MISTAKES:
        try:
            mistake()
        except Exception as error:
            met[mistake.__name__] = f"{type(error).__name__}: {error}"
        else:
            met[mistake.__name__] = "nothing was raised"
    return met


@pytest.fixture(scope="module")
def met() -> list[dict[str, str]]:
    return run_ranks(2, make_mistakes)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_error_says_what_is_wrong_and_what_to_do_for(
    met: list[dict[str, str]], mistake: Callable[[], None]
) -> None:
    wanted = MISTAKES[mistake]
    for messages in met:
        message = messages[mistake.__name__]
        assert message.startswith(wanted[0])
        assert [word for word in wanted[1:] if word not in message] == [], message


def state_after_a_refusal() -> bool:
    """Try to shard a model with one bad parameter; return whether nothing about it has changed."""
    model = Scaled(nn.Parameter(torch.tensor(2.0)))
    before = dict(model.named_parameters())
    try:
        fully_shard(model)
    except ValueError:
        after = dict(model.named_parameters())
        same = after.keys() == before.keys() and all(after[name] is before[name] for name in before)
        return same and type(model) is Scaled and bool(torch.isfinite(model(torch.ones(1, 3))).all())
    return False


def test_a_refused_module_is_left_as_it_was() -> None:
    assert run_ranks(2, state_after_a_refusal) == [True, True]


@on_ranks(2)
def test_the_cures_in_the_messages_work() -> None:
    scaled = Scaled(nn.Parameter(torch.tensor(2.0)))
    fully_shard(scaled, ignored_params=[scaled.scale])
    tied = Tied()
    pair: list[nn.Module] = [tied.first, tied.second]
    fully_shard(pair)
    fully_shard(tied)
    blocks = nn.ModuleList([nn.Linear(3, 3)])
    for block in blocks:
        fully_shard(block)
    assert [type(module).__name__ for module in (scaled, tied, tied.first, blocks[0])] == [
        "FSDPScaled",
        "FSDPTied",
        "FSDPLinear",
        "FSDPLinear",
    ]


DISAGREEMENTS: dict[str, Callable[[int], nn.Module]] = {
    "shape": lambda rank: nn.Linear(3, 5 + rank),
    "dtype": lambda rank: nn.Linear(3, 5, dtype=(torch.float32, torch.bfloat16)[rank]),
    "frozen": lambda rank: nn.Linear(3, 5).requires_grad_(rank == 0),
    "number": lambda rank: nn.Linear(3, 5, bias=rank == 0),
    "name": lambda rank: (nn.Sequential(nn.Linear(3, 3)), nn.ModuleDict({"other": nn.Linear(3, 3)}))[rank],
}


def shard_differently(kind: str) -> str:
    model = nn.Sequential()
    model.add_module("part", DISAGREEMENTS[kind](dist.get_rank()))
    try:
        fully_shard(model)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_lay_a_unit_out_differently_all_raise_naming_it(kind: str) -> None:
    for message in run_ranks(2, shard_differently, kind):
        assert message.startswith("MeshError: unit 'Sequential': the ranks of its mesh lay it out differently")
        assert "'part." in message


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


def test_calls_written_for_megatron_s_function_of_the_name_point_to_ours() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    for arguments, options in (((optimizer,), {}), ((), {"optimizer": optimizer}), ((), {"zero_dp_strategy": 3})):
        with pytest.raises(ConfigError, match=r"is fully_shard_model_and_optimizer\(module, optimizer, \.\.\.\) here"):
            fully_shard(model, *arguments, **options)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'placement'; the nearest is 'placements'"):
        fully_shard(model, placement=None)
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
