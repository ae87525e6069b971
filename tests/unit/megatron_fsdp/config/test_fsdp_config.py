"""FsdpConfig: errors that name both flags, and the resulting arguments of fully_shard."""

import argparse
import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import Flat, Partial, Replicate
from megatron_fsdp.api import fully_shard
from megatron_fsdp.config.flags import FLAGS
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.policy.strategy import Placements
from tests.unit.megatron_fsdp.config.lines import config, mesh

STRATEGY = "--data-parallel-sharding-strategy"
MAIN_GRADS = "--megatron-fsdp-main-grads-dtype"
WIRE = "--megatron-fsdp-grad-comm-dtype"
WHOLE = (Replicate(), Replicate())
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def no_gpu_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


@pytest.mark.parametrize(
    ("has_gpu", "backend", "is_refused"), [(True, "nccl", True), (True, "gloo", False), (False, None, False)]
)
def test_one_gpu_queue_is_refused_in_a_job_on_gpus(
    has_gpu: bool, backend: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    args = argparse.Namespace(use_megatron_fsdp=True, distributed_backend=backend)
    if is_refused:
        with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 contradicts --use-megatron-fsdp"):
            FsdpConfig.from_args(args)
    else:
        assert FsdpConfig.from_args(args).use_megatron_fsdp


def test_one_gpu_queue_is_refused_on_a_mesh_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert FsdpConfig().fully_shard_kwargs(mesh(4))
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 contradicts --use-megatron-fsdp"):
        FsdpConfig().fully_shard_kwargs(mesh(4, device_type="cuda"))


def test_every_flag_has_a_field_with_its_default() -> None:
    found = {field.name: getattr(FsdpConfig(), field.name) for field in dataclasses.fields(FsdpConfig)}
    wanted = {**{flag.dest: flag.default for flag in FLAGS}, "use_megatron_fsdp": True, "hugging_face": None}
    assert list(found.items()) == list(wanted.items())


def test_a_config_made_in_code_uses_this_engine_and_a_parsed_one_asks_the_flag() -> None:
    assert FsdpConfig().use_megatron_fsdp
    assert not config("").use_megatron_fsdp
    assert config("--use-megatron-fsdp") == FsdpConfig()


def test_a_namespace_may_lack_flags_and_have_others() -> None:
    args = argparse.Namespace(hidden_size=3, data_parallel_sharding_strategy="optim", train_iters=None)
    assert FsdpConfig.from_args(args) == FsdpConfig(data_parallel_sharding_strategy="optim")


def test_the_forms_that_megatron_gives_values_after_parsing_are_understood() -> None:
    args = argparse.Namespace(
        megatron_fsdp_main_params_dtype=BF16,
        megatron_fsdp_main_grads_dtype=None,
        megatron_fsdp_grad_comm_dtype=F16,
        exp_avg_dtype=torch.uint8,
        high_priority_stream_groups=["dp_cp"],
    )
    assert FsdpConfig.from_args(args) == FsdpConfig(
        megatron_fsdp_main_params_dtype="bf16",
        megatron_fsdp_main_grads_dtype="auto",
        megatron_fsdp_grad_comm_dtype="fp16",
        exp_avg_dtype="fp8",
        high_priority_stream_groups=("dp_cp",),
    )


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("outer_dp_sharding_stratgy", "outer_dp_sharding_strategy"),
        ("use_nccl_ub", "nccl_ub"),
        ("overlap_param_gathr", "overlap_param_gather"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_valid_one(unknown: str, nearest: str) -> None:
    settings: dict[str, Any] = {unknown: True, "bf16": True}
    with pytest.raises(ConfigError, match=f"unknown setting '{unknown}'. fix: the nearest valid one is '{nearest}'"):
        FsdpConfig(**settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bf16": "yes"}, r"--bf16 \(bf16\): found 'yes'. fix: give a value of type bool"),
        ({"nccl_ub": 1}, r"--use-nccl-ub \(nccl_ub\): found 1. fix: give a value of type bool"),
        ({"num_distributed_optimizer_instances": True}, "found True. fix: give a value of type int"),
        ({"num_distributed_optimizer_instances": 0}, "found 0. fix: give a whole number >= 1"),
        ({"ddp_bucket_size": -3}, "found -3. fix: give a whole number >= 1"),
        ({"suggested_communication_unit_size": 1.5}, "found 1.5. fix: give a value of type int"),
        ({"optimizer_offload_fraction": "half"}, "found 'half'. fix: give a value of type float"),
        ({"high_priority_stream_groups": "dp"}, "found 'dp'. fix: give a value of type tuple"),
        ({"optimizer": None}, "found None. fix: give a value of type str"),
        ({"clip_grad": -1.0}, r"--clip-grad \(clip_grad\): found -1.0. fix: give a number >= 0"),
        ({"clip_grad": float("nan")}, "found nan. fix: give a number >= 0"),
        ({"megatron_fsdp_version": 3}, "found 3, wanted one of 1, 2"),
        (
            {"data_parallel_sharding_strategy": "optim_grad"},
            "wanted one of no_shard, .*fix: .* optim_grads is the nearest",
        ),
        ({"megatron_fsdp_main_params_dtype": torch.float64}, "found 'torch.float64', wanted one of fp32"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_of_another_type_or_choice_is_refused_with_what_is_legal(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FsdpConfig(**given)


def test_a_config_survives_copies_and_pickling() -> None:
    original = FsdpConfig(bf16=True)
    assert copy.deepcopy(original) == pickle.loads(pickle.dumps(original)) == original
    assert dataclasses.replace(original, bf16=False) == FsdpConfig()


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_on_one_axis_a_strategy_is_its_placements_for_every_unit(strategy: str) -> None:
    given = config(f"{STRATEGY} {strategy} --bf16")
    assert given.fully_shard_kwargs(mesh(3)) == {
        "placements": getattr(Placements, strategy)(0),
        "mp_policy": given.mixed_precision_policy(),
        "reshard_after_forward": None,
    }


@pytest.mark.parametrize(
    ("line", "placements"),
    [
        ("", Placements.hsdp(0, 1)),
        ("--outer-dp-sharding-strategy optim", Placements.hfsdp(0, 1)),
        ("--enable-full-sharding-in-hsdp", Placements.hfsdp(0, 1)),
        (f"{STRATEGY} optim_grads", Placements((0, 1), WHOLE, (Partial(), Flat()), (Replicate(), Flat()))),
        (f"{STRATEGY} optim", Placements((0, 1), WHOLE, (Partial(), Partial()), (Replicate(), Flat()))),
        (f"{STRATEGY} no_shard", Placements((0, 1), WHOLE, (Partial(), Partial()), WHOLE)),
    ],
)
def test_on_two_axes_the_strategy_is_the_inner_one_s(line: str, placements: Placements) -> None:
    for instances in ("", "--num-distributed-optimizer-instances 2"):
        assert config(f"{instances} {line}").fully_shard_kwargs(mesh(2, 3))["placements"] == placements


@pytest.mark.parametrize(
    ("line", "shape", "message"),
    [
        ("--num-distributed-optimizer-instances 2", (6,), "optimizer-instances 2 needs a mesh of two axes"),
        ("--outer-dp-sharding-strategy optim", (6,), "--outer-dp-sharding-strategy optim needs a mesh .* of 6 ranks"),
        ("--enable-full-sharding-in-hsdp", (6,), r"--enable-full-sharding-in-hsdp needs .*instances \(found 1\)"),
        ("--num-distributed-optimizer-instances 2", (3, 2), "an outer axis of 2 ranks, found a mesh of 3 x 2"),
        ("", (1, 2, 3), r"the mesh has 3 axes. fix: pass its data-parallel part"),
    ],
)
def test_a_mesh_of_other_axes_than_the_flags_ask_for_is_refused(
    line: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(line).fully_shard_kwargs(mesh(*shape))


# Compute, main weights, main gradients, reduction.
@pytest.mark.parametrize(
    ("line", "dtypes"),
    [
        ("", (None, F32, F32, F32)),
        ("--bf16", (BF16, F32, F32, F32)),
        ("--fp16", (F16, F32, F16, F16)),
        ("--bf16 --grad-reduce-in-bf16", (BF16, F32, BF16, BF16)),
        ("--grad-reduce-in-bf16", (None, F32, F32, F32)),
        (f"--bf16 --grad-reduce-in-bf16 {MAIN_GRADS} fp32", (BF16, F32, F32, BF16)),
        (f"--bf16 {MAIN_GRADS} bf16", (BF16, F32, BF16, BF16)),
        (f"--bf16 {WIRE} bf16", (BF16, F32, F32, BF16)),
        (f"{WIRE} fp16", (None, F32, F32, F16)),
        (f"--bf16 {MAIN_GRADS} bf16 {WIRE} fp32", (BF16, F32, BF16, F32)),
        ("--bf16 --megatron-fsdp-main-params-dtype auto", (BF16, BF16, F32, F32)),
        ("--fp16 --megatron-fsdp-main-params-dtype bf16", (F16, BF16, F16, F16)),
        ("--megatron-fsdp-main-params-dtype auto", (None, None, F32, F32)),
    ],
)
def test_the_dtypes_follow_megatron_s_rules(line: str, dtypes: tuple[torch.dtype | None, ...]) -> None:
    policy = config(line).mixed_precision_policy()
    assert (policy.param_dtype, policy.main_params_dtype, policy.main_grads_dtype, policy.reduce_dtype) == dtypes


@pytest.mark.parametrize(("line", "fuses"), [("", "wide"), ("--bf16 --no-gradient-accumulation-fusion", False)])
def test_the_policy_fuses_by_default(line: str, fuses: str | bool) -> None:
    assert config(line).mixed_precision_policy().fuse_weight_gradients == fuses


# For bf16 weights, the dtypes of main weights, of main gradients, and of reductions.
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("line", "dtypes"),
    [
        ("", (F32, F32, F32)),
        ("--megatron-fsdp-main-params-dtype bf16", (BF16, F32, F32)),
        ("--megatron-fsdp-main-grads-dtype bf16", (F32, BF16, BF16)),
        ("--megatron-fsdp-grad-comm-dtype bf16", (F32, F32, BF16)),
        ("--grad-reduce-in-bf16", (F32, BF16, BF16)),
    ],
)
def test_the_dtype_flags_reach_the_buffers(line: str, dtypes: tuple[torch.dtype, ...]) -> None:
    device_mesh = init_device_mesh("cpu", (1,))
    model: Any = fully_shard(nn.Linear(5, 3), device_mesh, **config(f"--bf16 {line}").fully_shard_kwargs(device_mesh))
    model(torch.ones(2, 5)).sum().backward()
    (group,) = model.parameter_groups
    assert (group.main_weight.dtype, group.main_grad.dtype, group.spec.dtypes.reduce) == dtypes


@pytest.mark.usefixtures("process_group")
def test_optimizer_cpu_offload_reaches_fully_shard_and_changes_no_result() -> None:
    device_mesh = init_device_mesh("cpu", (1,))
    gradients = []
    for line in ("", "--optimizer-cpu-offload"):
        torch.manual_seed(2)
        options = config(line).fully_shard_kwargs(device_mesh)
        model: Any = fully_shard(nn.Linear(5, 3), device_mesh, **options)
        model(torch.ones(2, 5)).square().sum().backward()
        gradients.append(model.weight.grad.full_tensor())
        assert model.parameter_groups[0].spec.is_offloaded is ("offload_policy" in options) is bool(line)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("flags", [{}, {"calculate_per_token_loss": True}, {"fsdp_double_buffer": True}])
def test_apply_before_fully_shard_is_an_error_rather_than_without_effect(flags: dict[str, Any]) -> None:
    with pytest.raises(
        StateError, match=r"Linear holds no sharded module\. fix: call FsdpConfig\.apply after fully_sh"
    ):
        FsdpConfig(**flags).apply(nn.Linear(2, 2))
