"""Weights arrive through the own code of vLLM, verl and SGLang as the plain model has them.

The ranks are fresh and used once: the modules that stand in for what these packages import would mislead other tests.
"""

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.integrations.inference.sglang import flattened_bucket
from megatron_fsdp.integrations.inference.verl import get_per_tensor_param, get_per_tensor_param_shard
from megatron_fsdp.integrations.inference.vllm import weight_source
from megatron_fsdp.transfer.stream import weight_stream
from tests.harness.models import Block, Stack, make_model
from tests.harness.oracle import sharded, token_loss
from tests.integration.engine_files import load, stand_in
from tests.integration.ranks import run_ranks

STRATEGIES = {2: ("optim_grads_params", "optim"), 4: ("hsdp", "no_shard")}
VERL = "verl.workers.engine"


def expected(plain: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(plain.named_parameters())
    return {name: value.bfloat16() if name in parameters else value for name, value in plain.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def through_vllm() -> None:
    """vLLM packs a source's tensors chunk by chunk, and unpacks them by its metadata, in each of two updates."""
    stand_in("vllm.config.parallel", ParallelConfig=object)
    stand_in("vllm.config.weight_transfer", WeightTransferConfig=object)
    base, packed = (load(f"vllm.distributed.weight_transfer.{name}") for name in ("base", "packed_tensor"))
    # vLLM's packing puts no FP32 tensor, as a buffer of make_model() is, behind an odd number of bf16 values.
    plain = Stack(Block(), Block(hidden=1), Block(hidden=17))
    source = weight_source(sharded(copy.deepcopy(plain)), bucket_bytes=500)
    assert isinstance(source, base.WeightSource)
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    assert source.owned_names(1) == [each.name for each in source.metadata]
    for _ in range(2):
        pairs = source.iter_full()
        found: dict[str, torch.Tensor] = {}
        while (chunk := packed.pack_tensors(pairs, lambda item: item[1], 1500)) is not None:
            table = (chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
            found |= {name: tensor.clone() for name, tensor in packed.unpack_tensor(chunk.packed_tensor, *table)}
        assert list(found) == [each.name for each in source.metadata]
        assert_same(found, expected(plain))


def test_vllm_packs_and_unpacks_a_source() -> None:
    run_ranks(2, through_vllm, fresh=True)


class Device:
    """The CPU, as verl asks for a device."""

    def synchronize(self) -> None:
        """Do nothing."""

    empty_cache = ipc_collect = synchronize


async def in_turn(weights: Iterable[Any]) -> AsyncIterator[Any]:
    for each in weights:
        yield each


def load_verl() -> tuple[Any, Any, Any]:
    """Return verl's transfer by buckets, its export of deltas, and its gather of them."""
    stand_in(
        "verl.utils.device", get_device_id=int, get_device_name=lambda: "cpu", get_torch_device=Device,
        is_support_ipc=bool, is_npu_available=False, manual_seed=None, manual_seed_all=None,
    )  # fmt: skip
    stand_in("verl.utils.tensordict_utils")
    stand_in("verl.utils.dataset.dataset_utils", DatasetPadMode=None)
    stand_in("verl.utils.py_functional", append_to_dict=None)
    stand_in("verl.utils.seqlen_balancing", rearrange_micro_batches=None, restore_dynamic_batch=None)
    stand_in("verl.workers.rollout.utils", ensure_async_iterator=in_turn)
    stand_in("tensordict", TensorDict=None)
    buckets = load("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    gather = load("verl.checkpoint_engine.delta_sync.sparse_gather")
    load(f"{VERL}.spec")
    return buckets, load(f"{VERL}.utils"), gather


def through_verl(strategy: str, folder: Path) -> None:
    """Send with verl's code: whole tensors by buckets, then the changes of a step shard by shard."""
    buckets, utils, gather = load_verl()
    plain = make_model()
    model = sharded(copy.deepcopy(plain), strategy)
    state = expected(plain)
    rank = dist.get_rank()

    weights, config = get_per_tensor_param(model, bucket_bytes=600)
    assert config is None
    if rank == 0:
        handle = f"ipc://{folder}/socket"
        found: dict[str, torch.Tensor] = {}
        receiver = buckets.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)

        def keep(arrived: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            found.update((name, tensor.clone()) for name, tensor in arrived)

        thread = threading.Thread(target=receiver.receive_weights, args=(keep,))
        thread.start()
        asyncio.run(buckets.BucketedWeightSender(handle, 1, use_shm=True).async_send_weights(weights))
        thread.join()
        assert_same(found, state)
    else:
        assert len(list(weights)) == len(state)

    snapshots: dict[str, torch.Tensor] = {}
    utils.prime_delta_snapshots(get_per_tensor_param_shard(model)[0], snapshots, pin=False)
    token_loss(model, rank, 0).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    shards, _ = get_per_tensor_param_shard(model)
    num_changed = 0
    for ((name, _),), _, counts, places, values, group in utils.hf_delta_export(
        shards, snapshots, utils._hf_entry_identity
    ):
        changes = [(places, values)]
        if group is not None:
            changes = gather.gather_slot_entries_to_rank0(places, values, counts, group=group) or []
        for at, new in changes:
            state[name].view(-1)[at.long()] = new
            num_changed += at.numel()
    after = {name: tensor.clone() for name, tensor in weight_stream(model)}
    if rank == 0:
        assert num_changed > 0
        assert_same(state, after)


def test_verl_gets_whole_tensors_and_then_what_changed(tmp_path: Path) -> None:
    for world, strategies in STRATEGIES.items():
        for strategy in strategies:
            run_ranks(world, through_verl, strategy, tmp_path, fresh=True)


def through_sglang() -> None:
    """SGLang rebuilds tensors from flattened buckets, in the same memory."""
    load("sglang.srt.weight_sync.tensor_bucket")
    plain = make_model()
    found: dict[str, torch.Tensor] = {}
    for bucket in weight_stream(sharded(copy.deepcopy(plain)), bucket_bytes=700).buckets():
        theirs = flattened_bucket(bucket)
        assert theirs.get_flattened_tensor().data_ptr() == bucket.data.data_ptr()
        found |= {name: tensor.clone() for name, tensor in theirs.reconstruct_tensors()}
    assert_same(found, expected(plain))


def test_sglang_rebuilds_tensors_from_flattened_buckets() -> None:
    run_ranks(2, through_sglang, fresh=True)
