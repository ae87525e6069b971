"""A torchtitan decoder trains with this engine's ``parallelize_fn`` as the whole one does."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megatron_fsdp import Muon
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.torchtitan import parallelize_decoder
from megatron_fsdp.muon import muon_param_groups
from tests.integration.ranks import run_ranks

# Importing it brings in parts of PyTorch that warn of each other.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

NUM_STEPS, LENGTH, VOCABULARY = 3, 16, 2048


def build_model() -> nn.Module:
    """Build torchtitan's smallest Llama, cut to two layers, on the meta device."""
    config = model_registry("debugmodel").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        # The only kind of attention that neither compiles nor needs a GPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        return config.build()


def initialise(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def configure(replicas: int = 1, **changes: Any) -> dict[str, Any]:
    """Return what torchtitan's trainer hands to a ``parallelize_fn``."""
    parallelism = ParallelismConfig(
        **{"data_parallel_replicate_degree": replicas, "spmd_backend": "partial_dtensor", **changes}
    )
    # torchtitan makes meshes of GPUs even without a GPU.
    parallel_dims.device_type = "cpu"
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    return {
        "parallel_dims": dims,
        "training": TrainingConfig(mixed_precision_param="float32"),
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable=False),
        "ac_config": None,
        "dump_folder": "",
    }


def train(
    model: nn.Module, ranks: list[int], num_ranks: int, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Train as torchtitan does: losses are sums over tokens, divided by the tokens of all ranks."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(LENGTH)[None].expand(2, LENGTH)
    for step in range(NUM_STEPS):
        for rank in ranks:
            generator = torch.Generator().manual_seed(100 * rank + step)
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
            logits = model(tokens, positions)
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")
            (loss / (num_ranks * tokens.numel())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.named_parameters()
    }


def compare(replicas: int, resharding: str) -> tuple[float, float, int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    model = parallelize_decoder(build_model(), **configure(replicas, fsdp_reshard_after_forward=resharding))
    num_units = len(list(units_below(model)))
    found = train(initialise(model), [rank], size)
    oracle = initialise(build_model())
    start = {name: parameter.detach().clone() for name, parameter in oracle.named_parameters()}
    wanted = train(oracle, list(range(size)), size)
    assert found.keys() == wanted.keys()
    apart = max((found[name] - wanted[name]).abs().max().item() for name in wanted)
    return apart, max((wanted[name] - start[name]).abs().max().item() for name in wanted), num_units


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 1), (4, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("resharding", ["default", "always", "never"])
def test_a_parallelized_decoder_trains_as_the_whole_one(num_ranks: int, replicas: int, resharding: str) -> None:
    for apart, movement, num_units in run_ranks(num_ranks, compare, replicas, resharding):
        assert apart < 2e-5
        assert movement > 1e-3
        # The embedding, two layers, the norm with the output, and the model around them.
        assert num_units == 5


def with_muon(num_shards: int) -> dict[str, torch.Tensor]:
    """Train with Muon for the matrices, on the same data for any number of ranks; in FP32, as bf16 is slow on CPUs."""
    model = initialise(parallelize_decoder(build_model(), **configure(dist.get_world_size() // num_shards)))
    groups = muon_param_groups(model)
    optimizer = Muon(groups, lr=0.02, ns_dtype=torch.float32)
    num_matrices = sum(len(group["params"]) for group in groups if group.get("use_muon", True))
    # Queries, keys and values in one, the output, and three of the feed-forward network, in two layers.
    assert num_matrices == 10
    return train(model, [0], 1, optimizer)


def test_muon_of_a_parallelized_decoder_takes_the_same_steps_on_any_number_of_ranks() -> None:
    (alone,) = run_ranks(1, with_muon, 1)
    for found in run_ranks(2, with_muon, 2):
        assert found.keys() == alone.keys()
        assert max((found[name] - alone[name]).abs().max().item() for name in alone) < 1e-4


def refuse() -> None:
    given = configure()
    with pytest.raises(ConfigError, match=r"spmd_backend 'spmd_types'"):
        parallelize_decoder(build_model(), **{**given, "parallelism": ParallelismConfig()})
    dims = SimpleNamespace(tp=1, cp=1, pp=2, ep=1)
    with pytest.raises(ConfigError, match=r"'pp': 2.* fix: degrees of 1"):
        parallelize_decoder(build_model(), **{**given, "parallel_dims": dims})
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    # Asked for when it is made, it wants a GPU there.
    parallelism.enable_fsdp_symm_mem = True
    with pytest.raises(ConfigError, match=r"enable_fsdp_symm_mem True\. fix: .* no symmetric memory"):
        parallelize_decoder(build_model(), **{**given, "parallelism": parallelism})


def test_unsupported_settings_are_refused_by_name() -> None:
    run_ranks(1, refuse)
