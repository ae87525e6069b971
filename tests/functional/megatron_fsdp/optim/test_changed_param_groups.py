"""Param groups that change between steps: optimizers step what they hold now, or refuse it by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import AdamW, ConfigError, MixedPrecisionPolicy, Muon, StateError, fully_shard_optimizer
from tests.harness import on_ranks
from tests.harness.models import squared, three_blocks
from tests.harness.oracle import sharded

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "flat": torch.optim.AdamW, "each parameter": torch.optim.Adagrad, "own": AdamW
}  # fmt: skip
BF16_SUMMED_IN_FP32 = MixedPrecisionPolicy(
    torch.bfloat16, main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32
)


def model_of(strategy: str = "optim_grads_params", **options: Any) -> Any:
    torch.manual_seed(0)
    return sharded(three_blocks(), strategy, **options)


def backward(*models: nn.Module) -> None:
    for model in models:
        squared(model, dist.get_rank(), 0).backward()


def old_parameter(model: Any, optimizer: Any) -> nn.Module:
    """Exchange a parameter for the one that it was before another model was sharded."""
    other = three_blocks()
    optimizer.param_groups[0]["params"][1] = next(other.parameters())
    return sharded(other)


def gathered_weight(model: Any, optimizer: Any) -> nn.Module:
    """Exchange a parameter for the gathered weight that its module shows in between."""
    model.layers[0].unshard()
    optimizer.param_groups[0]["params"][0] = next(model.layers[0].parameters())
    model.layers[0].reshard()
    return model


def plain_parameter(model: Any, optimizer: Any) -> nn.Module:
    """Exchange a parameter for one that no unit owns."""
    other = three_blocks()
    optimizer.param_groups[0]["params"][0] = next(other.parameters())
    return other


def split_weights(model: Any, optimizer: Any) -> nn.Module:
    """Exchange all parameters for the upper halves of FP32 weights."""
    other = model_of(mp_policy=MixedPrecisionPolicy(torch.bfloat16, split_main_params=True))
    optimizer.param_groups[0]["params"][:] = list(other.parameters())
    return other  # type: ignore[no-any-return]  # a module


CASES: list[tuple[Callable[[Any, Any], nn.Module], str]] = [
    (old_parameter, "holds parameter 'norm.weight' as it was before fully_shard"),
    (gathered_weight, "holds the gathered weights of parameter 'norm.weight' instead of its shard"),
    (plain_parameter, "belong to no unit"),
    (split_weights, "parameter 'norm.weight' of unit 'layers.0' is the bf16 half of an FP32 weight"),
]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("exchange", "words"), CASES)
@on_ranks(2)
def test_a_parameter_exchanged_for_one_that_must_not_be_stepped_is_refused(
    exchange: Callable[[Any, Any], nn.Module], words: str, kind: str
) -> None:
    model = model_of()
    optimizer = KINDS[kind](model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    other = exchange(model, optimizer)
    backward(model, *(() if other is model else (other,)))
    if exchange is split_weights and kind == "own":
        # It steps both halves.
        optimizer.step()
        return
    with pytest.raises((StateError, ConfigError), match=words):
        optimizer.step()


@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_an_optimizer_that_stepped_before_its_model_was_sharded_is_refused(kind: str) -> None:
    # Another sharded model is there already, so the first step was checked.
    backward(model_of())
    model = three_blocks()
    optimizer = KINDS[kind](model.parameters(), lr=0.1)
    squared(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded(model)
    backward(model)
    with pytest.raises(StateError, match=r"holds parameter 'norm\.weight' as it was before fully_shard"):
        optimizer.step()


def trained(kind: Callable[..., torch.optim.Optimizer], how: str) -> torch.Tensor:
    """Train a bf16 model whose gradients are summed in FP32; return its weights."""
    model = model_of(mp_policy=BF16_SUMMED_IN_FP32)
    first, rest = model.layers[0], model.layers[1:]
    is_added = how == "a group is added"
    optimizer = fully_shard_optimizer(kind((first if is_added else model).parameters(), lr=0.1))
    if is_added:
        optimizer.add_param_group({"params": list(rest.parameters())})
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            model.zero_grad()
            loss = squared(model, dist.get_rank(), step)
            loss.backward()
            return loss

        if how == "a closure":
            optimizer.step(closure)  # type: ignore[arg-type]  # torch wants a float
        else:
            closure()
            optimizer.step()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("how", ["a group is added", "a closure"])
@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_gradients_of_another_dtype_are_matched_if(how: str, kind: str) -> None:
    assert torch.equal(trained(KINDS[kind], how), trained(KINDS[kind], "as usual"))


@pytest.mark.parametrize("option", ["amsgrad", "differentiable", "capturable"])
@on_ranks(1)
def test_muon_refuses_options_of_adamw_that_are_set_in_a_group_later(option: str) -> None:
    model = model_of()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizer = Muon([{"params": matrices}, {"params": others, "use_muon": False}])
    backward(model)
    optimizer.step()
    optimizer.param_groups[1][option] = True
    with pytest.raises(ConfigError, match=f"{option}=True of a group with use_muon=False is not supported"):
        optimizer.step()
