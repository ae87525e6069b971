"""Weight gradients multiplied straight into the packed buffer are those of a whole model, however layers are used."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dbuffer import observe_collectives
from megatron_fsdp import FsdpModule, MixedPrecisionPolicy, expert_matmul
from megatron_fsdp.engine.outputs import iterate_tensors
from tests.functional.megatron_fsdp.engine.linear_uses import USES, counted_products, stack_of
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Made, RaisesInBackward, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare
from tests.harness.twins import Twins, sharded

NUM_STEPS = 2


@pytest.mark.parametrize("name", USES)
@on_ranks(2)
def test_gradients_and_the_number_of_products_are_right_with(name: str) -> None:
    with counted_products() as products:
        found = compare(replace(USES[name].case, steps=NUM_STEPS))
    assert found.is_exact, found
    # Rank 0 skips a layer in one of them.
    assert len(products) == NUM_STEPS * USES[name].products or dist.get_rank() == 0


NUM_EXPERTS, HIDDEN = 3, 5


def compute(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute all tokens with every expert, in one product for all experts."""
    hidden = torch.tanh(expert_matmul(x.expand(NUM_EXPERTS, *x.shape), layer.up))
    return x + expert_matmul(hidden, layer.down).sum(0)


def experts(use: Callable[[Any, torch.Tensor], torch.Tensor] = compute) -> Made:
    up, down = (torch.randn(NUM_EXPERTS, *sizes) / 3 for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    return Made(use, up=nn.Parameter(up), down=nn.Parameter(down))


def of_experts() -> nn.Module:
    return Stack(*(experts() for _ in range(3)))


@dataclass(frozen=True)
class Setting:
    strategy: str
    policy: MixedPrecisionPolicy
    is_fused: bool
    num_ranks: int = 2
    build: Callable[[], nn.Module] = three_blocks

    def gradients(self, policy: MixedPrecisionPolicy) -> tuple[list[torch.Tensor], int]:
        """Return the whole gradients of two microbatches, and the number of products."""
        torch.manual_seed(0)
        model = sharded(self.build(), self.strategy, mp_policy=policy)
        with counted_products() as products:
            for step in range(2):
                squared(model, dist.get_rank(), step).float().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()], len(products)


BF16, FP32 = torch.bfloat16, torch.float32
ZERO3 = "optim_grads_params"
WIDE: dict[str, Any] = {"fuse_weight_gradients": "wide"}
SETTINGS = {
    "experts, bf16": Setting(ZERO3, MixedPrecisionPolicy(BF16, BF16), True, build=of_experts),
    "experts, reduced in fp32": Setting(ZERO3, MixedPrecisionPolicy(BF16, FP32), False, build=of_experts),
    "experts, reduced in fp32, wide": Setting(ZERO3, MixedPrecisionPolicy(BF16, FP32, **WIDE), True, build=of_experts),
    "fp32": Setting(ZERO3, MixedPrecisionPolicy(), True),
    "bf16, summed in fp32": Setting(ZERO3, MixedPrecisionPolicy(BF16, BF16, main_grads_dtype=FP32), True),
    "bf16, reduced in fp32": Setting(ZERO3, MixedPrecisionPolicy(BF16, FP32), False),
    "fp16, divided before and after": Setting("optim_grads", MixedPrecisionPolicy(torch.float16, torch.float16), True),
    "halved as they are produced": Setting("no_shard", MixedPrecisionPolicy(), True),
    "divided by three as they are produced": Setting("no_shard", MixedPrecisionPolicy(), False, num_ranks=3),
    "gradients whole until the step": Setting("optim", MixedPrecisionPolicy(), True),
    "whole and in fp32 until the step": Setting("optim", MixedPrecisionPolicy(BF16), False),
    "bf16, reduced in fp32, wide": Setting(ZERO3, MixedPrecisionPolicy(BF16, FP32, **WIDE), True),
    "whole and in fp32 until the step, wide": Setting("optim", MixedPrecisionPolicy(BF16, **WIDE), True),
    "fp32 needs nothing wider": Setting(ZERO3, MixedPrecisionPolicy(**WIDE), True),
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(lambda name: SETTINGS[name].num_ranks)
def test_fusion_changes_no_gradient_and_needs_a_buffer_of_the_products_dtype(
    name: str,
) -> None:
    setting = SETTINGS[name]
    found, products = setting.gradients(setting.policy)
    wanted, none = setting.gradients(replace(setting.policy, fuse_weight_gradients=False))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
    # In units of the compute dtype's rounding error.
    assert worst <= 4 * torch.finfo(setting.policy.param_dtype or FP32).eps
    assert (products, none) == (12 if setting.is_fused else 0, 0)


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
    """Return the bytes that one of 64 ranks moves per parameter of the model, beyond those of the plain model."""
    plain = wide_stack()
    # Autograd would add to existing gradients; here, as in the engine, each microbatch starts without one.
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
        sharded(model, mesh=mesh, mp_policy=policy)
        num_parameters = sum(parameter.numel() for parameter in plain.parameters())
        return (bytes_of_a_microbatch(model) - least) / num_parameters
    finally:
        dist.destroy_process_group()


def test_fusion_moves_half_a_byte_per_parameter_and_packing_four_more() -> None:
    fused, unfused = bytes_per_parameter(is_fused=True), bytes_per_parameter(is_fused=False)
    assert 0 <= fused <= 0.5
    assert unfused - fused == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize("backward", [False, True], ids=["autograd.grad", "backward(inputs=)"])
@on_ranks(2)
def test_a_backward_for_inputs_alone_computes_and_reduces_no_weight_gradient(backward: bool) -> None:
    twins, x = Twins(), inputs(dist.get_rank(), 0).requires_grad_()
    (wanted,) = torch.autograd.grad(twins.plain(x).square().sum(), x)
    collectives: list[str] = []
    with counted_products() as products, observe_collectives(lambda call: collectives.append(call.kind)):
        loss = twins.model(x).square().sum()
        if backward:
            loss.backward(inputs=[x])
        found = x.grad if backward else torch.autograd.grad(loss, x)[0]
    assert (found - wanted).abs().max() < 1e-6
    assert [parameter.grad for parameter in twins.model.parameters() if parameter.grad is not None] == products == []
    assert set(collectives) == {"all_gather"}


class Withholding(torch.autograd.Function):
    """A linear layer whose function returns a gradient only for the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight, None


@on_ranks(2)
def test_a_weight_that_gets_neither_gradient_nor_product_counts_as_unused() -> None:
    model = sharded(stack_of(*[lambda m, x: Withholding.apply(x, m.linear.weight)] * 2)())
    squared(model, dist.get_rank(), 0).backward()
    assert not any(parameter.grad is not None for parameter in model.parameters())


def breakable(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Use the layer twice, and fail in backward between the two uses on demand."""
    x = torch.tanh(layer.linear(x))
    return layer.linear(RaisesInBackward.apply(x) if layer.is_broken and isinstance(layer, FsdpModule) else x)


def fail_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Run a backward that raises after one of two products, then return the loss of another forward."""
    for layer in model.layers:
        layer.is_broken = True
    if isinstance(model, FsdpModule):
        with pytest.raises(ArithmeticError):
            (100 * squared(model, rank, step)).backward()
        model.zero_grad()
    for layer in model.layers:
        layer.is_broken = False
    return squared(model, rank, step)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_a_backward_that_raises_between_two_products_leaves_nothing_behind(strategy: str) -> None:
    result = compare(Case(stack_of(breakable, breakable), fail_first, shard=partial(sharded, strategy=strategy)))
    assert result.is_exact, result


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@on_ranks(2)
def test_anomaly_detection_finds_nothing_wrong_with_products() -> None:
    with torch.autograd.set_detect_anomaly(True):
        result = compare(Case(three_blocks, squared))
        assert result.is_exact


KINDS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], int]] = {
    "once": (compute, 4),
    "twice": (lambda m, x: compute(m, compute(m, x)), 8),
    "beside another use": (lambda m, x: compute(m, x) * (1 + m.up.square().mean()), 4),
    "recomputed": (lambda m, x: checkpoint(compute, m, x, use_reentrant=False), 4),
}


@on_ranks(3)
def test_gradients_of_experts_are_exact_and_each_product_goes_into_the_buffer() -> None:
    for kind, (use, num_products) in KINDS.items():
        with counted_products() as products:
            found = compare(Case(lambda: Stack(experts(use), experts(use)), squared, steps=1))  # noqa: B023
        assert found.is_exact, (kind, found)
        assert len(products) == num_products, kind


@on_ranks(2)
def test_a_frozen_weight_has_no_product() -> None:
    model = Stack(experts(), experts())
    first: Any = model.layers[0]
    first.up.requires_grad_(False)
    sharded(model)
    with counted_products() as products:
        model(inputs(0, 0)).sum().backward()
    assert first.up.grad is None
    assert first.down.grad is not None
    assert len(products) == 3


def test_without_sharding_the_layer_computes_an_ordinary_product() -> None:
    layer: Any = experts()
    x = inputs(0, 0, NUM_EXPERTS, 4, WIDTH)
    assert torch.equal(expert_matmul(x, layer.up), torch.bmm(x, layer.up))
    expert_matmul(x, layer.up).sum().backward()
    assert layer.up.grad is not None
