"""Models with peft's adapters, sharded by ``prepare_model``."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp.integrations.huggingface.prepare import prepare_model
from tests.integration.adapters import QUIET, make_lora, make_prompt
from tests.integration.ranks import run_ranks
from tests.integration.test_transformers_trainer import run_trainer
from tests.integration.tiny_models import LENGTH, generated, make_model, train, whole_state, worst

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

KINDS = {"lora": make_lora, "lora of a tied model": lambda: make_lora("gpt2"), "prompt": make_prompt}
# Adapters of a tiny model take less, its weights more than ten times as much.
FEW_BYTES = 8192


def train_save_and_generate(name: str, config: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    oracle, model = KINDS[name](), prepare_model(KINDS[name](), config)
    start = whole_state(oracle)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    train(model, 4, [dist.get_rank()])
    train(oracle, 4, range(dist.get_world_size()))
    gathered: list[CollectiveCall] = []
    with observe_collectives(gathered.append):
        model.save_pretrained(folder)
    num_bytes = sum(call.num_bytes for call in gathered if call.kind == "all_gather")
    apart = worst(whole_state(model), whole_state(oracle))
    return apart, worst(whole_state(oracle), start), num_bytes, generated(model), generated(oracle)


@pytest.mark.parametrize("config", [{}, {"auto_wrap_policy": "NO_WRAP"}], ids=["units", "one unit"])
@pytest.mark.parametrize("name", KINDS)
def test_adapters_train_save_and_generate_as_those_of_a_whole_model(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(2, train_save_and_generate, name, config, tmp_path)
    for apart, movement, num_bytes, found, wanted in results:
        assert apart < 2e-5
        assert movement > 1e-2
        assert 0 < num_bytes < FEW_BYTES
        assert found == wanted
        assert len(found) == LENGTH + 4
    loaded = PeftModel.from_pretrained(make_model("gpt2" if "tied" in name else "llama"), tmp_path)
    assert generated(loaded) == results[0][-1]


def train_adapters(is_sharded: bool, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    model = prepare_model(make_lora()) if is_sharded else make_lora()
    losses, norms, trainer = run_trainer(model, folder / "run", 3 if is_sharded else 6, **options)
    assert (trainer.model_wrapped is model) == is_sharded
    trainer.save_model(str(folder / "saved"))
    return {"losses": losses, "norms": norms, "state": whole_state(model), "tokens": generated(model)}


def test_the_trainer_trains_sharded_adapters_as_whole_ones_and_saves_them(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    options |= {"save_only_model": True}
    oracle = run_ranks(1, train_adapters, False, tmp_path / "whole", options)[0]
    for found in run_ranks(2, train_adapters, True, tmp_path, options):
        assert found["losses"] == pytest.approx(oracle["losses"], abs=2e-4)
        assert found["norms"] == pytest.approx(oracle["norms"], abs=1e-4)
        assert worst(found["state"], oracle["state"]) < 2e-5
        assert found["tokens"] == oracle["tokens"]
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2"):
        loaded = PeftModel.from_pretrained(make_model("llama"), folder)
        assert worst(whole_state(loaded), found["state"]) == 0
