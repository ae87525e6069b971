"""Backward through functions of sharded tensors gives the gradients of the whole ones, in their rows."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from dbuffer import FlatDTensor
from tests.functional.dbuffer.dtensor.operator_cases import (
    SHAPES,
    agree,
    in_other_rows,
    make_mesh,
    num_ranks,
    sharded,
    values,
    whole,
)
from tests.harness import on_ranks
from tests.harness.grids import nightly_but

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _hooked(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    inner = p * q
    inner.register_hook(lambda gradient: gradient * 3)
    p.register_hook(lambda gradient: gradient * 2)
    return inner.square().sum() + p.sum()


def _second_use(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    inner = p.exp()
    return (inner * q).sum() + inner.square().mean() + inner.flatten()[:1].sum() + p.norm() + (p * p).sum() + p.sum()


def _mixed_whole(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    everything = p.full_tensor() if isinstance(p, DTensor) else p
    return everything.square().sum() + (p * q).sum()


def _redistributed(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if isinstance(p, DTensor):
        return (p.redistribute(placements=[Replicate()] * p.device_mesh.ndim) * q).square().sum() + q.sum()
    return (p * q).square().sum() + q.sum()


def _other_rows(p: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    other = values(7)[SHAPES.index(tuple(p.shape))]
    if isinstance(p, DTensor):
        other = in_other_rows(other, p, kind)
    return (p * other).square().sum() + (other - q).square().sum()


def _grad_function(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad((p.square() * q.detach()).sum(), [p])
    assert type(gradient) is type(p.detach())
    return (gradient * p).sum() + (gradient * q).sum()


def _backward_with_gradient(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    (p * q).backward(q.detach() * 2, retain_graph=True)
    torch.autograd.backward([p * 2, q.sum()], [p.detach(), None])
    return p.sum()


LOSSES: dict[str, Loss] = {
    "sum": lambda p, q: p.sum() + (q * 2).sum(),
    "mean": lambda p, q: p.mean() * q.square().mean(),
    "sum of squares": lambda p, q: 0.5 * (p * p).sum() + q.pow(2).sum(),
    "bf16": lambda p, q: (p.bfloat16() * q.bfloat16()).float().sum(),
    "norm": lambda p, q: p.norm() + torch.linalg.vector_norm(q, 3),
    "absolute": lambda p, q: p.abs().sum() + q.abs().amax(),
    "distance": lambda p, q: (p - q).square().sum().sqrt(),
    "matmul": lambda p, q: (p.flatten(0, -2) @ q.flatten(0, -2).T).square().sum() if p.ndim > 1 else p.dot(q),
    "transposed": lambda p, q: (p.transpose(0, -1) * q.transpose(0, -1)).sum() + p.transpose(0, -1).square().sum(),
    "slices": lambda p, q: p[:1].square().sum() + q[-1].sum() + (p[..., :1] * q[..., :1]).sum(),
    "views": lambda p, q: (p.view(-1)[:1] * q.reshape(-1)).sum(),
    "broadcast row": lambda p, q: (p * q[0]).square().sum(),
    "broadcast column": lambda p, q: (p * q.sum(-1, keepdim=True)).square().sum(),
    "softmax": lambda p, q: (p.softmax(0) * q).sum() + (p.softmax(-1) * q).sum(),
    "layer norm": lambda p, q: (functional.layer_norm(p, p.shape[-1:]) * q).sum(),
    "where": lambda p, q: torch.where(p > q, p, q * 2).sum(),
    "lerp": lambda p, q: torch.lerp(p, q, 0.3).square().sum(),
    "activation": lambda p, q: functional.gelu(p).sum() + functional.relu(q).sum() + functional.softplus(p * q).sum(),
    "detached": lambda p, q: (p.detach() * q).sum() + p.sum() + (p.data * q).sum(),
    "clone": lambda p, q: (p.clone() * q.contiguous()).sum() + torch.zeros_like(p).sum() + p.double().sum().float(),
    "cat": lambda p, q: torch.cat([p, q]).square().sum(),
    "scalar products": lambda p, q: (p.sum() * q).sum() + (p * q.norm()).sum(),
    "many uses": _second_use,
    "hooks": _hooked,
    "full_tensor": _mixed_whole,
    "redistribute": _redistributed,
    "autograd.grad": _grad_function,
    "backward with a gradient": _backward_with_gradient,
    "other rows, cut by torch": lambda p, q: _other_rows(p, q, "cut by torch"),
    "other rows, replicated": lambda p, q: _other_rows(p, q, "replicated"),
    "other rows, another buffer": lambda p, q: _other_rows(p, q, "another buffer"),
    "plain 0-d tensor": lambda p, q: (p * torch.tensor(3.0)).sum() + torch.tensor(1.0, requires_grad=True) * q.sum(),
}


def gradients(loss: Loss, p: torch.Tensor, q: torch.Tensor) -> object:
    p, q = nn.Parameter(p), nn.Parameter(q)
    for _ in range(2):
        loss(p, q).backward()
    for tensor in (p, q):
        if isinstance(tensor, DTensor) and tensor.grad is not None:
            assert type(tensor.grad) is FlatDTensor
            assert tensor.grad.placements == tensor.placements
    return [whole(p.grad), whole(q.grad)]


NUM_PARTS = 6


LAYOUTS_OF_REGULARIZERS = ["one rank", "three ranks", "hsdp", "hfsdp", "inside slices", "inside slices, hfsdp"]


QUICK = [("one rank", 0), ("three ranks", 1), ("inside slices", 2)]


@pytest.mark.parametrize(("layout", "part"), nightly_but(QUICK, product(LAYOUTS_OF_REGULARIZERS, range(NUM_PARTS))))
@on_ranks(lambda layout: num_ranks(layout))
def test_gradients_are_those_of_whole_tensors(layout: str, part: int) -> None:
    found, mesh = [], make_mesh(layout)
    for number, (name, loss) in enumerate(LOSSES.items()):
        plain = zip(values(1), values(2), strict=True)
        faces = zip(sharded(layout, values(1), mesh), sharded(layout, values(2), mesh), strict=True)
        for position, (shape, operands, own) in enumerate(zip(SHAPES, plain, faces, strict=True)):
            if 0 in shape or (number + position) % NUM_PARTS != part:
                continue
            wanted, result = gradients(loss, *operands), gradients(loss, *own)
            if not agree(result, wanted, 1e-2 if name == "bf16" else 1e-5):
                found.append(f"{name} of {shape}: {result}, wanted {wanted}")
    assert found == []


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a sum of parameters": lambda a, b: torch.zeros_like(a).add_(a, alpha=2).add_(b).mul_(a).square().sum(),
    "a copy of a parameter": lambda a, b: a.clone().mul_(b).sub_(1).square().sum(),
    "rows of zeros": lambda a, b: (torch.zeros_like(a).copy_(a * b) * b).sum(),
    "what others saved": lambda a, b: ((doubled := a * 2).exp() * doubled.detach().mul_(b)).sum(),
    "in place by an option": lambda a, b: nn.functional.relu(a * b, inplace=True).square().sum(),
    "a product of wholes": lambda a, b: torch.zeros_like(a).add_(a @ b.t() @ a).square().mean(),
    "memory without history": lambda a, b: (a.detach().clone().add_(b * b) * a).sum(),
}


@pytest.mark.parametrize("name", WRITES)
@on_ranks(3)
def test_gradients_through_a_write_equal_those_of_plain_tensors(name: str) -> None:
    mesh = make_mesh("three ranks")
    first = torch.randn(5, 7)
    plain = [nn.Parameter(first), nn.Parameter(first * 0.5 + 1)]
    WRITES[name](*plain).backward()
    placed: list[Any] = [nn.Parameter(sharded("three ranks", [each.detach()], mesh)[0]) for each in plain]
    WRITES[name](*placed).backward()
    for mine, wanted in zip(placed, plain, strict=True):
        assert (mine.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)
        assert torch.equal(mine.detach().full_tensor(), wanted)


# PyTorch does not ask the class of a tensor that these functions wrap.
TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "vmap over rows": lambda p: torch.func.vmap(lambda row: row * 2)(p),
    "vmap of sums": lambda p: torch.func.vmap(torch.sum)(p),
    "vmap over columns": lambda p: torch.func.vmap(torch.sin, in_dims=1)(p),
    "grad": lambda p: torch.func.grad(lambda x: x.square().sum())(p),
    "vjp": lambda p: torch.func.vjp(lambda x: x * x, p)[1](p),
    "functionalize": lambda p: torch.func.functionalize(lambda x: x * 2)(p),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@on_ranks(3)
def test_transforms_of_a_sharded_tensor_are_refused(name: str) -> None:
    placed = sharded("three ranks", [torch.randn(5, 7)], make_mesh("three ranks"))[0]
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"\(5, 7\).*fix: give the transform p\.full_tensor\(\)"),
    ):
        TRANSFORMS[name](placed)


@on_ranks(3)
def test_vmap_equals_that_of_plain_tensors_if_it_does_not_map_the_sharded_one() -> None:
    plain = torch.randn(5, 7)
    placed = sharded("three ranks", [plain], make_mesh("three ranks"))[0]
    with torch.no_grad():
        found, wanted = (torch.func.vmap(lambda x, p=p: p @ x)(torch.ones(4, 7)) for p in (placed, plain))
    torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, wanted)
