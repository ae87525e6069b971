"""Families: from a Hugging Face config to the shapes of its parameters.

The names and shapes are those of the modeling files of transformers 5, where routed experts are stored fused: one
(experts, outputs, inputs) tensor for a projection of all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.catalog.architecture import Architecture, Parameters, UnitShapes

__all__ = ["SUPPORTED", "architecture"]

Config = Mapping[str, Any]
# The part of a multimodal config that holds the model in question.
_PARTS = {"gemma3": "text_config", "siglip": "vision_config"}
# Where a config may leave a field out because its family's config class has a default other than hidden_size / heads.
_HEAD_DIMS = {"gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "qwen3": 128}
_TIED_BY_DEFAULT = ("gemma2", "gemma3_text", "gpt2")


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the units and sizes of a model from its Hugging Face config.

    Args:
        config: the content of a config.json. Of a gemma3 config the text model is taken, of a siglip config the vision
            model. DeepSeek's extra layer that predicts one token more (MTP) is left out, as transformers does.
    Raises:
        ConfigError: a family that is not known here, or a config that lacks a field.
    """
    model_type = config.get("model_type")
    if model_type in _PARTS and _PARTS[model_type] in config:
        part = config[_PARTS[model_type]]
        return architecture(
            {"model_type": {"gemma3": "gemma3_text", "siglip": "siglip_vision_model"}[model_type], **part}
        )
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not in the catalog, which knows {', '.join(SUPPORTED)}; for another model "
            "pass a function that builds it (--factory package.module:function)"
        )
    return _FAMILIES[model_type](_Fields(config, model_type))


class _Fields:
    """A config with the names and defaults of its family settled."""

    def __init__(self, config: Config, model_type: str) -> None:
        self.model_type = model_type
        self._config = config
        self.hidden = self.number("n_embd" if model_type == "gpt2" else "hidden_size")
        self.layers = self.number("n_layer" if model_type == "gpt2" else "num_hidden_layers")
        self.heads = self.number("n_head" if model_type == "gpt2" else "num_attention_heads")
        self.key_value_heads = self.number("num_key_value_heads", self.heads)
        self.head_dim = self.number("head_dim", _HEAD_DIMS.get(model_type, self.hidden // self.heads))
        self.tied = bool(config.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT))

    def number(self, field: str, default: int | None = None, least: int = 1) -> int:
        """Return a field that is a number; one that is absent or null takes the default, if there is one."""
        value = self._config.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            raise ConfigError(
                f"config of a {self.model_type} model: {field} is {value!r}, wanted an integer >= {least}"
            )
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a field that is true or false."""
        return bool(self._config.get(field, default))

    def numbers(self, field: str) -> tuple[int, ...]:
        """Return a field that is a list of numbers, empty when it is absent."""
        return tuple(self._config.get(field) or ())


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Parameters:
    weight = (f"{name}.weight", (outputs, inputs))
    return (weight, (f"{name}.bias", (outputs,))) if bias else (weight,)


def _norm(name: str, width: int, bias: bool = False) -> Parameters:
    weight = (f"{name}.weight", (width,))
    return (weight, (f"{name}.bias", (width,))) if bias else (weight,)


def _attention(fields: _Fields, *, bias: bool, output_bias: bool, head_norms: bool = False) -> Parameters:
    queries, pairs = fields.heads * fields.head_dim, fields.key_value_heads * fields.head_dim
    norms = ("q_norm", "k_norm") if head_norms else ()
    return (
        *_linear("self_attn.q_proj", queries, fields.hidden, bias),
        *_linear("self_attn.k_proj", pairs, fields.hidden, bias),
        *_linear("self_attn.v_proj", pairs, fields.hidden, bias),
        *_linear("self_attn.o_proj", fields.hidden, queries, output_bias),
        *(parameter for name in norms for parameter in _norm(f"self_attn.{name}", fields.head_dim)),
    )


def _gated_mlp(name: str, hidden: int, width: int, bias: bool = False) -> Parameters:
    return (
        *_linear(f"{name}.gate_proj", width, hidden, bias),
        *_linear(f"{name}.up_proj", width, hidden, bias),
        *_linear(f"{name}.down_proj", hidden, width, bias),
    )


def _fused_experts(num_experts: int, hidden: int, width: int) -> Parameters:
    return (("gate_up_proj", (num_experts, 2 * width, hidden)), ("down_proj", (num_experts, hidden, width)))


def _two_norms(fields: _Fields) -> Parameters:
    return (*_norm("input_layernorm", fields.hidden), *_norm("post_attention_layernorm", fields.hidden))


def _language_model(
    fields: _Fields, layers: tuple[UnitShapes, ...], routed: int = 0, num_experts: int = 1
) -> Architecture:
    """Put the embedding before the layers and the last norm with the output matrix behind them.

    A tied output matrix leaves the last norm to the unit of the embedding, which is gathered at both ends.
    """
    vocab = fields.number("vocab_size")
    norm = _norm("norm", fields.hidden)
    table = ("embed_tokens.weight", (vocab, fields.hidden))
    if fields.tied:
        units = (UnitShapes("embedding", 1, (table, *norm)), *layers)
    else:
        head = UnitShapes("head", 1, (*norm, *_linear("lm_head", vocab, fields.hidden)))
        units = (UnitShapes("embedding", 1, (("weight", table[1]),)), *layers, head)
    total = sum(unit.count * unit.num_parameters for unit in units)
    experts = sum(unit.count * unit.num_parameters for unit in units if unit.name == "experts")
    return Architecture(
        model_type=fields.model_type,
        units=tuple(unit for unit in units if unit.count),
        tied=fields.tied,
        hidden_size=fields.hidden,
        num_layers=fields.layers,
        num_attention_heads=fields.heads,
        num_key_value_heads=fields.key_value_heads,
        head_dim=fields.head_dim,
        intermediate_size=fields.number("intermediate_size"),
        vocab_size=vocab,
        num_active_parameters=total - experts + experts * routed // num_experts,
        num_parameters=total,
    )


def _llama(fields: _Fields) -> Architecture:
    """Llama, Mistral, Qwen2 and Qwen3: they differ in biases and in norms of the heads."""
    bias = fields.flag("attention_bias")
    is_qwen2 = fields.model_type == "qwen2"
    layer = (
        *_attention(
            fields, bias=bias or is_qwen2, output_bias=bias and not is_qwen2, head_norms=fields.model_type == "qwen3"
        ),
        *_gated_mlp("mlp", fields.hidden, fields.number("intermediate_size"), fields.flag("mlp_bias")),
        *_two_norms(fields),
    )
    return _language_model(fields, (UnitShapes("layer", fields.layers, layer),))


def _gemma(fields: _Fields) -> Architecture:
    bias = fields.flag("attention_bias")
    names = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    layer = (
        *_attention(fields, bias=bias, output_bias=bias, head_norms=fields.model_type == "gemma3_text"),
        *_gated_mlp("mlp", fields.hidden, fields.number("intermediate_size")),
        *(parameter for name in names for parameter in _norm(name, fields.hidden)),
    )
    return _language_model(fields, (UnitShapes("layer", fields.layers, layer),))


def _mixtral(fields: _Fields) -> Architecture:
    num_experts = fields.number("num_local_experts")
    layer = (
        *_attention(fields, bias=False, output_bias=False),
        *_linear("mlp.gate", num_experts, fields.hidden),
        *_two_norms(fields),
    )
    experts = _fused_experts(num_experts, fields.hidden, fields.number("intermediate_size"))
    units = UnitShapes("moe_layer", fields.layers, layer), UnitShapes("experts", fields.layers, experts)
    return _language_model(fields, units, fields.number("num_experts_per_tok"), num_experts)


def _qwen3_moe(fields: _Fields) -> Architecture:
    num_experts, step = fields.number("num_experts"), fields.number("decoder_sparse_step", 1)
    dense = fields.numbers("mlp_only_layers")
    num_sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(fields.layers))
    bias = fields.flag("attention_bias")
    attention = _attention(fields, bias=bias, output_bias=bias, head_norms=True)
    mlp = _gated_mlp("mlp", fields.hidden, fields.number("intermediate_size"))
    gate = _linear("mlp.gate", num_experts, fields.hidden)
    experts = _fused_experts(num_experts, fields.hidden, fields.number("moe_intermediate_size"))
    units = (
        UnitShapes("dense_layer", fields.layers - num_sparse, (*attention, *mlp, *_two_norms(fields))),
        UnitShapes("moe_layer", num_sparse, (*attention, *gate, *_two_norms(fields))),
        UnitShapes("experts", num_sparse, experts),
    )
    return _language_model(fields, units, fields.number("num_experts_per_tok"), num_experts)


def _deepseek_v3(fields: _Fields) -> Architecture:
    num_experts, width = fields.number("n_routed_experts"), fields.number("moe_intermediate_size")
    num_dense = min(fields.number("first_k_dense_replace", least=0), fields.layers)
    fields.head_dim = fields.number("qk_nope_head_dim") + fields.number("qk_rope_head_dim")
    attention = _latent_attention(fields)
    mlp = _gated_mlp("mlp", fields.hidden, fields.number("intermediate_size"))
    shared = (
        *_linear("mlp.gate", num_experts, fields.hidden),
        *_gated_mlp("mlp.shared_experts", fields.hidden, width * fields.number("n_shared_experts")),
    )
    units = (
        UnitShapes("dense_layer", num_dense, (*attention, *mlp, *_two_norms(fields))),
        UnitShapes("moe_layer", fields.layers - num_dense, (*attention, *shared, *_two_norms(fields))),
        UnitShapes("experts", fields.layers - num_dense, _fused_experts(num_experts, fields.hidden, width)),
    )
    return _language_model(fields, units, fields.number("num_experts_per_tok"), num_experts)


def _latent_attention(fields: _Fields) -> Parameters:
    """Multi-head latent attention: queries, and keys with values, go through a narrow vector each."""
    bias, queries = fields.flag("attention_bias"), fields.heads * fields.head_dim
    rank, query_rank = fields.number("kv_lora_rank"), fields.number("q_lora_rank", 0, least=0)
    values = fields.number("v_head_dim")
    query = (
        (
            *_linear("self_attn.q_a_proj", query_rank, fields.hidden, bias),
            *_norm("self_attn.q_a_layernorm", query_rank),
            *_linear("self_attn.q_b_proj", queries, query_rank),
        )
        if query_rank
        else _linear("self_attn.q_proj", queries, fields.hidden)
    )
    return (
        *query,
        *_linear("self_attn.kv_a_proj_with_mqa", rank + fields.number("qk_rope_head_dim"), fields.hidden, bias),
        *_norm("self_attn.kv_a_layernorm", rank),
        *_linear("self_attn.kv_b_proj", fields.heads * (fields.number("qk_nope_head_dim") + values), rank),
        *_linear("self_attn.o_proj", fields.hidden, fields.heads * values, bias),
    )


def _gpt_oss(fields: _Fields) -> Architecture:
    num_experts, width = fields.number("num_local_experts"), fields.number("intermediate_size")
    bias = fields.flag("attention_bias", True)
    layer = (
        ("self_attn.sinks", (fields.heads,)),
        *_attention(fields, bias=bias, output_bias=bias),
        *_linear("mlp.router", num_experts, fields.hidden, True),
        *_two_norms(fields),
    )
    experts = (
        ("gate_up_proj", (num_experts, fields.hidden, 2 * width)),
        ("gate_up_proj_bias", (num_experts, 2 * width)),
        ("down_proj", (num_experts, width, fields.hidden)),
        ("down_proj_bias", (num_experts, fields.hidden)),
    )
    units = UnitShapes("moe_layer", fields.layers, layer), UnitShapes("experts", fields.layers, experts)
    return _language_model(fields, units, fields.number("num_experts_per_tok", 4), num_experts)


def _gpt2(fields: _Fields) -> Architecture:
    """GPT-2's linear layers are stored as (inputs, outputs)."""
    hidden, width = fields.hidden, fields.number("n_inner", 4 * fields.hidden)
    vocab = fields.number("vocab_size")
    layer = (
        *_norm("ln_1", hidden, True),
        *(("attn.c_attn.weight", (hidden, 3 * hidden)), ("attn.c_attn.bias", (3 * hidden,))),
        *(("attn.c_proj.weight", (hidden, hidden)), ("attn.c_proj.bias", (hidden,))),
        *_norm("ln_2", hidden, True),
        *(("mlp.c_fc.weight", (hidden, width)), ("mlp.c_fc.bias", (width,))),
        *(("mlp.c_proj.weight", (width, hidden)), ("mlp.c_proj.bias", (hidden,))),
    )
    tables = (("wte.weight", (vocab, hidden)), ("wpe.weight", (fields.number("n_positions"), hidden)))
    last = _norm("ln_f", hidden, True)
    head = () if fields.tied else _linear("lm_head", vocab, hidden)
    units = (
        UnitShapes("embedding", 1, (*tables, *(last if fields.tied else ()))),
        UnitShapes("layer", fields.layers, layer),
        *(() if fields.tied else (UnitShapes("head", 1, (*last, *head)),)),
    )
    return _dense(fields, units, width, vocab)


def _siglip_vision(fields: _Fields) -> Architecture:
    hidden, width, patch = fields.hidden, fields.number("intermediate_size"), fields.number("patch_size")
    num_patches = (fields.number("image_size") // patch) ** 2
    names = "k_proj", "v_proj", "q_proj", "out_proj"
    layer = (
        *_norm("layer_norm1", hidden, True),
        *(parameter for name in names for parameter in _linear(f"self_attn.{name}", hidden, hidden, True)),
        *_norm("layer_norm2", hidden, True),
        *_linear("mlp.fc1", width, hidden, True),
        *_linear("mlp.fc2", hidden, width, True),
    )
    embedding = (
        ("patch_embedding.weight", (hidden, fields.number("num_channels", 3), patch, patch)),
        ("patch_embedding.bias", (hidden,)),
        ("position_embedding.weight", (num_patches, hidden)),
    )
    pooling = (
        ("head.probe", (1, 1, hidden)),
        *(("head.attention.in_proj_weight", (3 * hidden, hidden)), ("head.attention.in_proj_bias", (3 * hidden,))),
        *_linear("head.attention.out_proj", hidden, hidden, True),
        *_norm("head.layernorm", hidden, True),
        *_linear("head.mlp.fc1", width, hidden, True),
        *_linear("head.mlp.fc2", hidden, width, True),
    )
    units = (
        UnitShapes("embedding", 1, embedding),
        UnitShapes("layer", fields.layers, layer),
        UnitShapes("head", 1, (*_norm("post_layernorm", hidden, True), *pooling)),
    )
    return _dense(fields, units, width, 0)


def _dense(fields: _Fields, units: tuple[UnitShapes, ...], width: int, vocab: int) -> Architecture:
    total = sum(unit.count * unit.num_parameters for unit in units)
    return Architecture(
        model_type=fields.model_type,
        units=units,
        tied=fields.tied,
        hidden_size=fields.hidden,
        num_layers=fields.layers,
        num_attention_heads=fields.heads,
        num_key_value_heads=fields.key_value_heads,
        head_dim=fields.head_dim,
        intermediate_size=width,
        vocab_size=vocab,
        num_active_parameters=total,
        num_parameters=total,
    )


_FAMILIES: dict[str, Callable[[_Fields], Architecture]] = {
    "deepseek_v3": _deepseek_v3,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _qwen3_moe,
    "siglip_vision_model": _siglip_vision,
}
SUPPORTED = tuple(sorted({*_FAMILIES, *_PARTS}))
