"""``send_weights`` and ``receive_weights``: an engine's slices get the trainer's weights to the bit."""

import copy
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer.mesh import new_group
from megatron_fsdp import (
    AgreementError,
    MeshError,
    MixedPrecisionPolicy,
    TransferError,
    TransferLayout,
    plan_transfer,
    receive_weights,
    send_weights,
    weight_layout,
)
from tests.functional.megatron_fsdp.transfer.tensor_parallel import tensor_parallel_stack
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, make_model
from tests.harness.oracle import STRATEGIES, sharded, token_loss
from tests.harness.timeouts import give_up_after


def slices(
    plain: nn.Module, dtype: torch.dtype | None, dims: dict[str, int], number: int, place: int
) -> dict[str, Any]:
    """Return one engine rank's part of the plain model's state dict."""
    parameters = dict(plain.named_parameters())
    found = {}
    for name, value in plain.state_dict().items():
        if dtype is not None and name in parameters:
            value = value.to(dtype)
        found[name] = value
        if name in dims:
            parts = value.chunk(number, dims[name])
            found[name] = parts[place] if place < len(parts) else value.narrow(dims[name], 0, 0)
    return found


def deliver(model: nn.Module, plain: nn.Module, engine: list[int], seed: int, dtype: torch.dtype | None) -> None:
    """Send a model to an engine that cuts some weights, and compare each rank's slices with the plain model's."""
    dice = random.Random(seed)
    source = weight_layout(model, dtype=dtype)
    dims = {name: dice.randrange(len(shape)) for name, _, shape in source.metadata() if shape and dice.random() < 0.7}
    plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), engine, dims), staging_bytes=1500)
    into: dict[str, torch.Tensor] = {}
    rank = dist.get_rank()
    if rank in engine:
        wanted = slices(plain, dtype, dims, len(engine), engine.index(rank))
        into = {name: torch.full(each.shape, -1).to(each.dtype) for name, each in wanted.items()}
    send_weights(model, plan, into=into)
    for name, value in into.items():
        assert torch.equal(value, wanted[name]), name


@on_ranks(4)
def test_engine_slices_equal_the_plain_models_to_the_bit() -> None:
    plain = make_model()
    split = MixedPrecisionPolicy(torch.bfloat16, torch.float32, split_main_params=True)
    for seed, strategy in enumerate(STRATEGIES):
        model = sharded(copy.deepcopy(plain), strategy)
        deliver(model, plain, [[0, 1, 2, 3], [2, 1], [3]][seed % 3], seed, torch.bfloat16 if seed % 2 else None)
    deliver(sharded(copy.deepcopy(plain), mp_policy=split), plain, [0, 3, 1], 11, None)
    deliver(sharded(copy.deepcopy(plain), mp_policy=split), plain, [1, 2], 12, torch.bfloat16)


@on_ranks(4)
def test_tensor_parallel_weights_go_to_another_degree() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = tensor_parallel_stack(mesh, Block(hidden=10), Block(hidden=6))
    for seed, engine in enumerate(([0, 1, 2, 3], [1], [3, 0, 2])):
        deliver(model, plain, engine, seed, torch.bfloat16)


@on_ranks(3)
def test_ranks_of_the_trainer_send_to_ranks_of_the_engine() -> None:
    plain = make_model()
    trainer = DeviceMesh.from_group(new_group([0, 1], "trainer"), "cpu") if dist.get_rank() < 2 else None
    layouts: list[Any] = [None]
    if trainer is not None:
        model = sharded(copy.deepcopy(plain), mesh=trainer)
        layouts = [weight_layout(model)]
    dist.broadcast_object_list(layouts)
    source: TransferLayout = layouts[0]
    plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), [2]))
    wanted = slices(plain, torch.bfloat16, {}, 1, 0)
    if trainer is not None:
        send_weights(model, plan)
    else:
        state = {name: torch.empty_like(value) for name, value in wanted.items()}
        receive_weights(state, plan)
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
        assert plan.received == {2: plan.num_bytes}


@on_ranks(3)
def test_a_receiver_that_fails_is_named_and_training_goes_on() -> None:
    model = sharded(make_model())
    source = weight_layout(model)
    plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), [2]))
    state = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in source.metadata()}
    if dist.get_rank() == 2:
        name = next(iter(state))
        for wrong, words in (
            ({**state, name: state[name].float()}, rf"tensor '{name}' is .* of torch.float32 .* fix: "),
            ({key: value for key, value in state.items() if key != name}, rf"has no tensor '{name}'.* fix: "),
        ):
            with pytest.raises(TransferError, match=words):
                send_weights(model, plan, into=wrong)
    else:
        for _ in range(2):
            with pytest.raises(
                AgreementError, match="rank 2, which moves weights by a transfer plan, raised TransferErr"
            ):
                send_weights(model, plan)
    staging_bytes = 500 + 300 * dist.get_rank()
    other = plan_transfer(source, TransferLayout.sliced(source.metadata(), [2]), staging_bytes=staging_bytes)
    with pytest.raises(MeshError, match="the ranks have different transfer plans"):
        send_weights(model, other, into=state)
    token_loss(model, dist.get_rank(), 0).backward()
    send_weights(model, plan, into=state)
    if dist.get_rank() == 2:
        with pytest.raises(TransferError, match=r"holds weights in the plan's source layout.* fix: "):
            receive_weights(state, plan)
    else:
        with pytest.raises(AgreementError, match="rank 2"):
            send_weights(model, plan)


@on_ranks(3)
def test_a_receiver_that_never_calls_is_named_and_training_goes_on() -> None:
    trainer = DeviceMesh.from_group(new_group([0, 1], "trainer"), "cpu") if dist.get_rank() < 2 else None
    model = sharded(make_model(), mesh=trainer) if trainer is not None else None
    layouts = [weight_layout(model) if model is not None else None]
    dist.broadcast_object_list(layouts)
    source = layouts[0]
    assert source is not None
    plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), [2]))
    store = dist.distributed_c10d._get_default_store()
    if model is None:
        # The engine's rank lives, but never calls receive_weights.
        store.wait(["over 0", "over 1"], timedelta(seconds=60))
        return
    give_up_after(2.0)
    with pytest.raises(AgreementError, match="but rank 2 did not come within 2 s"):
        send_weights(model, plan)
    token_loss(model, dist.get_rank(), 0).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None or not param.requires_grad, name
    store.set(f"over {dist.get_rank()}", "")


@on_ranks(2)
def test_a_plan_of_another_model_is_refused() -> None:
    model, other = sharded(make_model()), sharded(Stack(Block()))
    source = weight_layout(other)
    plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), [0]))
    with pytest.raises(TransferError, match=r"the model has .* weights, and the plan's source layout has .* fix: "):
        send_weights(model, plan)


@on_ranks(2)
def test_a_tensor_of_another_shape_and_as_many_bytes_is_refused() -> None:
    model = sharded(Stack(nn.Linear(6, 4)))
    source = weight_layout(model)
    name, rank = "layers.0.weight", dist.get_rank()
    for dims, wrong, words in (
        ({}, (6, 4), r"gets a slice of shape \(4, 6\)"),
        ({name: 0}, (3, 4), r"gets a slice of shape \(2, 6\)"),
        ({name: 1}, (2, 6), r"gets a slice of shape \(4, 3\)"),
    ):
        plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), [0, 1], dims))
        bias = {"layers.0.bias": torch.empty(4, dtype=torch.bfloat16)}
        with pytest.raises(TransferError, match=rf"tensor '{name}' is .* at rank {rank}, which {words}.*fix: "):
            send_weights(model, plan, into={name: torch.empty(wrong, dtype=torch.bfloat16), **bias})


@on_ranks(2)
def test_plans_for_tensors_of_other_names_are_refused() -> None:
    model = sharded(Stack(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    names = {"layers.0.weight": "layers.1.weight", "layers.1.weight": "layers.0.weight"} if dist.get_rank() else None
    source = weight_layout(model, names=names)
    plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), [0, 1]))
    into = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in source.metadata()}
    with pytest.raises(MeshError, match="the ranks have different transfer plans"):
        send_weights(model, plan, into=into)
