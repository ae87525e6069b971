"""Buckets at a receiver, and deltas: the receiver's weights equal the trainer's, or an error names the tensor."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import (
    ConfigError,
    Placements,
    StateError,
    TransferError,
    apply_bucket,
    apply_delta,
    remember_weights,
    reshard_,
    weight_stream,
)
from tests.harness import on_ranks
from tests.harness.models import make_model
from tests.harness.oracle import STRATEGIES, sharded, token_loss

TWO_AXES = ("hsdp", "hfsdp", "no_shard on two axes", "optim_grads_params on two axes")


def receiver() -> dict[str, torch.Tensor]:
    """Return a generator's state in bf16, with other weights than the trainer's."""
    return {name: value.to(torch.bfloat16) for name, value in make_model(seed=9).state_dict().items()}


@on_ranks(2)
def test_buckets_bring_a_receiver_to_the_trainers_weights() -> None:
    plain = make_model()
    plain.head.weight = plain.embedding.weight
    model, state = sharded(copy.deepcopy(plain)), receiver()
    for bucket in weight_stream(model, bucket_bytes=500, checksums=True).buckets():
        apply_bucket(state, bucket)
    assert all(torch.equal(state[name], value.bfloat16()) for name, value in plain.state_dict().items())


@on_ranks(2)
def test_a_bucket_that_was_changed_on_its_way_is_refused_by_name() -> None:
    model, state = sharded(make_model()), receiver()
    before = {name: value.clone() for name, value in state.items()}
    bucket = next(iter(weight_stream(model, checksums=True).buckets()))
    entry = next(entry for entry in bucket.entries if entry.name == "blocks.1.project.weight")
    bucket.data[entry.offset + 5] ^= 4
    with pytest.raises(TransferError, match=r"tensor 'blocks\.1\.project\.weight' arrived changed: its checksum"):
        apply_bucket(state, bucket)
    assert all(torch.equal(before[name], value) for name, value in state.items())


@on_ranks(2)
def test_a_receiver_without_a_tensor_or_with_another_shape_is_refused_by_name() -> None:
    model, state = sharded(make_model()), receiver()
    bucket = next(iter(weight_stream(model).buckets()))
    short = {name: value for name, value in state.items() if name != "norm.bias"}
    with pytest.raises(TransferError, match=r"the receiver has no tensor 'norm\.bias'.*fix: .*names="):
        apply_bucket(short, bucket)
    with pytest.raises(TransferError, match=r"tensor 'norm\.bias' is \(3,\) at the receiver, and \(7,\) was sent"):
        apply_bucket(state | {"norm.bias": torch.zeros(3)}, bucket)


@pytest.mark.parametrize("lr", [1e-4, 0.5])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(lambda strategy: 4 if strategy in TWO_AXES else 3)
def test_deltas_bring_a_receiver_to_the_trainers_weights(strategy: str, lr: float) -> None:
    model = sharded(make_model(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    state = dict(weight_stream(model))
    version = remember_weights(model)
    kinds, densities = set(), []
    for step in range(3):
        token_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        stream = weight_stream(model, changed_since=version)
        num_bytes = 0
        for bucket in stream:
            apply_delta(state, bucket, version=version)
            kinds.add(bucket.kind)
            num_bytes += bucket.num_bytes
        version = stream.version
        assert num_bytes == stream.report.delta_bytes
        densities.append(stream.report.density)
        wanted = dict(weight_stream(model))
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
    assert "sparse" in kinds
    assert ("xor" in kinds) == (lr > 0.1)
    assert max(densities) < 0.9 if lr < 0.1 else max(densities) > 0.5


@on_ranks(2)
def test_a_delta_of_a_buffer_keeps_its_values_when_the_buffer_changes() -> None:
    model = sharded(make_model())
    model.register_buffer("seen", torch.zeros(3))
    version = remember_weights(model)
    model.seen += 1
    *_, delta = weight_stream(model, changed_since=version)
    model.seen += 1
    assert (delta.kind, delta.entries[0].name, delta.values.tolist()) == ("whole", "seen", [1.0] * 3)


@on_ranks(2)
def test_a_delta_since_another_version_than_the_receivers_is_refused() -> None:
    model = sharded(make_model())
    state, version = dict(weight_stream(model)), remember_weights(model)
    bucket = next(weight_stream(model, changed_since=version))
    with pytest.raises(TransferError, match=r"the receiver has version 7\. fix: send all weights once"):
        apply_delta(state, bucket, version=7)


@on_ranks(2)
def test_a_version_that_is_not_remembered_is_refused() -> None:
    model = sharded(make_model())
    with pytest.raises(TransferError, match=r"remembers nothing.*fix: version = remember_weights\(model\)"):
        weight_stream(model, changed_since=0)


@on_ranks(2)
def test_a_delta_on_other_weights_is_found_by_its_checksum() -> None:
    model = sharded(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    version = remember_weights(model)
    token_loss(model, dist.get_rank(), 0).backward()
    optimizer.step()
    state = {name: value.to(torch.bfloat16) for name, value in make_model(seed=9).state_dict().items()}
    bucket = list(weight_stream(model, changed_since=version))[-1]
    with pytest.raises(TransferError, match=r"tensor '.*' has checksum .* after the delta"):
        apply_delta(state, bucket, version=version)


@on_ranks(2)
def test_a_step_between_the_call_and_the_first_delta_is_refused() -> None:
    model = sharded(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    version = remember_weights(model)
    token_loss(model, dist.get_rank(), 0).backward()
    stream = weight_stream(model, changed_since=version)
    optimizer.step()
    with pytest.raises(StateError, match=r"would send version 1 as version 0\. fix: "):
        next(stream)


def add_a_buffer(model: Any) -> None:
    model.register_buffer("seen", torch.zeros(3))


def shard_once_more(model: Any) -> None:
    reshard_(model.blocks[0], placements=Placements.optim(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_a_buffer, "the model has other plain weights: 'seen'"),
        (shard_once_more, r"the parameters of unit 'blocks\.0' were sharded since"),
    ],
)
@on_ranks(2)
def test_deltas_of_a_model_with_other_parts_are_refused(change: Callable[[Any], None], words: str) -> None:
    model = sharded(make_model())
    version = remember_weights(model)
    change(model)
    with pytest.raises(TransferError, match=words + r".*fix: version = remember_weights\(model\)"):
        weight_stream(model, changed_since=version)
    version = remember_weights(model)
    assert list(weight_stream(model, changed_since=version))


@on_ranks(2)
def test_a_delta_of_a_buffer_has_its_sign_of_zero_and_its_dtype() -> None:
    model = sharded(make_model())
    model.register_buffer("seen", torch.zeros(3))
    for changed in (-torch.zeros(3), torch.zeros(3, dtype=torch.int32)):
        version = remember_weights(model)
        model.seen = changed
        *_, delta = weight_stream(model, changed_since=version)
        assert (delta.kind, delta.values.dtype) == ("whole", changed.dtype)
        assert torch.equal(delta.values.signbit(), changed.signbit())
    version = remember_weights(model)
    assert all(delta.kind != "whole" for delta in weight_stream(model, changed_since=version))


@on_ranks(2)
def test_a_refused_delta_writes_nothing() -> None:
    model, state = sharded(make_model()), receiver()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    version = remember_weights(model)
    token_loss(model, dist.get_rank(), 0).backward()
    optimizer.step()
    before = {name: value.clone() for name, value in state.items()}
    for bucket in weight_stream(model, changed_since=version):
        last = bucket.entries[-1].name
        with pytest.raises(TransferError, match=r"tensor '.*' is torch\.float32 .*fix: "):
            apply_delta(state | {last: state[last].float()}, bucket, version=version)
    assert all(torch.equal(before[name], value) for name, value in state.items())


@on_ranks(2)
def test_deltas_go_to_no_other_device() -> None:
    model = sharded(make_model())
    version = remember_weights(model)
    with pytest.raises(ConfigError, match=r"fix: leave names=, merge_lora= and device= out"):
        weight_stream(model, changed_since=version, device="meta")  # type: ignore[call-overload]
