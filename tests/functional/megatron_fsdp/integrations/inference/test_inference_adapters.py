"""Adapters for inference engines, tested with receivers that follow the engines' interfaces.

vLLM, verl and SGLang are not installed here. Stand-ins with the names and fields of their classes take their place.
"""

import copy
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.errors import ConfigError, TransferError
from megatron_fsdp.integrations.inference.sglang import flattened_bucket
from megatron_fsdp.integrations.inference.verl import get_per_tensor_param, get_per_tensor_param_shard
from megatron_fsdp.integrations.inference.vllm import weight_source
from megatron_fsdp.transfer.stream import weight_stream
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, make_model
from tests.harness.oracle import sharded

NAMES = {"layers.*.up.weight": "model.layers.*.mlp.weight"}


def expected(plain: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(plain.named_parameters())
    return {name: value.bfloat16() if name in parameters else value for name, value in plain.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# ---------------------------------------------------------------- vLLM


@dataclass(frozen=True)
class ParamMeta:
    """vLLM's class, with the fields that a source of whole tensors gives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FullSource(ABC):
    """``WeightSource`` of vLLM 0.33."""

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class IteratedSource(ABC):
    """``WeightSource`` of vLLM 0.28 to 0.32."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def packed_receiver(metadata: list[ParamMeta], pairs: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Receive like vLLM's packed broadcast: a chunk collects tensors until it is full, and is then copied at once."""
    found: dict[str, torch.Tensor] = {}
    chunk: list[tuple[ParamMeta, torch.Tensor]] = []
    for meta, (name, tensor) in zip(metadata, pairs, strict=True):
        assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
        chunk.append((meta, tensor.contiguous().view(-1).view(torch.uint8)))
        if sum(each.numel() for _, each in chunk) > 1500 or len(found) + len(chunk) == len(metadata):
            packed = torch.cat([each for _, each in chunk]).split([each.numel() for _, each in chunk])
            for (of, _), part in zip(chunk, packed, strict=True):
                found[of.name] = part.contiguous().view(of.dtype).view(of.shape)
            chunk = []
    return found


@on_ranks(2)
def test_a_vllm_source_describes_its_tensors_and_can_be_iterated_repeatedly() -> None:
    plain = Stack(Block(), Block(hidden=1), Block(hidden=17))
    model = sharded(copy.deepcopy(plain))
    wanted = {
        f"model.layers.{name.split('.')[1]}.mlp.weight" if name.endswith("up.weight") else name: value
        for name, value in expected(plain).items()
    }
    kind: Any
    for kind in (FullSource, IteratedSource):
        patch = pytest.MonkeyPatch()
        stand_in(patch, "vllm.distributed.weight_transfer.base", ParamMeta=ParamMeta, WeightSource=kind)
        try:
            source = weight_source(model, names=NAMES, bucket_bytes=500)
        finally:
            patch.undo()
        assert isinstance(source, kind)
        for _ in range(2):
            if kind is FullSource:
                assert_same(packed_receiver(source.metadata, source.iter_full()), wanted)
            else:
                assert_same(packed_receiver(source.metadata(), iter(source)), wanted)


# ---------------------------------------------------------------- verl


@dataclass
class ShardSpec:
    """verl 0.9.1's class, with the fields that its page names."""

    full_shape: Any = None
    mesh: Any = None
    placements: Any = None
    place: Any = None
    gather_group: Any = None
    contributes: bool = True
    to_hf_chunk: Any = None
    hf_slots: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def stand_in(monkeypatch: pytest.MonkeyPatch, path: str, **members: Any) -> None:
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    vars(sys.modules[path]).update(members)


def gathered(shards: Iterable[tuple[str, torch.Tensor, Any]]) -> dict[str, torch.Tensor]:
    """Gather like verl's ranks: each group gathers (place, flat values), written at ``place`` of the flat weight."""
    found = {}
    for name, local, spec in shards:
        whole = torch.zeros(spec.full_shape, dtype=local.dtype)
        if spec.gather_group is None:
            found[name] = local.view(spec.full_shape)
            continue
        assert local.ndim == 1
        every: list[Any] = [None] * dist.get_world_size(spec.gather_group)
        dist.all_gather_object(every, (spec.place, local if spec.contributes else local[:0]), group=spec.gather_group)
        for place, values in every:
            whole.view(-1)[place : place + values.numel()] = values
        found[name] = whole
    return found


@on_ranks(4)
def test_verl_gets_whole_parameters_and_puts_shards_together_by_their_place() -> None:
    patch = pytest.MonkeyPatch()
    stand_in(patch, "verl.workers.engine.spec", ShardSpec=ShardSpec)
    try:
        for strategy in ("optim_grads_params", "hsdp", "optim", "no_shard"):
            plain = make_model()
            model = sharded(copy.deepcopy(plain), strategy)
            parameters, config = get_per_tensor_param(model)
            assert config is None
            assert_same(dict(parameters), expected(plain))
            shards, config = get_per_tensor_param_shard(model)
            assert config is None
            assert_same(gathered(shards), expected(plain))
        model = sharded(make_model(), "hfsdp")
        with pytest.raises(TransferError, match=r"parameter '.*' is cut along several axes .* fix: "):
            list(get_per_tensor_param_shard(model)[0])
    finally:
        patch.undo()


# ---------------------------------------------------------------- SGLang


@dataclass
class FlattenedTensorMetadata:
    """SGLang's: positions are in bytes of the flattened tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class FlattenedTensorBucket:
    def __init__(self, flattened_tensor: torch.Tensor, metadata: list[FlattenedTensorMetadata]) -> None:
        self.flattened_tensor, self.metadata = flattened_tensor, metadata

    def reconstruct_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self.metadata:
            part = self.flattened_tensor[each.start_idx : each.end_idx]
            assert part.numel() == each.numel
            yield each.name, part.view(each.dtype).reshape(each.shape)


@on_ranks(2)
def test_sglang_rebuilds_tensors_from_flattened_buckets_in_the_same_memory() -> None:
    patch = pytest.MonkeyPatch()
    names = {"FlattenedTensorBucket": FlattenedTensorBucket, "FlattenedTensorMetadata": FlattenedTensorMetadata}
    stand_in(patch, "sglang.srt.weight_sync.tensor_bucket", **names)
    try:
        plain = make_model()
        found: dict[str, torch.Tensor] = {}
        for bucket in weight_stream(sharded(copy.deepcopy(plain)), bucket_bytes=700).buckets():
            theirs = flattened_bucket(bucket)
            assert theirs.flattened_tensor.data_ptr() == bucket.data.data_ptr()
            found |= {name: tensor.clone() for name, tensor in theirs.reconstruct_tensors()}
        assert_same(found, expected(plain))
    finally:
        patch.undo()


# ---------------------------------------------------------------- adapters of peft's shape


class LoraLayer(nn.Module):
    """A linear layer with the attributes and the product of peft's ``lora.Linear``."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": scaling}
        self.active_adapters, self.merged, self.disable_adapters = ["default"], False, False
        self.use_dora: dict[str, bool] = {}

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        product = self.lora_B[adapter].weight @ self.lora_A[adapter].weight
        return product * self.scaling[adapter]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]
        return self.base_layer(x) + delta


def with_adapters() -> Stack:
    torch.manual_seed(3)
    model: Any = Stack(Block(), Block(hidden=5))
    for layer in model.layers:
        layer.up = LoraLayer(layer.up, rank=2, scaling=0.5)
        layer.up.base_layer.requires_grad_(False)
    return model


def merged(plain: nn.Module) -> dict[str, torch.Tensor]:
    """Return the result of ``merge_and_unload``: base weights plus products, under the names of the base model."""
    found = {}
    for name, value in plain.state_dict().items():
        if "lora_" in name:
            continue
        path, _, rest = name.partition(".base_layer.")
        if rest == "weight":
            value = value + plain.get_submodule(path).get_delta_weight("default")
        found[f"{path}.{rest}" if rest else name] = value
    return found


@pytest.mark.parametrize("strategy", ["optim_grads_params", "hsdp"])
@on_ranks(4)
def test_merged_adapters_equal_the_plain_sum_to_the_bit(strategy: str) -> None:
    plain = with_adapters()
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)):
        model = sharded(copy.deepcopy(plain), strategy, mp_policy=policy)
        for bucket_bytes in (300, 1 << 20):
            found = dict(weight_stream(model, merge_lora=True, dtype=None, bucket_bytes=bucket_bytes))
            assert_same({name: tensor.clone() for name, tensor in found.items()}, merged(plain))
        assert_same(dict(weight_stream(model, dtype=None)), dict(plain.state_dict()))


@on_ranks(2)
def test_adapters_that_are_no_sum_are_refused_by_name() -> None:
    model = with_adapters()
    model.layers[1].up.use_dora = {"default": True}
    with pytest.raises(ConfigError, match=r"layer 'layers\.1\.up': adapter 'default' is a variant of LoRA"):
        weight_stream(sharded(model), merge_lora=True)
    with pytest.raises(ConfigError, match=r"merge_lora=True\): the model has no LoRA layer"):
        weight_stream(sharded(make_model()), merge_lora=True)
