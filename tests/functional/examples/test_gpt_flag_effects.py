"""Each sharding flag of the training script has its documented effect."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from dbuffer.slot_pool import can_exchange_memory
from gpt import parallel
from gpt.checkpoint import TrainingState
from megatron_fsdp import FsdpModule
from megatron_fsdp.lifecycle.module import unit_of
from megatron_fsdp.variants.memory_slots import pools_of
from tests.harness import run_ranks
from tests.unit.examples.jobs import TINY, make_job, train_steps, whole_weights

RUN = f"{TINY} --micro-batch-size 4 --log-interval 1 --eval-iters 0 --num-tokens-to-generate 0 --data-path text"
SHARDED = "--use-megatron-fsdp"


def rows(flags: str) -> list[dict[str, Any]]:
    """Run the script, and return the rows of its log."""
    assert pretrain_gpt.main([*RUN.split(), *flags.split()]) == 0
    return [json.loads(line) for line in Path("runs/gpt/log.jsonl").read_text().splitlines()]


def kinds(flags: str) -> tuple[bool, str, int]:
    """Return whether the model is sharded, the class of the optimizer, and the elements of this rank's weights."""
    job = make_job(flags)
    numbers = [getattr(p, "_local_tensor", p).numel() for p in job.model.parameters()]
    return isinstance(job.model, FsdpModule), type(job.optimizer).__name__, sum(numbers)


def test_use_megatron_fsdp_shards_what_is_replicated_without(documents: str) -> None:
    flags = f"--micro-batch-size 2 --data-path {documents}"
    sharded = run_ranks(2, kinds, f"{flags} --use-megatron-fsdp")
    whole = run_ranks(2, kinds, flags)
    assert [is_sharded for is_sharded, _, _ in sharded + whole] == [True, True, False, False]
    assert sum(number for _, _, number in sharded) == whole[0][2] == whole[1][2]


def test_torch_fsdp2_shards_too_and_learns_the_same(documents: str) -> None:
    flags = f"--micro-batch-size 2 --global-batch-size 8 --data-path {documents}"
    kind, optimizer, number = run_ranks(2, kinds, f"{flags} --use-torch-fsdp2")[0]
    assert (kind, optimizer) == (False, "AdamW")
    assert 0 < number < run_ranks(1, kinds, flags)[0][2]
    ours, _ = run_ranks(2, train_steps, f"{flags} --use-megatron-fsdp", 3)[0]
    theirs, _ = run_ranks(2, train_steps, f"{flags} --use-torch-fsdp2", 3)[0]
    assert theirs == pytest.approx(ours, rel=1e-4)


def pools(flags: str) -> list[str]:
    job = make_job(flags)
    pretrain_gpt.train_step(job, TrainingState())
    return [pool.sizing for pool in pools_of(unit_of(job.model))._pools.values()]


@pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")
def test_slot_pool_decides_where_buffers_lie(documents: str) -> None:
    flags = (
        f"--micro-batch-size 2 --data-path {documents} {SHARDED} --data-parallel-sharding-strategy optim_grads_params"
    )
    assert run_ranks(2, pools, flags) == [[]] * 2
    assert run_ranks(2, pools, f"{flags} --slot-pool by_size") == [["by_size"] * 2] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_clip_grad_limits_the_step_of_a_sharded_model(num_ranks: int, documents: str) -> None:
    flags = f"--micro-batch-size 2 --global-batch-size 4 --data-path {documents} {SHARDED} --optimizer sgd --lr 1"
    flags += " --lr-decay-style constant --weight-decay 0"
    moved = {}
    for limit in ("0", "0.01"):
        (start, *_), (end, *_) = (run_ranks(num_ranks, train_steps, f"{flags} --clip-grad {limit}", n) for n in (0, 1))
        moved[limit] = torch.stack([(end[1][name] - start[1][name]).norm() for name in end[1]]).norm().item()
        norm = end[0][1]
    assert norm > 0.5, "the norm that is reported is the one before clipping"
    # The first step of SGD at a rate of 1 is the gradient itself.
    assert moved["0.01"] == pytest.approx(0.01, rel=1e-3)
    assert moved["0"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.usefixtures("plain_start")
def test_no_check_for_nan_in_loss_and_grad_goes_on_regardless(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = parallel.clip_gradients
    monkeypatch.setattr(pretrain_gpt, "clip_gradients", lambda *args: step(*args) * float("nan"))
    found = rows(f"{SHARDED} --no-check-for-nan-in-loss-and-grad")
    assert len(found) == 6
    assert "--no-check-for-nan-in-loss-and-grad: NaN or infinity ends the run" in capsys.readouterr().out
    assert pretrain_gpt.main([*RUN.split(), SHARDED]) == 2
    dist.destroy_process_group()
    assert "error: iteration 1: lm loss" in capsys.readouterr().err


@pytest.mark.usefixtures("plain_start")
def test_a_flag_without_effect_is_accepted_and_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows(f"{SHARDED} --use-sharp --keep-fp8-transpose-cache")
    printed = capsys.readouterr().out
    assert printed.count("--use-sharp does nothing here; needs hardware that is not used: it takes switches") == 1
    assert printed.count("--keep-fp8-transpose-cache does nothing here; needs a package that is not used") == 1


@pytest.mark.usefixtures("plain_start")
def test_without_the_engine_its_flags_are_reported_as_unused(capsys: pytest.CaptureFixture[str]) -> None:
    rows("--data-parallel-sharding-strategy optim --use-nccl-ub --clip-grad 0.5")
    printed = capsys.readouterr().out
    assert (
        "without --use-megatron-fsdp nothing is sharded, and these do nothing: --data-parallel-sharding-strategy "
        "optim, --use-nccl-ub\n"
    ) in printed


META = "--init-model-with-meta-device"
VARIETY = "--num-experts 2 --untie-embeddings-and-output-weights --normalization RMSNorm"


def weights(flags: str) -> tuple[set[str], dict[str, torch.Tensor]]:
    """Return the devices of the weights when the model is about to be sharded, and their values when it is ready."""
    shard, before = parallel.shard, set[str]()

    def note(model: Any, *rest: Any) -> None:
        before.update(parameter.device.type for parameter in model.parameters())
        shard(model, *rest)

    with mock.patch.object(parallel, "shard", note):
        return before, whole_weights(make_job(flags))


@pytest.mark.parametrize("model", ["", VARIETY], ids=["plain", "variety"])
def test_meta_device_initialisation_gives_the_weights_of_a_model_built_whole(model: str, documents: str) -> None:
    flags = f"--micro-batch-size 2 --data-path {documents} {model}"
    ((_, wanted),) = run_ranks(1, weights, flags)
    assert run_ranks(1, weights, f"{flags} {SHARDED}")[0][0] == {"cpu"}
    for devices, found in run_ranks(3, weights, f"{flags} {SHARDED} {META}"):
        assert devices == {"meta"}
        assert found.keys() == wanted.keys()
        assert {name for name in found if not torch.equal(found[name], wanted[name])} == set()


DROPPING = "--hidden-dropout 0.2 --attention-dropout 0.2 --micro-batch-size 2 --global-batch-size 12"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dropout_drops_the_same_on_any_number_of_ranks(num_ranks: int, documents: str) -> None:
    flags = f"{DROPPING} --use-megatron-fsdp --data-path {documents}"
    (whole,) = run_ranks(1, train_steps, f"{DROPPING} --data-path {documents}", 3)
    for numbers, weights in run_ranks(num_ranks, train_steps, flags, 3):
        assert numbers == pytest.approx(whole[0], rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[1][name], rtol=1e-3, atol=1e-4)
    (undropped,) = run_ranks(1, train_steps, f"{flags} --hidden-dropout 0 --attention-dropout 0", 3)
    assert undropped[0] != pytest.approx(whole[0], rel=1e-3)
    (again,) = run_ranks(1, train_steps, f"{flags} --recompute-granularity full", 3)
    assert again[0] == pytest.approx(whole[0], rel=1e-4)
