"""``reshard_`` moves every bit of weights and optimizer state to another layout, and training continues as there."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer.mesh import new_group
from megatron_fsdp import (
    AdamW,
    AgreementError,
    ConfigError,
    CPUOffloadPolicy,
    MeshError,
    MixedPrecisionPolicy,
    Placements,
    StateError,
    TransferError,
    fully_shard_optimizer,
    no_sync,
    reshard_,
    weight_stream,
    weight_version,
)
from megatron_fsdp.transfer import reshard
from tests.harness import on_ranks
from tests.harness.models import make_model
from tests.harness.oracle import STRATEGIES, sharded, token_loss, units_of

Kind = Callable[..., torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def refreshing(params: Any) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.AdamW(params, lr=0.01))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = token_loss(model, dist.get_rank(), number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(strategy: str, kind: Kind, steps: int = 2, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(make_model(), strategy, **options)
    optimizer = kind(model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def whole(value: Any) -> Any:
    # A replicated DTensor uses the existing memory.
    return value.full_tensor().clone() if isinstance(value, DTensor) else copy.deepcopy(value)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return whole weights and state by name; every rank calls it."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = {f"{name}": whole(param.detach()) for name, param in model.named_parameters()}
    for param, values in optimizer.state.items():
        found |= {f"{names[id(param)]}.{key}": whole(value) for key, value in values.items()}
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def twin(model: nn.Module, optimizer: torch.optim.Optimizer, kind: Kind, **layout: Any) -> Any:
    """Return a model made in a layout, with an optimizer, and with the values of a model in any other layout."""
    other = sharded(make_model(1), **layout)
    other.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    like = kind(other.parameters())
    document = optimizer.state_dict()
    state = {i: {key: whole(value) for key, value in values.items()} for i, values in document["state"].items()}
    like.load_state_dict({"state": state, "param_groups": document["param_groups"]})
    return other, like


def plans(model: nn.Module) -> list[str]:
    return [
        f"{group.plan.fingerprint()} {group.spec.placements} {float(group.spec.divisor)} {list(group.parameters)}"
        for unit in units_of(model)
        for group in unit.parameter_groups
    ]


def check(source: str, target: str, kind: Kind, **options: Any) -> None:
    """Train in one strategy, change to another; compare values, plans and two more steps with a model made there."""
    model, optimizer = trained(source, kind, **options)
    before, parameters = contents(model, optimizer), list(model.parameters())
    placements = STRATEGIES[target]
    shape = (2, dist.get_world_size() // 2) if len(placements.dp_axes) == 2 else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape)
    plan = reshard_(model, mesh, placements, optimizer=optimizer, staging_bytes=2048)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert_same(contents(model, optimizer), before)
    other, like = twin(model, optimizer, kind, strategy=target, mesh=mesh, **options)
    assert plans(model) == plans(other)
    for number in (2, 3):
        assert step(model, optimizer, number) == step(other, like, number)
        assert_same(contents(model, optimizer), contents(other, like))
    assert sum(plan.sent.values()) == plan.num_bytes


@on_ranks(3)
def test_training_goes_on_as_in_a_model_made_in_the_new_layout_on_three_ranks() -> None:
    zero3 = "optim_grads_params"
    for source, target, kind in (
        (zero3, "optim", torch.optim.AdamW),
        ("optim", zero3, AdamW),
        (zero3, "no_shard", sgd),
        ("no_shard", "optim_grads", AdamW),
        ("optim_grads", zero3, refreshing),
        (zero3, "optim", refreshing),
    ):
        check(source, target, kind)
    check("optim", zero3, sgd, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    check(zero3, zero3, AdamW, offload_policy=CPUOffloadPolicy(pin_memory=False))


@on_ranks(4)
def test_training_goes_on_as_in_a_model_made_in_the_new_layout_on_four_ranks() -> None:
    zero3 = "optim_grads_params"
    for source, target, kind in (
        ("hsdp", zero3, torch.optim.AdamW),
        (zero3, "hsdp", AdamW),
        ("hfsdp", "hsdp", AdamW),
        ("optim", "hfsdp", sgd),
    ):
        check(source, target, kind)


@on_ranks(2)
def test_split_main_weights_keep_all_32_bits() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, split_main_params=True)
    model, optimizer = trained("optim_grads_params", AdamW, mp_policy=policy)
    other, like = trained("optim_grads_params", AdamW, mp_policy=policy)
    before = dict(weight_stream(model, dtype=torch.float32))
    assert any((each.view(torch.int32) & 0xFFFF).any() for each in before.values() if each.dtype is torch.float32)
    reshard_(model, placements=Placements.optim(0), optimizer=optimizer)
    assert_same(dict(weight_stream(model, dtype=torch.float32)), before)
    reshard_(model, placements=Placements.optim_grads_params(0), optimizer=optimizer)
    for number in (2, 3):
        assert step(model, optimizer, number) == step(other, like, number)
    assert_same(dict(weight_stream(model, dtype=None)), dict(weight_stream(other, dtype=None)))


def of_three() -> DeviceMesh:
    return DeviceMesh.from_group(new_group([0, 1, 2], "survivors"), "cpu")


@on_ranks(4)
def test_three_survivors_go_on_without_a_lost_rank_from_replicas() -> None:
    model, optimizer = trained("hsdp", AdamW)
    before = contents(model, optimizer)
    if dist.get_rank() == 3:
        return
    plan = reshard_(model, of_three(), Placements.optim_grads_params(0), optimizer=optimizer, lost_ranks=[3])
    assert 3 not in plan.ranks
    assert_same(contents(model, optimizer), before)
    other, like = twin(model, optimizer, AdamW, mesh=of_three())
    assert plans(model) == plans(other)
    assert step(model, optimizer, 2) == step(other, like, 2)
    assert_same(contents(model, optimizer), contents(other, like))


@on_ranks(4)
def test_a_rank_that_leaves_sends_its_part_and_can_train_no_more() -> None:
    model, optimizer = trained("optim_grads_params", torch.optim.AdamW)
    before = contents(model, optimizer)
    mesh = DeviceMesh("cpu", [0, 1, 2])
    reshard_(model, mesh, optimizer=optimizer)
    if dist.get_rank() == 3:
        with pytest.raises(StateError, match="moved this model to a mesh without this rank"):
            token_loss(model, 3, 2)
    else:
        assert_same(contents(model, optimizer), before)
        step(model, optimizer, 2)


@on_ranks(4)
def test_a_restarted_rank_gets_its_part_from_a_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model, optimizer = trained("hsdp", AdamW, mesh=mesh)
    before = contents(model, optimizer)
    if dist.get_rank() == 3:
        # Stand for lost memory: other values, and an optimizer that has not stepped.
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(7)
        optimizer.state.clear()
        optimizer = AdamW(model.parameters(), lr=5.0)
    plan = reshard_(model, optimizer=[optimizer], lost_ranks=[3])
    assert plan.received[3] == plan.num_bytes > 0
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert_same(contents(model, optimizer), before)
    step(model, optimizer, 2)


@on_ranks(2)
def test_int8_moments_keep_codes_and_scales() -> None:
    policy = MixedPrecisionPolicy(moments="int8")
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Linear(80, 77), nn.Linear(77, 80)), "optim_grads_params", mp_policy=policy)
    optimizer = AdamW(model.parameters(), moments="int8")
    for _ in range(2):
        model(torch.randn(4, 80)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = contents(model, optimizer)
    assert any("codes" in name for name in before)
    reshard_(model, placements=Placements.no_shard(0), optimizer=optimizer)
    assert_same(contents(model, optimizer), before)
    reshard_(model, placements=Placements.optim(0), optimizer=optimizer)
    assert_same(contents(model, optimizer), before)
    model(torch.randn(4, 80)).square().mean().backward()
    optimizer.step()


# ---------------------------------------------------------------- refusals and faults


@contextlib.contextmanager
def raising(name: str, error: BaseException) -> Iterator[None]:
    """Make a function of the module raise on rank 1."""
    original = getattr(reshard, name)

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    if dist.get_rank() == 1:
        setattr(reshard, name, fail)
    try:
        yield
    finally:
        setattr(reshard, name, original)


@on_ranks(2)
def test_an_error_inside_leaves_model_and_optimizer_as_they_were() -> None:
    model, optimizer = trained("optim_grads_params", AdamW)
    before, layout = contents(model, optimizer), plans(model)
    wanted = Placements.optim(0)
    for name, error in (
        ("make_weights", RuntimeError("out of memory")),
        ("plan_transfer", KeyboardInterrupt()),
        ("Mover", RuntimeError("out of memory")),
    ):
        expected: Any = type(error) if dist.get_rank() == 1 else AgreementError
        with raising(name, error), pytest.raises(expected, match=None if dist.get_rank() else type(error).__name__):
            reshard_(model, placements=wanted, optimizer=optimizer)
        assert plans(model) == layout
        assert_same(contents(model, optimizer), before)
    # The error is raised on all ranks, after all data have arrived.
    for name in ("make_over", "watch_inner_modules"):
        original = getattr(reshard, name)
        calls: list[int] = []

        def fail(*args: Any, original: Any = original, calls: Any = calls) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return original(*args)

        setattr(reshard, name, fail)
        try:
            with pytest.raises(RuntimeError, match="out of memory"):
                reshard_(model, placements=wanted, optimizer=optimizer)
        finally:
            setattr(reshard, name, original)
        assert plans(model) == layout
        assert_same(contents(model, optimizer), before)
    other, like = twin(model, optimizer, AdamW, strategy="optim_grads_params")
    for number in (2, 3):
        assert step(model, optimizer, number) == step(other, like, number)
    reshard_(model, placements=wanted, optimizer=optimizer)
    assert step(model, optimizer, 4) == pytest.approx(step(other, like, 4))


@on_ranks(2)
def test_reshard_of_a_model_in_use_is_refused_by_name() -> None:
    model, optimizer = trained("optim_grads_params", AdamW)
    wanted = Placements.optim(0)
    with pytest.raises(StateError, match=r"a AdamW has state .* was not given"):
        reshard_(model, placements=wanted)
    loss = token_loss(model, dist.get_rank(), 2)
    with pytest.raises(StateError, match=r"parameter '.*' is awaited by a backward"):
        reshard_(model, placements=wanted, optimizer=optimizer)
    loss.backward()
    with pytest.raises(StateError, match=r"parameter '.*' has a gradient; fix: "):
        reshard_(model, placements=wanted, optimizer=optimizer)
    optimizer.zero_grad()
    with no_sync(model):
        token_loss(model, dist.get_rank(), 2).backward()
    with pytest.raises(StateError, match="has a gradient"):
        reshard_(model, placements=wanted, optimizer=optimizer)
    token_loss(model, dist.get_rank(), 2).backward()
    optimizer.zero_grad()
    stream = weight_stream(model)
    next(stream)
    with pytest.raises(StateError, match="while a weight_stream of the model is open"):
        reshard_(model, placements=wanted, optimizer=optimizer)
    list(stream)
    with pytest.raises(TransferError, match=r"no rank of the source layout holds .* the first is tensor '"):
        reshard_(model, optimizer=optimizer, lost_ranks=[1])
    optimizer.state[next(iter(optimizer.state))]["row_var"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"state 'row_var' of shape \(3,\) for parameter '"):
        reshard_(model, placements=wanted, optimizer=optimizer)
    with pytest.raises(StateError, match=r"Linear has no sharded parameter\. fix: "):
        reshard_(nn.Linear(2, 2))


@on_ranks(2)
def test_other_arguments_on_another_rank_are_an_error_that_names_both() -> None:
    model, optimizer = trained("optim_grads_params", AdamW, steps=1)
    wanted = Placements.optim(0) if dist.get_rank() else Placements.optim_grads(0)
    with pytest.raises(MeshError, match=r"rank 0 has .*gradient=\(Flat.*rank 1 has .*gradient=\(Partial"):
        reshard_(model, placements=wanted, optimizer=optimizer)
    step(model, optimizer, 1)


@on_ranks(2)
def test_versions_freezing_and_streams_go_on_after_a_move() -> None:
    model, optimizer = trained("optim_grads_params", AdamW)
    version = weight_version(model)
    before = dict(weight_stream(model, dtype=None))
    model.blocks[0].requires_grad_(False)
    old = [weakref.ref(group) for unit in units_of(model) for group in unit.parameter_groups]
    reshard_(model, placements=Placements.optim_grads(0), optimizer=optimizer)
    gc.collect()
    assert all(reference() is None for reference in old)
    assert weight_version(model) == version
    assert_same(dict(weight_stream(model, dtype=None)), before)
    frozen = [whole(param.detach()) for param in model.blocks[0].parameters()]
    step(model, optimizer, 2)
    assert all(torch.equal(a, whole(b.detach())) for a, b in zip(frozen, model.blocks[0].parameters(), strict=True))
    model.blocks[0].requires_grad_(True)
    step(model, optimizer, 3)
    assert not torch.equal(frozen[0], whole(next(model.blocks[0].parameters()).detach()))
    model.to(torch.float64)
    assert weight_version(model) > version


@on_ranks(2)
def test_a_kept_graph_is_refused_after_a_move() -> None:
    model, optimizer = trained("optim_grads_params", AdamW)
    loss = token_loss(model, dist.get_rank(), 2)
    loss.backward(retain_graph=True)
    model.zero_grad()
    reshard_(model, placements=Placements.optim(0), optimizer=optimizer)
    with pytest.raises(StateError, match=r"unit '.*': its main weights .* were changed between a forward and"):
        loss.backward()


@on_ranks(2)
def test_a_move_inside_a_forward_is_refused() -> None:
    model, optimizer = trained("optim_grads_params", AdamW)

    def move(*_: object) -> None:
        reshard_(model, placements=Placements.optim(0), optimizer=optimizer)

    model.blocks[0].norm.register_forward_hook(move)
    with pytest.raises(StateError, match=r"reshard_: unit '.*' is in a forward\. fix: "):
        token_loss(model, dist.get_rank(), 2)


@on_ranks(2)
def test_a_version_follows_a_part_that_was_moved() -> None:
    model, optimizer = trained("optim_grads_params", AdamW)
    version = weight_version(model)
    with torch.no_grad():
        model.blocks[0].project.weight.mul_(2)
    reshard_(model.blocks[0], placements=Placements.optim(0), optimizer=optimizer)
    assert weight_version(model) == version + 1
    with torch.no_grad():
        model.blocks[0].project.weight.mul_(2)
    assert weight_version(model) == version + 2
