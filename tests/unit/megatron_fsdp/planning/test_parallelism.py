"""Plans of models that are divided over further axes: against formulas written down by hand."""

import contextlib
import dataclasses
import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.__main__ import main
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.estimate import Projection, project_stages
from megatron_fsdp.planning.parallelism import Parallelism, stages_of
from megatron_fsdp.planning.stand_in import Axis
from megatron_fsdp.planning.transformer import Transformer, Workload
from tests.unit.megatron_fsdp.planning.chains import options_of, setup_of
from tests.unit.megatron_fsdp.planning.test_cost_of_compute import operations

HIDDEN, WIDTH, VOCABULARY = 7168, 2048, 129_280
# DeepSeek-V3, by its paper: 128 heads of 128 + 64, values of 128, ranks 1536 and 512.
ATTENTION = HIDDEN * 1536 + 1536 * 128 * 192 + HIDDEN * (512 + 64) + 512 * 128 * 256 + 128 * 128 * HIDDEN
EXPERT = 3 * HIDDEN * WIDTH
MOE_MATRICES = ATTENTION + EXPERT + 256 * HIDDEN
NORMS = 2 * HIDDEN + 1536 + 512


@functools.cache
def stages(words: str) -> tuple[Projection, ...]:
    """Return the plan of each stage."""
    return project_stages(options_of(words).subject(), setup_of(words))


@functools.cache
def plan(words: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", *words.split(), "--json"]) == 0
    plain = json.loads(printed.getvalue())
    assert isinstance(plain, dict)
    return plain


DEEPSEEK = "--model deepseek-v3 --world 2048 --ep 64 --pp 16 --recompute full --num-microbatches 8"
MIXTRAL = "--model mixtral-8x7b --world 64 --tp 2 --ep 4 --pp 2 --cp 2 --num-microbatches 4 --seq-length 2048 --stage 0"


def test_deepseek_v3_on_2048_ranks_gathers_four_experts_of_a_layer() -> None:
    sharding = setup_of(DEEPSEEK).sharding
    assert sharding.axes == (Axis("dp", 2048 // 16, 0),)
    assert sharding.expert_axes == (Axis("expert dp", 2048 // (64 * 16), 0),)
    stage = stages(DEEPSEEK)[5]
    units = {
        name: [unit for unit in stage.report().units if unit.modules == (name,)] for name in ("moe_layer", "experts")
    }
    assert [len(alike) for alike in units.values()] == [4, 4]
    layers, experts = units["moe_layer"][0], units["experts"][0]
    assert sum(group.numel for group in layers.groups) == MOE_MATRICES + NORMS
    assert [group.numel for group in experts.groups] == [4 * EXPERT]
    gathers = [each for each in stage.report().collectives if each.axis == "expert dp" and each.kind == "all_gather"]
    assert {(each.num_ranks, each.num_bytes // each.count) for each in gathers} == {(2, 2 * 4 * EXPERT)}
    parts = stage.memory
    shard = 4 * ((MOE_MATRICES + NORMS) / 128 + 4 * EXPERT / 2)
    for name, itemsize in {"main weights": 4, "gradients": 4, "AdamW moments": 8}.items():
        assert parts[name] == pytest.approx(itemsize * shard, rel=2e-3), name


def test_all_parameters_are_on_some_stage_and_the_layers_in_one_order() -> None:
    found = [each.stage for each in stages(DEEPSEEK) if each.stage is not None]
    counts = [count for _, count in (stage.layers for stage in found)]
    assert counts == [3, *[4] * 13, 3, 3]
    assert [stage.layers[0] for stage in found] == [sum(counts[:number]) for number in range(16)]
    whole = catalog.architecture(catalog.load("deepseek-v3"))
    experts = whole.num_routed_parameters
    # Each rank has one in 64 of the experts, and all other weights.
    total = sum(stage.architecture.num_parameters for stage in found)
    assert total == whole.num_parameters - experts + experts // 64


@pytest.mark.parametrize(("stage", "num_layers"), [(0, 3), (5, 4), (15, 3)])
def test_a_stage_holds_as_many_microbatches_as_come_before_their_backward(stage: int, num_layers: int) -> None:
    projection = stages(DEEPSEEK)[stage]
    assert projection.stage is not None
    inside = max(layer.elements * 4096 * 2 for layer in Transformer(projection.stage.architecture).layers)
    last = 4096 * (2 * HIDDEN * 2 + VOCABULARY * 10) if stage == 15 else 0
    assert projection.memory["activations"] == min(16 - stage, 8) * num_layers * 4096 * HIDDEN * 2 + inside + last


@pytest.mark.parametrize(("is_sequence_parallel", "per_element"), [(True, 32 / 4), (False, 8 + 24 / 4)])
def test_the_activations_of_a_gpt_layer_are_those_of_korthikanti_and_others(
    is_sequence_parallel: bool, per_element: float
) -> None:
    gpt2 = catalog.architecture(catalog.load("gpt2"))
    (stage,) = stages_of(gpt2, Parallelism(tensor=4, is_sequence_parallel=is_sequence_parallel))
    (layer,) = Transformer(stage.architecture, stream_ranks=4 if is_sequence_parallel else 1).layers
    assert 2 * layer.elements == per_element * 768


def test_tensor_parallel_ranks_have_their_part_of_matrices_and_all_of_the_norms() -> None:
    llama = catalog.architecture(catalog.load("llama3-8b"))
    (stage,) = stages_of(llama, Parallelism(tensor=4))
    (layer,) = (dict(unit.parameters) for unit in stage.architecture.units if unit.name == "layer")
    assert layer["self_attn.q_proj.weight"] == (4096 // 4, 4096)
    assert layer["self_attn.k_proj.weight"] == (8 * 128 // 4, 4096)
    assert layer["self_attn.o_proj.weight"] == (4096, 4096 // 4)
    assert layer["mlp.up_proj.weight"] == (14_336 // 4, 4096)
    assert layer["mlp.down_proj.weight"] == (4096, 14_336 // 4)
    assert layer["input_layernorm.weight"] == (4096,)
    # There are fewer heads of keys and values than ranks: two ranks have the same head.
    (stage,) = stages_of(llama, Parallelism(tensor=16))
    (layer,) = (dict(unit.parameters) for unit in stage.architecture.units if unit.name == "layer")
    assert layer["self_attn.k_proj.weight"] == (128, 4096)


@pytest.mark.parametrize("name", [name for name in catalog.names() if name != "siglip-so400m"])
def test_every_catalog_model_is_divided(name: str) -> None:
    whole = catalog.architecture(catalog.load(name))
    has_experts = any(unit.name == "experts" for unit in whole.units)
    parallelism = Parallelism(tensor=2, pipeline=2, expert=4 if has_experts else 1)
    stages = stages_of(whole, parallelism)
    total = sum(stage.architecture.num_parameters for stage in stages)
    experts = whole.num_routed_parameters
    wanted = (whole.num_parameters - experts) / 2 + experts / 8
    # The sum counts norms, routers and biases whole on each stage, and a tied table twice.
    table = whole.vocab_size * whole.hidden_size / 2 if whole.tied else 0
    assert wanted + table <= total <= 1.03 * wanted + table
    work = Workload(sequence_length=128)
    divided = sum(operations(Transformer(stage.architecture), work) for stage in stages)
    assert divided * 2 == pytest.approx(operations(Transformer(whole), work), rel=0.06)


def test_model_parallel_transfers_are_counted_and_their_keys_documented() -> None:
    plain = plan(MIXTRAL)
    inside, stream, layers = plain["parallelism"], 2048 // 2 * 4096 * 2, 16
    keys = ("kind", "axis", "num_ranks", "num_bytes", "count")
    found = {tuple(each[key] for key in keys) for each in inside["transfers"]}
    assert found == {
        ("all_reduce", "tp", 2, stream, 4 * (4 * layers + 1)),
        ("all_to_all", "ep", 4, 2 * stream, 4 * 4 * layers),
        ("all_gather", "cp", 2, 2048 * 2 * (8 * 128 // 2) * 2, 4 * 2 * layers),
        ("reduce_scatter", "cp", 2, 2048 * 2 * (8 * 128 // 2) * 2, 4 * layers),
        ("send", "pp", 2, stream, 4),
    }  # fmt: skip
    # 64 / (2 x 2) ranks for dense weights, 64 / (2 x 4 x 2) for an expert.
    assert plain["mesh"] == [{"axis": "dp", "size": 16}]
    assert inside["expert_mesh"] == [{"axis": "expert dp", "size": 4}]
    time = plain["time"]
    spent = sum(time[f"{name}_seconds"] for name in ("compute", "exposed", "copying", "optimizer"))
    assert time["total_seconds"] == pytest.approx(spent + time["model_parallel_seconds"] + time["bubble_seconds"])
    text = (Path(__file__).parents[4] / "docs" / "planning.md").read_text(encoding="utf-8")
    documented = {*inside, *inside["transfers"][0], *plain["stages"][0], "stages"}
    assert not [key for key in documented if f"`{key}`" not in text]


def test_links_are_those_of_ranks_that_lie_behind_each_other_in_megatrons_order() -> None:
    links = setup_of("--model mixtral-8x7b --world 64 --tp 4 --ep 2 --pp 2").hardware.links
    # Eight ranks a node: four tp ranks together, two dp ranks in a node, experts and stages on different nodes.
    assert {axis: link.bytes_per_second for axis, link in links.items()} == {
        "dp": 100e9, "expert dp": 50e9, "tp": 450e9, "ep": 450e9, "pp": 50e9,
    }  # fmt: skip


def test_stages_wait_for_the_slowest() -> None:
    times = [each.time for each in stages("--model gpt2 --world 16 --pp 4 --num-microbatches 6")]
    ends = [time.total - time.optimizer for time in times]
    assert max(ends) == pytest.approx(min(ends))
    assert ends[0] == pytest.approx(max(time.busy for time in times) * (1 + 3 / 6))


def test_sizes_of_one_change_nothing() -> None:
    ones, none = plan("--model gpt2 --mesh 16 --tp 1 --ep 1 --pp 1"), plan("--model gpt2 --mesh 16")
    assert ones == none


def test_shapes_that_nothing_is_known_of_are_refused() -> None:
    whole = catalog.architecture(catalog.load("gpt2"))
    unknown = catalog.UnitShapes("layer", 1, (("mixer.weight", (4, 4)),))
    with pytest.raises(ConfigError, match=r"how tensor parallelism cuts unit 'layer', parameter 'mixer\.weight'"):
        stages_of(dataclasses.replace(whole, units=(unknown,)), Parallelism(tensor=2))
