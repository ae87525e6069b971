"""The command that continues a text with a saved model."""

from pathlib import Path

import pytest
import torch

import generate_gpt
import pretrain_gpt
from megatron_fsdp.checkpoint.api import save_checkpoint

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 3 "
    "--lr 0.01 --eval-iters 0 --distributed-backend gloo --save run --data-path text --num-tokens-to-generate 5 "
    "--seed 7"
)
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
MODERN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --disable-bias-linear "
    "--num-experts 2 --moe-aux-loss-coeff 0.1"
)


pytestmark = pytest.mark.usefixtures("plain_start")


def trained_sample(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Train, and return the sample that the training script shows at its end."""
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 0
    sample, _, _ = capsys.readouterr().out.partition(" sample at temperature ")[2].partition("\nloss curve  ")
    return sample.partition("\n")[2]


def generated(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert generate_gpt.main(["--load", "run", "--num-tokens-to-generate", "5", *flags.split()]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def refusal(load: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert generate_gpt.main(["--load", load]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flags", [SHARDED, f"{SHARDED} {MODERN}"])
def test_a_saved_model_continues_as_it_did_in_training(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = trained_sample(f"{flags} --prompt fox", capsys)
    assert len(wanted) > 3
    assert generated("--prompt fox --seed 7", capsys) == wanted
    assert generated("--prompt fox --seed 7 --load run/iter_0000003", capsys) == wanted


def test_a_folder_without_checkpoints_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--load: no whole checkpoint in nowhere" in refusal("nowhere", capsys)


def test_a_checkpoint_of_another_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(torch.nn.Linear(2, 2), None, "other")
    assert "other says nothing of its model" in refusal("other", capsys)


def test_a_damaged_checkpoint_is_refused_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    trained_sample("", capsys)
    file = Path("run/iter_0000003/__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "is damaged" in refusal("run", capsys)
