"""The mixed-precision policy: dtypes and casts of each copy."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from megatron_fsdp import ConfigError, MixedPrecisionPolicy
from megatron_fsdp.policy.precision import GroupDtypes, as_policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("policy", "own", "trained", "frozen"),
    [
        (MixedPrecisionPolicy(), FP32, GroupDtypes(FP32, FP32, FP32, FP32), GroupDtypes(FP32, FP32, FP32, FP32)),
        (MixedPrecisionPolicy(BF16, FP32), FP32, GroupDtypes(BF16, FP32, FP32, FP32), None),
        # Frozen parameters get no wider main copy, and are not split.
        (
            MixedPrecisionPolicy(main_params_dtype=FP32),
            BF16,
            GroupDtypes(BF16, FP32, BF16, FP32),
            GroupDtypes(BF16, BF16, BF16, BF16),
        ),
        (MixedPrecisionPolicy(FP16, main_grads_dtype=BF16), FP32, GroupDtypes(FP16, FP32, BF16, BF16), None),
        (
            MixedPrecisionPolicy(BF16, split_main_params=True),
            FP32,
            GroupDtypes(BF16, BF16, BF16, BF16, is_split=True),
            GroupDtypes(BF16, FP32, FP32, FP32),
        ),
        (
            MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=FP32, split_main_params=True),
            FP32,
            GroupDtypes(BF16, BF16, FP32, FP32, is_split=True),
            None,
        ),
        (
            MixedPrecisionPolicy(BF16, FP32),
            torch.uint8,
            GroupDtypes(torch.uint8, torch.uint8, torch.uint8, torch.uint8),
            None,
        ),
    ],
)
def test_parameters_get_the_dtypes_of(
    policy: MixedPrecisionPolicy, own: torch.dtype, trained: GroupDtypes, frozen: GroupDtypes | None
) -> None:
    assert policy.dtypes_for(own, requires_grad=True) == trained
    if frozen is not None:
        assert policy.dtypes_for(own, requires_grad=False) == frozen


@pytest.mark.parametrize(
    ("policy", "own"),
    [
        (MixedPrecisionPolicy(split_main_params=True), FP32),
        (MixedPrecisionPolicy(FP16, split_main_params=True), FP32),
        (MixedPrecisionPolicy(split_main_params=True), BF16),
        (MixedPrecisionPolicy(BF16, main_params_dtype=torch.float64, split_main_params=True), FP32),
    ],
)
def test_weights_that_are_no_halves_of_fp32_ones_are_refused(policy: MixedPrecisionPolicy, own: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="only bf16 weights are the upper half of FP32 ones"):
        policy.dtypes_for(own, requires_grad=True)
    whole = MixedPrecisionPolicy(main_params_dtype=FP32, split_main_params=True)
    assert whole.dtypes_for(BF16, requires_grad=True).stepped is FP32


@pytest.mark.parametrize("name", [field.name for field in fields(MixedPrecisionPolicy)])
@pytest.mark.parametrize("value", [torch.int8, torch.bool, "bfloat16", 16])
def test_a_dtype_that_is_none_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    if name == "cast_forward_inputs":
        assert MixedPrecisionPolicy().cast_forward_inputs is True
        return
    with pytest.raises(ConfigError, match=f"{name}="):
        MixedPrecisionPolicy(**{name: value})


def test_any_kind_of_policy_keeps_all_of_its_fields() -> None:
    assert as_policy(None) == MixedPrecisionPolicy()
    policy = MixedPrecisionPolicy(BF16, main_params_dtype=FP32)
    assert as_policy(policy) is policy
    assert as_policy(TorchPolicy(BF16, FP32, FP16, False)) == MixedPrecisionPolicy(BF16, FP32, FP16, False)
    # New in 2.15.
    override: Any = len
    theirs = SimpleNamespace(**vars(TorchPolicy(BF16)) | {"param_dtype_override_fn": override})
    assert as_policy(theirs) == MixedPrecisionPolicy(BF16, param_dtype_override_fn=override)


@pytest.mark.parametrize("policy", ["bf16", torch.bfloat16, {"param_dtype": BF16}])
def test_anything_else_is_refused_by_its_class(policy: object) -> None:
    with pytest.raises(ConfigError, match=f"{type(policy).__name__}. fix: give a MixedPrecisionPolicy"):
        as_policy(policy)
