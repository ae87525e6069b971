"""Steps of ``torch.optim``'s own optimizers over sharded parameters are taken on flat memory, to the same bits."""

import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from megatron_fsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
)
from megatron_fsdp.engine.param_group import group_of_parameter
from tests.functional.adamw_comparison import differing_state, differing_values, two_groups
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model
from tests.harness.oracle import differing, sharded_model, train, whole_state

OPTIM = torch.optim
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW foreach": (OPTIM.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "AdamW loop": (OPTIM.AdamW, {"foreach": False, "amsgrad": True}),
    "Adam amsgrad": (OPTIM.Adam, {"foreach": True, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": (OPTIM.SGD, {"foreach": True}),
    "SGD momentum": (OPTIM.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD loop": (OPTIM.SGD, {"foreach": False, "momentum": 0.9, "dampening": 0.5}),
}
OFTEN = ["AdamW foreach", "AdamW loop", "Adam amsgrad", "SGD momentum"]


class Net(nn.Module):
    """A model with uneven shards: 1 and 3 rows over three ranks, and widths that are no multiple of a SIMD vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.blocks: Any = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "one": nn.Linear(16, 3), "two": nn.Linear(3, 16, bias=False)})
            for _ in range(2)
        )
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["two"](block["one"](block["norm"](x)).relu())
        return self.last(x)


def sharded(policy: MixedPrecisionPolicy | None = None) -> Net:
    torch.manual_seed(3)
    model = Net()
    for part in (model.embed, model.last):
        fully_shard(part, mp_policy=policy)
    # the root unit owns the remaining parameters, all kinds next to each other
    return fully_shard(model, mp_policy=policy)


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 5)).square().mean().backward()


def not_flat(kind: type[Optimizer]) -> Any:
    """Return a class with the same steps that is not known to be element-wise: it steps every DTensor."""
    return type(kind.__name__, (kind,), {})


def parameter_sizes(optimizer: Optimizer) -> list[int]:
    sizes: list[int] = []
    kind: Any = next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim"))
    original: Any = kind._init_group

    def listen(self: Any, group: Any, *rest: Any) -> Any:
        sizes.extend(parameter.numel() for parameter in group["params"])
        return original(self, group, *rest)

    kind._init_group = listen
    try:
        optimizer.step()
    finally:
        kind._init_group = original
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
    cls: Any
    cls, options = KINDS[kind]
    pairs = [trained(partial(one, lr=0.01, **options), meddle) for one in (cls, not_flat(cls))]
    (mine, optimizer), (theirs, other) = pairs
    wrong = differing(whole_state(mine), whole_state(theirs)) + state_differing(optimizer, other)
    for model, stepped in pairs:
        backward(model, 9)
        stepped.step()
    return wrong + differing(whole_state(mine), whole_state(theirs)) + state_differing(optimizer, other)


def nothing(model: Net, optimizer: Optimizer, step: int) -> None:
    """Train without special calls."""


def everything(model: Net, optimizer: Optimizer, step: int) -> None:
    """Change gradients or settings between backward and step: one change in each of steps 1 to 3, all in step 4."""
    first, second = model.blocks[0]["norm"].weight, model.blocks[1]["one"].weight
    if step in (1, 4):
        first.grad = None
    if step in (2, 4):
        second.grad = second.grad.detach() * 3 + 1
    if step in (3, 4):
        clip_grad_norm_(model, 0.1)
        optimizer.param_groups[0]["lr"] *= 0.5


def state_replaced(model: Net, optimizer: Optimizer, step: int) -> None:
    weight: Any = model.blocks[0]["one"].weight
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


OFTEN_ON = [(kind, 3 if place % 3 == 0 else 1) for place, kind in enumerate(OFTEN)]


@pytest.mark.parametrize(("kind", "num_ranks"), nightly_but(OFTEN_ON, product(KINDS, [1, 3])))
@on_ranks(lambda num_ranks: num_ranks)
def test_weights_and_state_are_those_of_a_step_over_each_parameter_to_the_bit(kind: str, num_ranks: int) -> None:
    for each in (nothing, everything, state_replaced):
        assert compare(kind, each) == [], each.__name__


@on_ranks(1)
def test_a_step_goes_through_few_tensors_only_where_that_is_exact() -> None:
    num_parameters = len(list(Net().parameters()))
    found: dict[str, list[int]] = {}

    def record(name: str, make: Callable[[Net], Optimizer], policy: MixedPrecisionPolicy | None = None) -> None:
        model = sharded(policy)
        optimizer = make(model)
        for step in range(3):
            backward(model, step)
            found[name] = parameter_sizes(optimizer)
            optimizer.zero_grad()

    def adamw(model: Net) -> Optimizer:
        return OPTIM.AdamW(model.parameters(), foreach=True)

    def with_a_gap(model: Net) -> Optimizer:
        return OPTIM.AdamW([p for name, p in model.named_parameters() if name != "blocks.0.one.weight"], foreach=True)

    record("foreach", adamw)
    record("wrapped", lambda model: fully_shard_optimizer(adamw(model)))
    record("fused", lambda model: OPTIM.AdamW(model.parameters(), fused=True))
    record("gap", with_a_gap)
    record("unknown", lambda model: not_flat(OPTIM.AdamW)(model.parameters(), foreach=True))
    record("default", lambda model: OPTIM.SGD(model.parameters(), lr=0.1, momentum=0.9))
    record("narrow", adamw, MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16))
    counts = {name: len(sizes) for name, sizes in found.items()}
    assert counts["foreach"] == counts["wrapped"] == counts["default"] == 3
    # A parameter that another optimizer steps cuts its unit in two.
    assert counts["gap"] == 4
    assert sum(found["gap"]) <= sum(found["foreach"]) - 16 * 3
    # Fused steps on the CPU restart SIMD vectors at each parameter; the remaining elements round differently.
    assert 3 <= counts["fused"] < num_parameters
    assert counts["unknown"] == counts["narrow"] == num_parameters


def watched(factor: float) -> tuple[Net, list[float]]:
    """Train with gradients of ``factor``, doubled by a hook for 0.5; return the mean step counts after each step."""
    model = sharded()
    optimizer = OPTIM.AdamW(model.parameters(), foreach=True, eps=0.1)
    counts: list[float] = []

    def double(optimizer: Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(2)

    def count(optimizer: Optimizer, *_: Any) -> None:
        values = [optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"]]
        assert all(type(value["exp_avg"]) is FlatDTensor for value in values)
        counts.append(sum(float(value["step"]) for value in values) / len(values))

    if factor == 0.5:
        optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(count)
    for step in range(3):
        backward(model, step)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    return model, counts


@on_ranks(2)
def test_hooks_before_a_step_change_its_gradients_and_hooks_after_it_see_its_state() -> None:
    (halved, counts), (whole, _) = watched(0.5), watched(1.0)
    assert (differing(whole_state(halved), whole_state(whole)), counts) == ([], [1.0, 2.0, 3.0])


Make = Callable[..., Optimizer]


def with_closures(make: Make) -> Net:
    model = sharded()
    optimizer = make(model.parameters(), lr=0.01, foreach=True)

    def loss() -> float:
        optimizer.zero_grad()
        backward(model, 5)
        return 1.5

    for step in range(4):
        backward(model, step)
        assert (optimizer.step(loss) if step % 2 else optimizer.step()) == (1.5 if step % 2 else None)
    return model


def with_a_scaler(make: Make) -> Net:
    model = sharded()
    optimizer = make(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    for step in range(5):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 5) * (torch.inf if step == 2 else 1)).square().mean()
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def with_more_groups(make: Make) -> Net:
    model = sharded()
    parameters = list(model.parameters())
    optimizer = make(parameters[:6], lr=0.01, foreach=True)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        model.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
        if step == 1:
            optimizer.add_param_group({"params": parameters[6:], "lr": 0.1})
    return model


def with_copies(make: Make) -> Net:
    model: Any = sharded()
    optimizer = make(model.parameters(), lr=0.01, foreach=True)
    backward(model, 0)
    optimizer.step()
    document = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer = make(model.parameters(), lr=0.01, foreach=True)
    optimizer.load_state_dict(document)
    optimizer.step()
    # Units do not gather the parameters of a copy, so these are stepped one by one.
    copied = copy.deepcopy(optimizer)
    theirs = copied.param_groups[0]["params"]
    for parameter, mine in zip(theirs, model.parameters(), strict=True):
        parameter.grad = copy.deepcopy(mine.grad)
    copied.step()
    optimizer.step()
    for parameter, mine in zip(theirs, model.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), mine.full_tensor())
    return model


@pytest.mark.parametrize("way", [with_closures, with_a_scaler, with_more_groups, with_copies])
@on_ranks(2)
def test_closures_scalers_groups_and_copies_give_the_bits_of_unflattened_steps(
    way: Callable[[Make], Net],
) -> None:
    mine, theirs = (whole_state(way(make)) for make in (OPTIM.AdamW, not_flat(OPTIM.AdamW)))
    assert differing(mine, theirs) == []


@on_ranks(1)
def test_a_parameter_trained_later_counts_its_own_steps_and_changes_no_others() -> None:
    model = sharded()
    optimizer = OPTIM.AdamW(model.parameters(), foreach=True)
    late: Any = model.blocks[0]["one"].weight
    found = []
    for step in range(4):
        backward(model, step)
        if not step:
            late.grad = None
        optimizer.step()
        counts = {p: float(optimizer.state[p]["step"]) for p in model.parameters() if p in optimizer.state}
        found.append([counts.pop(late, 0.0), *sorted(set(counts.values()))])
        optimizer.zero_grad()
    assert found == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]


@on_ranks(1)
def test_the_memory_of_gradients_is_given_back_after_a_step() -> None:
    model = sharded()
    optimizer = OPTIM.AdamW(model.parameters(), foreach=True)
    found = []
    for step in range(3):
        backward(model, step)
        optimizer.step()
        groups = {id(group): group for p in model.parameters() if (group := group_of_parameter(p)) is not None}
        storages = [
            group.gradient_buffer.main_grad.storage for group in groups.values() if group.gradient_buffer is not None
        ]
        before = all(storage.is_allocated for storage in storages)
        optimizer.zero_grad()
        found.append(before and not any(storage.is_allocated for storage in storages))
    assert found == [True] * 3


def loaded_and_refused() -> tuple[list[str], str]:
    """Load whole state, and step split weights, if only ``fully_shard`` has registered the units."""
    model = sharded()
    optimizer = OPTIM.AdamW(model.parameters(), lr=0.01, foreach=True)
    backward(model, 0)
    optimizer.step()
    document = optimizer.state_dict()
    whole = {
        index: {key: value.full_tensor() if value.ndim else value for key, value in values.items()}
        for index, values in document["state"].items()
    }
    optimizer.load_state_dict({**document, "state": whole})
    optimizer.step()
    kinds = {type(values["exp_avg"]).__name__ for values in optimizer.state.values()}
    split = sharded(MixedPrecisionPolicy(torch.bfloat16, split_main_params=True))
    try:
        OPTIM.AdamW(split.parameters()).step()
    except Exception as error:
        return sorted(kinds), str(error)
    return sorted(kinds), ""


def test_optimizers_over_sharded_parameters_are_handled_after_fully_shard_alone() -> None:
    for kinds, refusal in run_ranks(2, loaded_and_refused):
        assert kinds == ["FlatDTensor"]
        assert "is the bf16 half of an FP32 weight" in refusal


def stock(kind: type[Optimizer], model: Model) -> Optimizer:
    groups = [{key: value for key, value in group.items() if key != "betas"} for group in two_groups(model)]
    return fully_shard_optimizer(kind(groups, lr=0.01, foreach=None, momentum=0.9))  # type: ignore[call-arg]


def compare_stock(strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy | None = None) -> list[str]:
    """Train on flat memory and parameter by parameter; then continue each run with the other run's state."""
    kinds = torch.optim.SGD, not_flat(torch.optim.SGD)
    models = [sharded_model(strategy, mesh=mesh, mp_policy=policy) for _ in kinds]
    optimizers = [stock(kind, model) for kind, model in zip(kinds, models, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3), [dist.get_rank()])
    found, wanted = map(whole_state, models)
    wrong = differing(found, wanted) + differing_state(*optimizers)
    again = [stock(kind, model) for kind, model in zip(kinds, models, strict=True)]
    for model, optimizer, other in zip(models, again, reversed(optimizers), strict=True):
        optimizer.load_state_dict(other.state_dict())
        train(model, optimizer, range(3, 5), [dist.get_rank()])
    found, wanted = map(whole_state, models)
    return wrong + differing(found, wanted) + differing_state(*again)


LAYOUTS = [("optim_grads", (2,)), ("optim", (3,)), ("no_shard", (2,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2))]


@pytest.mark.parametrize(("strategy", "mesh"), nightly_but([("optim", (3,)), ("hsdp", (2, 2))], LAYOUTS))
def test_every_strategy_takes_the_steps_that_go_parameter_by_parameter(strategy: str, mesh: tuple[int, ...]) -> None:
    num_ranks = torch.Size(mesh).numel()
    assert run_ranks(num_ranks, compare_stock, strategy, mesh) == [[]] * num_ranks


def test_gradients_of_another_dtype_are_cast_for_a_step() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, main_grads_dtype=torch.bfloat16)
    assert run_ranks(2, compare_stock, "optim_grads_params", (2,), policy) == [[]] * 2
