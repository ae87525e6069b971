"""The GPT of the example."""

import dataclasses
import math

import pytest
import torch

from gpt.loss import next_token_loss
from gpt.model import GptConfig, GptModel, Recompute

CONFIG = GptConfig(num_layers=3, hidden_size=20, num_attention_heads=5, ffn_hidden_size=36, max_position_embeddings=11)


def make(*, recompute: Recompute = Recompute.NONE, seed: int = 1, **changes: object) -> GptModel:
    """Return a small model; ``changes`` are fields of its configuration."""
    model = GptModel(dataclasses.replace(CONFIG, **changes), recompute=recompute)  # type: ignore[arg-type]
    model.init_weights(seed)
    return model


def make_text(batch: int = 2, length: int = 12) -> torch.Tensor:
    """Return random bytes, (batch, length) int64."""
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(5))


def test_new_weights_predict_almost_uniformly() -> None:
    assert next_token_loss(make(), make_text()).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_later_byte_changes_no_earlier_prediction() -> None:
    model, text = make(), make_text(length=9)
    changed = text.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_the_order_of_bytes_matters() -> None:
    model, text = make(), make_text(batch=1, length=6)
    swapped = text[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model(text)[:, -1], model(swapped)[:, -1], atol=1e-5)


@pytest.mark.parametrize("is_untied", [False, True])
def test_untying_adds_exactly_one_output_weight(is_untied: bool) -> None:
    names = dict(make(untie_embeddings_and_output_weights=is_untied).named_parameters())
    assert ("head.output_layer.weight" in names) is is_untied
    assert len(names) == 2 + 12 * CONFIG.num_layers + 2 + is_untied


def test_a_tied_embedding_gets_gradients_for_bytes_that_occur_only_as_targets() -> None:
    model = make()
    next_token_loss(model, torch.tensor([[1, 2, 3]])).backward()
    gradient = model.embedding.word_embeddings.weight.grad
    assert gradient is not None
    assert gradient[3].abs().max() > 0


def test_equal_seeds_give_equal_weights_whatever_the_global_random_state() -> None:
    first = make(seed=7)
    torch.rand(3)
    second = make(seed=7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = make(seed=8)
    assert not torch.equal(first.embedding.word_embeddings.weight, other.embedding.word_embeddings.weight)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.word_embeddings.weight", 0.05),
        ("blocks.1.self_attention.linear_qkv.weight", 0.05),
        ("blocks.1.mlp.linear_fc1.weight", 0.05),
        ("blocks.1.self_attention.linear_proj.weight", 0.05 / math.sqrt(6)),
        ("blocks.1.mlp.linear_fc2.weight", 0.05 / math.sqrt(6)),
    ],
)
def test_weights_start_with_megatron_s_standard_deviations(name: str, std: float) -> None:
    model = make(hidden_size=100, ffn_hidden_size=100, init_method_std=0.05)
    assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.05)


def test_norms_start_as_the_identity_and_biases_at_zero() -> None:
    for name, parameter in make().named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputation_changes_neither_loss_nor_gradients(recompute: Recompute) -> None:
    text = make_text()
    plain, saving = make(), make(recompute=recompute)
    losses = [next_token_loss(model, text) for model in (plain, saving)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for expected, found in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


def test_more_recomputation_keeps_fewer_bytes_for_backward() -> None:
    kept = [bytes_kept_for_backward(recompute) for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)]
    assert kept[0] > kept[1] > kept[2]


def bytes_kept_for_backward(recompute: Recompute) -> int:
    """Return the bytes of distinct storages that one forward pass saves beside the weights."""
    model = make(recompute=recompute)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        next_token_loss(model, make_text())
    return sum(kept.values())


def test_the_model_learns_a_repeating_text() -> None:
    model = make()
    text = torch.arange(12).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = next_token_loss(model, text)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
