"""Fixtures for unit tests of the engine."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Make this process rank 0 of eight fake ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()
