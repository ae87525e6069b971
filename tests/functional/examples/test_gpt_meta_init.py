"""A model that is built without memory: its weights, its losses and what a rank holds of it."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import pretrain_gpt
from gpt import parallel
from tests.harness import run_ranks
from tests.unit.examples.jobs import make_job, train_steps, whole_weights

FLAG = "--init-model-with-meta-device"
RUN = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 3 "
    "--lr 0.01 --log-interval 1 --eval-iters 0 --num-tokens-to-generate 0 --distributed-backend gloo --data-path text "
    "--save run"
)
SHARDED = "--use-megatron-fsdp --micro-batch-size 2"
VARIETY = "--num-experts 2 --untie-embeddings-and-output-weights --normalization RMSNorm"


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
    return str(path)


def weights(flags: str) -> dict[str, torch.Tensor]:
    return whole_weights(make_job(flags))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("model", ["", VARIETY], ids=["plain", "variety"])
def test_weights_are_those_of_a_model_that_was_built_whole(num_ranks: int, model: str, text: str) -> None:
    (wanted,) = run_ranks(1, weights, f"--micro-batch-size 2 --data-path {text} {model}")
    for found in run_ranks(num_ranks, weights, f"{SHARDED} --data-path {text} {model} {FLAG}"):
        assert found.keys() == wanted.keys()
        assert {name for name in found if not torch.equal(found[name], wanted[name])} == set()


@pytest.mark.parametrize("more", ["--bf16", "--num-distributed-optimizer-instances 2", "--optimizer sgd"])
def test_training_goes_the_same_way(more: str, text: str) -> None:
    flags = f"{SHARDED} --data-path {text} {more}"
    assert repr(run_ranks(2, train_steps, f"{flags} {FLAG}", 2)) == repr(run_ranks(2, train_steps, flags, 2))


def devices_when_sharded(flags: str) -> tuple[set[str], set[str]]:
    """Return the devices of the weights when the model is about to be sharded, and when it is ready."""
    shard, before = parallel.shard, set()

    def note(model: nn.Module, *rest: Any, **options: Any) -> nn.Module:
        before.update(parameter.device.type for parameter in model.parameters())
        return shard(model, *rest, **options)  # type: ignore[arg-type]

    with mock.patch.object(parallel, "shard", note):
        job = make_job(flags)
    return before, {parameter.device.type for parameter in job.model.parameters()}


def test_no_weight_has_memory_before_the_model_is_sharded(text: str) -> None:
    flags = f"{SHARDED} --data-path {text}"
    assert run_ranks(1, devices_when_sharded, f"{flags} {FLAG}") == [({"meta"}, {"cpu"})]
    assert run_ranks(1, devices_when_sharded, flags) == [({"cpu"}, {"cpu"})]


def losses(flags: str) -> list[float]:
    assert pretrain_gpt.main([*RUN.split(), *flags.split()]) == 0
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows]


@pytest.mark.usefixtures("plain_start")
def test_a_run_of_init_model_with_meta_device_starts_as_one_without(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = losses("--use-megatron-fsdp")
    shutil.rmtree("run")
    assert "initialise" not in capsys.readouterr().out
    assert losses("--use-megatron-fsdp --init-model-with-meta-device --exit-interval 2") == wanted[:2]
    printed = capsys.readouterr().out
    assert "the model is built without memory, sharded, then initialised: --init-model-with-meta-device" in printed
    assert "--init-model-with-meta-device does nothing here" not in printed
    assert losses("--use-megatron-fsdp --init-model-with-meta-device --load run") == wanted


@pytest.mark.usefixtures("plain_start")
def test_a_model_that_is_not_sharded_is_refused_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--use-megatron-fsdp {FLAG} --data-parallel-sharding-strategy no_shard"
    assert pretrain_gpt.main([*RUN.split(), *flags.split()]) == 2
    assert f"{FLAG} contradicts --data-parallel-sharding-strategy no_shard" in capsys.readouterr().err
    assert not Path("run").exists()
