"""Local shards are views of each rank's main weights; the senders' views together are the plain model."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dbuffer.events import CollectiveCall, observe_collectives
from megatron_fsdp import LocalShard, MixedPrecisionPolicy, local_shards
from tests.functional.megatron_fsdp.transfer.tensor_parallel import tensor_parallel_stack
from tests.harness import on_ranks
from tests.harness.models import Block, make_model
from tests.harness.oracle import STRATEGIES, sharded, token_loss

TWO_AXES = ("hsdp", "hfsdp", "no_shard on two axes", "optim_grads_params on two axes")


def put_together(shards: dict[str, LocalShard]) -> dict[str, torch.Tensor]:
    """Assemble whole weights from the senders' shards; each element has to come once."""
    found = {}
    for name, shard in shards.items():
        whole, times = torch.zeros(shard.shape), torch.zeros(shard.shape)
        if shard.contributes:
            box = tuple(slice(a, a + n) for a, n in zip(shard.part_offsets, shard.part_shape, strict=True))
            part, count = (torch.zeros(math.prod(shard.part_shape)) for _ in range(2))
            part[shard.offset : shard.offset + shard.local.numel()] = shard.local.float()
            count[shard.offset : shard.offset + shard.local.numel()] = 1
            whole[box], times[box] = part.view(shard.part_shape), count.view(shard.part_shape)
        for tensor in (whole, times):
            dist.all_reduce(tensor)
        assert bool((times == 1).all()), name
        found[name] = whole
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(lambda strategy: 4 if strategy in TWO_AXES else 3)
def test_senders_of_local_shards_have_each_element_of_the_plain_model_once(strategy: str) -> None:
    plain = make_model()
    model = sharded(copy.deepcopy(plain), strategy)
    calls: list[CollectiveCall] = []
    with observe_collectives(calls.append):
        shards = local_shards(model)
    assert not calls
    found = put_together(shards)
    assert found.keys() == plain.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


@on_ranks(4)
def test_parts_of_tensor_parallel_weights_have_their_place_in_the_whole_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = tensor_parallel_stack(mesh, Block(), Block(hidden=5))
    shards = {name: shard for name, shard in local_shards(model).items() if name.endswith(("up.weight", "down.weight"))}
    found = put_together(shards)
    assert len(found) == 4
    assert all(torch.equal(found[name], plain.state_dict()[name]) for name in found)


@on_ranks(2)
def test_addresses_stay_while_the_model_trains() -> None:
    model = sharded(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: shard.local.data_ptr() for name, shard in local_shards(model).items()}
    kept = local_shards(model)
    for step in range(2):
        token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    after = local_shards(model)
    assert before == {name: shard.local.data_ptr() for name, shard in after.items()}
    assert all(torch.equal(kept[name].local, shard.local) for name, shard in after.items())


@on_ranks(4)
def test_replicas_of_hsdp_share_the_work_of_sending() -> None:
    shards = local_shards(sharded(make_model(), "hsdp"))
    place = dist.get_rank() % 2
    assert {shard.replica_ranks for name, shard in shards.items() if name != "positions"} == {(place, place + 2)}
    assert {shard.sender for name, shard in shards.items() if name != "positions"} == {place, place + 2}


@on_ranks(2)
def test_split_main_weights_show_their_bf16_plane() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, split_main_params=True)
    shards = local_shards(sharded(make_model(), mp_policy=policy))
    assert shards["blocks.0.project.weight"].local.dtype is torch.bfloat16
