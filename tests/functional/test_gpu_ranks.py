"""Collectives of every kind on as many GPUs as there are, up to eight: losses are those of a plain model on all data.

The same functions run on CPU ranks with gloo, so that on a GPU only the device and NCCL are new.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer.collectives import all_gather, reduce_scatter
from dbuffer.slot_pool import can_exchange_memory
from dbuffer_kernels import switches
from megatron_fsdp import FSDPModule, MixedPrecisionPolicy, Muon, Watch, microbatch
from tests.harness import run_ranks
from tests.harness.models import Block, Made, Stack
from tests.harness.twins import sharded

WIDTH, ROWS, STEPS, MICROBATCHES = 32, 6, 4, 2
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)
Losses: TypeAlias = list[list[float]]


class Gained(Block):
    """A block with a parameter of another dtype, so that a unit has two groups and its collectives two parts."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a block's output, times the gain."""
        return super().forward(x) * self.gain.to(x.dtype)


def products(width: int, hidden: int) -> nn.Module:
    """Return the output of layers with matrices only, which Muon steps: (rows, width) for (rows, width)."""
    return Made(
        lambda m, x: x + m.down(torch.tanh(m.up(x))),
        up=nn.Linear(width, hidden, bias=False), down=nn.Linear(hidden, width, bias=False),
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A way to train.

    Attributes:
        strategy: names a classmethod of ``Placements``. without: words for ``DBUFFER_WITHOUT``.
        prepare: is called with the sharded model and the device. tolerance: of losses, relative.
    """

    strategy: str = "optim_grads_params"
    policy: MixedPrecisionPolicy | None = None
    block: Callable[[int, int], nn.Module] = Block
    optimizer: str = "SGD"
    without: str = ""
    prepare: Callable[[FSDPModule, str], object] | None = None
    watches: bool = False
    tolerance: float = 1e-4


def _registered(model: FSDPModule, device: str) -> None:
    for unit in _units(model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
        _expect_slots(unit, "communicator" if device == "cuda" else "device")


def _symmetric(model: FSDPModule, device: str) -> None:
    for unit in _units(model):
        # Only GPUs have this memory; on CPUs, use slots of the allocator.
        if device == "cuda":
            unit.set_symm_mem_for_comm("NCCL")
            _expect_slots(unit, "NCCL")
        else:
            unit.set_slot_pool("by_size", recurse=False)


def _expect_slots(unit: FSDPModule, source: str) -> None:
    assert unit._fsdp_unit.slots.source == source


def _units(model: FSDPModule) -> Iterator[FSDPModule]:
    assert isinstance(model, nn.Module)
    return (module for module in model.modules() if isinstance(module, FSDPModule) and module.parameter_groups)


def _packed(dtype: str) -> Setting:
    return Setting(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_dtype=dtype), tolerance=0.015)


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
WORDS = ("separate-reduce", "together", "in-place", "priority", "together,in-place,separate-reduce,priority,slots")
WIDE = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, accumulate_dtype=torch.float32)
SETTINGS = {
    **{strategy: Setting(strategy) for strategy in STRATEGIES},
    **{f"bf16, {strategy}": Setting(strategy, BF16, tolerance=0.01) for strategy in ("optim_grads_params", "hsdp")},
    **{f"without {words}": Setting(block=Gained, without=words) for words in WORDS},
    **{f"two dtypes, {strategy}": Setting(strategy, block=Gained) for strategy in ("optim", "hfsdp")},
    "sums in FP32 of bf16": Setting(policy=WIDE, tolerance=0.01),
    "sums in FP32 of bf16, watched": Setting(policy=WIDE, watches=True, tolerance=0.01),
    "int8 gathers": _packed("int8_block"),
    "two packed buffers": Setting(
        policy=BF16, prepare=lambda model, _: model.set_reduce_scatter_max_input_buffers(2), tolerance=0.01
    ),
    "one communicator": Setting(prepare=lambda model, _: model.set_separate_reduce_scatter_group(False)),
    "slots": Setting(policy=BF16, prepare=lambda model, _: model.set_slot_pool("largest"), tolerance=0.01),
    "nccl_ub": Setting(prepare=_registered),
    "symmetric memory": Setting(prepare=_symmetric),
    "Muon": Setting(block=products, optimizer="Muon", tolerance=0.015),
    "Muon, hsdp, watched": Setting("hsdp", block=products, optimizer="Muon", watches=True, tolerance=0.015),
}
if not can_exchange_memory():
    # Before PyTorch 2.13 there are no slots; test_slots.py tests the refusal.
    for _name in ("slots", "nccl_ub", "symmetric memory"):
        del SETTINGS[_name]


def build(block: Callable[[int, int], nn.Module]) -> Stack:
    torch.manual_seed(0)
    return Stack(*(block(WIDTH, hidden) for hidden in (48, 20, 33)))


def data(rank: int, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + MICROBATCHES * step + part)
    # Each rank's data has another size and sign, so that its gradients differ from those of other ranks.
    return torch.randn(ROWS, WIDTH, generator=generator) * (1.0 + 0.5 * rank) + (-1) ** rank


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.sin()).square().mean() / MICROBATCHES


def optimizer_of(name: str, parameters: Iterator[nn.Parameter], *, is_plain: bool) -> torch.optim.Optimizer:
    if name == "Muon":
        return (torch.optim.Muon if is_plain else Muon)(parameters, lr=0.05, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.2)


def trained(name: str, device: str) -> list[float]:
    """Train sharded, and return this rank's losses."""
    setting = SETTINGS[name]
    os.environ["DBUFFER_WITHOUT"] = setting.without
    switches._named.cache_clear()
    all_gather.COPIES = reduce_scatter.COPIES = switches.is_off("in-place")  # type: ignore[attr-defined]  # imported names
    size = dist.get_world_size()
    outer = 2 if setting.strategy in ("hsdp", "hfsdp") and size % 2 == 0 else 1
    shape = (outer, size // outer) if setting.strategy in ("hsdp", "hfsdp") else (size,)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model: Any = sharded(build(setting.block).to(device), setting.strategy, mesh=mesh, mp_policy=setting.policy)
    if setting.prepare is not None:
        setting.prepare(model, device)
    optimizer = optimizer_of(setting.optimizer, model.parameters(), is_plain=False)
    losses = []
    with Watch(model) if setting.watches else nullcontext():
        for step in range(STEPS):
            for part in range(MICROBATCHES):
                with microbatch(model, is_last=part == MICROBATCHES - 1):
                    loss = loss_of(model, data(dist.get_rank(), step, part).to(device))
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


@functools.cache
def plain_losses(block: Callable[[int, int], nn.Module], optimizer_name: str, ranks: tuple[int, ...]) -> Losses:
    """Train a plain model on the data of some ranks, and return the losses on each one's."""
    model = build(block)
    optimizer = optimizer_of(optimizer_name, model.parameters(), is_plain=True)
    losses: Losses = [[] for _ in ranks]
    for step in range(STEPS):
        for part in range(MICROBATCHES):
            for own, rank in zip(losses, ranks, strict=True):
                loss = loss_of(model, data(rank, step, part))
                (loss / len(ranks)).backward()
                own.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def ranks_on(device: str, strategy: str) -> int:
    if device == "cuda":
        return min(torch.cuda.device_count(), 8)
    return 4 if strategy in ("hsdp", "hfsdp") else 2


# Other tests cover all of this on CPUs, so `make test` runs only enough to reach each line here.
BY_DAY = (
    "bf16, hsdp", "without together,in-place,separate-reduce,priority,slots", "two dtypes, hfsdp", "int8 gathers",
    "sums in FP32 of bf16, watched", "two packed buffers", "one communicator", "nccl_ub", "symmetric memory",
    "Muon, hsdp, watched",
)  # fmt: skip
RUNS = [
    *(pytest.param(name, "cpu", marks=() if name in BY_DAY else pytest.mark.slow) for name in SETTINGS),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in SETTINGS),
]


@pytest.mark.parametrize(("name", "device"), RUNS)
def test_losses_on_all_ranks_are_those_of_a_plain_model_on_all_data(name: str, device: str) -> None:
    setting = SETTINGS[name]
    size = ranks_on(device, setting.strategy)
    backend = "nccl" if device == "cuda" else "gloo"
    found: Losses = run_ranks(size, trained, name, device, backend=backend, timeout=300, fresh=bool(setting.without))
    for own, wanted in zip(found, plain_losses(setting.block, setting.optimizer, tuple(range(size))), strict=True):
        assert own == pytest.approx(wanted, rel=setting.tolerance)
