"""The mixed-precision policy: which dtype each copy gets, and what is cast."""

from dataclasses import fields
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from megatron_fsdp import ConfigError, MixedPrecisionPolicy
from megatron_fsdp.policy.precision import GradDtype, GroupDtypes, as_policy, grad_dtype_of, set_grad_dtype
from megatron_fsdp.runtime.step.schedule import caster

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("policy", "own", "wanted"),
    [
        (MixedPrecisionPolicy(), FP32, GroupDtypes(*[FP32] * 4)),
        (MixedPrecisionPolicy(), BF16, GroupDtypes(*[BF16] * 4)),
        (MixedPrecisionPolicy(BF16), FP32, GroupDtypes(BF16, FP32, FP32, FP32)),
        (MixedPrecisionPolicy(BF16, FP32), FP32, GroupDtypes(BF16, FP32, FP32, FP32)),
        (MixedPrecisionPolicy(main_params_dtype=FP32), BF16, GroupDtypes(BF16, FP32, BF16, FP32)),
        (MixedPrecisionPolicy(FP16, main_grads_dtype=BF16), FP32, GroupDtypes(FP16, FP32, BF16, BF16)),
        (MixedPrecisionPolicy(BF16, split_main_params=True), FP32, GroupDtypes(*[BF16] * 4, is_split=True)),
        (
            MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=FP32, split_main_params=True),
            FP32,
            GroupDtypes(BF16, BF16, FP32, FP32, is_split=True),
        ),
        (MixedPrecisionPolicy(BF16, FP32), torch.int64, GroupDtypes(*[torch.int64] * 4)),
        (MixedPrecisionPolicy(BF16, FP32), torch.uint8, GroupDtypes(*[torch.uint8] * 4)),
    ],
)
def test_trainable_parameters_get_the_dtypes_of(
    policy: MixedPrecisionPolicy, own: torch.dtype, wanted: GroupDtypes
) -> None:
    assert policy.dtypes_for(own, requires_grad=True) == wanted


@pytest.mark.parametrize(
    ("policy", "own", "asked", "reduce", "main_grad"),
    [
        (MixedPrecisionPolicy(), FP32, BF16, BF16, BF16),
        (MixedPrecisionPolicy(), BF16, FP32, FP32, FP32),
        (MixedPrecisionPolicy(BF16, FP32), FP32, BF16, FP32, BF16),
        (MixedPrecisionPolicy(BF16, main_grads_dtype=FP32), FP32, BF16, BF16, BF16),
        (MixedPrecisionPolicy(BF16), FP32, "any", BF16, BF16),
        (MixedPrecisionPolicy(BF16, FP16), FP32, "any", FP16, FP16),
        (MixedPrecisionPolicy(main_params_dtype=FP32), BF16, "any", BF16, BF16),
    ],
)
def test_gradients_travel_and_rest_as_grad_dtype_says_but_for_reduce_dtype(
    policy: MixedPrecisionPolicy, own: torch.dtype, asked: GradDtype, reduce: torch.dtype, main_grad: torch.dtype
) -> None:
    dtypes = policy.dtypes_for(own, requires_grad=True, grad_dtype=asked)
    assert (dtypes.reduce, dtypes.main_grad) == (reduce, main_grad)


@pytest.mark.parametrize(
    ("policy", "asked", "wanted"),
    [
        (MixedPrecisionPolicy(BF16), [(FP32, "own"), (BF16, "own")], None),
        (MixedPrecisionPolicy(BF16), [(FP32, BF16), (FP32, "own")], FP32),
        (MixedPrecisionPolicy(BF16), [(FP32, BF16), (FP32, FP16)], FP32),
        (MixedPrecisionPolicy(BF16), [(FP32, BF16), (FP32, "any")], BF16),
        (MixedPrecisionPolicy(BF16, FP16), [(FP32, BF16), (FP32, FP32)], FP16),
        (MixedPrecisionPolicy(BF16), [], None),
    ],
)
def test_gradients_of_a_unit_are_reduced_in_the_widest_that_its_parameters_ask_for(
    policy: MixedPrecisionPolicy, asked: list[tuple[torch.dtype, GradDtype]], wanted: torch.dtype | None
) -> None:
    assert policy.common_reduce_dtype(asked) is wanted


def test_what_is_set_as_grad_dtype_of_one_parameter_can_be_set_on_another() -> None:
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert grad_dtype_of(parameter) == "own"
    for value, wanted in ((BF16, BF16), (None, "any")):
        parameter.grad_dtype = value
        assert grad_dtype_of(parameter) == wanted
        set_grad_dtype(other, grad_dtype_of(parameter))
        assert other.grad_dtype is value
    set_grad_dtype(other, "own")
    assert other.grad_dtype is None


def test_a_parameter_computes_in_its_own_dtype_where_the_override_says_so() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: FP32 if parameter.ndim == 1 else None)
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    assert policy.for_parameter("one", one) == MixedPrecisionPolicy(FP32)
    assert policy.for_parameter("two", two) == MixedPrecisionPolicy(BF16)


@pytest.mark.parametrize("value", [FP16, "float32", 32])
def test_an_override_of_another_dtype_is_refused_with_the_parameter(value: object) -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: value)
    with pytest.raises(
        ConfigError, match=r"'up.weight': param_dtype_override_fn returned .* torch.float32, or None or"
    ):
        policy.for_parameter("up.weight", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("policy", "own", "wanted"),
    [
        (MixedPrecisionPolicy(BF16, main_params_dtype=FP32), BF16, GroupDtypes(*[BF16] * 4)),
        (MixedPrecisionPolicy(BF16, split_main_params=True), FP32, GroupDtypes(BF16, FP32, FP32, FP32)),
    ],
)
def test_frozen_parameters_get_no_wider_main_copy_and_are_not_split(
    policy: MixedPrecisionPolicy, own: torch.dtype, wanted: GroupDtypes
) -> None:
    assert policy.dtypes_for(own, requires_grad=False) == wanted


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
def test_a_dtype_that_is_none_is_refused_with_the_name_of_its_field(name: str, value: object) -> None:
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
    theirs = SimpleNamespace(**vars(TorchPolicy(BF16)) | {"param_dtype_override_fn": len})
    assert as_policy(theirs) == MixedPrecisionPolicy(BF16, param_dtype_override_fn=len)


@pytest.mark.parametrize("policy", ["bf16", torch.bfloat16, {"param_dtype": BF16}])
def test_anything_else_is_refused_by_its_class(policy: object) -> None:
    with pytest.raises(ConfigError, match=f"{type(policy).__name__}; give a MixedPrecisionPolicy"):
        as_policy(policy)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_floating_point_tensors_are_cast_wherever_they_are() -> None:
    cast = caster(BF16)({"a": [torch.ones(2)], "b": Pair(torch.ones(1), torch.ones(1, dtype=FP16))})
    assert {cast["a"][0].dtype, cast["b"].first.dtype, cast["b"].second.dtype} == {BF16}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64, BF16])
def test_other_tensors_and_those_of_the_wanted_dtype_are_not_cast(dtype: torch.dtype) -> None:
    tensor = torch.ones(2).to(dtype)
    assert caster(BF16)(tensor) is tensor


def test_gradients_flow_back_through_a_cast() -> None:
    x = torch.ones(3, requires_grad=True)
    caster(BF16)({"x": x})["x"].sum().backward()
    assert x.grad.dtype is FP32
