"""Weight streams yield the plain model's state dict bit for bit; after a fault the model is usable."""

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.allocations import phases_of
from benchmarks.null_group import null_world
from dbuffer.events import CollectiveCall, observe_collectives
from megatron_fsdp import (
    AdamW,
    AgreementError,
    ConfigError,
    CPUOffloadPolicy,
    MeshError,
    MixedPrecisionPolicy,
    StateError,
    TransferError,
    fsdp_no_shard,
    full_state_dict,
    fully_shard,
    local_shards,
    remember_weights,
    unsharded,
    weight_layout,
    weight_stream,
    weight_version,
)
from tests.functional.expert_parallel import shard_experts
from tests.functional.megatron_fsdp.transfer.tensor_parallel import tensor_parallel_stack
from tests.harness import on_ranks
from tests.harness.grids import covering
from tests.harness.models import Block, Stack, make_model
from tests.harness.oracle import STRATEGIES, sharded, token_loss, units_of

TWO_AXES = ("hsdp", "hfsdp", "no_shard on two axes", "optim_grads_params on two axes")


def expected(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the plain model's state dict, with its floating-point parameters in a dtype."""
    parameters = dict(model.named_parameters())
    return {
        name: value.to(dtype) if dtype is not None and name in parameters and value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


def changed(model: nn.Module, seed: int = 5) -> None:
    """Give every parameter new values, some of them halfway between two bf16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        bits = values.view(torch.int32)
        bits.bitwise_and_(-1 << 16).bitwise_or_(torch.randint(0, 3, bits.shape, generator=generator).int() << 15)
        parameter.data.copy_(values)


@pytest.mark.parametrize(
    ("strategy", "bucket_bytes", "dtype"),
    covering(itertools.product(STRATEGIES, [1, 300, 1 << 30], [torch.bfloat16, None])),
)
@on_ranks(lambda strategy: 4 if strategy in TWO_AXES else 3)
def test_a_stream_equals_the_plain_state_dict(strategy: str, bucket_bytes: int, dtype: torch.dtype | None) -> None:
    plain = make_model()
    changed(plain)
    model = sharded(copy.deepcopy(plain), strategy)
    assert_same(dict(weight_stream(model, dtype=dtype, bucket_bytes=bucket_bytes)), expected(plain, dtype))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        MixedPrecisionPolicy(torch.float16),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, split_main_params=True),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_dtype="int8_block"),
    ],
    ids=["bf16", "fp16", "split", "int8"],
)
@on_ranks(lambda ranks: ranks)
def test_a_stream_after_steps_equals_the_full_state_dict(policy: MixedPrecisionPolicy, ranks: int) -> None:
    model = sharded(make_model(), mp_policy=policy)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted: list[Any] = [full_state_dict(model)]
    dist.broadcast_object_list(wanted)
    names = {name for name, _ in model.named_parameters()}
    for dtype in (torch.bfloat16, torch.float32):
        found = dict(weight_stream(model, dtype=dtype, bucket_bytes=500))
        assert_same(found, {name: each.to(dtype) if name in names else each for name, each in wanted[0].items()})


@on_ranks(2)
def test_a_stream_of_offloaded_weights_equals_the_plain_state_dict() -> None:
    plain = make_model()
    model = sharded(copy.deepcopy(plain), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_same(dict(weight_stream(model)), expected(plain, torch.bfloat16))


@on_ranks(3)
def test_a_tied_weight_is_sent_once_with_its_aliases() -> None:
    plain = make_model()
    plain.head.weight = plain.embedding.weight
    model = sharded(copy.deepcopy(plain))
    stream = weight_stream(model)
    found = dict(stream)
    assert stream.aliases == {"embedding.weight": ("head.weight",)}
    assert "head.weight" not in found
    assert torch.equal(found["embedding.weight"], plain.head.weight.bfloat16())


@on_ranks(3)
def test_ignored_replicated_frozen_and_unowned_weights_are_streamed_too() -> None:
    plain = Stack(Block(), Block(hidden=1), Block(hidden=17), Block())
    plain.register_buffer("count", torch.tensor(3))
    plain.layers[0].requires_grad_(False)
    model: Any = copy.deepcopy(plain)
    fsdp_no_shard(model.layers[1])
    ignored = {model.layers[2].up.weight}
    for layer in model.layers[:3]:
        fully_shard(layer, ignored_params=ignored)
    assert_same(dict(weight_stream(model)), expected(plain, torch.bfloat16))


@on_ranks(2)
def test_a_plain_model_streams_too() -> None:
    plain = make_model()
    assert_same(dict(weight_stream(plain)), expected(plain, torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 30])
@on_ranks(lambda shape: shape[0] * shape[1])
def test_tensor_parallel_parts_are_put_together(shape: tuple[int, int], bucket_bytes: int) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plain, model = tensor_parallel_stack(mesh, Block(), Block(hidden=5))
    assert_same(dict(weight_stream(model, bucket_bytes=bucket_bytes)), expected(plain, torch.bfloat16))


@on_ranks(4)
def test_experts_cut_along_two_axes_are_put_together() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    experts = torch.randn(5, 3, 7)
    model = nn.Module()
    model.experts = nn.Parameter(distribute_tensor(experts, mesh["ep", "tp"], [Shard(0), Shard(2)]))
    fully_shard(model, mesh=mesh["dp"])
    assert_same(dict(weight_stream(model)), {"experts": experts.bfloat16()})


@on_ranks(4)
def test_experts_of_other_ranks_under_the_same_name_stay_with_their_ranks() -> None:
    model: Any
    model, _ = shard_experts(2)
    own = {name: parameter.full_tensor().bfloat16() for name, parameter in model.named_parameters()}
    assert_same(dict(weight_stream(model)), own)


# ---------------------------------------------------------------- order, buckets, cost


@on_ranks(2)
def test_buckets_hold_the_tensors_that_the_iterator_yields_in_its_order() -> None:
    model = sharded(make_model())
    wanted = list(weight_stream(model, bucket_bytes=700))
    found = []
    for bucket in weight_stream(model, bucket_bytes=700).buckets():
        storage = bucket.data.untyped_storage().data_ptr()
        for name, tensor in bucket.tensors():
            assert tensor.untyped_storage().data_ptr() == storage
            found.append((name, tensor.clone()))
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, wanted, strict=True))
    described = weight_stream(model, bucket_bytes=700).metadata()
    assert described == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted]


@on_ranks(2)
def test_a_unit_is_gathered_by_one_collective_and_its_bytes_travel_once() -> None:
    model = sharded(Stack(Block(), Block(hidden=1), Block(hidden=17)))
    calls: list[CollectiveCall] = []
    stream = weight_stream(model)
    with observe_collectives(calls.append):
        num_tensors = sum(1 for _ in stream)
    assert num_tensors == len(dict(model.named_parameters()))
    assert len(calls) == stream.explain().num_gathers == 3
    padded = sum(2 * group.plan.numel for unit in units_of(model) for group in unit.parameter_groups)
    assert sum(call.num_bytes for call in calls) == padded


@on_ranks(3)
def test_tensors_that_are_kept_stay_as_they_were() -> None:
    plain = make_model()
    model = sharded(copy.deepcopy(plain))
    kept = [(name, tensor) for name, tensor in weight_stream(model, bucket_bytes=200)]
    assert_same(dict(kept), expected(plain, torch.bfloat16))


@pytest.mark.parametrize("by_bucket", [False, True])
@on_ranks(2)
def test_at_most_two_buckets_have_memory_which_is_reused(by_bucket: bool) -> None:
    model = sharded(Stack(*(Block(hidden=64) for _ in range(8))))
    stream = weight_stream(model, bucket_bytes=2100)
    addresses = set()
    if by_bucket:
        for bucket in stream.buckets():
            addresses.add(bucket.data.data_ptr())
    else:
        for _, tensor in stream:
            addresses.add(tensor.untyped_storage().data_ptr())
    assert stream.explain().num_buckets >= 8
    assert len(addresses) == 2


@pytest.mark.parametrize("widths", [(64,) * 4, (64,), (16, 64, 24, 8, 48), (64, 8, 64, 8, 96)])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 2), (4, 5)])
def test_memory_of_a_stream_equals_the_report_to_the_byte(rank: int, num_ranks: int, widths: tuple[int, ...]) -> None:
    # Not on real ranks: a thread of gloo may be the last to free a tensor, which the profiler does not see.
    with null_world(num_ranks, rank=rank):
        model = sharded(Stack(*(Block(hidden=width) for width in widths)))
        stream = weight_stream(model, bucket_bytes=2100)

        def run(begin: Callable[[str], None]) -> None:
            begin("stream")
            for _ in stream.buckets():
                pass

        (_, phase), *_ = phases_of(run)
        assert phase.peak - phase.start == stream.explain().peak_bytes
        assert phase.end == phase.start


@on_ranks(2)
def test_the_bytes_of_a_bucket_may_not_be_read_after_the_next_one_came() -> None:
    model = sharded(make_model())
    buckets = list(weight_stream(model, bucket_bytes=300).buckets())
    with pytest.raises(TransferError, match=r"bucket 0: its memory went back.*fix: use bucket\.data inside"):
        _ = buckets[0].data


@on_ranks(2)
def test_names_are_mapped_by_patterns() -> None:
    model = sharded(make_model())
    found = dict(weight_stream(model, names={"blocks.*.project.weight": "model.layers.*.mlp.weight"}))
    assert {"model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "embedding.weight"} <= found.keys()


@on_ranks(2)
def test_training_goes_on_after_a_stream_as_without_it() -> None:
    def train(with_stream: bool) -> list[float]:
        model = sharded(make_model())
        optimizer = AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = token_loss(model, dist.get_rank(), step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if with_stream:
                assert all(tensor.isfinite().all() for _, tensor in weight_stream(model))
        return losses

    assert train(True) == train(False)


# ---------------------------------------------------------------- faults


def stepping() -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model with gradients, and its optimizer."""
    model = sharded(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    token_loss(model, dist.get_rank(), 0).backward()
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, AdamW])
@on_ranks(2)
def test_a_step_while_a_stream_is_open_is_refused_by_name(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model, _ = stepping()
    optimizer = kind(model.parameters(), lr=0.1)
    stream = weight_stream(model)
    next(stream)
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    with pytest.raises(StateError, match=r"step\(\) while a weight_stream .* is open.*fix: .*stream\.close\(\)"):
        optimizer.step()
    assert all(torch.equal(before[name], parameter.full_tensor()) for name, parameter in model.named_parameters())
    stream.close()
    optimizer.step()


@on_ranks(2)
def test_an_optimizer_of_another_model_may_step_while_a_stream_is_open() -> None:
    model, _ = stepping()
    _, other = stepping()
    for number, _ in enumerate(weight_stream(model, bucket_bytes=300)):
        if number == 3:
            other.step()


@on_ranks(2)
def test_a_change_in_place_during_a_stream_is_refused_by_name() -> None:
    model = sharded(make_model())
    stream = weight_stream(model, bucket_bytes=300)
    next(stream)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(StateError, match="main weights were changed while they were being sent"):
        list(stream)
    found = dict(weight_stream(model))
    assert all(torch.equal(found[name], value.full_tensor().bfloat16()) for name, value in model.named_parameters())


@on_ranks(3)
def test_leaving_the_loop_early_leaves_the_model_usable() -> None:
    model, optimizer = stepping()
    for number, _ in enumerate(weight_stream(model, bucket_bytes=300)):
        if number == 2:
            break
    optimizer.step()
    token_loss(model, dist.get_rank(), 1).backward()
    assert len(dict(weight_stream(model))) == len(model.state_dict())


@on_ranks(3)
def test_an_error_names_the_rank_that_left_a_stream_and_the_reason() -> None:
    model, optimizer = stepping()
    rank = dist.get_rank()
    if rank == 1:
        with contextlib.suppress(ConnectionError):
            for number, _ in enumerate(weight_stream(model, bucket_bytes=300)):
                if number == 2:
                    raise ConnectionError("the receiver has gone")
    else:
        with pytest.raises(AgreementError, match="rank 1, which leaves weight_stream"):
            for _ in weight_stream(model, bucket_bytes=300):
                pass
    optimizer.step()
    token_loss(model, rank, 1).backward()
    assert len(dict(weight_stream(model))) == len(model.state_dict())


@on_ranks(2)
def test_other_arguments_on_another_rank_are_an_error_that_names_both() -> None:
    model = sharded(make_model())
    dtype = torch.bfloat16 if dist.get_rank() else torch.float32
    with pytest.raises(MeshError, match="the ranks would send different weights"):
        dict(weight_stream(model, dtype=dtype))
    assert len(dict(weight_stream(model))) == len(model.state_dict())


class Allocator(TorchDispatchMode):
    """On one rank, fail to allocate bytes, or raise another error there."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format and (kwargs or {}).get("dtype") is torch.uint8:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("out of memory"), TransferError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
@on_ranks(2)
def test_out_of_memory_or_an_interrupt_in_a_bucket_is_an_error_on_all_ranks(
    error: BaseException, raised: type[BaseException]
) -> None:
    model, optimizer = stepping()
    stream = weight_stream(model, bucket_bytes=300)
    next(stream)
    if dist.get_rank():
        with Allocator(error), pytest.raises(raised):
            list(stream)
    else:
        with pytest.raises(AgreementError, match=f"rank 1, which gathers bucket.*{type(error).__name__}"):
            list(stream)
    optimizer.step()
    token_loss(model, dist.get_rank(), 1).backward()
    assert len(dict(weight_stream(model))) == len(model.state_dict())


@on_ranks(2)
def test_a_version_grows_with_every_step() -> None:
    model, optimizer = stepping()
    first = weight_version(model)
    optimizer.step()
    optimizer.step()
    assert weight_version(model) == first + 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert weight_version(model) == weight_version(model) == first + 3


@on_ranks(2)
def test_a_model_sharded_after_its_version_was_read_is_followed() -> None:
    model = make_model()
    assert weight_version(model) == 0
    sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    version = weight_version(model)
    token_loss(model, dist.get_rank(), 0).backward()
    optimizer.step()
    assert weight_version(model) == version + 1
    stream = weight_stream(model)
    next(stream)
    with pytest.raises(StateError, match=r"step\(\) while a weight_stream of the same model is open"):
        optimizer.step()
    stream.close()


@on_ranks(2)
def test_a_version_follows_an_optimizer_whose_parameters_are_exchanged() -> None:
    (model, optimizer), (other, _) = stepping(), stepping()
    versions = [weight_version(each) for each in (model, other)]
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(other.parameters())
    optimizer.step()
    optimizer.step()
    assert [weight_version(each) for each in (model, other)] == [versions[0] + 1, versions[1] + 2]


@on_ranks(2)
def test_weights_are_not_sent_inside_unsharded() -> None:
    model = sharded(make_model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    for send in (weight_stream, weight_layout, local_shards, remember_weights):
        with unsharded(model), pytest.raises(StateError, match=r"unit '.*': .* inside unsharded\(\).*fix: "):
            send(model)


@on_ranks(2)
def test_weights_are_not_sent_in_a_backward() -> None:
    model, _ = stepping()

    def send(*_: Any) -> None:
        weight_stream(model)

    model.blocks[0].project.register_full_backward_hook(send)
    loss = token_loss(model, dist.get_rank(), 0)
    with pytest.raises(StateError, match=r"unit '.*': .* in a backward.*fix: "):
        loss.backward()


@on_ranks(2)
def test_two_streams_in_another_order_on_another_rank_are_refused() -> None:
    streams = [weight_stream(sharded(make_model(seed)), bucket_bytes=200).buckets() for seed in (0, 1)]
    for stream in streams:
        next(stream)
    with pytest.raises(
        MeshError, match=r"the ranks would send different weights: .*the stream that began with meeting"
    ):
        next(streams[dist.get_rank()])


@on_ranks(2)
def test_integers_are_no_dtype_to_send_weights_in() -> None:
    model = sharded(make_model())
    for send in (weight_stream, weight_layout, remember_weights):
        with pytest.raises(ConfigError, match=r"dtype=torch\.int8: .*fix: dtype=None"):
            send(model, dtype=torch.int8)


@on_ranks(2)
def test_a_complex_plain_weight_has_a_checksum() -> None:
    model = sharded(make_model())
    model.register_buffer("angles", torch.randn(3, dtype=torch.complex64))
    for bucket in weight_stream(model, checksums=True).buckets():
        bucket.verify()
    assert bucket.entries[-1].name == "angles"


class Adapted(nn.Module):
    """The parts of peft's LoRA layer that a stream reads."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})
        self.active_adapters, self.merged, self.disable_adapters = ["default"], False, False

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return self.lora_B[adapter].weight @ self.lora_A[adapter].weight


def two_layers(*, is_tied: bool) -> Any:
    """Return two layers of one shape, the second one with an adapter."""
    model: Any = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    model[1] = Adapted(model[1])
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@on_ranks(2)
def test_an_adapter_of_a_plain_or_tied_weight_is_merged(is_tied: bool) -> None:
    plain = two_layers(is_tied=is_tied)
    merged = plain[1].base_layer.weight.detach() + plain[1].get_delta_weight("default").detach()
    wanted = {"0.weight": merged} if is_tied else {"0.weight": plain[0].weight, "1.weight": merged}
    model = copy.deepcopy(plain)
    ignored = copy.deepcopy(plain)
    fully_shard(model)
    fully_shard(ignored, ignored_params={ignored[1].base_layer.weight})
    for each in (plain, model, ignored):
        found = dict(weight_stream(each, dtype=None, merge_lora=True))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@on_ranks(1)
def test_two_adapters_of_one_tied_weight_are_refused() -> None:
    model = two_layers(is_tied=True)
    model[0] = Adapted(model[0])
    with pytest.raises(ConfigError, match=r"'0\.base_layer\.weight' and '1\.base_layer\.weight' are one tensor"):
        weight_stream(model, merge_lora=True)
