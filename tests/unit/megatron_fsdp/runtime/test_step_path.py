"""How many files, and lines in them, one training step runs through: what a reader of all of it has to read."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_fsdp.optim.loaded_state  # noqa: F401  # it looks at stock optimizers too
from megatron_fsdp import fully_shard

MAX_FILES, MAX_LINES = 31, 7_800


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_with_a_stock_optimizer_runs_through_no_more_files_than_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        step(model, optimizer)
    finally:
        sys.setprofile(None)
    ours = [Path(name) for name in seen if {"megatron_fsdp", "dbuffer"} & set(Path(name).parts[:-1])]
    paths = sorted(path for path in ours if "tests" not in path.parts and "site-packages" not in path.parts)
    lines = {"/".join(path.parts[-2:]): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    print(len(lines), sum(lines.values()), lines)
    assert "runtime/backward.py" in lines
    assert "optim/loaded_state.py" in lines
    assert len(lines) <= MAX_FILES
    assert sum(lines.values()) <= MAX_LINES
