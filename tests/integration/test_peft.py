"""Models with peft's adapters, sharded as any other model is."""

from pathlib import Path

import pytest
import torch.distributed as dist
from peft import PeftModel

from megatron_fsdp import full_state_dict
from tests.harness.oracle import whole_state
from tests.integration.adapters import QUIET, make_lora, make_prompt
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import generated, make_model, shard, train, worst

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

KINDS = {"lora": make_lora, "lora of a tied model": lambda: make_lora("gpt2"), "prompt": make_prompt}


def train_and_save(name: str, folder: Path) -> tuple[float, float, list[int]]:
    oracle, model = KINDS[name](), shard(KINDS[name]())
    start = whole_state(oracle)
    train(model, 4, [dist.get_rank()])
    train(oracle, 4, range(dist.get_world_size()))
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        if name == "prompt":
            # peft computes prompts of their module's weights when it saves them.
            plain = KINDS[name]()
            plain.load_state_dict(state)
            plain.save_pretrained(folder)
        else:
            model.save_pretrained(folder, state_dict=state)
    return worst(whole_state(model), whole_state(oracle)), worst(whole_state(oracle), start), generated(oracle)


@pytest.mark.parametrize("name", KINDS)
def test_adapters_train_and_save_as_those_of_a_whole_model(name: str, tmp_path: Path) -> None:
    results = run_ranks(2, train_and_save, name, tmp_path)
    for apart, movement, _ in results:
        assert apart < 2e-5
        assert movement > 1e-2
    loaded = PeftModel.from_pretrained(make_model("gpt2" if "tied" in name else "llama"), tmp_path)
    assert generated(loaded) == results[0][-1]
