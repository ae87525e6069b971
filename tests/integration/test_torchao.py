"""torchao's low-bit optimizers over sharded parameters: as near to the plain optimizer as on PyTorch's FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp import fully_shard
from tests.harness.oracle import whole
from tests.integration.ranks import run_ranks

KINDS = {"AdamW8bit": {"block_size": 64}, "AdamW4bit": {"block_size": 64}, "AdamWFp8": {"block_size": 64}}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64))


def weights_after(engine: Any, name: str) -> list[torch.Tensor]:
    """Return the whole weights after three steps, each on the data of both ranks."""
    # Steps are compiled one parameter at a time; without this line to machine code, which takes a minute.
    torch._dynamo.reset()
    model = make_model()
    ranks = range(2)
    if engine is not None:
        ranks = range(dist.get_rank(), dist.get_rank() + 1)
        for module in (*(each for each in model if isinstance(each, nn.Linear)), model):
            engine(module)
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=0.01, **KINDS[name])
    compiler = torch.compile
    # One function for all overloads.
    torch.compile = lambda function, **options: compiler(  # type: ignore[assignment]
        function, **{**options, "backend": "aot_eager"}
    )
    try:
        for step in range(3):
            for rank in ranks:
                generator = torch.Generator().manual_seed(10 * step + rank)
                (model(torch.randn(4, 64, generator=generator)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.compile = compiler
    return [whole(parameter, parameter).detach().clone() for parameter in model.parameters()]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))


def compare(name: str) -> tuple[float, float, float]:
    """Return how far the weights are from those of one process, here and with FSDP2, and how far those moved."""
    wanted = weights_after(None, name)
    ours, theirs = (worst(weights_after(engine, name), wanted) for engine in (fully_shard, torch_fully_shard))
    return ours, theirs, worst([p.detach() for p in make_model().parameters()], wanted)


@pytest.mark.parametrize("name", KINDS)
def test_low_bit_state_rounds_as_much_as_on_fsdp2_with(name: str) -> None:
    # Blocks of state that share a scale are cut from the rows of each rank, so the last bits are not those of FSDP2.
    for ours, theirs, moved in run_ranks(2, compare, name):
        assert ours <= 1.5 * theirs + 1e-6
        assert ours < moved
