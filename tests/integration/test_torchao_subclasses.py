"""torchao's weights that bring their own all-gather train as they do under PyTorch's FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from megatron_fsdp import AdamW, fully_shard
from tests.harness.oracle import whole
from tests.integration.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ENGINES: dict[str, Any] = {"ours": fully_shard, "FSDP2": torch_fully_shard}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, after: Any = None) -> list[float]:
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(16, 128)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)
        losses.append(float(loss.detach()))
    return losses


def train_float8(engine: str, optimizer: type[torch.optim.Optimizer], precomputes: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    for layer in (model[0], model[2]):
        ENGINES[engine](layer)
    ENGINES[engine](model)
    after = precompute_float8_dynamic_scale_for_fsdp if precomputes else None
    return steps(model, optimizer(model.parameters(), lr=0.01), after)  # type: ignore[call-arg]  # torch's stub


@pytest.mark.parametrize("precomputes", [False, True], ids=["scales in the gather", "scales after the step"])
def test_float8_linears_have_the_losses_of_fsdp2(precomputes: bool) -> None:
    wanted = run_ranks(2, train_float8, "FSDP2", torch.optim.AdamW, precomputes)
    assert run_ranks(2, train_float8, "ours", torch.optim.AdamW, precomputes) == wanted
    assert run_ranks(2, train_float8, "ours", AdamW, precomputes) == wanted


class Lora(nn.Module):
    """A frozen NF4 weight with an adapter."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        weight = to_nf4(torch.randn(rows, columns) * 0.1, block_size=64, scaler_block_size=256)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return linear_nf4(x, self.weight) + self.up(self.down(x))


def train_qlora(engine: str) -> tuple[list[float], bool, bool, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(Lora(128, 512), nn.ReLU(), Lora(512, 128))
    rank, size = dist.get_rank(), dist.get_world_size()
    layers: list[Any] = [model[0], model[2]]
    bases = [layer.weight.get_original_weight().chunk(size)[rank].clone() for layer in layers]
    for layer in layers:
        ENGINES[engine](layer)
    ENGINES[engine](model)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Whole: a small adapter may lie on one rank alone.
    before = [whole(adapter, adapter).clone() for adapter in adapters]
    losses = steps(model, torch.optim.AdamW(adapters, lr=0.01))
    is_same = all(
        torch.equal(layer.weight._local_tensor.get_original_weight(), base)
        for layer, base in zip(layers, bases, strict=True)
    )
    is_trained = all(
        not torch.equal(whole(adapter, adapter), old) for adapter, old in zip(adapters, before, strict=True)
    )
    bits: list[float] = []
    if engine == "ours":
        groups = [group for layer in layers for group in layer._fsdp_unit.groups]
        packed = [group for group in groups if group.main_weight.dtype is torch.uint8]
        # Each rank has the weights, NF4's 16 values, a mean and padding.
        bits = [8 * (group.main_weight.local_buffer.numel() - 80) * size / (128 * 512) for group in packed]
    return losses, is_same, is_trained, bits


def test_qlora_trains_adapters_over_an_untouched_base_of_4_13_bits() -> None:
    theirs = run_ranks(2, train_qlora, "FSDP2")
    for (losses, is_same, is_trained, bits), (wanted, *_) in zip(
        run_ranks(2, train_qlora, "ours"), theirs, strict=True
    ):
        assert losses == wanted
        assert is_same
        assert is_trained
        assert len(bits) == 2
        assert all(4.12 < each < 4.14 for each in bits)
