"""Sharded transformers models train as whole ones do, in loops that know nothing of the sharding."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.integrations.huggingface.prepare import prepare_model
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import ALL, make_model, mean_over_ranks, train, whole_state, worst

NUM_STEPS = 4


def compare_training(kind: str, config: dict[str, Any]) -> tuple[float, float, float]:
    """Return the worst difference of losses and of weights, and how far the weights moved."""
    oracle = make_model(kind)
    start = whole_state(oracle)
    model = prepare_model(make_model(kind), config)
    losses = mean_over_ranks(train(model, NUM_STEPS, [dist.get_rank()]))
    wanted = train(oracle, NUM_STEPS, range(dist.get_world_size()))
    apart = max(abs(mine - theirs) for mine, theirs in zip(losses, wanted, strict=True))
    return apart, worst(whole_state(model), whole_state(oracle)), worst(whole_state(oracle), start)


@pytest.mark.parametrize("kind", [*ALL, "tied_llama"])
def test_a_sharded_model_trains_as_the_whole_one(kind: str) -> None:
    for loss, weight, movement in run_ranks(2, compare_training, kind, {}):
        assert loss < 1e-5
        assert weight < 2e-5
        assert movement > 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {"reshard_after_forward": False},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
        {"auto_wrap_policy": "NO_WRAP"},
        {"activation_checkpointing": True},
        {"version": 1, "sharding_strategy": "NO_SHARD"},
        {"cpu_offload": True},
    ],
    ids=lambda config: next(iter(config.values())) if len(config) == 1 else str(list(config.values())[-1]),
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_no_setting_changes_the_result(kind: str, config: dict[str, Any]) -> None:
    for loss, weight, movement in run_ranks(2, compare_training, kind, config):
        assert loss < 1e-5
        assert weight < 2e-5
        assert movement > 1e-3


def train_in_bf16(kind: str) -> tuple[list[float], list[float], set[torch.dtype], set[torch.dtype]]:
    model = prepare_model(make_model(kind), FsdpConfig(bf16=True))
    seen: set[torch.dtype] = set()
    layer = model.get_submodule("transformer.h.1" if kind == "gpt2" else "model.layers.1")
    layer.register_forward_hook(lambda module, args, output: seen.update(p.dtype for p in module.parameters()))
    losses = mean_over_ranks(train(model, NUM_STEPS, [dist.get_rank()]))
    return (
        losses,
        train(make_model(kind), NUM_STEPS, range(dist.get_world_size())),
        seen,
        {parameter.dtype for parameter in model.parameters()},
    )


@pytest.mark.parametrize("kind", ALL)
def test_bf16_compute_stays_near_fp32_and_keeps_fp32_main_weights(kind: str) -> None:
    for losses, wanted, computed, main in run_ranks(2, train_in_bf16, kind):
        # bf16 has eight bits; the logits of an untrained model are near zero, its loss near log(61) = 4.1.
        assert max(abs(mine - theirs) for mine, theirs in zip(losses, wanted, strict=True)) < 0.03
        assert losses != wanted
        assert computed == {torch.bfloat16}
        assert main == {torch.float32}
