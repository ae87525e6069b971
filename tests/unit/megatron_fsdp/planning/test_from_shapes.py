"""Facts from shapes are the facts of the live model: what is planned is what will be."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbuffer.errors import LayoutError
from megatron_fsdp import ConfigError, MixedPrecisionPolicy, Placements, explain, fsdp_no_shard, fully_shard
from megatron_fsdp.planning.catalog import Architecture, UnitShapes, architecture
from megatron_fsdp.planning.from_shapes import (
    Sharding,
    architecture_facts,
    build_on_meta,
    module_facts,
    repeated_blocks,
)
from megatron_fsdp.planning.live_model import read_facts
from megatron_fsdp.planning.model_spec import AxisFacts, Call, ModelFacts, Use
from megatron_fsdp.planning.report import report_of
from megatron_fsdp.planning.report_text import Report

NUM_RANKS, RANK = 6, 4
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
    """A norm, two linear layers of which one has a frozen bias."""

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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_RANKS)
    yield init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
    dist.destroy_process_group()


def sharding(placements: Placements) -> Sharding:
    return Sharding((AxisFacts("outer", 2, 1), AxisFacts("inner", 3, 1)), placements, POLICY)


def live_facts(model: nn.Module) -> ModelFacts:
    """Return the facts of a live model but for what the device decides, which plans take to be a GPU."""
    found = read_facts(model)
    units = tuple(replace(unit, max_packed_buffers=0) for unit in found.units)
    return replace(found, units=units, has_streams=True)


@pytest.mark.parametrize("placements", [Placements.hsdp(0, 1), Placements.hfsdp(0, 1)], ids=["hsdp", "hfsdp"])
def test_a_module_on_meta_has_the_facts_of_the_live_one(mesh: DeviceMesh, placements: Placements) -> None:
    meta = build_on_meta(Model)
    planned = module_facts(meta, repeated_blocks(meta), sharding(placements))
    live = Model()
    for block in repeated_blocks(live):
        fully_shard(block, mesh, placements, mp_policy=POLICY)
    fully_shard(live, mesh, placements, mp_policy=POLICY)
    assert planned == live_facts(live)


def test_replicated_parameters_are_planned_as_they_will_be(mesh: DeviceMesh) -> None:
    placements = Placements.hsdp(0, 1)

    def build() -> Model:
        model = Model()
        fsdp_no_shard(model.blocks[0].get_submodule("norm"))
        fsdp_no_shard(model.blocks[1])
        return model

    meta = build_on_meta(build)
    planned = module_facts(meta, repeated_blocks(meta), sharding(placements))
    live = build()
    for block in repeated_blocks(live):
        fully_shard(block, mesh, placements, mp_policy=POLICY)
    assert planned == live_facts(fully_shard(live, mesh, placements, mp_policy=POLICY))


def test_blocks_of_a_list_in_a_list_are_no_units_of_their_own() -> None:
    model = nn.Module()
    model.outer = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    model.single = nn.ModuleList([nn.Linear(2, 2)])
    assert repeated_blocks(model) == tuple(model.outer)


def test_equal_blocks_share_their_plan() -> None:
    facts = module_facts(model := build_on_meta(Model), model.blocks, sharding(Placements.hsdp(0, 1)))  # type: ignore[arg-type]
    assert facts.units[1].groups is facts.units[3].groups
    assert facts.units[1].groups is not facts.units[2].groups


def test_a_tied_parameter_of_two_units_is_refused_with_both_names() -> None:
    model = build_on_meta(Model)
    with pytest.raises(ConfigError, match=r"'weight' of unit 'head' .* 'embedding.weight' of unit 'Model'"):
        module_facts(model, [model.get_submodule("head")], sharding(Placements.hsdp(0, 1)))


def test_a_parameter_without_dimensions_is_refused() -> None:
    model = nn.Module()
    model.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="'gain' has no dimensions"):
        module_facts(model, [], sharding(Placements.hsdp(0, 1)))


def test_nothing_is_allocated_for_a_factory() -> None:
    model = build_on_meta(lambda: nn.Linear(1 << 20, 1 << 20))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("factory", "message"),
    [(lambda: 3, "returned int"), (lambda: nn.Linear(2, 2).weight.sum().item(), "failed on the meta device: Runtime")],
)
def test_a_factory_without_a_module_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on_meta(factory)


# ---------------------------------------------------------------------- catalog architectures


def live_report(found: Architecture, mesh: DeviceMesh) -> Report:
    """Build modules with the parameters of an architecture, shard them as its units say, and report on them."""
    model = nn.Module()
    layers = nn.ModuleList()
    kinds = {unit.name: unit for unit in found.units}
    embedding = register(model, kinds["embedding"], "" if found.tied else "embed_tokens.")
    model.layers = layers
    for _ in range(found.num_layers):
        layers.append(nn.Module())
        register(layers[-1], next(unit for unit in found.units if unit.name.endswith("layer")), "")
        if "experts" in kinds:
            register(layers[-1], kinds["experts"], "mlp.experts.")
            fully_shard(layers[-1].get_submodule("mlp.experts"), mesh, mp_policy=POLICY)
        fully_shard(layers[-1], mesh, mp_policy=POLICY)
    if found.tied:
        # Modules are called in the order of registration: the last norm after the layers.
        norm = model._modules.pop("norm")
        model.norm = norm
    fully_shard(embedding, mesh, mp_policy=POLICY)
    if "head" in kinds:
        fully_shard(register(model, kinds["head"], ""), mesh, mp_policy=POLICY)
    return explain(fully_shard(model, mesh, mp_policy=POLICY), 3)


def register(model: nn.Module, unit: UnitShapes, prefix: str) -> list[nn.Module]:
    """Register a unit's parameters below ``model``, and return the children that hold them."""
    children: dict[str, nn.Module] = {}
    for name, shape in unit.parameters:
        module = model
        *path, attribute = (prefix + name).split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(attribute, nn.Parameter(torch.zeros(shape)))
        children[path[0]] = model.get_submodule(path[0])
    return list(children.values())


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, GEMMA], ids=lambda config: str(config["model_type"]))
def test_an_architecture_takes_what_a_live_model_of_its_shapes_takes(mesh: DeviceMesh, config: dict[str, Any]) -> None:
    found = architecture(config)
    facts = architecture_facts(found, sharding(Placements.hsdp(0, 1)))
    planned = report_of(replace(facts, has_streams=False), 3)
    live = live_report(found, mesh)
    assert planned.persistent_bytes == live.persistent_bytes > 0
    assert planned.padding_bytes == live.padding_bytes
    assert planned.optimizer_bytes == live.optimizer_bytes
    assert planned.forward_peak.num_bytes == live.forward_peak.num_bytes > 0
    assert planned.backward_peak.num_bytes == live.backward_peak.num_bytes > 0
    assert planned.collectives == live.collectives


def test_experts_run_inside_of_their_layer() -> None:
    facts = architecture_facts(architecture(MIXTRAL), sharding(Placements.hsdp(0, 1)))
    layer = next(call for call in facts.call.inner() if facts.units[call.unit].name == "moe_layer.1")
    inner = [facts.units[step.unit].name for step in layer.steps if isinstance(step, Call)]
    assert inner == ["moe_layer.1.experts"]


def test_the_unit_of_a_tied_embedding_is_open_until_the_last_norm() -> None:
    facts = architecture_facts(architecture(GEMMA), sharding(Placements.hsdp(0, 1)))
    (embedding,) = facts.call.steps
    assert isinstance(embedding, Call)
    assert facts.units[embedding.unit].name == "embedding"
    assert [type(step) for step in embedding.steps] == [Use, *[Call] * 3, Use]


def test_a_unit_that_cannot_be_laid_out_is_named() -> None:
    # 100 rows of a million elements each: a shard on each of 1,000 ranks holds one of them or none.
    experts = UnitShapes("experts", 1, (("gate_up_proj", (100, 1_000_000)),))
    found = replace(architecture(MIXTRAL), units=(UnitShapes("layer", 1, (("weight", (1000, 1000)),)), experts))
    axes = (AxisFacts("dp", 1000, 0),)
    with pytest.raises(LayoutError, match=r"unit 'experts': padding makes"):
        architecture_facts(found, Sharding(axes, Placements.optim_grads_params(0), POLICY))
