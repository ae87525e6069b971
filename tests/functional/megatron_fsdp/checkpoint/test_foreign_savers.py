"""Savers of other packages that are given sharded tensors: PyTorch's asynchronous one and save_pretrained."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import megatron_fsdp
from megatron_fsdp import CheckpointError, fully_shard
from megatron_fsdp.checkpoint.model_state import full_state_dict
from tests.harness import on_ranks

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "our AdamW": lambda parameters: megatron_fsdp.AdamW(parameters, lr=0.1),
    "our Muon": lambda parameters: megatron_fsdp.Muon(by_kind(parameters), lr=0.1),
}


def by_kind(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return a group of matrices for Muon and one of the rest for AdamW."""
    params = list(parameters)
    matrices = [parameter for parameter in params if parameter.ndim == 2]
    return [{"params": matrices}, {"params": [each for each in params if each.ndim != 2], "use_muon": False}]


class Pretrained(nn.Linear):
    """Has the interface of Hugging Face's models."""

    def save_pretrained(
        self, folder: Path, is_main_process: bool = True, state_dict: Mapping[str, Any] | None = None
    ) -> None:
        """Save the given state dict, or this module's own."""
        torch.save(dict(state_dict or self.state_dict()), folder / "model.pt")


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 7) + dist.get_rank()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wholes(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in state.items() if hasattr(value, "full_tensor")}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(3)
def test_pytorchs_async_save_saves_the_state_of_the_call(name: str, tmp_path: Path) -> None:
    model = sharded()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        step(model, optimizer)
    moments = get_optimizer_state_dict(model, optimizer)["state"]
    flat = {f"{name}.{key}": value for name, record in moments.items() for key, value in record.items()}
    state = {**model.state_dict(), **flat}
    wanted = wholes(state)
    future: Any = async_save(state, checkpoint_id=tmp_path / "step", process_group=dist.new_group(backend="gloo"))
    step(model, optimizer)
    future.result()
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load(found, checkpoint_id=tmp_path / "step")
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("is_given_sharded", [True, False])
@on_ranks(2)
def test_save_pretrained_of_sharded_weights_names_the_lines_to_use(is_given_sharded: bool, tmp_path: Path) -> None:
    model = Pretrained(7, 3)
    wanted = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    options: dict[str, Any] = {"state_dict": model.state_dict()} if is_given_sharded else {}
    if dist.get_rank() == 0:
        with pytest.raises(
            CheckpointError, match=r"fix: call on every rank\n    state = megatron_fsdp.full_state_dict"
        ):
            model.save_pretrained(tmp_path, **options)
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        found = torch.load(tmp_path / "model.pt")
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@on_ranks(2)
def test_a_file_of_another_ranks_rows_is_refused_with_the_call_to_use(tmp_path: Path) -> None:
    model = sharded()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), tmp_path / "model.pt")
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(Exception, match=r"holds that rank's rows alone.*fix: save_checkpoint\(\.\.\.\)"):
            model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=False))


@on_ranks(2)
def test_save_pretrained_of_a_model_with_sharded_layers_names_the_lines_to_use(tmp_path: Path) -> None:
    class Model(Pretrained):
        def __init__(self) -> None:
            super().__init__(7, 3)
            self.layer = nn.Linear(3, 5)

    model = Model()
    wanted = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model.layer)
    if dist.get_rank() == 0:
        with pytest.raises(
            CheckpointError, match=r"'Linear' is one of its units.*fix: call on every rank\n    state = "
        ):
            model.save_pretrained(tmp_path)
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        found = torch.load(tmp_path / "model.pt")
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
