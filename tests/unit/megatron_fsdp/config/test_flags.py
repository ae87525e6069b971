"""The flags: Megatron's names, defaults and choices, and a parser that has some of them already."""

import argparse
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.config.flag_rules import RULES
from megatron_fsdp.config.flags import FLAGS, Flag, add_megatron_fsdp_args
from megatron_fsdp.errors import ConfigError
from tests.unit.megatron_fsdp.config.lines import config, namespace

# Megatron-LM's documented defaults, and the attributes with each default.
_BY_DEFAULT: list[tuple[Any, str]] = [
    (
        False,
        """use_megatron_fsdp enable_full_sharding_in_hsdp init_model_with_meta_device create_all_gather_group
        megatron_fsdp_enable_fine_grained_param_gather keep_fp8_transpose_cache fsdp_double_buffer
        megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail nccl_ub
        disable_symmetric_registration fsdp_manual_registration use_torch_fsdp2 overlap_grad_reduce overlap_param_gather
        overlap_param_gather_with_optimizer_step ddp_pad_buckets_for_high_nccl_busbw
        ddp_reduce_scatter_with_fp32_accumulation ddp_average_in_collective grad_reduce_in_bf16
        calculate_per_token_loss use_distributed_optimizer use_sharp fsdp_invariant_reduction fsdp_forward_order bf16
        fp16 use_precision_aware_optimizer fp8_param_gather fp4_param_gather optimizer_cpu_offload
        overlap_cpu_optimizer_d2h_h2d optimizer_cuda_graph async_save check_for_large_grads fake_process_group""",
    ),
    (
        True,
        """torch_fsdp2_reshard_after_forward align_param_gather gradient_reduce_div_fusion gradient_accumulation_fusion
        strict_fsdp_dtensor_load check_for_nan_in_loss_and_grad""",
    ),
    (
        None,
        """suggested_communication_unit_size ddp_num_buckets ddp_bucket_size sharp_enabled_group
        dump_param_to_param_group_map""",
    ),
    (1, "megatron_fsdp_version num_distributed_optimizer_instances"),
    (1.0, "optimizer_offload_fraction clip_grad"),
    ([], "ddp_param_name_patterns_for_fp32_local_accumulation high_priority_stream_groups"),
    ("fp32", "megatron_fsdp_main_params_dtype main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"),
    ("auto", "megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype"),
    ("optim_grads_params", "data_parallel_sharding_strategy"),
    ("no_shard", "outer_dp_sharding_strategy"),
    ("adam", "optimizer"),
    ("none", "cuda_graph_impl"),
    ("torch_dist", "ckpt_format"),
    ("assume_ok_unexpected", "dist_ckpt_strictness"),
]
DEFAULTS = {name: default for default, names in _BY_DEFAULT for name in names.split()}
CHOICES = {
    "--megatron-fsdp-version": "1 2",
    "--data-parallel-sharding-strategy": "no_shard optim optim_grads optim_grads_params",
    "--outer-dp-sharding-strategy": "no_shard optim",
    "--megatron-fsdp-main-params-dtype": "fp32 bf16 fp16 auto",
    "--megatron-fsdp-main-grads-dtype": "fp32 bf16 fp16 auto",
    "--megatron-fsdp-grad-comm-dtype": "fp32 bf16 fp16 auto",
    "--sharp-enabled-group": "dp dp_replica",
    "--optimizer": "adam sgd muon dist_muon lion soap adaptive_muon",
    "--main-grads-dtype": "fp32 bf16",
    "--main-params-dtype": "fp32 fp16",
    "--exp-avg-dtype": "fp32 fp16 bf16 fp8",
    "--exp-avg-sq-dtype": "fp32 fp16 bf16 fp8",
    "--cuda-graph-impl": "none local transformer_engine full_iteration",
    "--ckpt-format": "torch torch_dist torch_dcp fsdp_dtensor",
    "--dist-ckpt-strictness": "assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all "
    "return_unexpected return_all ignore_all",
}
# Flags whose attribute is not the flag with underscores.
OTHER_ATTRIBUTES = {
    "--use-nccl-ub": ("nccl_ub", True),
    "--torch-fsdp2-no-reshard-after-forward": ("torch_fsdp2_reshard_after_forward", False),
    "--no-align-param-gather": ("align_param_gather", False),
    "--no-gradient-reduce-div-fusion": ("gradient_reduce_div_fusion", False),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
}


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    return add_megatron_fsdp_args(argparse.ArgumentParser(exit_on_error=False))


def another_value(flag: Flag) -> object:
    if flag.kind is bool:
        return not flag.default
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    return {int: 7, float: 0.25, str: "a/b", tuple: ("first", "second")}[flag.kind]


def test_the_attributes_and_defaults_are_megatron_s(parser: argparse.ArgumentParser) -> None:
    assert vars(parser.parse_args([])) == DEFAULTS


def test_the_choices_are_megatron_s_and_flags_without_listed_ones_have_none(parser: argparse.ArgumentParser) -> None:
    found = {name: action.choices for name, action in parser._option_string_actions.items() if action.choices}
    assert {name: set(map(str, choices)) for name, choices in found.items()} == {
        name: set(choices.split()) for name, choices in CHOICES.items()
    }


@pytest.mark.parametrize("name", OTHER_ATTRIBUTES)
def test_a_flag_with_another_attribute_sets_that(name: str, parser: argparse.ArgumentParser) -> None:
    attribute, value = OTHER_ATTRIBUTES[name]
    assert vars(parser.parse_args([name])) == {**DEFAULTS, attribute: value}


def test_all_other_flags_are_their_attribute_with_dashes() -> None:
    names = {flag.name for flag in FLAGS if flag.name != "--" + flag.dest.replace("_", "-")}
    assert names == set(OTHER_ATTRIBUTES)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_sets_its_attribute_and_no_other(flag: Flag, parser: argparse.ArgumentParser) -> None:
    value = another_value(flag)
    expected = {**DEFAULTS, flag.dest: list(value) if isinstance(value, tuple) else value}
    assert vars(parser.parse_args(flag.spell(value).split())) == expected


def test_a_default_that_is_on_can_be_asked_for_and_switched_off(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args(["--strict-fsdp-dtensor-load"]).strict_fsdp_dtensor_load is True
    assert parser.parse_args(["--no-strict-fsdp-dtensor-load"]).strict_fsdp_dtensor_load is False
    for prefix, value in (("--", True), ("--no-", False)):
        given = parser.parse_args([f"{prefix}check-for-nan-in-loss-and-grad"])
        assert given.check_for_nan_in_loss_and_grad is value


@pytest.mark.parametrize("conflicts", ["error", "resolve"])
def test_flags_that_the_parser_has_are_left_alone(conflicts: str) -> None:
    parser = argparse.ArgumentParser(conflict_handler=conflicts)
    parser.add_argument("--optimizer", default="adafactor")
    parser.add_argument("-b", "--bf16", type=int, default=3)
    add_megatron_fsdp_args(parser)
    given = vars(parser.parse_args(["--optimizer", "mine", "-b", "4", "--use-megatron-fsdp"]))
    assert given == {**DEFAULTS, "optimizer": "mine", "bf16": 4, "use_megatron_fsdp": True}


def test_help_says_which_flags_do_nothing_and_why(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    assert "reduce inside the network (here: needs hardware that is not used; it takes switches with SHARP)" in text
    assert "--use-megatron-fsdp shard the model with Megatron FSDP --megatron-fsdp-version" in text


def test_the_documentation_is_what_the_tables_give() -> None:
    pages = runpy.run_path(str(Path(__file__).parents[4] / "docs" / "settings.py"))
    assert pages["FLAGS_PAGE"].read_text(encoding="utf-8") == pages["flags_markdown"](), "run: python docs/settings.py"
    rows = pages["flags_markdown"]().splitlines()
    assert {row.replace("\\|", "").count("|") for row in rows if row.startswith("|")} == {5}


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(line)
    return str(caught.value)


# Per rule, a line that breaks it, the start of the message, and a similar line that is allowed.
LINES = """
--use-megatron-fsdp --use-torch-fsdp2
  --use-megatron-fsdp contradicts --use-torch-fsdp2:
  --use-megatron-fsdp
--use-megatron-fsdp --ckpt-format torch_dcp
  --use-megatron-fsdp needs --ckpt-format fsdp_dtensor (found torch_dcp):
  --use-megatron-fsdp --ckpt-format fsdp_dtensor
--use-megatron-fsdp --optimizer lion
  --use-megatron-fsdp needs --optimizer adam, sgd or muon (found lion):
  --use-megatron-fsdp --optimizer sgd
--outer-dp-sharding-strategy optim --data-parallel-sharding-strategy optim_grads
  --outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params (found
  --outer-dp-sharding-strategy optim --data-parallel-sharding-strategy optim_grads_params
--enable-full-sharding-in-hsdp --data-parallel-sharding-strategy optim
  --enable-full-sharding-in-hsdp needs --data-parallel-sharding-strategy optim_grads_params (found optim):
  --enable-full-sharding-in-hsdp
--init-model-with-meta-device --data-parallel-sharding-strategy no_shard
  --init-model-with-meta-device contradicts --data-parallel-sharding-strategy no_shard:
  --init-model-with-meta-device --data-parallel-sharding-strategy optim
--optimizer-cpu-offload --data-parallel-sharding-strategy optim
  --optimizer-cpu-offload needs --data-parallel-sharding-strategy optim_grads_params (found optim):
  --optimizer-cpu-offload
--megatron-fsdp-version 2 --use-distributed-optimizer
  --megatron-fsdp-version 2 contradicts --use-distributed-optimizer:
  --megatron-fsdp-version 1 --use-distributed-optimizer
--fsdp-manual-registration --use-nccl-ub
  --fsdp-manual-registration needs --use-megatron-fsdp:
  --fsdp-manual-registration --use-nccl-ub --use-megatron-fsdp
--fsdp-manual-registration --use-megatron-fsdp
  --fsdp-manual-registration needs --use-nccl-ub:
  --use-nccl-ub --use-megatron-fsdp
--use-megatron-fsdp --overlap-param-gather
  --overlap-param-gather needs --overlap-grad-reduce:
  --use-megatron-fsdp --overlap-param-gather --overlap-grad-reduce
--overlap-param-gather --overlap-grad-reduce
  --overlap-param-gather needs --use-megatron-fsdp: or --use-distributed-optimizer
  --overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer
--ddp-num-buckets 4 --ddp-bucket-size 1000
  --ddp-num-buckets 4 contradicts --ddp-bucket-size 1000:
  --ddp-num-buckets 4
--bf16 --fp16
  --bf16 contradicts --fp16:
  --fp16
--bf16 --grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32
  --grad-reduce-in-bf16 contradicts --megatron-fsdp-grad-comm-dtype fp32:
  --bf16 --grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype bf16
--fsdp-invariant-reduction
  --fsdp-invariant-reduction needs --use-megatron-fsdp:
  --fsdp-invariant-reduction --use-megatron-fsdp
--fsdp-forward-order
  --fsdp-forward-order needs --use-megatron-fsdp:
  --fsdp-forward-order --use-megatron-fsdp
--async-save --ckpt-format torch
  --async-save needs --ckpt-format fsdp_dtensor or torch_dist (found torch):
  --async-save --ckpt-format fsdp_dtensor
"""
CONTRADICTIONS = [[line.strip() for line in rule.splitlines()] for rule in re.split(r"\n(?=-)", LINES.strip())]


@pytest.mark.parametrize(("broken", "message", "fine"), CONTRADICTIONS, ids=lambda value: value)
def test_a_contradiction_is_refused_with_both_flags_and_a_similar_legal_line_is_not(
    broken: str, message: str, fine: str
) -> None:
    found = refusal(broken)
    assert found.startswith(message)
    assert ";" not in found.removeprefix(message), "one contradiction, one refusal"
    config(fine)


def test_every_rule_is_among_the_contradictions() -> None:
    broken = [{rule for rule in RULES if rule.is_broken(settings(line))} for line, _, _ in CONTRADICTIONS]
    assert all(len(rules) == 1 for rules in broken)
    assert set.union(*broken) == set(RULES)


def settings(line: str) -> Any:
    """Return the values of a command line unchecked, in the shape of a config."""
    args = namespace(line)
    args.is_zero3 = args.data_parallel_sharding_strategy == "optim_grads_params"
    return args


def test_contradictions_are_all_named_at_once() -> None:
    found = refusal("--use-megatron-fsdp --optimizer lion --bf16 --fp16")
    assert "--optimizer adam, sgd or muon (found lion)" in found
    assert "--bf16 contradicts --fp16" in found
