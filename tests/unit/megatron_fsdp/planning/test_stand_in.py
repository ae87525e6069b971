"""Stand-ins use the same bytes as the live model."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer.errors import LayoutError
from megatron_fsdp import ConfigError, MixedPrecisionPolicy, Placements, Report, explain, fsdp_no_shard, fully_shard
from megatron_fsdp.planning.catalog import UnitShapes, architecture
from megatron_fsdp.planning.model_source import build_on_meta, repeated_blocks, shaped_module
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.report import report_of
from megatron_fsdp.planning.stand_in import Axis, Sharding, put, shaped_stand_ins
from tests.unit.megatron_fsdp.planning.chains import world

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_grads_dtype=torch.bfloat16)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 4}


class Block(nn.Module):
    """A norm and two linear layers, the second with a frozen bias."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, hidden)
        self.down = nn.Linear(hidden, 7)
        self.down.bias.requires_grad_(False)


class Model(nn.Module):
    """A tied head, blocks of two sizes, and a list in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 7)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (5, 13, 5))
        self.side = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])])
        self.norm = nn.LayerNorm(7, dtype=torch.bfloat16)
        self.head = nn.Linear(7, 23, bias=False)
        self.head.weight = self.embedding.weight


def partly_replicated() -> Model:
    model = Model()
    fsdp_no_shard(model.blocks[0].get_submodule("norm"))
    fsdp_no_shard(model.blocks[1])
    return model


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with world(6, rank=4):
        yield init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))


def planned(model: nn.Module, blocks: Any, placements: Placements | None = None, axes: Any = None) -> Report:
    """Report the result of sharding a model's blocks on a CPU, for steps of three microbatches."""
    sharding = Sharding(axes or (Axis("outer", 2, 1), Axis("inner", 3, 1)), placements or Placements.hsdp(0, 1), POLICY)
    return report_of(play_step(partial(shaped_stand_ins, model, blocks, sharding, {}, has_streams=False), [3]), 3)


@pytest.mark.parametrize("placements", [Placements.hsdp(0, 1), Placements.hfsdp(0, 1)], ids=["hsdp", "hfsdp"])
@pytest.mark.parametrize("build", [Model, partly_replicated])
def test_a_module_on_meta_is_reported_on_as_the_live_one(
    mesh: DeviceMesh, build: Callable[[], Model], placements: Placements
) -> None:
    meta, live = build_on_meta(build), build()
    for block in repeated_blocks(live):
        fully_shard(block, mesh, placements, mp_policy=POLICY)
    assert planned(meta, repeated_blocks(meta), placements) == explain(
        fully_shard(live, mesh, placements, mp_policy=POLICY), 3
    )


def test_blocks_of_a_list_in_a_list_are_no_units_of_their_own() -> None:
    model = nn.Module()
    model.outer = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    model.single = nn.ModuleList([nn.Linear(2, 2)])
    assert repeated_blocks(model) == tuple(model.outer)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("build", "unit", "message"),
    [
        (Model, "head", r"Model: parameter 'embedding.weight' is the same tensor as 'weight' of unit 'Linear'"),
        (Gain, None, "'gain' has no dimensions"),
    ],
)
def test_parameters_that_no_unit_can_own_are_refused(build: Callable[[], nn.Module], unit: str, message: str) -> None:
    model = build_on_meta(build)
    with pytest.raises(ConfigError, match=message):
        planned(model, [model.get_submodule(unit)] if unit else [])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 3, "returned int"),
        (lambda: nn.Linear(2, 2).weight.sum().item(), "failed on the meta device: Runtime"),
        (lambda: nn.Linear(1 << 20, 1 << 20), None),
    ],
)
def test_a_factory_has_to_return_a_module_on_the_meta_device(factory: Any, message: str | None) -> None:
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert all(parameter.is_meta for parameter in build_on_meta(factory).parameters())


# ---------------------------------------------------------------------- catalog architectures


class Live(nn.Module):
    """The parameters of an architecture, in the same modules as in transformers."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        found = architecture(config)
        kinds = {unit.name: unit for unit in found.units}
        self.embedding = register(self, kinds["embedding"], "" if found.tied else "embed_tokens.")
        self.layers = nn.ModuleList()
        for _ in range(found.num_layers):
            self.layers.append(nn.Module())
            register(self.layers[-1], next(unit for unit in found.units if unit.name.endswith("layer")), "")
            if "experts" in kinds:
                register(self.layers[-1], kinds["experts"], "mlp.experts.")
        if found.tied:
            # Modules are called in the order of registration: the last norm comes after the layers.
            self.add_module("norm", self._modules.pop("norm"))
        self.head = register(self, kinds["head"], "") if "head" in kinds else []

    def shard(self, mesh: DeviceMesh) -> nn.Module:
        for layer in self.layers:
            if "experts" in dict(layer.mlp.named_children()):  # type: ignore[union-attr]
                fully_shard(layer.get_submodule("mlp.experts"), mesh, mp_policy=POLICY)
            fully_shard(layer, mesh, mp_policy=POLICY)
        for part in (self.embedding, self.head):
            if part:
                fully_shard(part, mesh, mp_policy=POLICY)
        return fully_shard(self, mesh, mp_policy=POLICY)


def register(model: nn.Module, unit: UnitShapes, prefix: str) -> list[nn.Module]:
    """Register a unit's parameters below ``model``, and return the children that hold them."""
    for name, shape in unit.parameters:
        put(model, prefix + name, nn.Parameter(torch.zeros(shape)))
    paths = dict.fromkeys((prefix + name).split(".")[0] for name, _ in unit.parameters)
    return [model.get_submodule(path) for path in paths]


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, GEMMA], ids=lambda config: str(config["model_type"]))
def test_an_architecture_takes_what_a_live_model_of_its_shapes_takes(mesh: DeviceMesh, config: dict[str, Any]) -> None:
    told, live = planned(*shaped_module(architecture(config))), explain(Live(config).shard(mesh), 3)
    assert told.persistent_bytes == live.persistent_bytes > 0
    assert told.padding_bytes == live.padding_bytes
    assert told.optimizer_bytes == live.optimizer_bytes
    assert told.forward_peak.num_bytes == live.forward_peak.num_bytes > 0
    assert told.backward_peak.num_bytes == live.backward_peak.num_bytes > 0
    assert told.collectives == live.collectives


def test_a_unit_that_cannot_be_laid_out_is_named() -> None:
    # 100 rows of a million elements each: a shard on each of 1,000 ranks holds one of them or none.
    experts = UnitShapes("experts", 1, (("gate_up_proj", (100, 1_000_000)),))
    found = replace(architecture(MIXTRAL), units=(UnitShapes("layer", 1, (("weight", (1000, 1000)),)), experts))
    with pytest.raises(LayoutError, match=r"unit 'layer.0.experts': padding makes"):
        planned(*shaped_module(found), Placements.optim_grads_params(0), (Axis("dp", 1000, 0),))
