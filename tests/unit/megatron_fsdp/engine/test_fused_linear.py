"""Linear layers that multiply their weight gradient into a buffer, tested without the units that own the buffers."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from dbuffer_kernels.products import add_product
from megatron_fsdp.build.ownership import OwnedParameter, collect_parameters
from megatron_fsdp.engine.fused_linear import FusedLinear, fuse_linear_layers, offer_products

NO_NUMBER = float("nan")


class Receiver:
    def __init__(self, weight: torch.Tensor, *, is_willing: bool = True) -> None:
        self.view = torch.zeros(weight.shape, dtype=weight.dtype)
        self.num_products = 0
        self.takes_products = is_willing
        offer_products([weight], [self.view], self)

    def receive_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        assert index == 0
        add_product(left, right, self.view)
        self.num_products += 1


def owned_by(*modules: nn.Module) -> list[OwnedParameter]:
    return collect_parameters(modules, ())


def fused(layer: nn.Linear) -> nn.Linear:
    fuse_linear_layers(owned_by(layer))
    return layer


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Renamed(nn.Linear):
    """A linear layer's forward under another class."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_an_overwriting_product_ignores_what_lay_there(dtype: torch.dtype, scale: float) -> None:
    left, right = torch.randn(3, 5, dtype=dtype), torch.randn(5, 7, dtype=dtype)
    out = torch.full((3, 7), NO_NUMBER, dtype=dtype)
    add_product(left, right, out, scale=scale, overwrite=True)
    assert torch.equal(out, scale * (left @ right))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_another_product_is_added(scale: float) -> None:
    left, right, out = torch.randn(3, 5), torch.randn(5, 7), torch.randn(3, 7)
    wanted = out + scale * (left @ right)
    add_product(left, right, out, scale=scale)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("overwrite", "wanted"), [(True, 0.0), (False, 2.0)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_product_over_no_rows_is_zero(overwrite: bool, wanted: float, scale: float) -> None:
    out = torch.full((3, 7), NO_NUMBER if overwrite else 2.0)
    add_product(torch.empty(3, 0), torch.empty(0, 7), out, scale=scale, overwrite=overwrite)
    assert torch.equal(out, torch.full((3, 7), wanted))


def test_a_fused_layer_looks_like_one_of_its_class() -> None:
    layer = fused(Renamed(3, 4))
    assert isinstance(layer, FusedLinear)
    assert repr(layer) == repr(Renamed(3, 4))
    assert type(layer).__name__ == "Renamed"
    assert "FusedLinear" in str(type(layer))
    assert list(layer.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(
    "module",
    [
        Doubled(3, 4), nn.Embedding(3, 4), nn.Bilinear(2, 2, 2), nn.Conv1d(1, 1, 1),
        parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Identity()),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_other_forwards_and_modules_and_computed_weights_are_left_alone(module: nn.Module) -> None:
    kind = type(module)
    fuse_linear_layers(owned_by(module))
    assert type(module) is kind


def copied_by_pickle(layer: nn.Linear) -> nn.Linear:
    result = pickle.loads(pickle.dumps(layer))
    assert isinstance(result, nn.Linear)
    return result


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, copied_by_pickle])
def test_a_copy_is_a_plain_layer_again(duplicate: Callable[[nn.Linear], nn.Linear]) -> None:
    layer = fused(Renamed(3, 4))
    other = duplicate(layer)
    assert type(other) is Renamed
    assert torch.equal(other.weight, layer.weight)


def test_a_copied_weight_does_not_write_into_the_buffer_of_the_first() -> None:
    layer = fused(nn.Linear(3, 4))
    receiver = Receiver(layer.weight)
    other = fused(copy.deepcopy(layer))
    other(torch.ones(2, 3)).sum().backward()
    assert other.weight.grad is not None
    assert receiver.num_products == 0


def gradient_of(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.load_state_dict(layer.state_dict())
    plain(x).square().sum().backward()
    assert plain.weight.grad is not None
    return plain.weight.grad


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (2, 1, 5, 3), (0, 3), (2, 0, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_number_of_dimensions_give_the_gradient(shape: tuple[int, ...], bias: bool) -> None:
    layer = fused(nn.Linear(3, 4, bias=bias))
    receiver, x = Receiver(layer.weight), torch.randn(shape, requires_grad=True)
    output = layer(x)
    output.square().sum().backward()
    assert output.shape == (*shape[:-1], 4)
    assert x.grad.shape == shape
    assert layer.weight.grad is None
    assert receiver.num_products == 1
    torch.testing.assert_close(receiver.view, gradient_of(layer, x.detach()))


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (2, 1, 5, 3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_an_output_may_be_changed_in_place(shape: tuple[int, ...], bias: bool, is_contiguous: bool) -> None:
    def loss(layer: nn.Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        output = layer(x if is_contiguous or x.ndim < 2 else x.transpose(0, -2))
        output += residual
        return (nn.functional.relu(output, inplace=True) * residual).sum()

    layer = fused(nn.Linear(3, 4, bias=bias))
    receiver, plain = Receiver(layer.weight), nn.Linear(3, 4, bias=bias)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(shape)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    residuals = [torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2)]
    for each, given, residual in zip((layer, plain), inputs, residuals, strict=True):
        loss(each, given, residual).backward()
    assert receiver.num_products == 1
    torch.testing.assert_close(receiver.view, plain.weight.grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(residuals[0].grad, residuals[1].grad)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_outputs_have_no_gradient_to_give() -> None:
    layer = fused(nn.Linear(3, 0, bias=False))
    receiver = Receiver(layer.weight)
    layer(torch.ones(2, 5, 3)).sum().backward()
    assert receiver.view.shape == (0, 3)


def test_the_hook_of_a_weight_runs_once_after_all_of_its_products() -> None:
    layer, seen = fused(nn.Linear(3, 3)), []
    receiver = Receiver(layer.weight)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append((receiver.num_products, weight.grad)))
    layer(layer(layer(torch.ones(2, 3)))).sum().backward()
    assert seen == [(3, None)]


def test_a_receiver_that_is_unwilling_or_gone_leaves_the_gradient_to_autograd() -> None:
    layer = fused(nn.Linear(3, 4))
    unwilling = Receiver(layer.weight, is_willing=False)
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert unwilling.num_products == 0
    layer.weight.grad = None
    del unwilling
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None


def test_a_view_of_another_dtype_is_not_offered() -> None:
    layer = fused(nn.Linear(3, 4).bfloat16())
    receiver = Receiver(layer.weight)
    other = fused(nn.Linear(3, 4).bfloat16())
    offer_products([other.weight], [torch.zeros(4, 3)], receiver)
    for one in (layer, other):
        one(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is None
    assert other.weight.grad is not None


def test_autocast_to_the_dtype_of_the_weight_casts_the_input_and_multiplies() -> None:
    layer = fused(nn.Linear(3, 4).bfloat16())
    receiver, x = Receiver(layer.weight), torch.randn(5, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    output.float().sum().backward()
    assert output.dtype is torch.bfloat16
    assert x.grad.dtype is torch.float32
    assert receiver.num_products == 1


def test_recorded_backwards_get_a_gradient_that_can_be_differentiated() -> None:
    layer, plain = fused(nn.Linear(3, 4)), nn.Linear(3, 4)
    plain.load_state_dict(layer.state_dict())
    receiver, found = Receiver(layer.weight), []
    for one in (layer, plain):
        x = torch.linspace(0, 1, 6).view(2, 3).requires_grad_()
        (slope,) = torch.autograd.grad(one(x).square().sum(), one.weight, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*found)
    assert receiver.num_products == 0


def mapped(layer: nn.Linear) -> torch.Tensor:
    return torch.func.vmap(layer)(torch.ones(4, 2, 3)).sum()


def differentiated_forward(layer: nn.Linear) -> torch.Tensor:
    with forward_ad.dual_level():
        output = layer(forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3)))
        return forward_ad.unpack_dual(output).tangent.sum()


def called_with_other_weights(layer: nn.Linear) -> torch.Tensor:
    parameters = {name: parameter * 1 for name, parameter in layer.named_parameters()}
    return torch.func.functional_call(layer, parameters, torch.ones(2, 3)).sum()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("way", [mapped, differentiated_forward, called_with_other_weights])
def test_transforms_of_functions_see_the_ordinary_layer(way: Callable[[nn.Linear], torch.Tensor]) -> None:
    layer, plain = fused(nn.Linear(3, 4)), nn.Linear(3, 4)
    plain.load_state_dict(layer.state_dict())
    receiver = Receiver(layer.weight)
    way(layer).backward()
    way(plain).backward()
    assert math.isclose(float(layer.weight.grad.sum()), float(plain.weight.grad.sum()), rel_tol=1e-5)
    assert receiver.num_products == 0


def test_inputs_of_another_dtype_raise_what_they_raise_on_a_plain_layer() -> None:
    layer = fused(nn.Linear(3, 4))
    receiver = Receiver(layer.weight)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(2, 3, dtype=torch.float64))
    assert receiver.num_products == 0


def test_a_node_that_is_called_by_hand_returns_the_gradient() -> None:
    layer = fused(nn.Linear(3, 4, bias=False))
    receiver, x = Receiver(layer.weight), torch.ones(2, 3)
    output = layer(x)
    _, found, *_ = output.grad_fn.apply(torch.ones(2, 4))
    assert torch.equal(found, torch.full((4, 3), 2.0))
    assert receiver.num_products == 0


def test_a_backward_within_autocast_multiplies_in_the_dtype_of_the_weight() -> None:
    layer = fused(nn.Linear(3, 4))
    receiver, x = Receiver(layer.weight), torch.randn(5, 3, requires_grad=True)
    loss = layer(x).square().sum() + layer(x).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert receiver.num_products == 2
    torch.testing.assert_close(receiver.view, 2 * gradient_of(layer, x.detach()))
