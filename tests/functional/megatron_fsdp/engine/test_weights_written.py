"""Writes to sharded parameters, and attributes set on them, equal the plain model or raise a named error."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from megatron_fsdp import PlacementError, StateError, fully_shard
from tests.harness import on_ranks
from tests.harness.models import Stack, squared
from tests.harness.twins import Twins

WIDTH = 7


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that can be merged into it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)
        self.is_merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base(x)
        return base if self.is_merged else base + 0.5 * self.up(self.down(x))

    def merge(self, how: str) -> None:
        """Add the adapter to the weight, as the libraries do."""
        delta = 0.5 * (self.up.weight @ self.down.weight)
        if how == "+= of .data":
            self.base.weight.data += delta
        elif how == "add_ to .data":
            self.base.weight.data.add_(delta)
        else:
            self.base.weight.data = self.base.weight.data + delta
        self.is_merged = True


def adapted() -> nn.Module:
    return Stack(Adapted(), Adapted(), nn.Linear(WIDTH, 5))


@pytest.mark.parametrize("how", ["+= of .data", "add_ to .data", "assigned .data"])
@pytest.mark.parametrize("has_gradients", [False, True])
@on_ranks(3)
def test_an_adapter_merged_outside_of_no_grad_is_in_the_weights(how: str, has_gradients: bool) -> None:
    twins = Twins(adapted, reshard_after_forward=True)
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
    twins.backward()
    if not has_gradients:
        twins.step(optimizers)
    for model in twins:
        for layer in model.modules():
            if isinstance(layer, Adapted):
                layer.merge(how)
    assert twins.weights_apart() < 1e-6
    assert twins.gradients_apart() < 1e-6
    twins.zero_grad()
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6


@pytest.mark.parametrize("how", ["scalar", "tensor like it", "its gradient"])
@on_ranks(2)
def test_data_of_a_parameter_with_a_gradient_is_added_to(how: str) -> None:
    twins = Twins()
    twins.backward()
    for model in twins:
        for parameter in model.parameters():
            if how == "scalar":
                parameter.data += 0.5
            elif how == "tensor like it":
                parameter.data += torch.full_like(parameter.data, 0.5)
            else:
                parameter.data += parameter.grad * -0.5
    assert twins.weights_apart() < 1e-6
    assert twins.gradients_apart() < 1e-6
    twins.zero_grad()
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_an_attribute_set_by_a_hook_on_a_weight_is_on_the_parameter() -> None:
    twins = Twins()

    def note(layer: Any, given: Any, gradient: Any) -> None:
        layer.weight.grad_sample = gradient[0].detach().clone()
        layer.weight.count = getattr(layer.weight, "count", 0) + 1

    for model in twins:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_full_backward_hook(note)
    for step in range(2):
        for model in twins:
            squared(model, dist.get_rank(), step).backward()
    seen = 0
    for (name, mine), other in zip(twins.model.named_parameters(), twins.plain.parameters(), strict=True):
        if hasattr(other, "grad_sample"):
            torch.testing.assert_close(mine.grad_sample, other.grad_sample, msg=name)
            assert mine.count == other.count == 2
            del mine.grad_sample
            assert not hasattr(mine, "grad_sample")
            seen += 1
    assert seen


@on_ranks(2)
def test_an_attribute_of_a_parameter_is_on_its_gathered_weight() -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 1))
    model[0].weight.mark = "before"
    fully_shard(model, reshard_after_forward=True)
    seen = []
    model[0].register_forward_pre_hook(lambda layer, given: seen.append(layer.weight.mark))
    model(torch.ones(2, WIDTH))
    model[0].weight.mark = "after"
    model(torch.ones(2, WIDTH))
    assert seen == ["before", "after"]
    model[0].register_forward_pre_hook(lambda layer, given: layer.weight.nothing)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        model(torch.ones(2, WIDTH))


@on_ranks(2)
def test_sparse_adam_is_refused_by_parameter_and_unit() -> None:
    model: Any = nn.Sequential(nn.Embedding(11, 3, sparse=True), nn.Linear(3, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SparseAdam([model[0].weight], lr=0.1)
    model(torch.tensor([dist.get_rank(), 5])).sum().backward()
    with pytest.raises(
        StateError, match=r"SparseAdam holds parameter 'weight' of unit '0'.*fix: use torch\.optim\.Adam"
    ):
        optimizer.step()


@on_ranks(2)
def test_torch_export_is_refused_by_parameter_and_unit() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    fully_shard(model)
    with pytest.raises(StateError, match=r"parameter '0\.weight' is sharded, and torch\.export.*fix: export a plain"):
        torch.export.export(model, (torch.ones(2, 3),), strict=False)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    exported = torch.export.export(plain, (torch.ones(2, 3),)).module()
    torch.testing.assert_close(exported(torch.ones(2, 3)), model(torch.ones(2, 3)))


@on_ranks(1)
def test_strict_export_names_the_unit_and_the_fix() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    fully_shard(model)
    # Dynamo puts its own text around the error.
    wanted = r"unit 'Sequential' is sharded, and torch\.export.*fix: export a plain model"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=wanted):
        torch.export.export(model, (torch.ones(2, 3),), strict=True)


@on_ranks(2)
def test_data_of_another_shape_is_refused_by_parameter_and_unit() -> None:
    model: Any = nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 1))
    fully_shard(model)
    wanted = (
        re.escape("parameter '0.weight' is torch.float32 of shape (11, 3)") + ".*fix: change shapes before fully_shard"
    )
    with pytest.raises(PlacementError, match=wanted):
        model[0].weight.data = torch.zeros(13, 3)
    with pytest.raises(PlacementError, match=r"unit 'Sequential': parameter '0\.weight'.*fix: "):
        model[0].weight.resize_(13, 3)


ARRAYS = {
    "numpy": lambda weight: weight.numpy(force=True),
    "asarray": lambda weight: np.asarray(weight.detach()),
    "of its gradient": lambda weight: weight.grad.numpy(),
}


@pytest.mark.parametrize("way", ARRAYS)
@on_ranks(2)
def test_an_array_of_a_sharded_parameter_is_refused_by_name(way: str) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    wanted = r"an array cannot share the memory of .*0\.weight'.*fix: call p\.detach\(\)\.full_tensor\(\)\.numpy\(\)"
    weight = model[0].weight
    with pytest.raises(PlacementError, match=wanted):
        ARRAYS[way](weight)
    assert weight.detach().full_tensor().numpy().shape == (5, 3)
    assert weight.detach().norm().numpy() == pytest.approx(weight.detach().full_tensor().norm().item())


@on_ranks(2)
def test_a_mask_is_refused_with_the_place_for_prune_remove() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    fully_shard(model)
    with pytest.raises(PlacementError, match=r"parameter '0\.weight_orig'.*Call prune\.remove, .* before fully_shard"):
        prune.remove(model[0], "weight")
