"""TRL's DPO with LoRA: the reference is the model itself, its adapters off between forward and backward."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.models.activation_offloading import get_act_offloading_ctx_manager

from megatron_fsdp import FsdpModule
from megatron_fsdp.huggingface import accelerate_fsdp2
from tests.harness.oracle import whole_state
from tests.integration.adapters import QUIET, make_lora
from tests.integration.ranks import run_ranks
from tests.integration.test_accelerate import FSDP, fsdp_on_cpu
from tests.integration.tiny_models import (
    VOCABULARY,
    draw_tokens,
    make_model,
    reset_accelerate,
    shard,
    worst,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
NUM_STEPS = 4


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words "w3", one for each number of the vocabulary after the special ones."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def preferences() -> Dataset:
    """Return different rows of a prompt, a chosen and a rejected answer."""

    def text(start: int, length: int) -> str:
        return " ".join(f"w{3 + (start + 5 * index) % (VOCABULARY - 3)}" for index in range(length))

    rows = [
        {"prompt": text(row, 3), "chosen": " " + text(row + 11, 4), "rejected": " " + text(2 * row + 30, 4)}
        for row in range(24)
    ]
    return Dataset.from_list(rows)


def trainer_of(folder: Path, **options: Any) -> DPOTrainer:
    arguments = DPOConfig(
        output_dir=str(folder),
        learning_rate=0.02,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_steps=NUM_STEPS,
        save_strategy="no",
        logging_steps=1,
        beta=0.5,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return DPOTrainer(model=make_lora(), args=arguments, train_dataset=preferences(), processing_class=tokenizer())


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_sharded(folder: Path, options: dict[str, Any]) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    with fsdp_on_cpu():
        with accelerate_fsdp2():
            trainer = trainer_of(folder, per_device_train_batch_size=2, **FSDP, **options)
            start = whole_state(trainer.model)
            trainer.train()
        assert isinstance(trainer.model, nn.Module)
        assert isinstance(trainer.model, FsdpModule)
        assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        return losses_of(trainer), start, whole_state(trainer.model)


def train_replicated(folder: Path, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Train on two ranks of accelerate's DDP."""
    reset_accelerate()
    trainer = trainer_of(folder, per_device_train_batch_size=2, **options)
    trainer.train()
    assert trainer.accelerator.num_processes == dist.get_world_size()
    return losses_of(trainer), whole_state(trainer.accelerator.unwrap_model(trainer.model))


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointing"])
def test_dpo_with_lora_loses_what_ddp_loses(is_checkpointed: bool, tmp_path: Path) -> None:
    options = {"gradient_checkpointing": is_checkpointed}
    wanted = run_ranks(2, train_replicated, tmp_path / "replicated", options)[0]
    losses, start, state = run_ranks(2, train_sharded, tmp_path / "sharded", options)[0]
    assert losses == pytest.approx(wanted[0], abs=2e-5)
    assert losses[0] != pytest.approx(losses[-1], abs=1e-2)
    assert worst(state, wanted[1]) < 2e-5
    assert worst(state, start) > 1e-2


class Stream:
    """A stand-in for a GPU's stream, on which each copy ends before the next line of Python."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return object()


def offload_and_train(has_streams: bool) -> tuple[float, int]:
    """Train a sharded and a whole model; return how their weights differ, and the number of offloaded tensors."""
    stream = Stream()
    module = SimpleNamespace(
        Stream=Stream,
        empty_cache=lambda: None,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
    )
    oracle, model = make_model("llama"), shard(make_model("llama"))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, oracle)]
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")),
        mock.patch.object(torch, "get_device_module", return_value=module),
        mock.patch.object(torch.Tensor, "record_stream", return_value=None),
    ):
        offload: Any = get_act_offloading_ctx_manager(
            model=model, use_streams=has_streams, min_offload_size=4, use_pin_memory=False
        )
        num_offloaded = 0
        for step in range(3):
            tokens = draw_tokens(dist.get_rank(), step)
            with offload:
                loss = model(input_ids=tokens, labels=tokens).loss
            num_offloaded += sum(bool(entry[1]) for entry in offload.tracker.values())
            loss.backward()
            for rank in range(dist.get_world_size()):
                tokens = draw_tokens(rank, step)
                (oracle(input_ids=tokens, labels=tokens).loss / dist.get_world_size()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return worst(whole_state(model), whole_state(oracle)), num_offloaded


@pytest.mark.parametrize("has_streams", [False, True], ids=["one stream", "two streams"])
def test_activations_that_trl_offloads_change_no_weight(has_streams: bool) -> None:
    for apart, num_offloaded in run_ranks(2, offload_and_train, has_streams):
        assert apart < 2e-5
        assert num_offloaded > 100
