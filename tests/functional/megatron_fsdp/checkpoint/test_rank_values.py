"""Each rank gets its own buffers back; another number of ranks gets the first rank's, with a message."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megatron_fsdp import fully_shard, load_checkpoint, save_checkpoint
from tests.harness import run_ranks
from tests.harness.models import world_mesh

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two linear layers, batch norm between them, and a parameter that stays whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7)
        self.own = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.norm(self.first(inputs))) * self.own.sum()
        return hidden


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, world_mesh(), ignored_params={model.own})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def local_state(model: Net, optimizer: torch.optim.Optimizer) -> State:
    """Return the values that only this rank has: buffers, and the unsharded parameter with its moments."""
    moments = {key: value.clone() for key, value in optimizer.state[model.own].items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {**buffers, "own": model.own.detach().clone(), **moments}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(100 + dist.get_rank())
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(path: str) -> tuple[State, State]:
    model, optimizer = build()
    train_step(model, optimizer)
    save_checkpoint(model, optimizer, path, asynchronous=True).wait()
    other, other_optimizer = build()
    load_checkpoint(other, other_optimizer, path)
    return local_state(model, optimizer), local_state(other, other_optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[State]]:
    path = str(tmp_path_factory.mktemp("saved") / "step")
    found = run_ranks(2, save, path)
    (first, loaded_first), (second, loaded_second) = found
    for name in ("norm.running_mean", "norm.running_var", "own", "momentum_buffer"):
        assert not torch.equal(first[name], second[name]), name
    # Equal bits, and each rank's own values.
    for wanted, loaded in ((first, loaded_first), (second, loaded_second)):
        assert [name for name in wanted if not torch.equal(wanted[name], loaded[name])] == []
    return path, [first, second]


def load(path: str) -> tuple[State, list[str]]:
    """Return this rank's values after loading, and the log."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_fsdp")
    logger.addHandler(handler)
    model, optimizer = build()
    load_checkpoint(model, optimizer, path)
    logger.removeHandler(handler)
    return local_state(model, optimizer), texts


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_on_another_number_of_ranks_all_get_rank_0s_values_and_a_log_line(
    num_ranks: int, saved: tuple[str, list[State]]
) -> None:
    path, (first, _) = saved
    texts = []
    for loaded, said in run_ranks(num_ranks, load, path):
        assert [name for name in first if not torch.equal(first[name], loaded[name])] == []
        texts += said
    (text,) = texts
    assert "had different values of norm.running_mean, norm.running_var, own:" in text
    assert "the first rank's values are taken on all ranks" in text


def read_with_pytorch(path: str) -> State:
    state = {"model": {name: torch.empty(5) for name in ("norm.running_mean", "norm.running_var")}}
    dcp_load(state, checkpoint_id=path)
    return state["model"]


def test_pytorchs_own_loader_gets_all_of_the_first_ranks(saved: tuple[str, list[State]]) -> None:
    path, (first, _) = saved
    for found in run_ranks(2, read_with_pytorch, path):
        for name, value in found.items():
            assert torch.equal(value, first[name]), name
