"""Uses of sharded parameters and norms: collectives, swaps of .data, numbers, and whole copies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import megatron_fsdp
from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import fully_shard
from tests.harness import on_ranks


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the same shape."""
    return torch.zeros(tuple(tensor.shape))


def each(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the same tensor for every rank."""
    return [tensor] * dist.get_world_size()


def group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    return dist.distributed_c10d._get_default_group()


# Each rank gathers to itself as the destination, so that every rank has the list.
COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "reduce": lambda tensor: dist.reduce(tensor, 0),
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor: dist.all_gather([torch.empty(tensor.shape)] * dist.get_world_size(), tensor),
    "isend": lambda tensor: dist.isend(tensor, 1 - min(dist.get_rank(), 1)),
    "functional": lambda tensor: functional_collectives.all_reduce(tensor, "sum", group()),
    "all_gather outputs": lambda tensor: dist.all_gather(each(tensor), like(tensor)),
    "all_gather_single output": lambda tensor: dist.all_gather_single(tensor, torch.zeros(3)),
    "all_to_all outputs": lambda tensor: dist.all_to_all(each(tensor), each(like(tensor))),
    "all_to_all inputs": lambda tensor: dist.all_to_all(each(like(tensor)), each(tensor)),
    "all_to_all_single output": lambda tensor: dist.all_to_all_single(tensor, like(tensor)),
    "gather outputs": lambda tensor: dist.gather(like(tensor), each(tensor), dist.get_rank()),
    "scatter inputs": lambda tensor: dist.scatter(like(tensor), each(tensor), dist.get_rank()),
    "reduce_scatter inputs": lambda tensor: dist.reduce_scatter(like(tensor), each(tensor)),
    "reduce_scatter_single output": lambda tensor: dist.reduce_scatter_single(tensor, torch.cat(each(like(tensor)))),
    "batch_isend_irecv": lambda tensor: dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, tensor, (dist.get_rank() + 1) % dist.get_world_size())]
    ),
    "group.allreduce": lambda tensor: group().allreduce([like(tensor), tensor]),
    "group.allgather": lambda tensor: group().allgather([each(tensor)], [like(tensor)]),
    "group.allgather of it": lambda tensor: group().allgather([each(like(tensor))], [tensor]),
    "group.reduce_scatter": lambda tensor: group().reduce_scatter([like(tensor)], [each(tensor)]),
    "group.allgather_coalesced": lambda tensor: group().allgather_coalesced([each(tensor)], [like(tensor)]),
    "group.send": lambda tensor: group().send([tensor], (dist.get_rank() + 1) % dist.get_world_size(), 0),
}


def trained() -> tuple[nn.Linear, Any]:
    """Return a sharded layer with gradients, and its weight."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 7)
    fully_shard(layer)
    torch.manual_seed(dist.get_rank())
    layer(torch.randn(2, 3)).square().sum().backward()
    assert isinstance(layer.weight, DTensor)
    return layer, layer.weight


@pytest.mark.parametrize("is_in_inference_mode", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
@on_ranks(3)
def test_a_collective_of_a_sharded_parameter_names_it(name: str, is_in_inference_mode: bool) -> None:
    _, weight = trained()
    assert weight.grad is not None
    before = weight.full_tensor()
    for tensor in (weight, weight.data, weight.grad):
        with (
            pytest.raises(NotImplementedError, match=r"'weight'.*fix: ") as caught,
            torch.inference_mode() if is_in_inference_mode else torch.no_grad(),
        ):
            COLLECTIVES[name](tensor)
        assert "to_local" in str(caught.value)
    assert torch.equal(weight.full_tensor(), before)
    # This rank's rows are a plain tensor.
    counted = weight.to_local().detach().clone().sum()
    dist.all_reduce(counted)
    torch.testing.assert_close(counted, before.sum())


@on_ranks(3)
def test_whole_norms_and_plain_tensors_travel_in_lists() -> None:
    _, weight = trained()
    norm = get_total_norm([weight.grad])
    rank = dist.get_rank()
    found = [torch.zeros(()) for _ in range(3)]
    dist.all_gather(found, torch.tensor(float(rank)))
    assert torch.stack(found).tolist() == [0, 1, 2]
    received = torch.zeros(())
    dist.scatter(received, [norm, norm * 2, norm * 3] if rank == 0 else None)
    assert received.item() == pytest.approx(norm.item() * (rank + 1))
    dist.gather(received, found if rank == 2 else None, 2)
    assert rank != 2 or torch.stack(found).tolist() == pytest.approx([norm.item() * (each + 1) for each in range(3)])
    dist.reduce_scatter(received, [torch.tensor(1.0), torch.tensor(10.0), torch.tensor(100.0)])
    assert received.item() == 3 * 10**rank


@on_ranks(3)
def test_data_swapped_with_a_kept_tensor_comes_back() -> None:
    _, weight = trained()
    own = weight.full_tensor()
    kept = weight.detach().clone().mul_(2)
    for _ in range(2):
        weight.data, kept = kept, weight.data
        assert torch.equal(weight.full_tensor(), 2 * own)
        assert torch.equal(kept.full_tensor(), own)
        weight.data, kept = kept, weight.data
        assert torch.equal(weight.full_tensor(), own)
        assert torch.equal(kept.full_tensor(), 2 * own)


@on_ranks(3)
def test_data_of_two_parameters_is_swapped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fully_shard(model)
    first, second = model[0].weight, model[1].weight
    wholes = first.full_tensor(), second.full_tensor()
    first.data, second.data = second.data, first.data
    assert torch.equal(first.full_tensor(), wholes[1])
    assert torch.equal(second.full_tensor(), wholes[0])


@on_ranks(3)
def test_a_gradient_norm_is_formatted_and_an_array() -> None:
    layer, _ = trained()
    norms = [
        clip_grad_norm_(layer.parameters(), 1e9),
        get_total_norm([parameter.grad for parameter in layer.parameters() if parameter.grad is not None]),
        megatron_fsdp.clip_grad_norm_(layer, 1e9),
    ]
    for norm in norms:
        number = float(norm)
        assert number == norm.item() > 0
        assert f"{norm:.4f}" == f"{number:.4f}"
        assert float(norm.numpy()) == float(np.asarray(norm)) == number
        assert np.asarray(norm, dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@on_ranks(lambda num_ranks: num_ranks)
def test_full_tensor_moves_exactly_the_weight(num_ranks: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(9, 11, bias=False), nn.Linear(11, 1, bias=False), nn.Linear(1, 64, bias=False)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    wholes = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model)
    calls: list[CollectiveCall] = []
    for whole, parameter in zip(wholes, model.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        calls.clear()
        with observe_collectives(calls.append):
            assert torch.equal(parameter.full_tensor(), whole)
        assert sum(call.num_bytes for call in calls) == whole.nbytes
    calls.clear()
    with observe_collectives(calls.append):
        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(one, other) for one, other in zip(state.values(), wholes, strict=True))
    assert sum(call.num_bytes for call in calls) == sum(whole.nbytes for whole in wholes)
