"""``Accelerator.prepare`` shards with this engine inside of ``accelerate_fsdp2``.

accelerate takes its FSDP path on accelerators only, so the tests tell its state that it may take it on the CPU.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from torch.distributed.tensor import DTensor

from dbuffer import observe_collectives
from megatron_fsdp import FsdpModule
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.huggingface import accelerate_fsdp2
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import draw_tokens, make_model, reset_accelerate, whole_state, worst

NUM_STEPS = 3


def make_accelerator(**settings: Any) -> Accelerator:
    reset_accelerate()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **settings)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def train_prepared(accelerator: Accelerator, model: Any, optimizer: Any, rank: int) -> None:
    model.train()
    for step in range(NUM_STEPS):
        for microbatch in range(2):
            with accelerator.accumulate(model):
                tokens = draw_tokens(rank, 10 * step + microbatch)
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def train_whole(kind: str, num_ranks: int) -> dict[str, torch.Tensor]:
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            for microbatch in range(2):
                tokens = draw_tokens(rank, 10 * step + microbatch)
                (model(input_ids=tokens, labels=tokens).loss / num_ranks / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


def prepare_and_train(kind: str, settings: dict[str, Any]) -> tuple[float, float, int]:
    accelerator = make_accelerator(**settings)
    model = make_model(kind)
    start = whole_state(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = torch.distributed.fsdp.fully_shard
    with accelerate_fsdp2():
        model, optimizer = accelerator.prepare(model, optimizer)
    assert torch.distributed.fsdp.fully_shard is own
    assert isinstance(model, FsdpModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    kinds: set[str] = set()
    with observe_collectives(lambda call: kinds.add(call.kind)):
        train_prepared(accelerator, model, optimizer, dist.get_rank())
    assert {"all_gather", "reduce_scatter"} <= kinds
    wanted = train_whole(kind, dist.get_world_size())
    found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in whole_state(model).items()}
    return worst(found, wanted), worst(wanted, start), len(accelerator.get_state_dict(model))


@pytest.mark.parametrize(
    "settings",
    [{}, {"reshard_after_forward": False}, {"activation_checkpointing": True}, {"cpu_ram_efficient_loading": True}],
    ids=["default", "kept", "checkpointing", "efficient loading"],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prepared_model_trains_as_the_whole_one(kind: str, settings: dict[str, Any]) -> None:
    # accelerate gathers whole state on the first rank alone.
    num_entries = [len(make_model(kind).state_dict()), 0]
    results = run_ranks(2, prepare_and_train, kind, settings)
    assert [entries for _, _, entries in results] == num_entries
    for apart, movement, _ in results:
        assert apart < 2e-5
        assert movement > 1e-2


def raise_inside() -> None:
    with accelerate_fsdp2():
        assert torch.distributed.fsdp.FSDPModule is FsdpModule
        raise KeyError


def test_pytorch_s_functions_are_put_back_when_the_block_raises() -> None:
    own = torch.distributed.fsdp.fully_shard, torch.distributed.fsdp.FSDPModule
    with pytest.raises(KeyError):
        raise_inside()
    assert (torch.distributed.fsdp.fully_shard, torch.distributed.fsdp.FSDPModule) == own


def test_a_process_alone_that_is_not_on_the_path_is_warned_that_nothing_is_sharded() -> None:
    reset_accelerate()
    model = torch.nn.Linear(3, 5)
    with accelerate_fsdp2(), pytest.warns(UserWarning, match="one process, .* nothing is sharded"):
        Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    reset_accelerate()


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}]
)
def test_processes_started_together_that_accelerate_sees_alone_are_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_accelerate()
    model = torch.nn.Linear(3, 5)
    # accelerate looks at LOCAL_RANK, and asks for neither on a machine without an accelerator.
    accelerator = Accelerator()
    assert accelerator.num_processes == 1
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with (
        accelerate_fsdp2(),
        pytest.raises(ConfigError, match=r"2 processes were started together .* call fully_shard"),
    ):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    reset_accelerate()
