"""The catalog against the parameter counts that were published with the models."""

import math
import re
from collections import Counter
from typing import Any

import pytest

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.catalog import Architecture, UnitShapes

# In millions. DeepSeek-V3 is published as 671B for the main model, and as 685B on its hub page, which includes the
# layer that predicts a second token; the catalog leaves that layer out. It also leaves out the other tower of Gemma 3
# 27B and SigLIP: 27.0B is the text model of 27.4B, 428M the vision model of 878M.
PUBLISHED = {
    "deepseek-v3": 671_026,
    "gemma-2-9b": 9_242,
    "gemma-3-27b": 27_009,
    "gpt-oss-120b": 116_830,
    "gpt2": 124.4,
    "llama3-405b": 405_853,
    "llama3-70b": 70_554,
    "llama3-8b": 8_030,
    "mixtral-8x7b": 46_703,
    "qwen3-235b-a22b": 235_094,
    "siglip-so400m": 428.2,
}
# In billions, as published. gpt-oss counts without the embedding, whose 0.58B are looked up, not multiplied.
ACTIVE = {"mixtral-8x7b": 12.9, "qwen3-235b-a22b": 22.2, "deepseek-v3": 37.6, "gpt-oss-120b": 5.13 + 0.58}

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(model_type: str, **fields: Any) -> Architecture:
    return catalog.architecture({"model_type": model_type, **SMALL, **fields})


def unit(architecture: Architecture, name: str) -> UnitShapes:
    (found,) = [unit for unit in architecture.units if unit.name == name]
    return found


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *catalog.names()}))
def test_a_model_has_what_was_published_in_units_that_hold_each_parameter_once(name: str) -> None:
    found = catalog.architecture(catalog.load(name))
    assert found.num_parameters / 1e6 == pytest.approx(PUBLISHED[name], rel=0.001)
    active = ACTIVE[name] * 1e9 if name in ACTIVE else found.num_parameters
    assert found.num_active_parameters == pytest.approx(active, rel=0.005)
    assert sum(unit.count for unit in found.units if unit.name.endswith("layer")) == found.num_layers
    for kind in found.units:
        assert kind.count > 0
        assert max(Counter(name for name, _ in kind.parameters).values()) == 1
        assert all(dim > 0 for shape in kind.shapes for dim in shape)
    assert re.fullmatch(r"[^/]+/[^/]+", catalog.load(name)["source"])


def test_a_llama_layer_has_the_shapes_of_its_config() -> None:
    found = catalog.architecture(catalog.load("llama3-8b"))
    assert unit(found, "layer") == UnitShapes(
        "layer",
        32,
        (
            ("self_attn.q_proj.weight", (4096, 4096)),
            ("self_attn.k_proj.weight", (1024, 4096)),
            ("self_attn.v_proj.weight", (1024, 4096)),
            ("self_attn.o_proj.weight", (4096, 4096)),
            ("mlp.gate_proj.weight", (14336, 4096)),
            ("mlp.up_proj.weight", (14336, 4096)),
            ("mlp.down_proj.weight", (4096, 14336)),
            ("input_layernorm.weight", (4096,)),
            ("post_attention_layernorm.weight", (4096,)),
        ),
    )
    assert unit(found, "embedding").parameters == (("weight", (128256, 4096)),)
    assert unit(found, "head").parameters == (("norm.weight", (4096,)), ("lm_head.weight", (128256, 4096)))
    assert (found.head_dim, found.num_key_value_heads, found.tied) == (128, 8, False)


def test_routed_experts_are_fused_and_a_unit_of_their_own() -> None:
    found = catalog.architecture(catalog.load("deepseek-v3"))
    experts = unit(found, "experts")
    assert experts.count == unit(found, "moe_layer").count == 58
    assert experts.parameters == (("gate_up_proj", (256, 4096, 7168)), ("down_proj", (256, 7168, 2048)))


def test_tied_models_keep_their_last_norm_with_the_embedding() -> None:
    found = small("qwen3", tie_word_embeddings=True)
    assert found.tied
    assert unit(found, "embedding").parameters == (("embed_tokens.weight", (100, 64)), ("norm.weight", (64,)))
    assert [unit.name for unit in found.units] == ["embedding", "layer"]
    untied = small("qwen3", tie_word_embeddings=False)
    assert untied.num_parameters == found.num_parameters + 100 * 64


@pytest.mark.parametrize(
    ("model_type", "fields", "biases", "norms", "head_dim"),
    [
        ("llama", {}, set(), 0, 16),
        ("llama", {"attention_bias": True, "head_dim": 24}, {"q", "k", "v", "o"}, 0, 24),
        ("mistral", {"head_dim": None}, set(), 0, 16),
        ("qwen2", {}, {"q", "k", "v"}, 0, 16),
        ("qwen3", {}, set(), 2, 128),
        ("gemma2", {}, set(), 0, 256),
        ("gemma3_text", {}, set(), 2, 256),
    ],
)
def test_families_differ_in_biases_norms_and_width_of_heads(
    model_type: str, fields: dict[str, Any], biases: set[str], norms: int, head_dim: int
) -> None:
    found = small(model_type, **fields)
    parameters = dict(unit(found, "layer").parameters)
    assert {name.split(".")[1][0] for name in parameters if name.endswith("_proj.bias")} == biases
    assert sum(name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") for name in parameters) == norms
    assert (found.head_dim, parameters["self_attn.q_proj.weight"]) == (head_dim, (4 * head_dim, 64))


def test_some_layers_of_a_mixture_may_be_dense() -> None:
    fields = {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    found = small("qwen3_moe", **fields, decoder_sparse_step=2, mlp_only_layers=[3])
    assert {unit.name: unit.count for unit in found.units if unit.name != "head"} == {
        "embedding": 1,
        "dense_layer": 3,
        "moe_layer": 1,
        "experts": 1,
    }
    routed = math.prod((8, 64, 64)) + math.prod((8, 64, 32))
    assert found.num_active_parameters == found.num_parameters - routed * 6 // 8


def test_a_vision_part_counts_its_patches() -> None:
    found = catalog.architecture(catalog.load("siglip-so400m"))
    assert dict(unit(found, "embedding").parameters)["position_embedding.weight"] == (27 * 27, 1152)
    assert found.vocab_size == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({"model_type": each}, r"deepseek_v3, .*qwen3_moe.*--factory") for each in ("bert", None, 7)),
        ({"hidden_size": None}, "llama model: hidden_size is None. fix: give an integer >= 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": "100"}, "vocab_size is '100'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ],
)
def test_an_unknown_family_and_a_config_without_a_needed_number_are_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        catalog.architecture({"model_type": "llama", **SMALL, **config})
