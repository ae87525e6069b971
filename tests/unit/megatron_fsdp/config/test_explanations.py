"""FsdpConfig explains which flag caused which decision, and which flags have no effect."""

from typing import Any

import pytest
from torch import nn

from megatron_fsdp.config.flags import FLAGS, Flag
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.errors import ConfigError
from tests.unit.megatron_fsdp.config.lines import config, mesh

STRATEGY = "--data-parallel-sharding-strategy"
MAIN_GRADS = "--megatron-fsdp-main-grads-dtype"
WIRE = "--megatron-fsdp-grad-comm-dtype"
FUSION = "--no-gradient-accumulation-fusion"


def test_the_explanation_has_the_dtypes_and_each_flag_that_acts() -> None:
    line = f"--use-megatron-fsdp --bf16 --grad-reduce-in-bf16 {MAIN_GRADS} fp32 --ckpt-format fsdp_dtensor"
    found = config(f"{line} --num-distributed-optimizer-instances 2").explain().splitlines()
    assert found[:4] == [
        "weights compute in bf16",
        "main weights are fp32",
        "gradients accumulate in fp32",
        "gradients are reduced in bf16",
    ]
    assert [each.split(":")[0] for each in found[4:]] == [
        "--use-megatron-fsdp",
        f"{STRATEGY} optim_grads_params (default)",
        "--num-distributed-optimizer-instances 2",
        f"{MAIN_GRADS} fp32",
        "--grad-reduce-in-bf16",
        "--bf16",
        "--ckpt-format fsdp_dtensor",
    ]


def test_every_flag_with_an_effect_is_explained_when_given() -> None:
    # The flag has no effect without --bf16.
    reduces = FsdpConfig(bf16=True, grad_reduce_in_bf16=True)
    for flag in (flag for flag in FLAGS if not flag.is_silent):
        given = reduces if flag.dest == "grad_reduce_in_bf16" else given_alone(flag)[0]
        if flag.name != "--ddp-reduce-scatter-with-fp32-accumulation":
            assert f"{flag.spell(getattr(given, flag.dest))}: {flag.here}" in given.explain().splitlines()


@pytest.mark.parametrize(
    ("line", "decision"),
    [
        ("", "weights compute in their own dtype"),
        ("--fp16", "gradients accumulate in fp16"),
        ("--bf16 --megatron-fsdp-main-params-dtype auto", "main weights are bf16"),
        (f"{MAIN_GRADS} bf16", "gradients are reduced in bf16"),
        (f"{STRATEGY} optim {WIRE} bf16", "gradients are reduced in fp32"),
    ],
)
def test_the_explanation_holds_the_dtype(line: str, decision: str) -> None:
    assert decision in config(line).explain().splitlines()


SAMPLES = {int: 2, float: 0.25, str: "a/b", tuple: ("first", "second")}
# Flags that are refused without other settings, and these settings.
NEEDED = {
    "--fsdp-manual-registration": {"nccl_ub": True},
    "--overlap-param-gather": {"overlap_grad_reduce": True},
    "--use-torch-fsdp2": {"use_megatron_fsdp": False},
    "--use-megatron-fsdp": {"use_megatron_fsdp": False},
}


def given_alone(flag: Flag) -> tuple[FsdpConfig, FsdpConfig, str]:
    """Return the config with one flag set, the same config without it, and the flag as written on a command line."""
    value: Any = not flag.default if flag.kind is bool else SAMPLES.get(flag.kind)
    if flag.choices:
        value = next(choice for choice in flag.choices if choice not in (flag.default, "torch", "torch_dcp"))
    needed: dict[str, Any] = NEEDED.get(flag.name, {})
    return FsdpConfig(**{**needed, flag.dest: value}), FsdpConfig(**needed), flag.spell(value)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.is_silent], ids=lambda flag: flag.name)
def test_a_flag_without_effect_is_noticed_once_with_the_reason(flag: Flag) -> None:
    given, without, spelled = given_alone(flag)
    (notice,) = set(given.notices()) - set(without.notices())
    assert notice == f"{spelled} does nothing here; {flag.effect.value}: {flag.here}"
    assert given.fully_shard_kwargs(mesh(4)) == without.fully_shard_kwargs(mesh(4)), "it does something"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--use-megatron-fsdp --bf16 --grad-reduce-in-bf16 --ckpt-format fsdp_dtensor --optimizer sgd",
        "--data-parallel-sharding-strategy optim --bf16 --grad-reduce-in-bf16",
        "--data-parallel-sharding-strategy optim_grads --megatron-fsdp-grad-comm-dtype bf16",
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        FUSION,
        f"--bf16 --grad-reduce-in-bf16 {FUSION}",
        f"--fp16 {FUSION}",
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
        (f"--fp16 {WIRE} bf16 {FUSION}", f"{FUSION} does nothing here; gradients of fp16 weights are packed as"),
    ],
)
def test_a_flag_without_effect_because_of_other_flags_is_noticed(line: str, notice: str) -> None:
    (found,) = config(line).notices()
    assert found.startswith(notice)


def test_invariant_sums_need_what_they_are_divided_by() -> None:
    given = FsdpConfig(fsdp_invariant_reduction=True)
    with pytest.raises(ConfigError, match=r"apply\(model, num_microbatches=...\), or --calculate-per-token-loss"):
        given.apply(nn.Linear(2, 2))
