"""Losses by tokens: the tokens that count, and equal results if ranks and microbatches have unequal numbers."""

import argparse

import torch

from gpt.loss import MeanLoss, TokenLoss, counting_tokens, step_weight, token_loss
from gpt.model import GptConfig, GptModel
from tests.harness import run_ranks
from tests.unit.examples.jobs import train_steps

CONFIG = GptConfig(num_layers=1, hidden_size=12, num_attention_heads=2, ffn_hidden_size=20, max_position_embeddings=9)


def model() -> GptModel:
    made = GptModel(CONFIG)
    made.init_weights(3)
    return made


def test_tokens_after_the_masked_token_do_not_count() -> None:
    text = torch.tensor([[5, 0, 6, 7], [0, 0, 8, 0]])
    assert counting_tokens(text, 0).tolist() == [[True, False, True], [False, False, True]]
    assert counting_tokens(text, None).all()


def test_the_sum_is_of_the_tokens_that_count() -> None:
    made, text = model(), torch.tensor([[5, 0, 6, 7, 9]])
    whole, masked = token_loss(made, text), token_loss(made, text, 0)
    logits = made(text[:, :-1])
    assert isinstance(logits, torch.Tensor)
    each = -logits.log_softmax(-1)[0, range(4), text[0, 1:]]
    torch.testing.assert_close(masked.total, each[0] + each[2] + each[3])
    torch.testing.assert_close(whole.total, each.sum())
    assert (whole.num_tokens.item(), masked.num_tokens.item()) == (4, 3)


def mean_of_unequal(is_per_token: bool) -> tuple[float, float]:
    """Return the mean loss over two ranks, one with 1 token of loss 8, the other with 3 of loss 2; and a weight."""
    args = argparse.Namespace(
        calculate_per_token_loss=is_per_token,
        use_megatron_fsdp=True,
        tensor_model_parallel_size=1,
        fsdp_invariant_reduction=False,
    )
    is_first = torch.distributed.get_rank() == 0
    total, count = (8.0, 1) if is_first else (6.0, 3)
    mean = MeanLoss(args, torch.device("cpu"))
    mean.add(TokenLoss(torch.tensor(total), torch.tensor(count)))
    text = torch.tensor([[5, 0, 0, 7]] if is_first else [[5, 6, 7, 8]])
    return mean.over_ranks().item(), float(step_weight(args, [text], 0))


def test_the_mean_is_over_tokens_or_over_microbatches() -> None:
    assert run_ranks(2, mean_of_unequal, True) == [(3.5, 0.25)] * 2
    assert run_ranks(2, mean_of_unequal, False) == [(5.0, 1.0)] * 2


def test_without_the_flag_microbatches_with_unequal_tokens_weigh_the_same(documents: str) -> None:
    flags = f"--eod-mask-loss --global-batch-size 8 --data-path {documents}"
    ((by_token, _),) = run_ranks(1, train_steps, f"{flags} --micro-batch-size 1 --calculate-per-token-loss", 1)
    ((by_sample, _),) = run_ranks(1, train_steps, f"{flags} --micro-batch-size 1", 1)
    assert abs(by_token[1] - by_sample[1]) > 0.03 * by_token[1]
