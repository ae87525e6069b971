"""Tiny models with peft's adapters, whose values the seed decides."""

import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model

from tests.integration.tiny_models import make_model

# Warnings of peft about its use of transformers, and about learned prompts.
QUIET = ["ignore:.*is deprecated and will be removed in v6:FutureWarning", "ignore:Position ids are not:UserWarning"]


def make_lora(kind: str = "llama") -> PeftModel:
    """Make a model with LoRA in its attention, and both matrices drawn, so that they matter from the first step on."""
    base = make_model(kind)
    torch.manual_seed(7)
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    options = {"r": 3, "target_modules": targets, "init_lora_weights": False, "fan_in_fan_out": kind == "gpt2"}
    return get_peft_model(base, LoraConfig(task_type=TaskType.CAUSAL_LM, **options))


def make_prompt() -> PeftModel:
    """Make a model with a learned prompt of five tokens."""
    base = make_model("llama")
    torch.manual_seed(7)
    return get_peft_model(base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5))
