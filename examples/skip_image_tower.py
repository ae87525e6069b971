"""Train a small vision-language model whose ranks get different modalities.

``torchrun --nproc-per-node 2 examples/skip_image_tower.py``

Some batches have images, and each rank draws its own batches. A rank whose batch has no image does not run the image
tower. With ``set_forward_order`` it still joins the tower's collectives, without dummy images.
"""

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import clip_grad_norm_, fully_shard, unsharded

WIDTH, NUM_WORDS, NUM_STEPS = 32, 64, 12


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, length, WIDTH)."""
        out: torch.Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return out


class VisionLanguageModel(nn.Module):
    """The words of a batch, after the patches of an image if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        """Return logits, (rows, length, NUM_WORDS).

        Args:
            words: (rows, length). images: patches of 4 x 4 pixels, (rows, patches, 48); None without images.
        """
        x: torch.Tensor = self.words(words)
        if images is not None:
            seen = self.patches(images)
            for block in self.tower:
                seen = block(seen)
            x = x + seen.mean(dim=1, keepdim=True)
        for block in self.decoder:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def draw(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the words of a batch, and its images, which half of the batches have."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(0, NUM_WORDS, (2, 8), generator=numbers)
    has_images = random.Random(f"{rank} {step}").random() < 0.5
    return words, torch.randn(2, 9, 48, generator=numbers) if has_images else None


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of predicting each next word."""
    words, images = draw(rank, step)
    logits = model(words, images)
    loss: torch.Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
    return loss


def main() -> list[float]:
    """Train, evaluate on sets of different lengths, and return this rank's losses."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = VisionLanguageModel()
    fully_shard([model.patches, *model.tower])  # the tower is one unit: all of it runs, or none
    for block in model.decoder:
        fully_shard(block)
    sharded: Any = fully_shard(model)
    sharded.set_forward_order()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        _, images = draw(rank, step)
        print(f"step {step} rank {rank} {'with' if images is not None else 'no'} images loss {losses[-1]:.4f}")
    with torch.no_grad(), unsharded(model):  # one more batch on each further rank
        scores = [loss_of(model, rank, 100 + number).item() for number in range(2 + rank)]
    print(f"evaluated rank {rank} on {len(scores)} batches loss {sum(scores) / len(scores):.4f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
