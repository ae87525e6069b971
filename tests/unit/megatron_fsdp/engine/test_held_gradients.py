"""Gradient memory that a communication thread releases late is reused; tensors that a user keeps stay valid."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import Placements, fully_shard

pytestmark = pytest.mark.usefixtures("eight_ranks")


@pytest.mark.parametrize("is_let_go", [True, False])
def test_zero_grad_waits_briefly_for_a_holder_of_the_last_reductions_memory(is_let_go: bool) -> None:
    model: Any = fully_shard(nn.Linear(16, 16), placements=Placements.optim(0))
    model(torch.ones(2, 16)).sum().backward()
    (group,) = model.parameter_groups
    assert group.main_grad is not None
    held = [group.main_grad.local_buffer[:1]]

    def pause(_: float) -> None:
        if is_let_go:
            held.clear()

    with mock.patch.object(time, "sleep", pause):
        model.zero_grad()
    assert group.main_grad.is_allocated is not is_let_go
