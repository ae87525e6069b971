"""Tiny, randomly initialised transformers models with ugly shapes, and data that differs on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from megatron_fsdp import fully_shard, register_fsdp_forward_method

VOCABULARY = 61
BATCH, LENGTH = 3, 7
ALL = ("llama", "qwen3_moe", "gpt2")


def make_model(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a model whose values the seed decides: "llama", "tied_llama", "qwen3_moe" or "gpt2" (tied)."""
    torch.manual_seed(seed)
    shapes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": 16}
    llama = {"hidden_size": 24, "intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 1}
    if kind == "gpt2":
        gpt2 = {"vocab_size": VOCABULARY, "n_embd": 20, "n_layer": 3, "n_head": 5, "n_positions": 16}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**gpt2 | dropout | {"bos_token_id": 1, "eos_token_id": 2} | changes))
    if kind == "qwen3_moe":
        experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shapes | llama | experts | changes))
    tied = {"tie_word_embeddings": kind == "tied_llama"}
    return LlamaForCausalLM(LlamaConfig(**shapes | llama | tied | changes))


def draw_tokens(rank: int, step: int, batch: int = BATCH) -> torch.Tensor:
    """Draw one rank's (batch, LENGTH) tokens of one step: no two are alike."""
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)


def train(model: nn.Module, num_steps: int, ranks: Sequence[int], learning_rate: float = 0.01) -> list[float]:
    """Train on the data of ``ranks``: this rank alone for a sharded model, all for the whole one. Return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    losses = []
    model.train()
    for step in range(num_steps):
        total = 0.0
        for rank in ranks:
            tokens = draw_tokens(rank, step)
            loss = model(input_ids=tokens, labels=tokens).loss / len(ranks)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def shard(model: PreTrainedModel, mesh: DeviceMesh | None = None, **options: Any) -> PreTrainedModel:
    """Shard a model in place as docs/huggingface.md does: each layer is a unit, and the rest another."""
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for layer in layers:
        fully_shard(layer, mesh, **options)
    sharded: PreTrainedModel = fully_shard(model, mesh, **{**options, "reshard_after_forward": None})
    register_fsdp_forward_method(sharded, "generate")
    return sharded


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two state dicts with the same names and shapes."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max((found[name].float() - wanted[name].float()).abs().max().item() for name in wanted)


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Average each value over the ranks of the job."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def logits_of(model: nn.Module) -> torch.Tensor:
    """Return the logits of the same tokens on every rank; on a sharded model, every rank calls it."""
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=draw_tokens(0, 999)).logits
    return logits.clone()


def generated(model: Any) -> list[int]:
    """Return a prompt and its continuation by the most likely tokens."""
    model.eval()
    tokens = model.generate(input_ids=draw_tokens(0, 5, 1), max_new_tokens=4, do_sample=False, pad_token_id=0)
    found: list[int] = tokens[0].tolist()
    return found


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, no two alike."""

    def __init__(self) -> None:
        self.tokens = draw_tokens(0, 0, batch=24)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """Return a Trainer that takes samples in order, without a schedule, and logs every step."""
    usual = {"per_device_train_batch_size": 3, "max_steps": 4, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=0.01,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{**usual, **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=Samples(), eval_dataset=Samples())


def reset_accelerate() -> None:
    """Make accelerate look at its surroundings anew: its state is that of the process, and ranks live on."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
