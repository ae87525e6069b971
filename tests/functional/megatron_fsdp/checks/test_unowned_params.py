"""A step or clip over sharded parameters and unmarked trained parameters outside units raises an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as ddp_replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp import StateError, clip_grad_norm_, fsdp_no_shard, fully_shard
from tests.harness import on_ranks


def forgotten(model: Any) -> None:
    fully_shard(model[0])


def marked_and_forgotten(model: Any) -> None:
    fsdp_no_shard(model[1])
    fully_shard(model[0])


def ignored(model: Any) -> None:
    fully_shard(model[0])
    fully_shard(model, ignored_params=list(model[1].parameters()))


def kept_whole(model: Any) -> None:
    marked_and_forgotten(model)
    fully_shard(model)


def frozen(model: Any) -> None:
    forgotten(model)
    model[1].requires_grad_(False)


def in_ddp(model: Any) -> None:
    forgotten(model)
    model[1] = DistributedDataParallel(model[1])


def in_pytorchs_replicate(model: Any) -> None:
    forgotten(model)
    ddp_replicate(model)


def hooked(model: Any) -> None:
    forgotten(model)
    for parameter in model[1].parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: dist.all_reduce(one.grad))


def train(shard: Callable[[Any], None], clips: bool) -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((2, 3), dist.get_rank() + step + 1.0)).square().mean().backward()
        if clips:
            clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def whole_layer(model: Any) -> torch.Tensor:
    """Return the second layer's weight, which most of these models leave outside units."""
    weight = getattr(model[1], "module", model[1]).weight.detach()
    return weight.full_tensor().clone() if isinstance(weight, DTensor) else weight.clone()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("shard", [forgotten, marked_and_forgotten])
@on_ranks(2)
def test_a_trained_layer_in_no_unit_is_refused_by_name(shard: Callable[[Any], None], clips: bool) -> None:
    with pytest.raises(StateError, match="belong to no unit") as refused:
        train(shard, clips)
    message = str(refused.value)
    assert "'1.weight', '1.bias'" in message
    assert message.startswith("clip_grad_norm_" if clips else "AdamW.step()")
    assert all(words in message for words in ("fix: call fully_shard(model)", "fsdp_no_shard", "ignored_params"))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("shard", [ignored, kept_whole, frozen, in_ddp, in_pytorchs_replicate, hooked])
@on_ranks(2)
def test_parameters_that_something_marks_are_stepped(shard: Callable[[Any], None], clips: bool) -> None:
    torch.manual_seed(5)
    before = whole_layer(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
    torch.manual_seed(5)
    after = whole_layer(train(shard, clips))
    assert torch.equal(before, after) == (shard is frozen)
    gathered = [torch.empty_like(after) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, after)
    # Gradients that the caller reduces himself, or forgets to reduce, differ between ranks.
    assert torch.equal(*gathered) == (shard is not ignored)


@on_ranks(1)
def test_one_rank_may_train_what_no_unit_owns() -> None:
    torch.manual_seed(5)
    wanted = train(lambda model: None, clips=False)
    torch.manual_seed(5)
    found = train(forgotten, clips=False)
    torch.testing.assert_close(whole_layer(found), whole_layer(wanted))
    train(forgotten, clips=True)


@on_ranks(2)
def test_ignored_parameters_are_known_after_to_empty() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    ignored(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model(torch.ones(2, 3)).sum().backward()
    clip_grad_norm_(model, 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not isinstance(model[1].weight, DTensor)
    assert (whole_layer(model) < 1).all()


@on_ranks(2)
def test_parts_in_pytorchs_replicate_keep_their_shards() -> None:
    model = train(in_pytorchs_replicate, clips=False)
    plain = model[1].weight.detach().clone()
    dist.broadcast(plain, 0)
    assert torch.equal(plain, model[1].weight)
    assert model[0].weight.to_local().shape[0] < 5
