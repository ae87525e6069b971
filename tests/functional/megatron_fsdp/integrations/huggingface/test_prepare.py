"""prepare_model on models that only look like transformers', on one and two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import FsdpConfig, clip_grad_norm_, export_safetensors
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.huggingface import prepare_model
from megatron_fsdp.runtime.step.unit import units_below
from tests.harness import on_ranks, run_ranks
from tests.unit.megatron_fsdp.integrations.huggingface.hf_model import loss_of, make_language_model

State = dict[str, torch.Tensor]


def whole_state(model: nn.Module) -> State:
    """Return copies of parameters and buffers as whole tensors; on a sharded model, every rank calls it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors}


def worst(found: State, wanted: State) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def train(model: nn.Module, ranks: range, num_steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(num_steps):
        for rank in ranks:
            torch.manual_seed(100 + 10 * rank + step)
            (loss_of(model, rank, step) / len(ranks)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def compare_training(config: Any, is_tied: bool) -> tuple[float, float]:
    oracle = make_language_model(is_tied=is_tied)
    start = whole_state(oracle)
    model = prepare_model(make_language_model(is_tied=is_tied), config)
    rank = dist.get_rank()
    train(model, range(rank, rank + 1))
    train(oracle, range(dist.get_world_size()))
    return worst(whole_state(model), whole_state(oracle)), worst(whole_state(oracle), start)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"reshard_after_forward": False},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 61},
        {"activation_checkpointing": True},
        {"version": 1, "sharding_strategy": "NO_SHARD"},
    ],
    ids=["default", "kept", "by size", "checkpointed", "no_shard"],
)
def test_a_prepared_model_trains_as_the_whole_one(config: dict[str, Any], is_tied: bool) -> None:
    for apart, movement in run_ranks(2, compare_training, config, is_tied):
        assert apart < 2e-6
        assert movement > 1e-2


@on_ranks(1)
def test_cpu_offload_reaches_every_unit() -> None:
    model = prepare_model(make_language_model(), {"cpu_offload": True})
    assert all(group.spec.is_offloaded for unit in units_below(model) for group in unit.groups)


def count_computations(config: Any) -> tuple[int, list[int], int]:
    model = prepare_model(make_language_model(), config)
    gathers: list[CollectiveCall] = []
    loss_of(model, dist.get_rank()).backward()
    before = [layer.num_computed for layer in model.model.layers]
    with observe_collectives(lambda call: gathers.append(call) if call.kind == "all_gather" else None):
        loss_of(model, dist.get_rank()).backward()
    after = [layer.num_computed for layer in model.model.layers]
    with torch.no_grad():
        loss_of(model, dist.get_rank())
    evaluated = [layer.num_computed for layer in model.model.layers]
    counts = [then - now for now, then in zip(before, after, strict=True)]
    return len(gathers), counts, evaluated[0] - after[0]


def test_checkpointed_layers_compute_their_forward_again_and_train_alike() -> None:
    ((gathers, counts, evaluated), _) = run_ranks(2, count_computations, {"activation_checkpointing": True})
    ((plain_gathers, plain_counts, _), _) = run_ranks(2, count_computations, {})
    assert counts == [2, 2]
    assert plain_counts == [1, 1]
    assert evaluated == 1
    # The second computation finds the weights that backward gathers anyway.
    assert gathers == plain_gathers
    for apart, movement in run_ranks(2, compare_training, {"activation_checkpointing": True}, False):
        assert apart < 2e-6
        assert movement > 1e-2


class Cache:
    def get_seq_length(self) -> int:
        return 0


@on_ranks(1)
def test_checkpointed_layers_get_a_cache_only_where_nothing_is_computed_again() -> None:
    model = prepare_model(make_language_model(), {"activation_checkpointing": True})
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    model(tokens, Cache()).sum().backward()
    trained = [cache is not None for cache in model.model.layers[0].caches]
    with torch.no_grad():
        model(tokens, Cache())
    evaluated = [cache is not None for cache in model.model.layers[0].caches[-2:]]
    assert trained == [False] * 4
    assert evaluated == [True, True]


@on_ranks(1)
def test_both_kinds_of_checkpointing_are_refused_whichever_comes_first() -> None:
    model = make_language_model()
    model.model.layers[1].gradient_checkpointing = True
    with pytest.raises(ConfigError, match="activation_checkpointing contradicts gradient checkpointing, which Layer"):
        prepare_model(model, {"activation_checkpointing": True})
    model = prepare_model(make_language_model(), {"activation_checkpointing": True})
    model.model.layers[1].gradient_checkpointing = True
    with pytest.raises(ConfigError, match="activation_checkpointing contradicts gradient checkpointing"):
        loss_of(model, 0)


@on_ranks(2)
def test_accelerate_s_mixed_precision_computes_in_bf16_from_fp32_main_weights() -> None:
    seen: set[torch.dtype] = set()
    model = make_language_model()
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, args, output: seen.update(p.dtype for p in module.parameters()))
    prepare_model(model, FsdpConfig.from_hf({"mixed_precision": "bf16", "fsdp_config": {}}))
    loss_of(model, 0).backward()
    clip_grad_norm_(model, 1.0)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def shard_inside_hosts(local_size: str | None) -> list[tuple[int, ...]]:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if local_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_size
    model = prepare_model(make_language_model(), {"sharding_strategy": "HYBRID_SHARD"})
    return [tuple(group.main_weight.mesh.shape) for unit in units_below(model) for group in unit.groups]


def test_a_hybrid_strategy_shards_inside_each_host() -> None:
    shapes = run_ranks(4, shard_inside_hosts, "2")[0]
    assert set(shapes) == {(2, 2)}


@on_ranks(2)
def test_a_hybrid_strategy_without_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match="shards inside each host, found 2 ranks and LOCAL_WORLD_SIZE unset"):
        shard_inside_hosts(None)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ConfigError, match=r"HYBRID_SHARD needs a mesh of two axes \(outer, inner\), found 1"):
        prepare_model(make_language_model(), {"sharding_strategy": "HYBRID_SHARD"}, mesh)


def share_out(key: str, is_tied: bool, others_on_meta: bool) -> tuple[State, int]:
    rank = dist.get_rank()
    if rank and others_on_meta:
        with torch.device("meta"):
            model = make_language_model(is_tied=is_tied)
    else:
        model = make_language_model(seed=5 + rank, is_tied=is_tied)
    largest = 0

    def measure(call: CollectiveCall) -> None:
        nonlocal largest
        largest = max(largest, call.num_bytes)

    with observe_collectives(measure):
        prepare_model(model, {key: True})
    return whole_state(model), largest


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_ranks_with_a_meta_model_receive_the_first_rank_s_weights(is_tied: bool) -> None:
    wanted = whole_state(make_language_model(seed=5, is_tied=is_tied))
    for found, largest in run_ranks(3, share_out, "cpu_ram_efficient_loading", is_tied, True):
        assert worst(found, wanted) == 0
        # One tensor at a time: the table of the embedding, and the head, have 13 rows of 6 numbers.
        assert largest == 13 * 6 * 4


def test_sync_module_states_makes_ranks_agree() -> None:
    wanted = whole_state(make_language_model(seed=5))
    for found, _ in run_ranks(2, share_out, "sync_module_states", False, False):
        assert worst(found, wanted) == 0


def share_out_on_a_grid() -> State:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = make_language_model(seed=5 + dist.get_rank())
    return whole_state(prepare_model(model, {"cpu_ram_efficient_loading": True, "ignored_modules": "head"}, mesh))


def test_the_first_rank_of_a_mesh_of_two_axes_is_the_source_also_of_ignored_parameters() -> None:
    wanted = whole_state(make_language_model(seed=5))
    assert [worst(found, wanted) for found in run_ranks(4, share_out_on_a_grid)] == [0, 0, 0, 0]


@on_ranks(2)
def test_a_first_rank_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = make_language_model()
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match=r"'model.embed.weight' and \d+ more are on the meta device on the first"):
            prepare_model(model, {"cpu_ram_efficient_loading": True})


def export(folder: Path) -> None:
    export_safetensors(make_language_model(seed=9), folder)


def import_into(folder: Path, on_meta: bool) -> State:
    with torch.device("meta" if on_meta else "cpu"):
        model = make_language_model(seed=1)
    model._init_weights = fill_scale
    return whole_state(prepare_model(model, checkpoint=folder))


def fill_scale(module: nn.Module) -> None:
    if hasattr(module, "scale"):
        module.scale.copy_(torch.linspace(0.5, 1.5, 6))


@pytest.mark.parametrize("on_meta", [False, True], ids=["cpu", "meta"])
def test_every_rank_reads_its_shards_of_a_checkpoint(on_meta: bool, tmp_path: Path) -> None:
    run_ranks(1, export, tmp_path)
    wanted = whole_state(make_language_model(seed=9))
    assert [worst(found, wanted) for found in run_ranks(2, import_into, tmp_path, on_meta)] == [0, 0]


def refuse_checkpoints(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        prepare_model(make_language_model(), checkpoint=folder / "missing")
    with pytest.raises(ConfigError, match="LanguageModel has no from_pretrained"):
        prepare_model(make_language_model(), {"cpu_ram_efficient_loading": True}, checkpoint=folder)
    with torch.device("meta"):
        model = make_language_model()
    with pytest.raises(
        ConfigError, match="has buffers on the meta device that no checkpoint holds, and no _init_weights"
    ):
        prepare_model(model, checkpoint=folder)
    prepared = prepare_model(make_language_model())
    with pytest.raises(ConfigError, match="is sharded already; call prepare_model once"):
        prepare_model(prepared)


def test_checkpoints_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    run_ranks(1, export, tmp_path)
    run_ranks(2, refuse_checkpoints, tmp_path)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("is_distributed_loading_by_transformers", True, r"was sharded by from_pretrained\(distributed_config=...\)"),
        ("hf_device_map", {"model": 0, "head": "cpu"}, r"was spread over \['0', 'cpu'\] by device_map"),
        ("hf_quantizer", object(), "is quantized: its weights are packed"),
    ],
)
def test_models_that_something_else_has_laid_out_are_refused(attribute: str, value: object, message: str) -> None:
    model = make_language_model()
    setattr(model, attribute, value)
    with pytest.raises(ConfigError, match=message):
        prepare_model(model)
