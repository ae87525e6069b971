"""Settings of Megatron's configs that this engine does not support raise an error; no test needs Megatron."""

import logging
import logging.handlers
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron import adapter as mcore_adapter
from megatron_fsdp.integrations.megatron import data_parallel
from megatron_fsdp.integrations.megatron.data_parallel import shard_for_megatron
from megatron_fsdp.integrations.megatron.fully_shard_model import fully_shard_model
from megatron_fsdp.integrations.megatron.groups import ModelGroups, hybrid_mesh
from megatron_fsdp.integrations.megatron.optimizer import adopt_optimizer
from megatron_fsdp.integrations.megatron.settings import refuse_arguments, refuse_configs, refuse_optimizer
from megatron_fsdp.lifecycle.module import unit_of
from tests.harness import on_ranks, run_ranks


class Config(SimpleNamespace):
    """A config of a class that only this test uses: the engine stops to search a class of configs for tensors."""


def model_config(**changes: Any) -> Config:
    return Config(**{"tensor_model_parallel_size": 1, "fp16": False, "calculate_per_token_loss": False, **changes})


def ddp_config(**changes: Any) -> Config:
    return Config(**{"average_in_collective": False, "num_distributed_optimizer_instances": 1, **changes})


def optimizer_config(**changes: Any) -> SimpleNamespace:
    plain = {
        "optimizer": "adam", "fp16": False, "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False,
        "overlap_param_gather_with_optimizer_step": False, "lr": 0.1, "weight_decay": 0.01, "sgd_momentum": 0.5,
        "decoupled_weight_decay": True, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


def test_supported_settings_are_accepted() -> None:
    # Each call checks a setting that raises a ConfigError if the engine lacks it: returning is the success.
    refuse_configs(model_config(calculate_per_token_loss=True), ddp_config())
    refuse_configs(model_config(tensor_model_parallel_size=2, fp16=True), ddp_config())
    refuse_configs(model_config(cuda_graph_impl="none", fp8=None), ddp_config(average_in_collective=True))
    refuse_optimizer(optimizer_config(fp16=True))
    refuse_optimizer(optimizer_config(optimizer="sgd"))
    refuse_optimizer(optimizer_config(optimizer="muon"))


def refuse_model(**changes: Any) -> None:
    refuse_configs(model_config(**changes), ddp_config())


def refuse_data_parallelism(**changes: Any) -> None:
    refuse_configs(model_config(), ddp_config(**changes))


def refuse_its_optimizer(**changes: Any) -> None:
    refuse_optimizer(optimizer_config(**changes))


@pytest.mark.parametrize(
    ("refuse", "changes", "message"),
    [
        (refuse_model, {"gtp_weight_remat_size": 4}, r"gtp_weight_remat_size=4: .* give 1"),
        (
            refuse_model,
            {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1},
            r"mtp_num_layers=1 and pipeline_model_parallel_size=2: .* give one stage",
        ),
        (refuse_model, {"cuda_graph_impl": "local"}, r"cuda_graph_impl='local'"),
        (refuse_model, {"fp8": "hybrid", "fp4": "nvfp4"}, r"fp8='hybrid': .*; fp4='nvfp4'"),
        (refuse_data_parallelism, {"fp8_param_gather": True}, r"fp8_param_gather=True"),
        (refuse_data_parallelism, {"delay_wgrad_compute": True}, r"delay_wgrad_compute=True"),
        (refuse_data_parallelism, {"check_for_large_grads": True}, r"check_for_large_grads=True"),
        (refuse_its_optimizer, {"optimizer": "lion"}, "optimizer='lion': "),
        (refuse_its_optimizer, {"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True: "),
        (refuse_its_optimizer, {"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer=True: "),
        (refuse_its_optimizer, {"overlap_param_gather_with_optimizer_step": True}, "_with_optimizer_step=True: "),
    ],
)
def test_unsupported_settings_are_refused_with_a_fix(
    refuse: Callable[..., None], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse(**changes)


def test_summed_and_averaged_gradients_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"calculate_per_token_loss=True and average_in_collective=True"):
        refuse_configs(model_config(calculate_per_token_loss=True), ddp_config(average_in_collective=True))


def test_arguments_of_newer_adapters_are_refused_only_where_they_ask_for_something() -> None:
    refuse_arguments({"full_param_layout": None, "is_expert": False})
    with pytest.raises(ConfigError, match=r"^full_param_layout=3: this wrapper does not know"):
        refuse_arguments({"full_param_layout": 3, "is_expert": False})


@on_ranks(4)
def test_megatrons_groups_become_a_mesh_of_instances_and_others_are_refused() -> None:
    ranks = torch.arange(4).view(2, -1)
    rows = [dist.new_group(row) for row in ranks.tolist()]
    columns = [dist.new_group(column) for column in ranks.t().tolist()]
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    assert dist.group.WORLD is not None
    mesh = hybrid_mesh(dist.group.WORLD, columns[column], rows[row], "cpu")
    assert mesh.mesh_dim_names == ("dp_outer", "dp_shard")
    with pytest.raises(ConfigError) as caught:
        hybrid_mesh(dist.group.WORLD, rows[row], columns[column], "cpu")
    message = str(caught.value)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert message.startswith("hybrid sharding over ranks [[0, 1], [2, 3]] needs the groups [")
    assert "leave Megatron's order of groups as it is" in message


def test_models_of_another_wrapper_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a list of ShardedDataParallel, found \['Linear'\]"):
        mcore_adapter.get_megatron_optimizer(optimizer_config(), [nn.Linear(2, 2)])


class FusedAdam(torch.optim.Optimizer):
    """Stands in for TransformerEngine's optimizer, which is none of PyTorch's classes."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "bias_correction": True})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [({}, "AdamW"), ({"decoupled_weight_decay": False}, "Adam"), ({"optimizer": "sgd"}, "SGD")],
)
@on_ranks(1)
def test_optimizers_of_fused_kernels_give_way_to_pytorchs_with_the_same_groups(changes: Any, wanted: str) -> None:
    model = fully_shard_model(nn.Linear(2, 2), [nn.Linear])
    groups = [{"params": [model.weight], "wd_mult": 1.0}, {"params": [model.bias], "wd_mult": 0.0, "lr": 0.3}]
    made = SimpleNamespace(optimizer=FusedAdam(groups), config=optimizer_config(**changes))
    assert dist.group.WORLD is not None
    assert adopt_optimizer(made, [model], ModelGroups(dist.group.WORLD))._chunks == (model,)
    fields = [
        {name: group[name] for name in ("lr", "wd_mult", "weight_decay")} for group in made.optimizer.param_groups
    ]
    name = type(made.optimizer).__name__
    assert name == wanted
    assert fields == [
        {"lr": 0.1, "wd_mult": 1.0, "weight_decay": 0.01},
        {"lr": 0.3, "wd_mult": 0.0, "weight_decay": 0.01},
    ]


class Attention(nn.Module):
    """The parameters of a Megatron layer that matter to Muon, with the attributes that describe their cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=3, hidden_size=12)
        self.embedding = nn.Embedding(5, 12)
        weight: Any = self.embedding.weight
        weight.is_embedding_or_output_parameter = True
        self.linear_qkv = nn.Linear(12, 24)
        self.linear_proj = nn.Linear(12, 12, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        hidden = self.linear_qkv(hidden)[..., :12]
        return self.linear_proj(hidden)


@on_ranks(2)
def test_muon_takes_the_matrices_of_megatrons_groups_and_adamw_the_rest() -> None:
    model = fully_shard_model(Attention(), [nn.Linear])
    named: dict[str, Any] = dict(model.named_parameters())
    decayed = [parameter for parameter in named.values() if parameter.ndim > 1]
    groups = [{"params": decayed, "wd_mult": 1.0}, {"params": [named["linear_qkv.bias"]], "wd_mult": 0.0}]
    fields = {"momentum": 0.9, "split_qkv": True, "use_nesterov": True, "scale_mode": "spectral",
              "num_ns_steps": 4, "extra_scale_factor": 0.2}  # fmt: skip
    config = optimizer_config(optimizer="muon", **{f"muon_{name}": value for name, value in fields.items()})
    assert dist.group.WORLD is not None
    ranks = ModelGroups(dist.group.WORLD)
    made = SimpleNamespace(optimizer=FusedAdam(groups), config=optimizer_config())
    made = adopt_optimizer(made, [model], ranks, config)
    before = {name: parameter.full_tensor().clone() for name, parameter in named.items()}
    model(torch.arange(5)[None]).square().sum().backward()
    made.optimizer.step()
    assert not [name for name in before if torch.equal(before[name], named[name].full_tensor())]
    names = {id(parameter): name for name, parameter in named.items()}
    found = [
        {
            "names": [names[id(parameter)] for parameter in group["params"]],
            "rows": group.get("view", {}).get("row_splits"),
            **{key: group.get(key) for key in ("wd_mult", "momentum", "nesterov", "ns_steps", "betas")},
        }
        for group in made.optimizer.param_groups
    ]
    muon = {"wd_mult": 1.0, "momentum": 0.9, "nesterov": True, "ns_steps": 4, "betas": None}
    adamw = {"rows": None, "momentum": None, "nesterov": None, "ns_steps": None, "betas": (0.8, 0.9)}
    assert found == [
        {"names": ["embedding.weight"], "wd_mult": 1.0, **adamw},
        {"names": ["linear_qkv.weight"], "rows": (6, 3, 3), **muon},
        {"names": ["linear_proj.weight"], "rows": (), **muon},
        {"names": ["linear_qkv.bias"], "wd_mult": 0.0, **adamw},
    ]


def test_names_that_the_adapter_lacks_are_errors_of_python() -> None:
    with pytest.raises(AttributeError, match=r"adapter.* has no attribute 'Sharded'"):
        _ = mcore_adapter.Sharded


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def shard_what_ranks_drew(given: dict[str, Any], shape: tuple[int, ...], strategy: str) -> dict[str, Any]:
    """Shard a model with one part drawn alike on all ranks, another differently; return weights and settings.

    A bias has the same values on all ranks, in another order.
    """
    names = ("dp_outer", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(3)
    layers = [nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)]
    torch.manual_seed(10 * dist.get_rank())
    layers[1].reset_parameters()
    with torch.no_grad():
        layers[0].bias.copy_(torch.arange(5.0).roll(dist.get_rank()))
        layers[2].weight.fill_(float("nan"))
    model = nn.Sequential(*layers)
    drawn = {name: value.detach().clone() for name, value in model.state_dict().items()}
    settings = {"data_parallel_sharding_strategy": strategy, "outer_dp_sharding_strategy": "no_shard"}
    config = ddp_config(**settings, check_for_nan_in_grad=False, grad_reduce_in_fp32=True, **given)
    assert dist.group.WORLD is not None
    hybrid = {"outer": mesh.get_group(0), "data_inner": mesh.get_group(1)} if len(shape) > 1 else {}
    said = logging.handlers.BufferingHandler(9)
    with mock.patch.object(logging.getLogger(data_parallel.__name__), "handlers", [said]):
        sharded = shard_for_megatron(
            model, model_config(), config, ModelGroups(dist.group.WORLD, **hybrid), "cpu", [nn.Linear]
        )
    ahead = [len(unit_of(layer).forward_prefetch or ()) for layer in layers]
    slots = [unit_of(layer).slots for layer in layers]
    state = sharded.state_dict().items()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state}
    lines = [record.getMessage() for record in said.buffer]
    return {"drawn": drawn, "found": whole, "ahead": ahead, "slots": slots, "said": lines}


@pytest.mark.parametrize(
    ("shape", "strategy"), [((3,), name) for name in STRATEGIES] + [((2, 2), "optim_grads_params")]
)
def test_weights_that_ranks_drew_differently_become_the_first_rank_s(shape: tuple[int, ...], strategy: str) -> None:
    results = run_ranks(math.prod(shape), shard_what_ranks_drew, {}, shape, strategy)
    first = results[0]["drawn"]
    assert not torch.equal(results[1]["drawn"]["1.weight"], first["1.weight"])
    for result in results:
        for name, value in first.items():
            assert torch.equal(result["found"][name].nan_to_num(9.0), value.nan_to_num(9.0)), name
    (line,) = results[0]["said"]
    assert line.startswith("3 parameters differed between data-parallel ranks (the first one is '0.bias')")
    assert "Megatron's DDP uses them only with --data-parallel-random-init" in line
    assert all(not result["said"] for result in results[1:])


def test_weights_initialised_only_in_a_meta_constructor_are_refused() -> None:
    class Column(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 5, device="meta"))

    config = model_config(init_model_with_meta_device=True, use_cpu_initialization=True)
    model = nn.Sequential(nn.Linear(3, 5, device="meta"), Column())
    with pytest.raises(
        ConfigError, match=r"'1' \(Column\) has \['weight'\] .* fix: leave out --use-cpu-initialization"
    ):
        shard_for_megatron(model, config, ddp_config(), mock.Mock(), "cpu", [nn.Linear])
    assert type(model[0]) is nn.Linear


def test_megatron_s_settings_of_buffers_and_prefetch_act() -> None:
    sizes = {"suggested_communication_unit_size": 20}
    (plain,) = run_ranks(1, shard_what_ranks_drew, {}, (1,), "optim_grads_params")
    (found,) = run_ranks(1, shard_what_ranks_drew, {"fsdp_double_buffer": True, **sizes}, (1,), "optim_grads_params")
    assert plain["ahead"] == [0, 0, 0]
    # The second layer has 18 elements, so the first one starts the third as well.
    assert found["ahead"] == [2, 1, 0]
    assert [slots.sizing for slots in plain["slots"]] == [None] * 3
    assert [slots.sizing for slots in found["slots"]] == ["by_size"] * 3
    (largest,) = run_ranks(
        1, shard_what_ranks_drew, {"megatron_fsdp_max_pool_double_buffer": True}, (1,), "optim_grads_params"
    )
    assert [slots.sizing for slots in largest["slots"]] == ["largest"] * 3
