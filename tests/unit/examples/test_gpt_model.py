"""The example's GPT: options that must equal the plain model do, and text generation."""

import dataclasses
import math
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.data import build_tokenizer
from gpt.loss import token_loss
from gpt.model import GptConfig, GptModel, MixtureOfExperts, Mlp, SelfAttention, continued, rotated, route

CONFIG = GptConfig(num_layers=2, hidden_size=24, num_attention_heads=4, ffn_hidden_size=20, max_position_embeddings=11)
OPTIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"swiglu": True, "normalization": "RMSNorm"},
    "rope": {"position_embedding_type": "rope", "num_query_groups": 2},
    "experts": {"num_experts": 3, "moe_aux_loss_coeff": 0.1},
}
OPTIONS["all"] = OPTIONS["swiglu"] | OPTIONS["rope"] | OPTIONS["experts"]
OPTIONS["all"] |= {"disable_bias_linear": True, "untie_embeddings_and_output_weights": True}


def configured(**changes: Any) -> GptConfig:
    return dataclasses.replace(CONFIG, **changes)


def make(*, recomputes: bool = False, seed: int = 1, **changes: Any) -> GptModel:
    """Return a small model; ``changes`` are fields of its configuration."""
    model = GptModel(configured(**changes), recomputes=recomputes)
    model.init_weights(seed)
    return model


def make_text(batch: int = 2, seed: int = 5) -> Tensor:
    return torch.randint(0, 256, (batch, 12), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return token_loss(model, text).mean


@pytest.mark.parametrize("name", OPTIONS)
def test_every_weight_of_every_option_gets_a_gradient(name: str) -> None:
    model = make(**OPTIONS[name])
    loss_of(model, make_text()).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", OPTIONS)
def test_recomputation_changes_no_gradient_of_any_option(name: str) -> None:
    gradients: list[Any] = []
    for model in (make(**OPTIONS[name]), make(recomputes=True, **OPTIONS[name])):
        with mock.patch("gpt.model.checkpoint", wraps=checkpoint) as recomputed:
            loss_of(model, make_text()).backward()
        assert recomputed.call_count == len(gradients) * CONFIG.num_layers
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_lets_a_later_token_change_an_earlier_prediction(name: str) -> None:
    model, text = make(**OPTIONS[name]), make_text()
    changed = text.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 256
    before, after = model(text[:, :11]), model(changed[:, :11])
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=1e-6)
    assert not torch.equal(after[:, 6:], before[:, 6:])


def test_a_group_is_plain_attention_whose_heads_have_equal_keys_and_values() -> None:
    grouped = SelfAttention(configured(num_query_groups=2))
    plain = SelfAttention(CONFIG)
    with torch.no_grad():
        for name in ("weight", "bias"):
            query, key, value = getattr(grouped.linear_qkv, name).unflatten(0, (2, 4, 6)).split([2, 1, 1], dim=1)
            copies = [query, key.expand_as(query), value.expand_as(query)]
            getattr(plain.linear_qkv, name).copy_(torch.stack(copies, dim=2).flatten(0, 3))
        plain.linear_proj.load_state_dict(grouped.linear_proj.state_dict())
        torch.testing.assert_close(grouped(noise(2, 7, 24)), plain(noise(2, 7, 24)))


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = noise(2, 6).unbind(0)
    products = rotated(query.expand(1, 1, 9, 6), 100) @ rotated(key.expand(1, 1, 9, 6), 100).transpose(-1, -2)
    for distance in range(-8, 9):
        diagonal = products[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products[0, 0, 0, 1:] - products[0, 0, 0, :1]).abs().min() > 1e-3


def mlp_of(experts: MixtureOfExperts, index: int, config: GptConfig) -> Mlp:
    """Return one expert as the MLP of a model without experts."""
    mlp = Mlp(config)
    mlp.load_state_dict({name: value[index] for name, value in experts.experts.state_dict().items()})
    return mlp


def test_each_token_has_the_weighted_sum_of_the_experts_that_it_chose() -> None:
    config = configured(num_experts=5, moe_router_topk=2)
    experts = MixtureOfExperts(config)
    with torch.no_grad():
        experts.experts.linear_fc1.bias.normal_()  # type: ignore[union-attr]  # it has one
        experts.experts.linear_fc2.bias.normal_()  # type: ignore[union-attr]
    hidden = noise(3, 7, 24)
    weights, _ = route(experts.router(hidden), config)
    wanted = sum(weights[..., index, None] * mlp_of(experts, index, config)(hidden) for index in range(5))
    torch.testing.assert_close(experts(hidden)[0], wanted)


def test_the_balance_loss_is_its_coefficient_if_balanced_and_grows_otherwise() -> None:
    config = configured(num_experts=4, moe_router_topk=1, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.5)
    alike = 20 * torch.eye(4)
    assert route(alike, config)[1].item() == pytest.approx(0.5)
    assert route(alike[:1].expand(4, 4), config)[1].item() == pytest.approx(2.0)


def test_the_balance_loss_moves_the_router_and_is_no_part_of_the_value() -> None:
    losses = []
    gradients: list[Any] = []
    for coefficient in (0.0, 10.0):
        model = make(num_experts=3, moe_aux_loss_coeff=coefficient)
        loss = loss_of(model, make_text())
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.get_parameter("blocks.1.mlp.router.weight").grad)
    assert losses[0] == losses[1]
    assert not torch.allclose(*gradients)


def test_weights_start_as_megatron_s_from_the_seed_alone() -> None:
    shape: dict[str, Any] = {"hidden_size": 96, "ffn_hidden_size": 96, "init_method_std": 0.05, "num_layers": 3}
    weights = dict(make(seed=7, **shape).named_parameters())
    torch.rand(3)
    assert all(torch.equal(weights[name], other) for name, other in make(seed=7, **shape).named_parameters())
    assert not torch.equal(weights["blocks.1.mlp.linear_fc1.weight"], weights["blocks.2.mlp.linear_fc1.weight"])
    for name, parameter in weights.items():
        if parameter.ndim == 1:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name
        else:
            divisor = math.sqrt(6) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 1.0
            assert parameter.std().item() == pytest.approx(0.05 / divisor, rel=0.05), name


class Successor(nn.Module):
    """Predicts the successor of the last byte, with little doubt, and remembers the lengths that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of 300 tokens that peak at the next byte value, and more at the last, which is padding."""
        self.lengths.append(tokens.shape[1])
        logits = 3.0 * nn.functional.one_hot((tokens + 1) % 256, 300).float()
        logits[..., 299] = 9.0
        return logits


def after_ab(temperature: float, *, seed: int = 1, num_tokens: int = 5, model: nn.Module | None = None) -> str:
    """Return 'ab' continued by a ``Successor`` that sees 4 tokens."""
    args = Namespace(prompt="ab", num_tokens_to_generate=num_tokens, temperature=temperature, seed=seed)
    return continued(model or Successor(), build_tokenizer(None), 4, args, torch.device("cpu"))


def test_a_low_temperature_is_greedy_and_a_high_one_depends_on_the_seed_only() -> None:
    assert after_ab(0) == after_ab(0.05) == "abcdefg"
    assert after_ab(5.0, seed=1) == after_ab(5.0, seed=1) != after_ab(5.0, seed=2)
    assert after_ab(1.0, num_tokens=0) == "ab"


def test_the_model_sees_no_more_than_the_context() -> None:
    model = Successor()
    after_ab(0, model=model)
    assert model.lengths == [2, 3, 4, 4, 4]
