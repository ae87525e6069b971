"""Text that the model continues."""

import torch
from torch import Tensor, nn

from gpt.sample import Sampling, generate

CPU = torch.device("cpu")


class Successor(nn.Module):
    """Predicts the successor of the last byte, with little doubt, and remembers the lengths that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits that peak at the next byte value."""
        self.lengths.append(tokens.shape[1])
        return 3.0 * nn.functional.one_hot((tokens + 1) % 256, 256).float()


def continued(temperature: float, *, seed: int = 1, num_bytes: int = 5) -> bytes:
    """Return 'ab' continued by a ``Successor``."""
    sampling = Sampling(temperature, seed, max_context=4)
    return b"ab" + bytes(generate(Successor(), b"ab", num_bytes, sampling, CPU))


def test_temperature_zero_takes_the_most_likely_byte() -> None:
    assert continued(0) == b"abcdefg"


def test_a_low_temperature_agrees_with_temperature_zero() -> None:
    assert continued(0.05) == b"abcdefg"


def test_a_high_temperature_depends_on_the_seed_alone() -> None:
    assert continued(5.0, seed=1) == continued(5.0, seed=1)
    assert continued(5.0, seed=1) != continued(5.0, seed=2)


def test_the_model_sees_no_more_than_the_context() -> None:
    model = Successor()
    assert len(list(generate(model, b"ab", 5, Sampling(0, 1, max_context=4), CPU))) == 5
    assert model.lengths == [2, 3, 4, 4, 4]


def test_each_token_comes_as_soon_as_it_is_drawn_and_gradients_go_on_meanwhile() -> None:
    model = Successor()
    tokens = generate(model, b"ab", 3, Sampling(0, 1, 4), CPU)
    assert next(tokens) == ord("c")
    assert model.lengths == [2]
    assert torch.is_grad_enabled()


def test_no_bytes_asked_leaves_the_prompt() -> None:
    assert continued(1.0, num_bytes=0) == b"ab"


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    sampling = Sampling(0, 1, max_context=4, vocabulary_size=100)
    # The successor of 99 is padding; all others are equally unlikely, and the first of them is taken.
    assert bytes(generate(Successor(), b"b", 3, sampling, CPU)) == b"c\0\1"
