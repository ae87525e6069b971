"""Tiny models of the architectures that transformers has, from their own configurations with small numbers in them."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["TASKS", "architectures", "build", "layers_of", "loss_of"]

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sound": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
}
"""For each task, the class of each architecture."""

VOCABULARY = 61
_SMALL = {
    32: "hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim embed_dim projection_dim image_size "
    "lru_width attention_hidden_size",
    48: "hidden_dim intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dim_ff",
    24: "shared_expert_intermediate_size moe_intermediate_size expert_ffn_hidden_size",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k linear_num_key_heads "
    "index_n_heads",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts time_step_rank mamba_dt_rank linear_num_value_heads index_topk",
    8: "head_dim d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_n_heads mamba_d_state "
    "mamba_d_head mamba_num_heads mamba_head_dim num_mamba_heads patch_size linear_key_head_dim linear_value_head_dim "
    "index_head_dim",
    16: "q_lora_rank kv_lora_rank qk_head_dim",
    64: "max_position_embeddings n_positions n_ctx max_sequence_length",
    1: "n_group topk_group first_k_dense_replace",
    VOCABULARY: "vocab_size",
}
# Ranks drop other layers, and mask other positions, than one process would.
_RANDOM = ("dropout", "drop_rate", "pdrop", "layerdrop", "mask_time_prob", "mask_feature_prob")
_MAX_NUMEL = 30_000_000


def architectures(task: str) -> Iterator[tuple[str, type[PreTrainedModel]]]:
    """Yield the name and the class of each architecture for a task."""
    for kind, name in TASKS[task].items():
        # The causal form of a model for masked text has the same layers.
        if task == "masked" and kind in TASKS["causal"]:
            continue
        found = getattr(transformers, name[0] if isinstance(name, (tuple, list)) else name, None)
        if found is not None:
            yield kind, found


def build(kind: str, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Make a tiny model whose values a fixed seed decides.

    Raises:
        Exception: the small numbers do not fit together in this architecture; or ValueError: the model is large.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind]()
    _shrink(config)
    config.use_cache = False
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in model_class(config).parameters())
    if numel > _MAX_NUMEL:
        raise ValueError(f"{kind} has {numel} elements")
    return model_class(config).train()


def _shrink(config: PretrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value)
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            kinds = list(dict.fromkeys(value))
            setattr(config, name, (kinds * 2)[:2])
        elif isinstance(value, float) and any(each in name for each in _RANDOM):
            setattr(config, name, 0.0)
        elif type(value) is int:
            setattr(config, name, _small(name, value))
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1


def _small(name: str, value: int) -> int:
    if name.endswith("_token_id"):
        return value if value < VOCABULARY else 1
    return next((number for number, names in _SMALL.items() if name in names.split()), value)


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers that transformers names as units, or else the members of the model's lists; inner ones first.

    Embeddings stay with the root, because heads are tied to them.
    """
    named = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in named]
    if not layers:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
        layers = [layer for each in lists for layer in each if not isinstance(layer, nn.ModuleList)]
    return [layer for layer in dict.fromkeys(layers) if "Embedding" not in type(layer).__name__][::-1]


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    """Return the model's own loss of one rank's data."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    # For layers that draw while they train, such as routers.
    torch.manual_seed(100 * rank + step)
    labels = torch.randint(3, 30, (2, 3), generator=generator)
    inputs: dict[str, torch.Tensor]
    if model.main_input_name == "pixel_values":
        channels, size = getattr(model.config, "num_channels", 3), getattr(model.config, "image_size", 32)
        images = torch.randn(2, channels, size, size, generator=generator)
        inputs = {"pixel_values": images, "labels": labels[:, 0] % 2}
    elif model.main_input_name == "input_values":
        inputs = {"input_values": torch.randn(2, 4000, generator=generator), "labels": labels}
    else:
        tokens = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
    loss: torch.Tensor = model(**inputs).loss
    return loss
