"""What a user does first on one GPU runs there: ways to build and load a model, and arguments of forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from megatron_fsdp import AdamW, CPUOffloadPolicy, fully_shard
from megatron_fsdp.checkpoint.writer import _copied
from tests.harness import run_ranks


class Normed(nn.Module):
    """A layer, and buffers that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return self.norm(self.block(x)).sum()


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        model = Normed()
    for module in (model.block, model):
        fully_shard(module, **options)
    return model


def emptied_on_the_cpu() -> Any:
    """Allocate an offloaded model as FSDP2 asks for."""
    return on_meta(offload_policy=CPUOffloadPolicy()).to_empty(device="cpu")


def assigned_on_meta() -> Any:
    model = on_meta()
    model.load_state_dict(Normed().state_dict(), assign=True)
    return model


def assigned_on_the_gpu() -> Any:
    model = Normed()
    fully_shard(model)
    model.load_state_dict(Normed().state_dict(), assign=True)
    return model


def devices_after_a_step(make: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """Take a step; return the devices of the model's parameters and of its buffers."""
    torch.backends.cudnn.enabled = False
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).backward()
    optimizer.step()
    parameters = {each.to_local().device.type for each in model.parameters()}
    return parameters, {each.device.type for each in model.buffers()}


@pytest.mark.filterwarnings("ignore:offload_policy", "ignore:FSDPNormed. buffers")
@pytest.mark.parametrize("make", [emptied_on_the_cpu, assigned_on_meta, assigned_on_the_gpu])
def test_buffers_are_on_the_gpu_and_weights_where_the_policy_says(make: Callable[[], Any]) -> None:
    (found,) = run_ranks(1, devices_after_a_step, make, backend="nccl", fresh=True, timeout=120)
    assert found == ({"cpu" if make is emptied_on_the_cpu else "cuda"}, {"cuda"})


class Recurrent(nn.Module):
    """An embedding behind a mapping, and a recurrent layer for packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4)
        self.lengths_are_on = ""

    def forward(self, batch: Any) -> torch.Tensor:
        """Return one number."""
        self.lengths_are_on = batch["packed"].batch_sizes.device.type
        return self.recurrent(batch["packed"])[0].data.sum() + batch["mask"].sum()


class Batch(dict[str, Any]):
    """A mapping that PyTorch's pytree does not know."""


def device_of_lengths() -> str:
    torch.backends.cudnn.enabled = False
    model: Any = fully_shard(Recurrent())
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    model(Batch(packed=packed, mask=torch.ones(2))).backward()
    found: str = model.lengths_are_on
    return found


def test_packed_sequences_and_mappings_are_moved_to_the_gpu() -> None:
    assert run_ranks(1, device_of_lengths, backend="nccl", fresh=True, timeout=120) == ["cpu"]


def trained_by_default_on_the_gpu() -> list[str]:
    """Train after ``torch.set_default_device("cuda")``; return the devices of copies in host memory."""
    torch.backends.cudnn.enabled = False
    torch.set_default_device("cuda")
    for policy in (None, CPUOffloadPolicy()):
        model: Any = Normed()
        for module in (model.block, model):
            fully_shard(module, offload_policy=policy)
        optimizer = AdamW(model.parameters(), max_norm=1.0)
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    stock = torch.optim.AdamW(model.parameters(), capturable=False)
    model(torch.ones(3, 4)).backward()
    stock.step()
    return [_copied(torch.ones(3)).device.type]


@pytest.mark.filterwarnings("ignore:offload_policy")
def test_models_train_where_the_gpu_is_the_default_device() -> None:
    found = run_ranks(1, trained_by_default_on_the_gpu, backend="nccl", fresh=True, timeout=120)
    assert found == [["cpu"]]
