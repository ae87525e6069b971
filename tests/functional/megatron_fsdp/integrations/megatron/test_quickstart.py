"""fully_shard_model: Megatron-FSDP's one call shards like calls of fully_shard, and says what it leaves undone."""

import logging
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import Flat, Replicate
from megatron_fsdp import ConfigError, FsdpModule, fully_shard
from megatron_fsdp import MixedPrecisionPolicy as Policy
from megatron_fsdp.integrations.megatron.fully_shard_model import (
    ACCEPTED,
    fully_shard_model,
    fully_shard_model_and_optimizer,
)
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare, units_of, whole

BASE = Case(three_blocks, squared)


def grid(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "dp", "cp")[: len(sizes)])


@pytest.mark.parametrize("strategy", [0, 1, 2, 3, "no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_gradients_are_exact_with_zero_dp_strategy(strategy: int | str) -> None:
    def shard(model: nn.Module) -> None:
        assert fully_shard_model(model, [Block], zero_dp_strategy=strategy) is model

    assert compare(replace(BASE, shard=shard)).is_exact


# Outer strategy, whether the inner axis is one of two flattened, inner strategy.
ON_TWO_AXES = [(0, False, 1), (0, True, 3), ("optim", False, 3)]
EVERY = [
    *((0, flattened, strategy) for flattened in (False, True) for strategy in (1, 3)),
    *((o, False, 3) for o in (1, "optim")),
]


# PyTorch warns that a flattened axis will not be found by name some day; until then Megatron's way to name it works.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
@pytest.mark.parametrize(("outer", "flattened", "strategy"), nightly_but(ON_TWO_AXES, EVERY))
@on_ranks(4)
def test_an_outer_axis_is_of_replicas_or_shards_the_optimizer_too(
    outer: int | str, flattened: bool, strategy: int
) -> None:
    mesh, seen = grid(2, 2, 1) if flattened else grid(2, 2), []
    if flattened:
        mesh["dp", "cp"]._flatten("dp_cp")

    def shard(model: nn.Module) -> None:
        inner = "dp_cp" if flattened else "dp"
        fully_shard_model(model, [Block], strategy, outer, mesh, dp_outer_dim="outer", dp_shard_dim=inner)
        seen.append(units_of(model)[1].parameter_groups[0].spec.placements.optimizer)

    assert compare(replace(BASE, shard=shard)).is_exact
    assert seen == [(Flat() if outer else Replicate(), Flat())]


@on_ranks(4)
def test_dp_shard_dim_alone_names_the_axis_of_a_larger_mesh() -> None:
    model = fully_shard_model(three_blocks(), [Block], device_mesh=grid(2, 2), dp_shard_dim="dp")
    axes = units_of(model)[1].parameter_groups[0].main_weight.axes
    assert (len(axes), axes[0].size) == (1, 2)


IN_NEST = [f"0.layers.{i}{part}" for i in (0, 1) for part in ("", ".up", ".down")]


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        *((entry, ["", "0.layers.0", "0.layers.1"]) for entry in ([Block], ["Block"], "Block", Block)),
        (["tests.harness.models.Block"], ["", "0.layers.0", "0.layers.1"]),
        (["Block", nn.Linear, "Stack"], ["", "0", *IN_NEST, "1"]),
    ],
    ids=["class", "name", "one name", "one class", "import path", "several, nested"],
)
@on_ranks(1)
def test_units_are_named_by_class_or_path(entries: Any, wanted: list[str]) -> None:
    model = fully_shard_model(nn.Sequential(Stack(Block(), Block()), nn.Linear(7, 7)), entries)
    assert [name for name, module in model.named_modules() if isinstance(module, FsdpModule)] == wanted


@on_ranks(2)
def test_without_unit_modules_the_model_is_one_unit_and_the_log_says_what_that_costs() -> None:
    model = three_blocks()
    lines = logged(lambda: fully_shard_model(model))
    assert len(units_of(model)) == 1
    words = "fully_shard_model(fsdp_unit_modules=None): the whole model is one unit, so nothing overlaps"
    assert lines == [words] * (dist.get_rank() == 0)


@on_ranks(2)
def test_what_was_sharded_before_stays_as_it_is() -> None:
    model = three_blocks()
    fully_shard(model.layers[0], grad_divisor=3)
    fully_shard_model(model, [Block])
    (group,) = units_of(model)[1].parameter_groups
    assert ([type(module).__name__ for module in units_of(model)], str(group.spec.divisor)) == (
        ["MegatronFSDPStack", "FSDPBlock", "FSDPBlock", "FSDPBlock"],
        "6",
    )


def logged(action: Any) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_fsdp.integrations.megatron.fully_shard_model")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return lines


@on_ranks(2)
def test_every_argument_without_effect_is_answered_with_the_reason_on_one_rank() -> None:
    for each in ACCEPTED:
        other = "given" if each.default is None else not each.default
        asked, default = (
            logged(partial(fully_shard_model, Block(), [Block], **{each.name: value}))
            for value in (other, each.default)
        )
        assert default == []
        assert len(asked) == (dist.get_rank() == 0)
        assert all(line.startswith(f"fully_shard_model({each.name}=") and line.endswith(each.reason) for line in asked)


REFUSED = {
    "unknown": ({"overlap_grads": True}, "no argument 'overlap_grads'; the nearest is 'overlap_grad_reduce'"),
    "misspelt": ({"dp_shard": "dp"}, "the nearest is 'dp_shard_dim'"),
    "strategy": ({"zero_dp_strategy": 4}, "give 0 to 3, or one of no_shard, optim"),
    "outer strategy": ({"outer_dp_sharding_strategy": "optim_grads"}, "give 0 to 1, or one of no_shard, optim"),
    "outer, one axis": ({"outer_dp_sharding_strategy": 1}, "needs a mesh of two axes"),
    "outer, not ZeRO-3": (
        {"outer_dp_sharding_strategy": 1, "zero_dp_strategy": 2, "device_mesh": 0, "dp_shard_dim": "dp",
         "dp_outer_dim": "outer"}, "needs --data-parallel-sharding-strategy optim_grads_params"),
    "axes": ({"device_mesh": 0}, "name the data-parallel ones"),
    "outer axis alone": ({"device_mesh": 0, "dp_outer_dim": "outer"}, "needs dp_shard_dim"),
    "unknown axis": ({"device_mesh": 0, "dp_shard_dim": "none"}, "dp_shard_dim='none'"),
    "no such unit": ({"fsdp_unit_modules": ["Layer"]}, "its classes are ['Block', 'LayerNorm', 'Linear'"),
    "decoupled": ({"use_decoupled_grad": True}, "gradients are .grad"),
    "device": ({"device_mesh": 0, "dp_shard_dim": "dp", "device": "cuda"}, "pass a mesh of 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(1)
def test_what_has_no_meaning_is_refused_with_the_cure(name: str) -> None:
    options, wanted = REFUSED[name]
    if "device_mesh" in options:
        options["device_mesh"] = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("outer", "dp", "cp"))
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        fully_shard_model(three_blocks(), **{"fsdp_unit_modules": [Block], **options})


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
@on_ranks(2)
def test_device_says_where_the_model_goes(device: Any) -> None:
    model = fully_shard_model(three_blocks(), [Block], device=device)
    assert str(next(model.parameters()).device) == "cpu"


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


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = {
    "default": (None, (BF16, FP32, BF16, FP32)),
    "Megatron's": (MegatronPolicy(), (BF16, FP32, BF16, FP32)),
    "Megatron's fp32 wire": (MegatronPolicy(grad_comm_dtype=FP32), (BF16, FP32, FP32, FP32)),
    "Megatron's bf16 main": (MegatronPolicy(BF16, FP32), (BF16, BF16, FP32, FP32)),
    "ours": (Policy(FP16), (FP16, BF16, BF16, BF16)),
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
        words = r"(?s)a reduced gradient is not a number.*'layers\.2'|'layers\.2'.*a reduced gradient is not a number"
        with pytest.raises(ValueError, match=words) if reports else nullcontext():
            (model(inputs(0, 0)) * poison).sum().backward()


class Expert(Block):
    """A block whose parameters are marked as Megatron marks experts."""

    def __init__(self) -> None:
        super().__init__()
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
    made: list[torch.optim.Optimizer] = []

    def shard(model: nn.Module) -> None:
        optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
        sharded, same = fully_shard_model_and_optimizer(model, optimizer, fsdp_unit_modules=[Block])
        assert sharded is model
        assert same is optimizer
        assert isinstance(sharded, MegatronFSDP)
        made.append(optimizer)

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return made.pop() if made else torch.optim.SGD(list(parameters), lr=0.1)

    assert compare(replace(BASE, shard=shard, optimizer=optimizer_of)).is_exact


@on_ranks(1)
def test_an_optimizer_with_state_is_refused() -> None:
    model = three_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    squared(model, 0, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has stepped"):
        fully_shard_model_and_optimizer(model, optimizer)
