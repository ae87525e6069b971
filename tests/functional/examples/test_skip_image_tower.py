"""The example whose ranks get different modalities."""

import torch
from torch import nn

import skip_image_tower as example
from tests.harness import run_ranks


def plain_losses(num_ranks: int) -> list[list[float]]:
    """Train the whole model in this process on the batches of all ranks; return each rank's losses."""
    torch.manual_seed(0)
    model = example.VisionLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(example.NUM_STEPS):
        losses = [example.loss_of(model, rank, step) for rank in range(num_ranks)]
        (sum(losses[1:], losses[0]) / num_ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for each, loss in zip(found, losses, strict=True):
            each.append(loss.item())
    return found


def test_ranks_that_skip_the_image_tower_have_the_losses_of_the_whole_model() -> None:
    with_images = [[example.draw(rank, step)[1] is not None for step in range(example.NUM_STEPS)] for rank in range(2)]
    assert {*zip(*with_images, strict=True)} == {(False, False), (False, True), (True, False), (True, True)}
    torch.testing.assert_close(run_ranks(2, example.main), plain_losses(2), rtol=1e-4, atol=1e-4)
