"""transformers models in hand-written loops: they train like whole models, and import and export weights exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import export_safetensors, import_safetensors, materialize
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.policy.mesh import sharding_target
from tests.harness.oracle import whole_state
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import (
    ALL,
    generated,
    logits_of,
    make_model,
    mean_over_ranks,
    shard,
    train,
    worst,
)

NUM_STEPS = 4
KINDS = [*ALL, "tied_llama"]


def of_settings(config: FsdpConfig) -> dict[str, Any]:
    return config.fully_shard_kwargs(sharding_target(None, None, None).mesh)


def compare_training(kind: str, config: dict[str, Any], folder: Path) -> tuple[float, float, float]:
    """Return the worst difference of losses and of weights, and how far the weights moved; leave the weights."""
    oracle, model = make_model(kind), make_model(kind)
    start = whole_state(oracle)
    is_checkpointed = config.pop("activation_checkpointing", False)
    if is_checkpointed:
        model.activation_checkpointing_enable()
    model = shard(model, **of_settings(FsdpConfig.from_hf(config)))
    losses = mean_over_ranks(train(model, NUM_STEPS, [dist.get_rank()]))
    wanted = train(oracle, NUM_STEPS, range(dist.get_world_size()))
    apart = max(abs(mine - theirs) for mine, theirs in zip(losses, wanted, strict=True))
    if not is_checkpointed:
        assert generated(model) == generated(oracle)
    export_safetensors(model, folder, max_file_bytes=10_000)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
    state = whole_state(model)
    if dist.get_rank() == 0:
        torch.save((state, logits_of(oracle)), folder / "state.pt")
    return apart, worst(state, whole_state(oracle)), worst(whole_state(oracle), start)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *((kind, {}) for kind in KINDS),
        ("llama", {"reshard_after_forward": False}),
        ("gpt2", {"version": 1, "sharding_strategy": "NO_SHARD"}),
        ("llama", {"cpu_offload": True}),
        ("llama", {"activation_checkpointing": True}),
    ],
    ids=str,
)
def test_a_sharded_model_trains_as_the_whole_one_and_from_pretrained_reads_it(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    for loss, weight, movement in run_ranks(2, compare_training, kind, config, tmp_path):
        assert loss < 1e-5
        assert weight < 2e-5
        assert movement > 1e-3
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = type(make_model(kind)).from_pretrained(tmp_path)
    state, logits = torch.load(tmp_path / "state.pt")
    assert worst(whole_state(loaded), state) == 0
    assert torch.allclose(logits_of(loaded), logits, atol=1e-4)


def train_in_bf16(kind: str) -> tuple[list[float], list[float], set[torch.dtype], set[torch.dtype]]:
    model = shard(make_model(kind), **of_settings(FsdpConfig(bf16=True)))
    seen: set[torch.dtype] = set()
    layer = model.get_submodule("transformer.h.1" if kind == "gpt2" else "model.layers.1")
    layer.register_forward_pre_hook(lambda module, args: seen.update(p.dtype for p in module.parameters()))
    losses = mean_over_ranks(train(model, NUM_STEPS, [dist.get_rank()]))
    wanted = train(make_model(kind), NUM_STEPS, range(dist.get_world_size()))
    return losses, wanted, seen, {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("kind", ALL)
def test_bf16_compute_stays_near_fp32_and_keeps_fp32_main_weights(kind: str) -> None:
    for losses, wanted, computed, main in run_ranks(2, train_in_bf16, kind):
        # bf16 has eight bits; the logits of an untrained model are near zero, its loss near log(61) = 4.1.
        assert max(abs(mine - theirs) for mine, theirs in zip(losses, wanted, strict=True)) < 0.03
        assert losses != wanted
        assert computed == {torch.bfloat16}
        assert main == {torch.float32}


def load(kind: str, folder: Path, on_meta: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    with torch.device("meta" if on_meta else "cpu"):
        model = make_model(kind, seed=7)
    shard(model)
    if on_meta:
        # No file holds the rotary frequencies.
        materialize(model, model._init_weights)
    import_safetensors(model, folder)
    return whole_state(model), logits_of(model)


@pytest.mark.parametrize("on_meta", [False, True], ids=["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_loads_into_a_sharded_model(kind: str, on_meta: bool, tmp_path: Path) -> None:
    model = make_model(kind, seed=3)
    model.save_pretrained(tmp_path, save_original_format=False)
    state, logits = whole_state(model), logits_of(model)
    for found, computed in run_ranks(2, load, kind, tmp_path, on_meta):
        assert worst(found, state) == 0
        assert torch.equal(computed, logits)


def refuse_experts(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        import_safetensors(shard(make_model("qwen3_moe")), folder)


def test_experts_stored_one_by_one_are_refused_by_name(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path)
    run_ranks(2, refuse_experts, tmp_path)
