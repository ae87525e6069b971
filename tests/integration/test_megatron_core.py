"""megatron.core's GPTModel trains over this engine as under Megatron's own DistributedDataParallel."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp import GradientScale, check_gradient_scale
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import FsdpError
from megatron_fsdp.lifecycle.module import FsdpModule
from tests.integration.megatron_meshes import (
    MOE,
    Mesh,
    Task,
    build,
    config_of,
    forward_step,
    make_chunk,
    microbatches,
    run_steps,
)
from tests.integration.megatron_training import MegatronBase, layers, megatron_processes, parallel_state
from tests.integration.ranks import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DDP = Mesh(strategy=None)
TASKS = {
    "tied": Task(is_tied=True),
    "untied": Task(),
    "experts": Task(MOE),
    "experts-tied": Task({**MOE, "moe_token_dispatcher_type": "allgather"}, is_tied=True),
}
Figures = list[tuple[float, float]]


def compare(task: Task, meshes: list[Mesh]) -> list[Figures]:
    with megatron_processes():
        return [run_steps(task, *build(task, mesh), range(4))[0] for mesh in meshes]


def assert_trains_as_ddp(num_ranks: int, task: Task, *meshes: Mesh, digits: float = 1e-5) -> None:
    """Train a task under DistributedDataParallel, set up as the first mesh, and then on each of the meshes."""
    results = run_ranks(num_ranks, compare, task, [replace(meshes[0], strategy=None), *meshes])
    assert all(result == results[0] for result in results)
    wanted, *found = results[0]
    assert wanted[0][0] != pytest.approx(wanted[-1][0], rel=1e-2)
    for figures in found:
        for pair, wanted_pair in zip(figures, wanted, strict=True):
            assert pair == pytest.approx(wanted_pair, rel=digits)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("num_ranks", "strategies"), [(1, STRATEGIES[-1:]), (2, STRATEGIES)], ids=["one", "two"])
def test_losses_and_gradient_norms_are_those_of_megatrons_ddp(
    name: str, num_ranks: int, strategies: tuple[str, ...]
) -> None:
    assert_trains_as_ddp(num_ranks, TASKS[name], *(Mesh(strategy=strategy) for strategy in strategies))


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("task", "ddp"),
    [
        (Task({"calculate_per_token_loss": True}, is_masked=True), {}),
        (Task(), {"average_in_collective": True}),
        (Task(), {"overlap_grad_reduce": False}),
        (Task(optimizer={"clip_grad": 0.1}), {}),
        (Task(optimizer={"optimizer": "sgd", "lr": 0.2}), {}),
        (Task(RECOMPUTE, is_tied=True), {}),
    ],
    ids=["per-token", "average", "no-overlap", "clip", "sgd", "recompute"],
)
def test_megatrons_settings_change_training_as_under_its_ddp(task: Task, ddp: dict[str, Any]) -> None:
    assert_trains_as_ddp(2, task, Mesh(strategy="no_shard", ddp=ddp), Mesh(ddp=ddp))


def test_bf16_models_train_like_megatrons_mixed_precision_optimizer() -> None:
    assert_trains_as_ddp(2, Task({"bf16": True, "params_dtype": torch.bfloat16}), Mesh(), digits=2e-2)


def look_at_mesh(outer: str) -> tuple[tuple[str, ...], list[list[int]], int]:
    """Return the mesh of the sharded weights, and the elements of the words' embedding that rest on this rank."""
    mesh = Mesh(instances=2, ddp={"outer_dp_sharding_strategy": outer})
    with megatron_processes(**mesh.groups()):
        (model,), _ = build(Task(), mesh)
        unit = next(unit for unit in units_below(model) if unit.groups)
        axes = unit.groups[0].main_weight.mesh
        weight = model.module.embedding.word_embeddings.weight
        return tuple(axes.mesh_dim_names or ()), axes.mesh.tolist(), weight.to_local().numel()


@pytest.mark.parametrize(("outer", "shards"), [("no_shard", 2), ("optim", 4)])
def test_hybrid_sharding_makes_replicas_of_neighbouring_ranks(outer: str, shards: int) -> None:
    found = run_ranks(4, look_at_mesh, outer)
    assert {(names, str(ranks)) for names, ranks, _ in found} == {(("dp_outer", "dp_shard"), "[[0, 1], [2, 3]]")}
    # The embedding's unit has positions next to the words, so each rank has about its part.
    assert sum(number for *_, number in found) == 32 * 16 // shards * 4


def train_from_meta() -> tuple[Figures, Figures, int]:
    """Train from a model with memory, then from one whose norms had none; return how many parameters had none."""
    task = Task(positions="rope", is_drawn=False)
    meta = replace(task, model={"init_model_with_meta_device": True})
    with megatron_processes():
        wanted, found = (run_steps(each, *build(each, Mesh()), range(2))[0] for each in (task, meta))
        empty = make_chunk(meta, config_of(meta, Mesh()), None)
        return wanted, found, sum(parameter.is_meta for parameter in empty.parameters())


def test_modules_left_on_the_meta_device_get_megatrons_initial_values() -> None:
    for wanted, found, number in run_ranks(2, train_from_meta):
        assert number > 0
        # Norms are summed in memory that lies elsewhere.
        assert [loss for loss, _ in found] == [loss for loss, _ in wanted]
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wanted], rel=1e-6)


def draw_positions() -> tuple[float, bool]:
    """Return the spread of positions that were on the meta device, and whether initialisers are back."""
    task = Task({"init_model_with_meta_device": True, "init_method_std": 0.5}, is_drawn=False)
    with megatron_processes():
        (model,), _ = build(task, Mesh())
        positions = model.module.embedding.position_embeddings
        return positions.weight.full_tensor().std().item(), "reset_parameters" not in vars(positions)


def test_positions_on_the_meta_device_are_drawn_by_megatrons_initialiser() -> None:
    first, second = run_ranks(2, draw_positions)
    wanted: Any = (pytest.approx(0.5, rel=0.2), True)
    assert first == second == wanted


def compare_fused() -> tuple[Figures, Figures, list[bool]]:
    """Train with and without gradient_accumulation_fusion, which needs a stand-in for a package of megatron.core."""
    with megatron_processes(), mock.patch.object(layers, "_grad_accum_fusion_available", True):
        wanted, _ = run_steps(Task(), *build(Task(), Mesh()), range(2))
        fused = Task({"gradient_accumulation_fusion": True})
        chunks, optimizer = build(fused, Mesh())
        switches = [getattr(part, "gradient_accumulation_fusion", None) for part in chunks[0].modules()]
        found, _ = run_steps(fused, chunks, optimizer, range(2))
        return wanted, found, [value for value in switches if value is not None]


def test_layers_with_fused_gradient_accumulation_train_as_without_it() -> None:
    for wanted, found, switches in run_ranks(2, compare_fused):
        assert found == wanted
        assert switches
        assert not any(switches)


def count_zeros(strategy: str) -> tuple[list[float], int]:
    """Return the zeros counted by DDP's optimizer and ours in the untrained model, and the number of units."""
    task, counts = Task(optimizer={"log_num_zeros_in_grad": True}), []
    with megatron_processes():
        for mesh in (DDP, Mesh(strategy=strategy)):
            (model,), optimizer = build(task, mesh)
            step = optimizer.step

            def counted(step: Any = step) -> Any:
                counts.append(step())
                return counts[-1]

            optimizer.step = counted
            run_steps(task, [model], optimizer, range(1))
        return [float(zeros) for *_, zeros in counts], len(list(units_below(model)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zeros_in_the_gradient_are_counted_once_each(strategy: str) -> None:
    for (wanted, found), num_units in run_ranks(2, count_zeros, strategy):
        # Rows of the embedding that no token asked for.
        assert wanted >= 16
        assert found == pytest.approx(wanted, abs=3)
        # The embedding, two layers, and the model around them.
        assert num_units == 4


def attributes() -> list[tuple[dict[str, Any], ...]]:
    """Return the attributes that Megatron put on each parameter, before and after sharding."""
    names = ("tensor_model_parallel", "partition_dim", "allreduce", "sequence_parallel", "shared",
             "is_embedding_or_output_parameter", "shared_embedding")  # fmt: skip
    with megatron_processes():
        (plain,), (sharded,) = (build(TASKS["experts-tied"], mesh)[0] for mesh in (DDP, Mesh()))
        found = dict(sharded.module.named_parameters())
        return [
            tuple(
                {name: getattr(one, name) for name in names if hasattr(one, name)} for one in (parameter, found[path])
            )
            for path, parameter in plain.module.named_parameters()
        ]


def test_parameters_keep_megatrons_attributes() -> None:
    for pairs in run_ranks(2, attributes):
        assert any(wanted.get("tensor_model_parallel") is not None for wanted, _ in pairs)
        assert any(wanted.get("is_embedding_or_output_parameter") for wanted, _ in pairs)
        for wanted, found in pairs:
            assert found == wanted


def poison() -> None:
    with megatron_processes():
        (model,), optimizer = build(Task(), Mesh(ddp={"check_for_nan_in_grad": True}))
        with torch.no_grad():
            next(model.parameters()).mul_(float("nan"))
        with pytest.raises(FsdpError, match=r"unit 'decoder.layers.1': a reduced gradient of one of .* is NaN"):
            run_steps(Task(), [model], optimizer, range(1))


def test_check_for_nan_in_grad_stops_the_backward_that_has_one() -> None:
    run_ranks(2, poison)


def accumulate(model: Any) -> None:
    output, loss_function = forward_step(microbatches(Task(), parallel_state.get_data_parallel_rank(), 0), model)
    loss_function(output)[0].backward()


def call_the_contract(strategy: str) -> dict[str, list[float]]:
    """Call the methods that Megatron's training loop calls apart from training; return pairs that should be equal."""
    with megatron_processes():
        (model,), optimizer = build(Task(), Mesh(strategy=strategy))
        assert isinstance(model, MegatronBase)
        assert model.force_all_reduce is False
        assert model.config is model.module.config
        assert (model.ddp_config.use_megatron_fsdp, model.ddp_config.data_parallel_sharding_strategy) == (
            True,
            strategy,
        )
        before = [parameter.full_tensor().sum().item() for parameter in model.parameters()]
        model.broadcast_params()
        after = [parameter.full_tensor().sum().item() for parameter in model.parameters()]
        model.start_param_sync(force_sync=True)
        model.stop_communication()
        # A checkpoint may be due just when weights are gathered.
        state = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
        assert len(state) == len(before)
        assert all(isinstance(value, DTensor) for value in state)
        model.zero_grad_buffer()
        with model.no_sync():
            accumulate(model)
        accumulate(model)
        model.start_grad_sync()
        model.finish_grad_sync(force_all_reduce=True)
        norms = [optimizer.get_grad_norm(), optimizer.get_grad_norm()]
        model.scale_gradients(0.5)
        halves = [norms[0] / 2, optimizer.get_grad_norm()]
        assert optimizer.scale_loss(torch.tensor(3.0)).item() == 3.0
        model.zero_grad_buffer()
        return {"weights": before, "weights again": after, "norms": norms, "halves": halves,
                "zeroed": [optimizer.get_grad_norm(), 0.0]}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_methods_that_megatrons_loop_calls_do_what_they_say(strategy: str) -> None:
    first, second = run_ranks(2, call_the_contract, strategy)
    assert first == second
    assert first["weights"] == first["weights again"]
    assert first["norms"][0] > 0.1
    for name in ("norms", "halves", "zeroed"):
        assert first[name][0] == pytest.approx(first[name][1])


def follow_the_page() -> tuple[bool, list[float]]:
    """Run the code of docs/megatron.md as it stands there."""
    page = Path(__file__).parents[2] / "docs" / "megatron.md"
    names: dict[str, Any] = {}
    with megatron_processes():
        for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(code, str(page), "exec"), names)  # the text is under test
        config = config_of(Task(), Mesh())
        model, optimizer = names["wrap"](config, make_chunk(Task(), config, None))
        norms = [norm for _, norm in run_steps(Task(), [model], optimizer, range(2))[0]]
        return isinstance(model.module, FsdpModule), norms


def test_the_documented_function_wraps_a_model_for_megatrons_schedule() -> None:
    for is_sharded, norms in run_ranks(2, follow_the_page):
        assert is_sharded
        assert all(norm > 0.1 for norm in norms)


def measured(strategy: str, is_per_token: bool) -> GradientScale:
    task = Task({**MOE, "calculate_per_token_loss": is_per_token})
    with megatron_processes():
        (model,), _ = build(task, Mesh(strategy=strategy))

        def loss_fn(inner: torch.nn.Module, step: int) -> torch.Tensor:
            output, loss_function = forward_step(microbatches(task, torch.distributed.get_rank(), step), inner)
            loss: torch.Tensor = loss_function(output)[0]
            return loss

        def finish() -> None:
            model.finish_grad_sync()
            if is_per_token:
                model.scale_gradients(1 / 32)

        expected = 1 / 32 if is_per_token else 1 / 2
        return check_gradient_scale(model, loss_fn, 0, expected=expected, finish=finish)


@pytest.mark.parametrize("is_per_token", [False, True])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_megatrons_gradients_have_the_factor_of_its_losses(strategy: str, is_per_token: bool) -> None:
    for report in run_ranks(2, measured, strategy, is_per_token):
        assert all(
            each.factor == pytest.approx(1 / 32 if is_per_token else 0.5, rel=1e-6) for each in report.parameters
        )
        assert any("experts" in each.name for each in report.parameters)
