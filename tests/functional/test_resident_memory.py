"""Resident memory of a process that trains on CPU: what collectives leave behind does not break up its heap."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import gloo
from gpt.train_log import memory_use
from megatron_fsdp import clip_grad_norm_, fully_shard, fully_shard_optimizer
from tests.harness import on_ranks

WIDTH, TOKENS = 32, 1024
FIRST, LAST = 20, 120


class Block(nn.Module):
    """Activations of 512 KiB, which the allocator takes from the heap, not from pages of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + update


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(Block() for _ in range(4)))
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = fully_shard_optimizer(torch.optim.AdamW(self.model.parameters()))

    def step(self) -> None:
        self.model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


# What it guards against has tests of its own: who issues collectives, below.
@pytest.mark.slow
@on_ranks(2, fresh=True, timeout=180.0)
def test_a_hundred_steps_add_less_than_10_mib_to_what_is_resident() -> None:
    # Without the comm thread 30. New processes, as a used heap has holes that take the growth for a while.
    training = Training()
    held = []
    for number in range(LAST):
        training.step()
        if number + 1 in (FIRST, LAST):
            held.append(memory_use(torch.device("cpu")).now)
    assert held[1] - held[0] < 10


@contextlib.contextmanager
def noting_threads(into: dict[str, set[bool]]) -> Iterator[None]:
    mine = threading.get_ident()

    def noting(kind: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            into.setdefault(kind, set()).add(threading.get_ident() == mine)
            return original(*args, **options)

        return call

    with contextlib.ExitStack() as patches:
        for owner, name in (
            (gloo, "gather_flat"),
            (dist, "all_to_all_single"),
            (dist, "all_reduce"),
            (dist, "broadcast"),
        ):
            kind = name.strip("_")
            patches.enter_context(mock.patch.object(owner, name, noting(kind, getattr(owner, name))))
        yield


@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [(2, {"all_to_all_single", "all_reduce"}), (3, {"gather_flat", "all_to_all_single", "all_reduce"})],
)
@on_ranks(lambda num_ranks: num_ranks)
def test_the_thread_that_trains_issues_no_collective_of_a_step_on(num_ranks: int, kinds: set[str]) -> None:
    training = Training()
    found: dict[str, set[bool]] = {}
    with noting_threads(found):
        training.step()
    assert found == {kind: {False} for kind in kinds}
