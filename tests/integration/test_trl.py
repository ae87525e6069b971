"""TRL's DPO with LoRA: the reference is the model itself, its adapters off between forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from megatron_fsdp import FsdpModule
from megatron_fsdp.huggingface import accelerate_fsdp2
from tests.integration.adapters import QUIET, make_lora
from tests.integration.ranks import run_ranks
from tests.integration.test_accelerate import FSDP, fsdp_on_cpu
from tests.integration.tiny_models import VOCABULARY, reset_accelerate, whole_state, worst

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
    """Return rows of a prompt, a chosen and a rejected answer, of which no two are alike."""

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
