"""fully_shard_model shards like calls of fully_shard, and warns of arguments without effect."""

import logging
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import ConfigError, FsdpModule, fully_shard
from megatron_fsdp import MixedPrecisionPolicy as Policy
from megatron_fsdp.integrations.megatron.fully_shard_model import (
    ACCEPTED,
    fully_shard_model,
    fully_shard_model_and_optimizer,
)
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, Comparison, compare, units_of, whole

BASE = Case(three_blocks, squared)


def grid(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "dp", "cp")[: len(sizes)])


def compare_with(**options: Any) -> Comparison:
    def shard(model: nn.Module) -> None:
        assert fully_shard_model(model, [Block], **options) is model

    return compare(replace(BASE, shard=shard))


@pytest.mark.parametrize("strategy", [0, 1, 2, 3, "no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_gradients_are_exact_with_zero_dp_strategy(strategy: int | str) -> None:
    result = compare_with(zero_dp_strategy=strategy)
    assert result.is_exact


def on_two_axes(outer: int | str, flattened: bool, strategy: int) -> tuple[Comparison, str]:
    mesh = grid(2, 2, 1) if flattened else grid(2, 2)
    shard = "dp"
    if flattened:
        mesh["dp", "cp"]._flatten("dp_cp")
        shard = "dp_cp"
    seen = []

    def shard_model(model: nn.Module) -> None:
        fully_shard_model(model, [Block], strategy, outer, mesh, dp_outer_dim="outer", dp_shard_dim=shard)
        seen.append(units_of(model)[1].parameter_groups[0].spec.placements)

    result = compare(replace(BASE, shard=shard_model))
    return result, repr(seen[0].optimizer)


# PyTorch warns that flattened axes will lose their names in a future version; Megatron still names them so.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
@pytest.mark.parametrize(
    ("flattened", "strategy"), nightly_but([(False, 1), (True, 3)], product((False, True), (1, 3)))
)
def test_an_outer_axis_of_replicas_is_hybrid_sharding(flattened: bool, strategy: int) -> None:
    for result, optimizer in run_ranks(4, on_two_axes, 0, flattened, strategy):
        assert result.is_exact
        assert optimizer == "(Replicate(), Flat())"


@pytest.mark.parametrize("outer", nightly_but(["optim"], [1, "optim"]))
def test_the_outer_axis_may_shard_the_optimizer_too(outer: int | str) -> None:
    for result, optimizer in run_ranks(4, on_two_axes, outer, False, 3):
        assert result.is_exact
        assert optimizer == "(Flat(), Flat())"


@on_ranks(4)
def test_dp_shard_dim_alone_names_the_axis_of_a_larger_mesh() -> None:
    model = fully_shard_model(three_blocks(), [Block], device_mesh=grid(2, 2), dp_shard_dim="dp")
    axes = units_of(model)[1].parameter_groups[0].main_weight.axes
    assert (len(axes), axes[0].size) == (1, 2)


def unit_names(entries: Any) -> list[str]:
    model = fully_shard_model(nn.Sequential(Stack(Block(), Block()), nn.Linear(7, 7)), entries)
    return [name for name, module in model.named_modules() if isinstance(module, FsdpModule)]


@pytest.mark.parametrize(
    "entries",
    [[Block], ["Block"], ["tests.harness.models.Block"], "Block", Block],
    ids=["class", "name", "import path", "one name", "one class"],
)
def test_units_are_named_by_class_or_path(entries: Any) -> None:
    assert run_ranks(1, unit_names, entries) == [["", "0.layers.0", "0.layers.1"]]


def test_units_may_nest_and_be_of_several_classes() -> None:
    assert run_ranks(1, unit_names, ["Block", nn.Linear, "Stack"]) == [
        ["", "0", *(f"0.layers.{i}{part}" for i in (0, 1) for part in ("", ".up", ".down")), "1"]
    ]


def without_units() -> tuple[int, list[str]]:
    lines = logged(lambda: fully_shard_model(three_blocks()))
    return sum(isinstance(module, FsdpModule) for module in fully_shard_model(three_blocks()).modules()), lines


def test_without_unit_modules_the_model_is_one_unit_and_the_log_says_what_that_costs() -> None:
    for count, lines in run_ranks(2, without_units)[:1]:
        assert count == 1
        assert lines == ["fully_shard_model(fsdp_unit_modules=None): the whole model is one unit, so nothing overlaps"]


@on_ranks(2)
def test_units_sharded_before_stay_unchanged() -> None:
    model: Any = three_blocks()
    fully_shard(model.layers[0], grad_divisor=3)
    fully_shard_model(model, [Block])
    (group,) = units_of(model)[1].parameter_groups
    assert [type(module).__name__ for module in units_of(model)] == ["MegatronFSDPStack", *["FSDPBlock"] * 3]
    assert group.spec.divisor == 6


def logged(action: Any) -> list[str]:
    lines: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_fsdp.integrations.megatron.fully_shard_model")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return lines


def shard_with(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    fully_shard_model(Block(), [Block], **options)


def notices() -> list[tuple[str, list[str], list[str]]]:
    results = []
    for each in ACCEPTED:
        other = "given" if each.default is None else not each.default
        asked, default = (logged(partial(shard_with, each.name, value)) for value in (other, each.default))
        results.append((each.name, asked, default))
    return results


def test_every_argument_without_effect_is_answered_with_the_reason_on_one_rank() -> None:
    first, second = run_ranks(2, notices)
    for each, (name, asked, default) in zip(ACCEPTED, first, strict=True):
        assert name == each.name
        assert len(asked) == 1
        assert asked[0].startswith(f"fully_shard_model({name}=")
        assert asked[0].endswith(each.reason)
        assert default == []
    assert all(asked == [] for _, asked, _ in second)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"overlap_grads": True}, "no argument 'overlap_grads'. fix: give 'overlap_grad_reduce'"),
    "misspelt": ({"dp_shard": "dp"}, "fix: give 'dp_shard_dim'"),
    "strategy": ({"zero_dp_strategy": 4}, "give 0 to 3, or one of no_shard, optim"),
    "outer strategy": ({"outer_dp_sharding_strategy": "optim_grads"}, "give 0 to 1, or one of no_shard, optim"),
    "outer, one axis": ({"outer_dp_sharding_strategy": 1}, "needs a mesh of two axes"),
    "outer, not ZeRO-3": (
        {"outer_dp_sharding_strategy": 1, "zero_dp_strategy": 2, "device_mesh": 0, "dp_shard_dim": "dp",
         "dp_outer_dim": "outer"}, "needs --data-parallel-sharding-strategy optim_grads_params (found optim_grads)"),
    "axes": ({"device_mesh": 0}, "fix: name the data-parallel axes"),
    "outer axis alone": ({"device_mesh": 0, "dp_outer_dim": "outer"}, "fix: name the inner axis with dp_shard_dim="),
    "unknown axis": ({"device_mesh": 0, "dp_shard_dim": "none"}, "dp_shard_dim='none'"),
    "no such unit": ({"fsdp_unit_modules": ["Layer"]}, "some of its classes: ['Block', 'LayerNorm', 'Linear'"),
    "decoupled": ({"use_decoupled_grad": True}, "gradients are in .grad"),
    "device": ({"device_mesh": 0, "dp_shard_dim": "dp", "device": "cuda"}, "pass a mesh of 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(1)
def test_meaningless_arguments_are_refused_with_the_fix(name: str) -> None:
    options, wanted = REFUSED[name]
    if "device_mesh" in options:
        options["device_mesh"] = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("outer", "dp", "cp"))
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        fully_shard_model(three_blocks(), **{"fsdp_unit_modules": [Block], **options})


@pytest.mark.parametrize("wanted", [True, False])
@on_ranks(2)
def test_meta_parameters_are_initialised_on_request(wanted: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard_model(model, [nn.Linear], init_model_with_meta_device=wanted)
    assert [parameter.is_meta for parameter in model.parameters()] == [not wanted] * 4


@dataclass(frozen=True)
class MegatronPolicy:
    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None


POLICIES = {
    "default": (None, (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)),
    "Megatron's": (MegatronPolicy(), (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)),
    "Megatron's fp32 wire": (
        MegatronPolicy(grad_comm_dtype=torch.float32),
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    ),
    "Megatron's bf16 main": (
        MegatronPolicy(torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    ),
    "ours": (Policy(torch.float16), (torch.float16, torch.bfloat16, torch.bfloat16, torch.bfloat16)),
}


@pytest.mark.parametrize("name", POLICIES)
@on_ranks(1)
def test_mixed_precision_policies_of_either_kind_decide_the_dtypes(name: str) -> None:
    module = fully_shard_model(Block().to(torch.bfloat16), mixed_precision_policy=POLICIES[name][0])
    found = module.parameter_groups[0].spec.dtypes
    assert (found.compute, found.main, found.reduce, found.main_grad) == POLICIES[name][1]


@on_ranks(2)
def test_a_gradient_that_is_not_a_number_is_reported_with_its_unit() -> None:
    for reports in (True, False):
        model = fully_shard_model(three_blocks(), [Block], report_nan_in_param_grad=reports)
        poison = float("nan") if dist.get_rank() == 1 else 1.0
        words = r"(?s)'layers\.2'.*a reduced gradient .*is NaN|a reduced gradient .*'layers\.2.* is NaN"
        with pytest.raises(ValueError, match=words) if reports else nullcontext():
            (model(inputs(0, 0)) * poison).sum().backward()


class Expert(Block):
    """A block whose parameters are marked as Megatron marks experts."""

    def __init__(self) -> None:
        super().__init__()
        parameter: Any
        for parameter in self.parameters():
            parameter.allreduce = False


@on_ranks(4)
def test_experts_are_sharded_over_their_own_mesh_and_divided_by_all_ranks() -> None:
    torch.manual_seed(0)
    model = Stack(Block(), Stack(Expert()))
    torch.manual_seed(dist.get_rank() // 2)
    model.layers[1] = Stack(Expert())
    oracle = Stack(Block(), Stack(Expert()))
    oracle.load_state_dict(model.state_dict())
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    fully_shard_model(model, [Block], device_mesh=dense, dp_shard_dim="dp", expt_device_mesh=experts)
    squared(model, dist.get_rank(), 0).backward()
    own = range(dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 2)
    for rank in own:
        (squared(oracle, rank, 0) / 4).backward()
    pairs = zip(model.layers[1].parameters(), oracle.layers[1].parameters(), strict=True)
    worst = max(float((whole(a.grad, a) - whole(b.grad, b)).abs().max()) for a, b in pairs)
    sizes = [unit.parameter_groups[0].main_weight.axes[0].size for unit in units_of(model) if unit.parameter_groups]
    assert sizes == [4, 2]
    assert worst < 1e-6


@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_the_sharded_parameters() -> None:
    rates: list[float] = []

    def shard(model: nn.Module) -> None:
        optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
        sharded, same = fully_shard_model_and_optimizer(model, optimizer, fsdp_unit_modules=[Block])
        assert sharded is model
        assert same is optimizer
        assert isinstance(sharded, MegatronFSDP)
        made.append(optimizer)

    made: list[torch.optim.Optimizer] = []

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        rates.append(len(made))
        return made.pop() if made else torch.optim.SGD(list(parameters), lr=0.1)

    result = compare(replace(BASE, shard=shard, optimizer=optimizer_of))
    assert result.is_exact


@on_ranks(1)
def test_an_optimizer_with_state_is_refused() -> None:
    model = three_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    squared(model, 0, 0).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="the optimizer has stepped"):
        fully_shard_model_and_optimizer(model, optimizer)
