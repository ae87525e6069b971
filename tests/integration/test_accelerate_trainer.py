"""``with accelerate_fsdp2(): trainer.train()``: a script for FSDP2 with one line around it.

accelerate takes its FSDP path on accelerators only, so the tests tell its state that it may take it on the CPU.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from megatron_fsdp import FsdpModule
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.huggingface import accelerate_fsdp2
from tests.integration.adapters import QUIET, make_lora
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import (
    generated,
    make_model,
    make_trainer,
    reset_accelerate,
    shard,
    whole_state,
    worst,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Let accelerate take the path on the CPU that it takes on GPUs where it got a plugin."""
    start = AcceleratorState.__init__

    def begin(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None:
            self.fsdp_plugin = plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    reset_accelerate()
    with mock.patch.object(AcceleratorState, "__init__", begin):
        yield
    reset_accelerate()


FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
MAKERS = {
    "llama": functools.partial(make_model, "llama"),
    "gpt2": functools.partial(make_model, "gpt2"),
    "lora": make_lora,
}


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_and_resume(kind: str, folder: Path) -> dict[str, Any]:
    # The evaluation falls, so under this setting the best step is the first that is evaluated.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    steps = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    with fsdp_on_cpu():
        trainer = make_trainer(MAKERS[kind](), folder, **FSDP, **steps, **best)
        with accelerate_fsdp2():
            trainer.train()
        model = trainer.model
        assert isinstance(model, FsdpModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        first, tokens = whole_state(model), generated(model)
        trainer.save_model(str(folder / "saved"))
    with fsdp_on_cpu():
        again = make_trainer(MAKERS[kind](), folder / "again", **FSDP)
        with accelerate_fsdp2():
            again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    losses = losses_of(again)
    return {"losses": (losses_of(trainer), losses), "best": first, "last": whole_state(again.model), "tokens": tokens}


def train_whole(kind: str, folder: Path) -> dict[str, Any]:
    reset_accelerate()
    trainer = make_trainer(MAKERS[kind](), folder / "whole", per_device_train_batch_size=6, max_steps=2)
    trainer.train()
    best, tokens = whole_state(trainer.model), generated(trainer.model)
    reset_accelerate()
    trainer = make_trainer(MAKERS[kind](), folder / "whole", per_device_train_batch_size=6)
    trainer.train()
    return {"losses": losses_of(trainer), "best": best, "last": whole_state(trainer.model), "tokens": tokens}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_trainer_s_own_fsdp_saves_resumes_and_loads_the_best_model(kind: str, tmp_path: Path) -> None:
    oracle = run_ranks(1, train_whole, kind, tmp_path)[0]
    for found in run_ranks(2, train_and_resume, kind, tmp_path):
        first, resumed = found["losses"]
        assert first == resumed
        assert first == pytest.approx(oracle["losses"], abs=2e-4)
        assert worst(found["best"], oracle["best"]) < 2e-5
        assert worst(found["last"], oracle["last"]) < 2e-5
        assert found["tokens"] == oracle["tokens"]
    assert worst(oracle["best"], oracle["last"]) > 1e-3
    saved = load_saved(kind, tmp_path / "saved")
    assert worst(whole_state(saved), found["best"]) == 0


def load_saved(kind: str, folder: Path) -> nn.Module:
    if kind == "lora":
        loaded: nn.Module = PeftModel.from_pretrained(make_model("llama"), folder)
        return loaded
    whole: nn.Module = type(make_model(kind)).from_pretrained(folder)
    return whole


def wrap_again(folder: Path) -> None:
    reset_accelerate()
    model = shard(make_model("llama"))
    Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))


def train_off_the_path(folder: Path) -> None:
    reset_accelerate()
    with accelerate_fsdp2():
        make_trainer(make_model("llama"), folder).train()


def off_the_path_by_version(folder: Path) -> None:
    model = make_model("llama")
    with fsdp_on_cpu(), accelerate_fsdp2():
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
        accelerator.prepare(model)


MISTAKES = {
    wrap_again: "DistributedDataParallel cannot be around it",
    train_off_the_path: "not on its FSDP2 path .found distributed_type MULTI_CPU",
    off_the_path_by_version: "not on its FSDP2 path .found distributed_type FSDP, fsdp_version 1",
}


def messages_of_mistakes(folder: Path) -> list[str]:
    found = []
    for mistake in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            mistake(folder)
        found.append(str(caught.value))
    reset_accelerate()
    return found


@pytest.mark.filterwarnings("ignore:.*FSDP.*is deprecated:FutureWarning")
def test_what_would_shard_twice_or_not_at_all_is_refused_with_the_cure(tmp_path: Path) -> None:
    for messages in run_ranks(2, messages_of_mistakes, tmp_path):
        for message, wanted in zip(messages, MISTAKES.values(), strict=True):
            assert re.search(wanted, message), message
            assert "accelerate_fsdp2()" in message
