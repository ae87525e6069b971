"""Split main weights: what does not go with them is refused, and frozen parameters have none."""

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import ConfigError, MixedPrecisionPolicy, fully_shard_optimizer
from tests.functional.adamw_comparison import groups_of
from tests.functional.split_weights import (
    BF16,
    FP32,
    PLAIN,
    SPLIT,
    full_weights,
    make_adamw,
    one_layer,
    train_on_two_microbatches,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.models import inputs, make_model, world_mesh
from tests.harness.oracle import differing, shard_model


def stepped_by(wrap: bool) -> str:
    model = one_layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_weights(model)
    try:
        if wrap:
            fully_shard_optimizer(optimizer)
        model(inputs(0, 0)).square().mean().backward()
        optimizer.step()
    except ConfigError as error:
        assert differing(full_weights(model), before) == []
        return str(error)
    return "no error"


@pytest.mark.parametrize("wrap", [False, True], ids=["in its step", "when it is wrapped"])
def test_another_optimizer_is_refused_with_the_parameters_name_and_the_cure(wrap: bool) -> None:
    (message,) = run_ranks(1, stepped_by, wrap)
    assert "SGD: parameter 'norm.weight' of unit 'layers.0'" in message
    assert "megatron_fsdp.AdamW" in message


def added_later() -> str:
    """Step an optimizer of whole weights once, and again with split weights among them."""
    whole, split = one_layer(PLAIN), one_layer()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for model in (whole, split):
        model(inputs(0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(split.parameters())})
    try:
        optimizer.step()
    except ConfigError as error:
        return str(error)
    return "no error"


def test_split_weights_are_found_in_a_param_group_that_is_added_later() -> None:
    assert "split_main_params=True" in run_ranks(1, added_later)[0]


@pytest.mark.parametrize(
    ("policy", "own"),
    [
        (MixedPrecisionPolicy(split_main_params=True), FP32),
        (MixedPrecisionPolicy(torch.float16, split_main_params=True), FP32),
        (MixedPrecisionPolicy(split_main_params=True), BF16),
        (MixedPrecisionPolicy(BF16, main_params_dtype=torch.float64, split_main_params=True), FP32),
    ],
)
def test_weights_that_are_no_halves_of_fp32_ones_are_refused(policy: MixedPrecisionPolicy, own: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="only bf16 weights are the upper half of FP32 ones"):
        policy.dtypes_for(own, requires_grad=True)


def test_parameters_of_bf16_can_be_the_upper_halves() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, split_main_params=True)
    assert policy.dtypes_for(BF16, requires_grad=True).stepped is FP32


@on_ranks(2)
def test_frozen_parameters_have_no_remainder_and_train_with_fp32_weights_once_unfrozen() -> None:
    model = shard_model(make_model(), world_mesh(), policy=SPLIT)
    has_remainder = [group.weights.remainder is not None for group in groups_of(model)]
    model.shift.requires_grad_(True)
    before = full_weights(model)
    train_on_two_microbatches(model, make_adamw(model), range(2), dist.get_rank())
    is_shift_trained = any(name == "shift" for name in differing(full_weights(model), before))
    assert sorted(has_remainder) == [False, True, True, True]
    assert is_shift_trained
