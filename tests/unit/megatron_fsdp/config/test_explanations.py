"""What FsdpConfig tells the user: which flag caused which decision, and which flags do nothing here."""

from typing import Any

import pytest

from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.config.parser import FLAGS, Flag
from tests.unit.megatron_fsdp.config.lines import config, mesh

STRATEGY = "--data-parallel-sharding-strategy"
MAIN_GRADS = "--megatron-fsdp-main-grads-dtype"
WIRE = "--megatron-fsdp-grad-comm-dtype"


def test_each_decision_names_the_flag_that_caused_it() -> None:
    line = f"--use-megatron-fsdp --bf16 --grad-reduce-in-bf16 {MAIN_GRADS} fp32 --ckpt-format fsdp_dtensor"
    assert config(f"{line} --num-distributed-optimizer-instances 2").explain().splitlines() == [
        "this engine shards the model: --use-megatron-fsdp",
        f"optimizer state, gradients and weights are sharded (ZeRO-3): {STRATEGY} optim_grads_params (default)",
        "2 outer replicas: --num-distributed-optimizer-instances 2, --outer-dp-sharding-strategy no_shard (default)",
        "weights compute in bf16: --bf16",
        "main weights are fp32: --megatron-fsdp-main-params-dtype fp32 (default)",
        "gradients accumulate in fp32: --megatron-fsdp-main-grads-dtype fp32",
        "gradients are reduced in bf16: --megatron-fsdp-grad-comm-dtype auto (default), --grad-reduce-in-bf16",
        "checkpoints are fsdp_dtensor: --ckpt-format fsdp_dtensor",
        "gathers and reductions overlap with compute: always",
    ]


@pytest.mark.parametrize(
    ("line", "decision"),
    [
        ("--init-model-with-meta-device", "the model is built without memory, sharded, then initialised: {}"),
        ("--suggested-communication-unit-size 700", "gathers run ahead by units of 700 elements or more: {}"),
        ("--no-gradient-accumulation-fusion", "weight gradients are added after the GEMM, not in it: {}"),
        ("--calculate-per-token-loss", "gradients are summed over ranks and divided by the tokens of the step: {}"),
        ("--optimizer sgd", "sgd steps the main weights: {}"),
        ("--optimizer-cpu-offload", "weights at rest, gradients and the optimizer step are on the CPU: {}"),
        ("--clip-grad 0.5", "the global norm of gradients is at most 0.5 (0: measured only): {}"),
        ("--no-check-for-nan-in-loss-and-grad", "NaN in losses and gradients ends nothing: {}"),
        ("--check-for-large-grads", "gradient norms far above those before are said: {}"),
        ("--async-save", "checkpoints are written while training goes on: {}"),
        ("--no-strict-fsdp-dtensor-load", "what a checkpoint has of another model is left out: {}"),
        ("--dump-param-to-param-group-map a/b", "the optimizer's groups are written to a/b: {}"),
        (
            "--fake-process-group",
            "one process stands for all ranks and communicates with none; losses mean nothing: {}",
        ),
    ],
)
def test_a_flag_that_is_seldom_given_is_explained_when_it_is(line: str, decision: str) -> None:
    assert decision.format(line) in config(line).explain().splitlines()
    assert decision.partition(":")[0] not in config("").explain()


def test_every_flag_that_acts_is_in_some_explanation() -> None:
    lines = [
        f"--use-megatron-fsdp {line}"
        for line in ("", "--enable-full-sharding-in-hsdp", "--bf16 --grad-reduce-in-bf16", "--fp16")
    ]
    flags = [flag for flag in FLAGS if not flag.is_silent]
    texts = [config(line).explain() for line in lines]
    texts += [given_alone(flag)[0].explain() for flag in flags]
    texts.append(config("--outer-dp-sharding-strategy optim").explain())
    assert [
        flag.name for flag in flags if not any(flag.name in text or flag.spell(False) in text for text in texts)
    ] == []


@pytest.mark.parametrize(
    ("line", "decision"),
    [
        ("", "a script that follows Megatron does not shard the model: no --use-megatron-fsdp"),
        ("", "one axis, no outer replicas: --num-distributed-optimizer-instances 1 (default)"),
        ("", "weights compute in their own dtype: neither --bf16 nor --fp16"),
        ("", "checkpoints are torch_dist: --ckpt-format torch_dist (default)"),
        ("--fp16", "gradients accumulate in fp16: --megatron-fsdp-main-grads-dtype auto (default), --fp16"),
        (
            "--bf16 --megatron-fsdp-main-params-dtype auto",
            "main weights are bf16: --megatron-fsdp-main-params-dtype auto, --bf16",
        ),
        (
            "--megatron-fsdp-main-grads-dtype bf16",
            f"gradients are reduced in bf16: {WIRE} auto (default), {MAIN_GRADS} bf16",
        ),
        (
            "--data-parallel-sharding-strategy optim",
            f"gradients are reduced as they are, in fp32: {STRATEGY} optim, {MAIN_GRADS} auto (default)",
        ),
        (
            "--enable-full-sharding-in-hsdp",
            "over the outer axis optimizer state and main weights are sharded too: --enable-full-sharding-in-hsdp",
        ),
    ],
)
def test_the_explanation_holds_the_decision(line: str, decision: str) -> None:
    assert decision in config(line).explain().splitlines()


SAMPLES = {int: 2, float: 0.25, str: "a/b", tuple: ("first", "second")}
# Beside these a flag is not refused.
NEEDED = {
    "--fsdp-manual-registration": {"nccl_ub": True},
    "--overlap-param-gather": {"overlap_grad_reduce": True},
    "--use-torch-fsdp2": {"use_megatron_fsdp": False, "gradient_accumulation_fusion": False},
}


def given_alone(flag: Flag) -> tuple[FsdpConfig, FsdpConfig, str]:
    """Return the config with one flag given, the same without it, and the flag as it was given."""
    value: Any = not flag.default if flag.kind is bool else SAMPLES.get(flag.kind)
    if flag.choices:
        value = next(choice for choice in flag.choices if choice not in (flag.default, "torch", "torch_dcp"))
    needed: dict[str, Any] = NEEDED.get(flag.name, {})
    return FsdpConfig(**{**needed, flag.dest: value}), FsdpConfig(**needed), flag.spell(value)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.is_silent], ids=lambda flag: flag.name)
def test_a_flag_that_does_nothing_here_says_so_once_with_the_reason(flag: Flag) -> None:
    given, without, spelled = given_alone(flag)
    (notice,) = set(given.notices()) - set(without.notices())
    assert notice == f"{spelled} does nothing here; {flag.effect.value}: {flag.here}"
    assert given.fully_shard_kwargs(mesh(4)) == without.fully_shard_kwargs(mesh(4)), "it does something"


def test_without_flags_there_is_nothing_to_notice() -> None:
    assert FsdpConfig().notices() == config("").notices() == ()


@pytest.mark.parametrize(
    "line",
    [
        "--use-megatron-fsdp --bf16 --grad-reduce-in-bf16 --ckpt-format fsdp_dtensor --optimizer sgd",
        "--data-parallel-sharding-strategy optim --bf16 --grad-reduce-in-bf16",
        "--data-parallel-sharding-strategy optim_grads --megatron-fsdp-grad-comm-dtype bf16",
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    ],
)
def test_flags_that_are_acted_on_give_no_notice(line: str) -> None:
    assert config(line).notices() == ()


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 does nothing here; it belongs to --bf16;"),
        (
            "--data-parallel-sharding-strategy optim --megatron-fsdp-grad-comm-dtype bf16",
            "--megatron-fsdp-grad-comm-dtype bf16 does nothing here; with --data-parallel-sharding-strategy optim",
        ),
        (
            f"{STRATEGY} no_shard --bf16 --grad-reduce-in-bf16 {MAIN_GRADS} fp32",
            "--grad-reduce-in-bf16 does nothing here; with --data-parallel-sharding-strategy no_shard",
        ),
    ],
)
def test_a_flag_that_the_other_flags_leave_without_effect_says_so(line: str, notice: str) -> None:
    (found,) = config(line).notices()
    assert found.startswith(notice)
