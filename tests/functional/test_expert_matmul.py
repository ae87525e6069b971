"""expert_matmul: batched products of experts whose weight gradients go straight into the unit's buffer."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MixedPrecisionPolicy, expert_matmul, fully_shard
from tests.functional.linear_uses import counted_products
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Stack, inputs, squared
from tests.harness.oracle import Case, compare

NUM_EXPERTS, HIDDEN = 3, 5


class Experts(nn.Module):
    """Every expert computes all tokens, in one product for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.expand(NUM_EXPERTS, *x.shape)
        hidden = torch.tanh(expert_matmul(tokens, self.up))
        return x + expert_matmul(hidden, self.down).sum(0)


class UsedTwice(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class BesideAnotherUse(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.up.square().mean())


class Recomputed(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


KINDS: dict[type[Experts], int] = {Experts: 4, UsedTwice: 8, BesideAnotherUse: 4, Recomputed: 4}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks(lambda num_ranks: num_ranks)
def test_gradients_are_exact_and_each_product_goes_into_the_buffer(kind: type[Experts], num_ranks: int) -> None:
    with counted_products() as products:
        found = compare(Case(lambda: Stack(kind(), kind()), squared, steps=1))
    products = len(products)
    assert found.is_exact, found
    assert products == KINDS[kind]


def gradients(policy: MixedPrecisionPolicy) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = Stack(Experts())
    fully_shard(model.layers[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with counted_products() as products:
        squared(model, 0, 0).float().backward()
    whole = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in whole]).tolist(), len(products)


@on_ranks(2)
def test_products_are_used_where_the_buffer_has_their_dtype_or_may_be_wider() -> None:
    found = []
    for reduce, fuses in ((torch.bfloat16, True), (torch.float32, True), (torch.float32, "wide")):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce, fuse_weight_gradients=fuses)
        ours, products = gradients(policy)
        wanted, _ = gradients(MixedPrecisionPolicy(torch.bfloat16, reduce, fuse_weight_gradients=False))
        worst = max(abs(a - b) for a, b in zip(ours, wanted, strict=True)) / max(map(abs, wanted))
        found.append((worst / torch.finfo(torch.bfloat16).eps, products))
    rank = found
    assert [products for _, products in rank] == [2, 0, 2]
    assert all(worst <= 4 for worst, _ in rank)


@on_ranks(2)
def test_a_frozen_weight_has_no_product() -> None:
    torch.manual_seed(0)
    model = Stack(Experts(), Experts())
    experts = model.layers[0]
    assert isinstance(experts, Experts)
    experts.up.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with counted_products() as products:
        model(inputs(0, 0)).sum().backward()
    assert experts.up.grad is None
    assert experts.down.grad is not None
    assert len(products) == 3


def test_without_sharding_it_is_an_ordinary_product() -> None:
    layer = Experts()
    x = inputs(0, 0, NUM_EXPERTS, 4, WIDTH)
    assert torch.equal(expert_matmul(x, layer.up), torch.bmm(x, layer.up))
    expert_matmul(x, layer.up).sum().backward()
    assert layer.up.grad is not None
