"""megatron.core's GPTModel trains over this engine as under Megatron's own DistributedDataParallel."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import FsdpError
from megatron_fsdp.runtime.step.unit import units_below
from tests.integration.megatron_training import (
    EXPERTS,
    Job,
    MegatronBase,
    batches,
    build,
    build_model,
    forward_step,
    layers,
    megatron_processes,
    train,
)
from tests.integration.ranks import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MODELS = {
    "tied": Job(None, is_tied=True),
    "untied": Job(None),
    "experts": Job(None, model=EXPERTS),
    "experts-tied": Job(None, is_tied=True, model={**EXPERTS, "moe_token_dispatcher_type": "allgather"}),
}
Figures = list[tuple[float, float, float]]


def compare(job: Job, strategies: tuple[str, ...]) -> tuple[Figures, list[Figures]]:
    """Train a job under DistributedDataParallel, then with each strategy of this engine."""
    with megatron_processes():
        wanted = train(*build(job), range(4))
        return wanted, [train(*build(replace(job, strategy=strategy)), range(4)) for strategy in strategies]


def check(num_ranks: int, job: Job, strategies: tuple[str, ...], digits: float = 1e-5) -> None:
    results = run_ranks(num_ranks, compare, job, strategies)
    assert all(result == results[0] for result in results)
    wanted, found = results[0]
    assert wanted[0][0] > wanted[-1][0] + 0.05
    for figures in found:
        for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(figures, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=digits)
            assert norm == pytest.approx(wanted_norm, rel=digits)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_ranks", "strategies"), [(1, STRATEGIES[-1:]), (2, STRATEGIES)], ids=["one", "two"])
def test_losses_and_gradient_norms_are_those_of_megatrons_ddp(
    model: str, num_ranks: int, strategies: tuple[str, ...]
) -> None:
    check(num_ranks, MODELS[model], strategies)


@pytest.mark.parametrize(
    "job",
    [
        Job(None, model={"calculate_per_token_loss": True}),
        Job(None, ddp={"average_in_collective": True}),
        Job(None, ddp={"overlap_grad_reduce": False}),
        Job(None, optimizer={"clip_grad": 0.1}),
        Job(None, optimizer={"optimizer": "sgd", "lr": 0.2}),
        Job(None, is_tied=True, model={"recompute_granularity": "full", "recompute_method": "uniform",
                                       "recompute_num_layers": 1}),
    ],
    ids=["per-token", "average", "no-overlap", "clip", "sgd", "recompute"],
)  # fmt: skip
def test_megatrons_settings_change_training_as_under_its_ddp(job: Job) -> None:
    check(2, job, ("no_shard", "optim_grads_params"))


def test_bf16_models_train_on_fp32_main_weights_as_under_megatrons_mixed_precision_optimizer() -> None:
    job = Job(None, model={"bf16": True, "params_dtype": torch.bfloat16})
    check(2, job, ("optim_grads_params",), digits=1e-3)


def compare_hybrid(job: Job) -> tuple[Figures, Figures]:
    """Train a job under DistributedDataParallel, then with two replicas of two shards each."""
    with megatron_processes():
        wanted = train(*build(replace(job, strategy=None, ddp={})), range(3))
    with megatron_processes(num_distributed_optimizer_instances=2):
        return wanted, train(*build(job), range(3))


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [("optim", "no_shard"), ("optim_grads", "no_shard"), ("optim_grads_params", "no_shard"),
     ("optim_grads_params", "optim")],
)  # fmt: skip
def test_hybrid_sharding_over_megatrons_instances_trains_as_its_ddp(strategy: str, outer: str) -> None:
    ddp = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
    results = run_ranks(4, compare_hybrid, Job(strategy, ddp=ddp))
    assert all(result == results[0] for result in results)
    wanted, found = results[0]
    for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


def look_at_mesh(outer: str) -> list[tuple[tuple[str, ...], list[list[int]], int]]:
    """Return the mesh of the sharded weights, and the elements of a 64 x 32 weight that rest on this rank."""
    with megatron_processes(num_distributed_optimizer_instances=2):
        ddp = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
        model, _ = build(Job("optim_grads_params", ddp=ddp))
        unit = next(unit for unit in units_below(model) if unit.groups)
        mesh = unit.groups[0].main_weight.mesh
        weight = model.module.embedding.word_embeddings.weight
        return [(tuple(mesh.mesh_dim_names or ()), mesh.mesh.tolist(), weight.to_local().numel())]


@pytest.mark.parametrize(("outer", "elements"), [("no_shard", 64 * 32 // 2), ("optim", 64 * 32 // 4)])
def test_hybrid_sharding_makes_replicas_of_neighbouring_ranks(outer: str, elements: int) -> None:
    found = run_ranks(4, look_at_mesh, outer)
    assert {(names, str(ranks)) for ((names, ranks, _),) in found} == {(("dp_outer", "dp_shard"), "[[0, 1], [2, 3]]")}
    # The embedding's unit has positions beside the words, so ranks hold about their part.
    assert sum(number for ((_, _, number),) in found) == elements * 4


META = {"init_model_with_meta_device": True}


def compare_meta(job: Job) -> tuple[Figures, Figures, int]:
    """Train from a model with memory, then from one whose norms had none; return how many parameters had none."""
    with megatron_processes():
        wanted = train(*build(job), range(2))
        meta = replace(job, model=META)
        _, empty = build_model(meta)
        return wanted, train(*build(meta), range(2)), sum(parameter.is_meta for parameter in empty.parameters())


def test_what_megatron_leaves_on_the_meta_device_gets_the_values_that_it_would_have_had() -> None:
    for wanted, found, number in run_ranks(2, compare_meta, Job("optim_grads_params", positions="rope")):
        assert number > 0
        assert found == wanted


def draw_positions() -> tuple[float, float, bool]:
    """Return the spread of positions that were on the meta device, Megatron's, and whether initialisers are back."""
    with megatron_processes():
        model, _ = build(Job("optim_grads_params", model={**META, "init_method_std": 0.5}))
        positions = model.module.embedding.position_embeddings
        return positions.weight.full_tensor().std().item(), 0.5, "reset_parameters" not in vars(positions)


def test_positions_on_the_meta_device_are_drawn_by_megatrons_initialiser() -> None:
    (found, wanted, is_back), other = run_ranks(2, draw_positions)
    assert found == pytest.approx(wanted, rel=0.1)
    assert other == (found, wanted, True)
    assert is_back


def compare_fused() -> tuple[Figures, Figures, list[bool]]:
    """Train with and without gradient_accumulation_fusion, for which megatron.core wants a package at construction."""
    with megatron_processes(), mock.patch.object(layers, "_grad_accum_fusion_available", True):
        wanted = train(*build(Job("optim_grads_params")), range(2))
        model, optimizer = build(Job("optim_grads_params", model={"gradient_accumulation_fusion": True}))
        switches = [getattr(part, "gradient_accumulation_fusion", None) for part in model.modules()]
        return wanted, train(model, optimizer, range(2)), [value for value in switches if value is not None]


def test_layers_with_fused_gradient_accumulation_train_as_without_it() -> None:
    for wanted, found, switches in run_ranks(2, compare_fused):
        assert found == wanted
        assert switches
        assert not any(switches)


def count_zeros(strategy: str) -> tuple[float, float, int]:
    """Return the zeros counted by DDP's optimizer and ours in the untrained model, and the number of units."""
    with megatron_processes():
        ((_, _, wanted),) = train(*build(Job(None)), range(1))
        model, optimizer = build(Job(strategy))
        ((_, _, found),) = train(model, optimizer, range(1))
        return wanted, found, len(list(units_below(model)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zeros_in_the_gradient_are_counted_once_each(strategy: str) -> None:
    for wanted, found, num_units in run_ranks(2, count_zeros, strategy):
        # Rows of the embedding that no token asked for.
        assert wanted >= 32
        assert found == pytest.approx(wanted, abs=3)
        # The embedding, two layers, and the model around them.
        assert num_units == 4


def attributes() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes that Megatron put on each parameter, before and after sharding."""
    names = ("tensor_model_parallel", "partition_dim", "allreduce", "sequence_parallel", "shared",
             "is_embedding_or_output_parameter", "shared_embedding")  # fmt: skip
    with megatron_processes():
        job = replace(MODELS["experts-tied"], strategy="optim_grads_params")
        plain, _ = build(replace(job, strategy=None))
        sharded, _ = build(job)
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
        model, optimizer = build(Job("optim_grads_params", ddp={"check_for_nan_in_grad": True}))
        with torch.no_grad():
            next(model.parameters()).mul_(float("nan"))
        with pytest.raises(FsdpError, match=r"unit 'decoder.layers.1': a reduced gradient is not a number"):
            train(model, optimizer, range(1))


def test_check_for_nan_in_grad_stops_the_backward_that_has_one() -> None:
    run_ranks(2, poison)


def call_the_contract(strategy: str) -> dict[str, list[float]]:
    """Call what Megatron's training loop calls besides training, and return what should be equal in pairs."""
    with megatron_processes():
        model, optimizer = build(Job(strategy))
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


def accumulate(model: Any) -> None:
    output, loss_function = forward_step(batches(0), model)
    loss_function(output)[0].backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_methods_that_megatrons_loop_calls_do_what_they_say(strategy: str) -> None:
    first, second = run_ranks(2, call_the_contract, strategy)
    assert first == second
    assert first["weights"] == first["weights again"]
    assert first["norms"][0] > 0.1
    for name in ("norms", "halves", "zeroed"):
        assert first[name][0] == pytest.approx(first[name][1])
