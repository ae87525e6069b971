"""The flag and the policy that switch fused weight gradients off."""

import argparse

import pytest
import torch

from megatron_fsdp import FsdpConfig, MixedPrecisionPolicy, add_megatron_fsdp_args
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.precision import as_policy

SWITCH = "--no-gradient-accumulation-fusion"


def config(line: str) -> FsdpConfig:
    return FsdpConfig.from_args(add_megatron_fsdp_args(argparse.ArgumentParser()).parse_args(line.split()))


@pytest.mark.parametrize(("line", "is_fused"), [("", True), (SWITCH, False), (f"--bf16 {SWITCH}", False)])
def test_the_flag_decides_whether_the_policy_fuses(line: str, is_fused: bool) -> None:
    assert config(line).mixed_precision_policy().fuse_weight_gradients == ("wide" if is_fused else False)


@pytest.mark.parametrize(
    "line",
    [
        f"--fp16 --megatron-fsdp-grad-comm-dtype bf16 {SWITCH}",
        f"--fp16 --megatron-fsdp-grad-comm-dtype bf16 --data-parallel-sharding-strategy optim_grads {SWITCH}",
    ],
)
def test_the_flag_says_that_it_does_nothing_where_gradients_are_packed_in_another_dtype(line: str) -> None:
    (notice,) = [one for one in config(line).notices() if one.startswith(SWITCH)]
    assert notice.startswith(f"{SWITCH} does nothing here; gradients of")
    assert "weights are packed as" in notice


@pytest.mark.parametrize(
    "line", [SWITCH, f"--bf16 {SWITCH}", f"--bf16 --grad-reduce-in-bf16 {SWITCH}", f"--fp16 {SWITCH}"]
)
def test_the_flag_gives_no_notice_where_it_changes_something(line: str) -> None:
    assert config(line).notices() == ()


def test_policies_fuse_unless_told_otherwise_and_so_do_those_of_pytorch() -> None:
    theirs = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert MixedPrecisionPolicy().fuse_weight_gradients
    assert as_policy(theirs).fuse_weight_gradients


@pytest.mark.parametrize("value", [1, "yes", torch.float32])
def test_a_switch_that_is_no_bool_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"fuse_weight_gradients=.*give True, False or 'wide'"):
        MixedPrecisionPolicy(fuse_weight_gradients=value)
