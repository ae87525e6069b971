"""``accelerate_fsdp2``: ``Accelerator.prepare`` and ``Trainer.train`` shard with this engine inside of it.

accelerate takes its FSDP path on accelerators only, so the tests tell its state that it may take it on the CPU.
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from dbuffer import observe_collectives
from megatron_fsdp import FsdpModule
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.huggingface import accelerate_fsdp2
from tests.docs.blocks import blocks_of
from tests.functional.megatron_fsdp.uneven.programs import PROGRAMS
from tests.functional.megatron_fsdp.uneven.programs import train as train_on_routes
from tests.harness.oracle import whole_state
from tests.harness.twins import Twins
from tests.integration.adapters import QUIET, make_lora
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import (
    Samples,
    draw_tokens,
    generated,
    make_model,
    make_trainer,
    reset_accelerate,
    shard,
    worst,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    """Run the block in a folder; ``contextlib.chdir`` is new in Python 3.11."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


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


def plugin_of(version: int = 2, **settings: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap", **settings)


# ---------------------------------------------------------------- Accelerator.prepare

NUM_STEPS = 3


def train(model: Any, optimizer: Any, ranks: range, accelerator: Accelerator | None = None) -> None:
    """Take steps of two microbatches, through accelerate where a sharded model is this rank's."""
    model.train()
    for step in range(NUM_STEPS):
        for rank in ranks:
            for microbatch in range(2):
                tokens = draw_tokens(rank, 10 * step + microbatch)
                if accelerator is None:
                    (model(input_ids=tokens, labels=tokens).loss / len(ranks) / 2).backward()
                    continue
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        if accelerator is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def prepare_and_train(
    kind: str, settings: dict[str, Any], compiler: TorchDynamoPlugin | None = None
) -> tuple[float, float, int]:
    oracle, model = make_model(kind), make_model(kind)
    start = whole_state(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = torch.distributed.fsdp.fully_shard, torch.distributed.fsdp.FSDPModule
    with fsdp_on_cpu():
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin_of(**settings), dynamo_plugin=compiler
        )
        with accelerate_fsdp2():
            model, optimizer = accelerator.prepare(model, optimizer)
        assert (torch.distributed.fsdp.fully_shard, torch.distributed.fsdp.FSDPModule) == own
        assert isinstance(model, nn.Module)
        assert isinstance(model, FsdpModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        kinds: set[str] = set()
        with observe_collectives(lambda call: kinds.add(call.kind)):
            train(model, optimizer, range(dist.get_rank(), dist.get_rank() + 1), accelerator)
        assert {"all_gather", "reduce_scatter"} <= kinds
        num_entries = len(accelerator.get_state_dict(model))
    train(oracle, torch.optim.AdamW(oracle.parameters(), lr=0.01), range(dist.get_world_size()))
    found = {
        re.sub("_checkpoint_wrapped_module.|_orig_mod.", "", name): value for name, value in whole_state(model).items()
    }
    return worst(found, whole_state(oracle)), worst(whole_state(oracle), start), num_entries


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reshard_after_forward": False},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"cpu_ram_efficient_loading": True},
    ],
    ids=["default", "kept", "checkpointing", "offloaded checkpoints", "efficient loading"],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prepared_model_trains_as_the_whole_one(kind: str, settings: dict[str, Any]) -> None:
    # accelerate gathers whole state on the first rank alone.
    results = run_ranks(2, prepare_and_train, kind, settings)
    assert [entries for *_, entries in results] == [len(make_model(kind).state_dict()), 0]
    for apart, movement, _ in results:
        assert apart < 2e-5
        assert movement > 1e-2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("by_region", [False, True], ids=["whole", "by region"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_accelerate_compiles_trains_as_the_whole_one(kind: str, by_region: bool) -> None:
    compiler = TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER, use_regional_compilation=by_region)
    for apart, movement, _ in run_ranks(2, prepare_and_train, kind, {}, compiler):
        assert apart < 2e-5
        assert movement > 1e-2


def prepare_and_skip() -> None:
    """Train a prepared model whose ranks run different parts."""
    program = PROGRAMS["early_exit"]
    assert program.routes is not None

    def prepared(model: Any) -> None:
        with fsdp_on_cpu():
            plugin = plugin_of(transformer_cls_names_to_wrap=["Block"])
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            with accelerate_fsdp2(forward_order=True):
                optimizer = torch.optim.SGD(model.parameters())
                assert accelerator.prepare(model, optimizer)[0] is model

    train_on_routes(Twins(lambda: program.build(0), None, prepared), program.routes)


def test_ranks_of_a_prepared_model_may_skip_units() -> None:
    run_ranks(2, prepare_and_skip)


# ---------------------------------------------------------------- Trainer.train

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
        assert isinstance(trainer.model, nn.Module)
        assert isinstance(trainer.model, FsdpModule)
        first, tokens = whole_state(trainer.model), generated(trainer.model)
        trainer.save_model(str(folder / "saved"))
    with fsdp_on_cpu():
        again = make_trainer(MAKERS[kind](), folder / "again", **FSDP)
        with accelerate_fsdp2():
            again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    losses = losses_of(again)
    return {"losses": (losses_of(trainer), losses), "best": first, "last": whole_state(again.model), "tokens": tokens}


def train_whole(kind: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in (("best", {"max_steps": 2}), ("last", {})):
        reset_accelerate()
        trainer = make_trainer(MAKERS[kind](), folder / "whole", per_device_train_batch_size=6, **options)
        trainer.train()
        found |= {name: whole_state(trainer.model), "losses": losses_of(trainer)}
        found.setdefault("tokens", generated(trainer.model))
    return found


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
    saved = tmp_path / "saved"
    is_adapter = kind == "lora"
    plain = make_model("llama" if is_adapter else kind)
    loaded = PeftModel.from_pretrained(plain, saved) if is_adapter else type(plain).from_pretrained(saved)
    assert worst(whole_state(loaded), found["best"]) == 0


def train_as_on_the_page(folder: Path) -> tuple[bool, float]:
    """Run the Trainer block of docs/huggingface.md; return whether its model is sharded, and how far it moved."""
    block = next(block for block in blocks_of("docs/huggingface.md") if "trainer.train()" in block.code)
    names: dict[str, Any] = {"model": make_model("llama"), "rows": Samples()}
    start = whole_state(names["model"])
    # It writes to runs/.
    with chdir(folder), fsdp_on_cpu():
        exec(block.code, names)
    return isinstance(names["trainer"].model, FsdpModule), worst(whole_state(names["trainer"].model), start)


# The page is for GPUs, where the Trainer pins memory.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_the_block_of_the_page_trains_a_sharded_model(tmp_path: Path) -> None:
    for is_sharded, movement in run_ranks(2, train_as_on_the_page, tmp_path):
        assert is_sharded
        assert movement > 1e-5


# ---------------------------------------------------------------- refused


def wrap_again(folder: Path) -> None:
    model = shard(make_model("llama"))
    Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))


def train_off_the_path(folder: Path) -> None:
    with accelerate_fsdp2():
        make_trainer(make_model("llama"), folder).train()


def off_the_path_by_version(folder: Path) -> None:
    with fsdp_on_cpu(), accelerate_fsdp2():
        Accelerator(cpu=True, fsdp_plugin=plugin_of(version=1)).prepare(make_model("llama"))


MISTAKES = {
    wrap_again: "DistributedDataParallel cannot be around it",
    train_off_the_path: r"^accelerate_fsdp2.. needs a GPU .* takes its FSDP2 path on GPUs only.*not on its FSDP2 path "
    r".found distributed_type MULTI_CPU.*fix: on GPUs .*on CPUs, .* call fully_shard on the model's layers",
    off_the_path_by_version: "not on its FSDP2 path .found distributed_type FSDP, fsdp_version 1",
}


def messages_of_mistakes(folder: Path) -> list[str]:
    found = []
    for mistake in MISTAKES:
        reset_accelerate()
        with pytest.raises(ConfigError) as caught:
            mistake(folder)
        found.append(str(caught.value))
    reset_accelerate()
    own = torch.distributed.fsdp.fully_shard
    with pytest.raises(KeyError), accelerate_fsdp2():
        raise KeyError
    assert torch.distributed.fsdp.fully_shard is own
    return found


@pytest.mark.filterwarnings("ignore:.*FSDP.*is deprecated:FutureWarning")
def test_settings_that_shard_twice_or_never_are_refused_with_the_fix(tmp_path: Path) -> None:
    for messages in run_ranks(2, messages_of_mistakes, tmp_path):
        for message, wanted in zip(messages, MISTAKES.values(), strict=True):
            assert re.search(wanted, message), message
            assert "accelerate_fsdp2()" in message


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}]
)
def test_processes_started_together_but_seen_alone_are_refused_others_warned(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_accelerate()
    model = nn.Linear(3, 5)
    # accelerate looks at LOCAL_RANK, and asks for neither on a machine without an accelerator.
    accelerator = Accelerator(cpu=True) if not variables else Accelerator()
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items() if variables else ():
        monkeypatch.setenv(name, value)
    raised: Any = pytest.raises(ConfigError, match=r"it sees 1 of 2 processes.* call fully_shard")
    warned = pytest.warns(UserWarning, match="it sees 1 of 1 processes.*nothing is sharded")
    with accelerate_fsdp2(), raised if variables else warned:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    reset_accelerate()
