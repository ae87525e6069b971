"""Weight gradients multiplied straight into the packed buffer are those of a whole model, however layers are used."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.runtime.pytree import iterate_tensors
from tests.functional.linear_uses import USES, counted_products, dropping_a_layer, shard_as
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Stack, squared, three_blocks
from tests.harness.oracle import Case, Comparison, compare, shard_layers

NUM_STEPS = 3


def use(name: str) -> tuple[Comparison, int]:
    with counted_products() as products:
        result = compare(replace(USES[name].case, steps=NUM_STEPS))
    return result, len(products)


@pytest.mark.parametrize("name", USES)
def test_gradients_and_the_number_of_products_are_right_with(name: str) -> None:
    results = run_ranks(2, use, name)
    assert all(result.is_exact for result, _ in results), results
    assert results[-1][1] == NUM_STEPS * USES[name].products


@on_ranks(3)
def test_a_layer_left_out_everywhere_at_times_gets_the_gradients_of_a_whole_model() -> None:
    result = compare(Case(three_blocks, dropping_a_layer))
    assert result.is_exact, result


def gradients_of(strategy: str, policy: MixedPrecisionPolicy) -> tuple[list[torch.Tensor], int]:
    """Return the whole gradients of two microbatches, and the number of products."""
    torch.manual_seed(0)
    model = three_blocks()
    shard_as(strategy, policy)(model)
    with counted_products() as products:
        for step in range(2):
            squared(model, dist.get_rank(), step).float().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()], len(products)


@dataclass(frozen=True)
class Setting:
    strategy: str
    policy: MixedPrecisionPolicy
    is_fused: bool
    num_ranks: int = 2


SETTINGS = {
    "fp32": Setting("optim_grads_params", MixedPrecisionPolicy(), True),
    "bf16": Setting("optim_grads_params", MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), True),
    "bf16, summed in fp32": Setting(
        "optim_grads_params", MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, main_grads_dtype=torch.float32), True
    ),
    "bf16, reduced in fp32": Setting("optim_grads_params", MixedPrecisionPolicy(torch.bfloat16, torch.float32), False),
    "fp16, divided before and after": Setting("optim_grads", MixedPrecisionPolicy(torch.float16, torch.float16), True),
    "halved as they are produced": Setting("no_shard", MixedPrecisionPolicy(), True),
    "divided by three as they are produced": Setting("no_shard", MixedPrecisionPolicy(), False, num_ranks=3),
    "gradients whole until the step": Setting("optim", MixedPrecisionPolicy(), True),
    "whole and in fp32 until the step": Setting("optim", MixedPrecisionPolicy(torch.bfloat16), False),
    "bf16, reduced in fp32, wide": Setting(
        "optim_grads_params", MixedPrecisionPolicy(torch.bfloat16, torch.float32, fuse_weight_gradients="wide"), True
    ),
    "whole and in fp32 until the step, wide": Setting(
        "optim", MixedPrecisionPolicy(torch.bfloat16, fuse_weight_gradients="wide"), True
    ),
    "fp32 needs nothing wider": Setting("optim_grads_params", MixedPrecisionPolicy(fuse_weight_gradients="wide"), True),
    "switched off": Setting("optim_grads_params", MixedPrecisionPolicy(fuse_weight_gradients=False), False),
}


def both_ways(setting: Setting) -> tuple[float, int]:
    """Return the largest difference that fusion makes, in units of the compute dtype's rounding, and the products."""
    found, products = gradients_of(setting.strategy, setting.policy)
    wanted, none = gradients_of(setting.strategy, replace(setting.policy, fuse_weight_gradients=False))
    assert none == 0
    epsilon = torch.finfo(setting.policy.param_dtype or torch.float32).eps
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
    return worst / epsilon, products


@pytest.mark.parametrize("name", SETTINGS)
def test_fusion_changes_no_gradient_and_is_used_where_the_packed_buffer_has_the_product_s_dtype_and_scale(
    name: str,
) -> None:
    setting = SETTINGS[name]
    for worst, products in run_ranks(setting.num_ranks, both_ways, setting):
        assert worst <= 4
        assert products == (12 if setting.is_fused else 0)


NUM_RANKS = 64
SIZES = (192, 768)
# Operators that write their first argument, or one that is named out, without reading it.
WRITERS = ("aten::copy_", "aten::zero_", "aten::fill_")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::linear")


class ByteCounter(TorchDispatchMode):
    """Adds up the bytes that operators read and write, except in matrix products and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, tags = func._schema.name, func.tags
        is_view = func.is_view or torch.Tag.inplace_view in tags or name in ("aten::detach", "aten::resize_")
        if not is_view and name.startswith("aten::") and name not in PRODUCTS and "empty" not in name:
            given = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)]
            read = given[1:] if name in WRITERS else [one for one in given if one is not kwargs.get("out")]
            self.num_bytes += sum(one.numel() * one.element_size() for one in (*read, *iterate_tensors(result)))
        return result


def wide_stack() -> nn.Module:
    narrow, wide = SIZES
    blocks = [nn.Sequential(nn.Linear(narrow, wide), nn.Tanh(), nn.Linear(wide, narrow)) for _ in range(3)]
    return Stack(*blocks).to(torch.bfloat16)


def bytes_of_a_microbatch(model: nn.Module) -> int:
    """Return the bytes moved by the second of two forward and backward passes."""
    x = torch.ones(2, SIZES[0], dtype=torch.bfloat16)
    counter = ByteCounter()
    model(x).sum().backward()
    with counter:
        model(x).sum().backward()
    return counter.num_bytes


def bytes_per_parameter(*, is_fused: bool) -> float:
    """Return what one of 64 ranks moves per parameter of the model, beyond what the plain model moves."""
    plain = wide_stack()
    # Autograd adds to gradients that are there; it is the engine's business to add up microbatches.
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    least = bytes_of_a_microbatch(plain)
    policy = MixedPrecisionPolicy(
        reduce_dtype=torch.bfloat16,
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        fuse_weight_gradients=is_fused,
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        model = wide_stack()
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        shard_layers(model, mesh=mesh, mp_policy=policy)
        num_parameters = sum(parameter.numel() for parameter in plain.parameters())
        return (bytes_of_a_microbatch(model) - least) / num_parameters
    finally:
        dist.destroy_process_group()


def test_with_fusion_half_a_byte_is_moved_per_parameter_and_microbatch_outside_of_products_and_collectives() -> None:
    assert 0 <= bytes_per_parameter(is_fused=True) <= 0.5


def test_without_fusion_packing_moves_four_bytes_more() -> None:
    fused, unfused = bytes_per_parameter(is_fused=True), bytes_per_parameter(is_fused=False)
    assert unfused - fused == pytest.approx(4.0, abs=0.05)
    assert unfused <= 4.5
