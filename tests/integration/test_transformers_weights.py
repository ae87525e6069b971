"""Weights of sharded transformers models to and from Hugging Face's folders, exactly."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import export_safetensors, import_safetensors
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.integrations.huggingface.prepare import prepare_model
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import ALL, logits_of, make_model, train, whole_state, worst

KINDS = [*ALL, "tied_llama"]


def export_trained(kind: str, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = prepare_model(make_model(kind))
    train(model, 2, [dist.get_rank()])
    export_safetensors(model, folder, max_file_bytes=10_000)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
    return whole_state(model), logits_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_is_what_from_pretrained_reads(kind: str, tmp_path: Path) -> None:
    state, logits = run_ranks(2, export_trained, kind, tmp_path)[0]
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = type(make_model(kind)).from_pretrained(tmp_path)
    assert worst(whole_state(loaded), state) == 0
    assert torch.equal(logits_of(loaded), logits)


def save_trained(kind: str, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = prepare_model(make_model(kind))
    train(model, 2, [dist.get_rank()])
    model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    return whole_state(model), logits_of(model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_writes_the_whole_model(kind: str, num_ranks: int, tmp_path: Path) -> None:
    state, logits = run_ranks(num_ranks, save_trained, kind, tmp_path)[0]
    loaded = type(make_model(kind)).from_pretrained(tmp_path)
    assert worst(whole_state(loaded), state) == 0
    assert torch.equal(logits_of(loaded), logits)


def load(
    kind: str, folder: Path, on_meta: bool, first_rank_reads: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    with torch.device("meta" if on_meta else "cpu"):
        model = make_model(kind, seed=7)
    prepare_model(model, {"cpu_ram_efficient_loading": first_rank_reads}, checkpoint=folder)
    return whole_state(model), logits_of(model)


def saved(kind: str, folder: Path, **options: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = make_model(kind, seed=3)
    model.save_pretrained(folder, **options)
    return whole_state(model), logits_of(model)


@pytest.mark.parametrize("first_rank_reads", [False, True], ids=["every rank reads", "first rank reads"])
@pytest.mark.parametrize("on_meta", [False, True], ids=["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_loads_into_a_sharded_model(
    kind: str, on_meta: bool, first_rank_reads: bool, tmp_path: Path
) -> None:
    # Only transformers itself knows how the experts that it stores one by one become one weight.
    state, logits = saved(kind, tmp_path, save_original_format=first_rank_reads)
    for found, computed in run_ranks(2, load, kind, tmp_path, on_meta, first_rank_reads):
        assert worst(found, state) == 0
        assert torch.equal(computed, logits)


def test_experts_stored_one_by_one_are_refused_by_name_where_every_rank_reads(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    run_ranks(2, refuse_experts, tmp_path)


def refuse_experts(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        prepare_model(make_model("qwen3_moe"), checkpoint=folder)


def import_renamed(folder: Path) -> dict[str, torch.Tensor]:
    model = prepare_model(make_model("llama", seed=5))
    names = {"model.layers.*.self_attn.*.weight": "decoder.*.attention.*", "lm_head.weight": "output"}
    export_safetensors(model, folder, name_map=names)
    again = make_model("llama", seed=6)
    prepare_model(again, checkpoint=folder, name_map=names)
    third = prepare_model(make_model("llama", seed=8))
    import_safetensors(third, folder, name_map=names)
    with pytest.raises(ConfigError, match="name_map contradicts cpu_ram_efficient_loading"):
        prepare_model(make_model("llama"), {"cpu_ram_efficient_loading": True}, checkpoint=folder, name_map=names)
    assert worst(whole_state(again), whole_state(model)) == 0
    assert worst(whole_state(third), whole_state(model)) == 0
    return whole_state(again)


def test_names_that_differ_are_translated_both_ways(tmp_path: Path) -> None:
    run_ranks(2, import_renamed, tmp_path)


def load_like_transformers(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    kind = type(make_model("qwen3_moe"))
    if dist.get_rank() == 0:
        model = kind.from_pretrained(folder)
    else:
        with torch.device("meta"):
            model = make_model("qwen3_moe")
    prepare_model(model, {"cpu_ram_efficient_loading": True})
    return whole_state(model), logits_of(model)


def test_a_model_that_one_rank_has_loaded_is_shared_out(tmp_path: Path) -> None:
    state, logits = saved("qwen3_moe", tmp_path)
    for found, computed in run_ranks(2, load_like_transformers, tmp_path):
        assert worst(found, state) == 0
        assert torch.equal(computed, logits)
