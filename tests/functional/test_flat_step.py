"""Steps of ``torch.optim``'s own optimizers over sharded parameters are taken on flat memory, to the same bits."""

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from megatron_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, fully_shard_optimizer
from megatron_fsdp.runtime.parameter_group import group_of_parameter
from tests.functional.adamw_comparison import differing_values
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.oracle import differing, whole_state

OPTIM = torch.optim
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW foreach": (OPTIM.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "AdamW fused": (OPTIM.AdamW, {"fused": True, "weight_decay": 0.1}),
    "AdamW loop": (OPTIM.AdamW, {"foreach": False, "amsgrad": True}),
    "Adam amsgrad": (OPTIM.Adam, {"foreach": True, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": (OPTIM.SGD, {"foreach": True}),
    "SGD momentum": (OPTIM.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD fused": (OPTIM.SGD, {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (OPTIM.Adagrad, {"foreach": True, "lr_decay": 0.1}),
    "Adagrad fused": (OPTIM.Adagrad, {"fused": True}),
    "RMSprop": (OPTIM.RMSprop, {"foreach": True, "centered": True, "momentum": 0.5}),
    "NAdam": (OPTIM.NAdam, {"foreach": True}),
    "RAdam": (OPTIM.RAdam, {"foreach": True, "weight_decay": 0.1}),
    "Adamax": (OPTIM.Adamax, {"foreach": True}),
    "Adadelta": (OPTIM.Adadelta, {"foreach": True}),
    "ASGD": (OPTIM.ASGD, {"foreach": True, "t0": 2}),
    "Rprop": (OPTIM.Rprop, {"foreach": True}),
}
OFTEN = ["AdamW foreach", "AdamW fused", "AdamW loop", "Adam amsgrad", "SGD momentum", "Adagrad", "RMSprop"]


class Net(nn.Module):
    """A model whose shards are uneven: 1 and 3 rows over three ranks, widths that no vector has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "one": nn.Linear(16, 3), "two": nn.Linear(3, 16, bias=False)})
            for _ in range(2)
        )
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per sample."""
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["two"](block["one"](block["norm"](x)).relu())
        return self.last(x)  # type: ignore[no-any-return]  # a module's result


def sharded(policy: MixedPrecisionPolicy | None = None) -> Net:
    torch.manual_seed(3)
    model = Net()
    for part in (model.embed, model.last):
        fully_shard(part, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)  # one unit of what is left, in which neighbours are of all kinds


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 5)).square().mean().backward()


def not_flat(kind: type[Optimizer]) -> type[Optimizer]:
    """Return a class of the same steps, which nobody can know to be element-wise: it steps every DTensor."""
    return type(kind.__name__, (kind,), {})


def parameter_sizes(optimizer: Optimizer) -> list[int]:
    """Return the sizes of what the class's step goes through."""
    sizes: list[int] = []
    kind = next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim"))
    original: Any = kind._init_group  # type: ignore[attr-defined]  # of all of torch.optim's element-wise ones

    def listen(self: Any, group: Any, *rest: Any) -> Any:
        sizes.extend(parameter.numel() for parameter in group["params"])
        return original(self, group, *rest)

    kind._init_group = listen  # type: ignore[attr-defined]  # put back below
    try:
        optimizer.step()
    finally:
        kind._init_group = original  # type: ignore[attr-defined]  # as above
    return sizes


Meddling = Callable[[Net, Optimizer, int], None]


def trained(make: Callable[[Iterable[Any]], Optimizer], meddle: Meddling, steps: range = range(5)) -> Any:
    model = sharded()
    optimizer = make(model.parameters())
    for step in steps:
        backward(model, step)
        meddle(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_differing(mine: Optimizer, theirs: Optimizer) -> list[str]:
    assert mine.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    return differing_values(mine.state_dict()["state"], theirs.state_dict()["state"])


def compare(kind: str, meddle: Meddling) -> list[str]:
    cls, options = KINDS[kind]
    pairs = [trained(lambda p, one=one: one(p, lr=0.01, **options), meddle) for one in (cls, not_flat(cls))]  # type: ignore[misc]  # the default binds the class
    (mine, optimizer), (theirs, other) = pairs
    wrong = differing(whole_state(mine), whole_state(theirs)) + state_differing(optimizer, other)
    for model, stepped in pairs:
        backward(model, 9)
        stepped.step()
    return wrong + differing(whole_state(mine), whole_state(theirs)) + state_differing(optimizer, other)


def nothing(model: Net, optimizer: Optimizer, step: int) -> None:
    """Train as everybody does."""


def everything(model: Net, optimizer: Optimizer, step: int) -> None:
    """Do what users do between a backward and a step, each in a step of its own and all in the last."""
    first, second = model.blocks[0]["norm"].weight, model.blocks[1]["one"].weight  # type: ignore[index]  # a ModuleDict
    if step in (1, 4):
        first.grad = None
    if step in (2, 4):
        second.grad = second.grad.detach() * 3 + 1
    if step in (3, 4):
        clip_grad_norm_(model, 0.1)
        optimizer.param_groups[0]["lr"] *= 0.5


def state_replaced(model: Net, optimizer: Optimizer, step: int) -> None:
    """Load, overwrite and delete state."""
    weight: Any = model.blocks[0]["one"].weight  # type: ignore[index]  # a ModuleDict
    if step == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if step == 2:
        for value in optimizer.state[weight].values():
            value.mul_(2) if value.ndim else value.add_(5)
    if step == 3:
        optimizer.state[weight] = {key: value.clone() for key, value in optimizer.state[weight].items()}
    if step == 4:
        document = io.BytesIO()
        torch.save(optimizer.state_dict(), document)
        document.seek(0)
        optimizer.load_state_dict(torch.load(document, weights_only=True))


def all_steps(kind: str) -> list[str]:
    return [f"{each.__name__}: {wrong}" for each in (nothing, everything, state_replaced) for wrong in compare(kind, each)]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("kind", nightly_but(OFTEN, KINDS))
def test_weights_and_state_are_those_of_a_step_over_each_parameter_to_the_bit(kind: str, num_ranks: int) -> None:
    assert run_ranks(num_ranks, all_steps, kind) == [[]] * num_ranks
