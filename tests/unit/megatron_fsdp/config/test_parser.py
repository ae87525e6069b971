"""The flags: Megatron's names, defaults and choices, beside what a parser has already."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.config.parser import FLAGS, RULES, Effect, Flag, add_megatron_fsdp_args, flag_of, flags_markdown
from megatron_fsdp.errors import ConfigError
from tests.unit.megatron_fsdp.config.lines import config, namespace

# As Megatron-LM documents them: attribute, default.
DEFAULTS = {
    "use_megatron_fsdp": False,
    "megatron_fsdp_version": 1,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "outer_dp_sharding_strategy": "no_shard",
    "num_distributed_optimizer_instances": 1,
    "enable_full_sharding_in_hsdp": False,
    "init_model_with_meta_device": False,
    "megatron_fsdp_main_params_dtype": "fp32",
    "megatron_fsdp_main_grads_dtype": "auto",
    "megatron_fsdp_grad_comm_dtype": "auto",
    "megatron_fsdp_enable_fine_grained_param_gather": False,
    "suggested_communication_unit_size": None,
    "create_all_gather_group": False,
    "keep_fp8_transpose_cache": False,
    "fsdp_double_buffer": False,
    "megatron_fsdp_max_pool_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "nccl_ub": False,
    "disable_symmetric_registration": False,
    "fsdp_manual_registration": False,
    "use_torch_fsdp2": False,
    "torch_fsdp2_reshard_after_forward": True,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "align_param_gather": True,
    "gradient_reduce_div_fusion": True,
    "ddp_num_buckets": None,
    "ddp_bucket_size": None,
    "ddp_pad_buckets_for_high_nccl_busbw": False,
    "ddp_reduce_scatter_with_fp32_accumulation": False,
    "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    "ddp_average_in_collective": False,
    "grad_reduce_in_bf16": False,
    "calculate_per_token_loss": False,
    "gradient_accumulation_fusion": True,
    "use_distributed_optimizer": False,
    "use_sharp": False,
    "sharp_enabled_group": None,
    "fsdp_invariant_reduction": False,
    "high_priority_stream_groups": [],
    "bf16": False,
    "fp16": False,
    "optimizer": "adam",
    "use_precision_aware_optimizer": False,
    "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "optimizer_cuda_graph": False,
    "cuda_graph_impl": "none",
    "ckpt_format": "torch_dist",
    "strict_fsdp_dtensor_load": True,
    "dist_ckpt_strictness": "assume_ok_unexpected",
    "async_save": False,
    "clip_grad": 1.0,
    "check_for_nan_in_loss_and_grad": True,
    "check_for_large_grads": False,
    "dump_param_to_param_group_map": None,
    "fake_process_group": False,
}
CHOICES = {
    "--megatron-fsdp-version": {"1", "2"},
    "--data-parallel-sharding-strategy": {"no_shard", "optim", "optim_grads", "optim_grads_params"},
    "--outer-dp-sharding-strategy": {"no_shard", "optim"},
    "--megatron-fsdp-main-params-dtype": {"fp32", "bf16", "fp16", "auto"},
    "--megatron-fsdp-main-grads-dtype": {"fp32", "bf16", "fp16", "auto"},
    "--megatron-fsdp-grad-comm-dtype": {"fp32", "bf16", "fp16", "auto"},
    "--sharp-enabled-group": {"dp", "dp_replica"},
    "--optimizer": {"adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"},
    "--main-grads-dtype": {"fp32", "bf16"},
    "--main-params-dtype": {"fp32", "fp16"},
    "--exp-avg-dtype": {"fp32", "fp16", "bf16", "fp8"},
    "--exp-avg-sq-dtype": {"fp32", "fp16", "bf16", "fp8"},
    "--cuda-graph-impl": {"none", "local", "transformer_engine", "full_iteration"},
    "--ckpt-format": {"torch", "torch_dist", "torch_dcp", "fsdp_dtensor"},
    "--dist-ckpt-strictness": {
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    },
}
# Those whose attribute is not the flag with underscores.
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


@pytest.mark.parametrize("name", CHOICES)
def test_the_choices_are_megatron_s(name: str, parser: argparse.ArgumentParser) -> None:
    assert {str(choice) for choice in parser._option_string_actions[name].choices or ()} == CHOICES[name]
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        parser.parse_args([name, "3"])


def test_flags_without_listed_choices_have_none() -> None:
    assert {flag.name for flag in FLAGS if flag.choices} == set(CHOICES)


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


def test_adding_the_flags_twice_changes_nothing(parser: argparse.ArgumentParser) -> None:
    before = dict(parser._option_string_actions)
    assert add_megatron_fsdp_args(parser)._option_string_actions == before


def test_help_says_which_flags_do_nothing_and_why(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    assert "reduce inside the network (here: needs hardware that is not used; it takes switches with SHARP)" in text
    assert "--use-megatron-fsdp shard the model with Megatron FSDP --megatron-fsdp-version" in text


def test_flags_are_found_by_name_and_by_attribute() -> None:
    assert flag_of("--use-nccl-ub") is flag_of("nccl_ub")
    with pytest.raises(KeyError):
        flag_of("--use-nccl")


def test_the_documentation_is_what_the_table_gives() -> None:
    written = (Path(__file__).parents[4] / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == flags_markdown(), "run: python -m megatron_fsdp.config.parser > docs/flags.md"


def test_every_flag_has_one_row_with_its_meaning_and_effect() -> None:
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in flags_markdown().splitlines()]
    for flag in FLAGS:
        wanted = [flag.meaning, f"{flag.effect.value}: {flag.here}"]
        assert sum(row[0] == f"`{flag.name}`" and row[2:] == wanted for row in rows) == 1, flag.name


def test_no_text_of_a_flag_or_rule_breaks_its_row() -> None:
    texts = [text for flag in FLAGS for text in (flag.name, flag.meaning, flag.here, *map(str, flag.choices))]
    texts += [text for rule in RULES for text in (rule.first, rule.relation, rule.second, rule.reason)]
    assert [text for text in texts if "|" in text or "\n" in text] == []


def test_only_acting_flags_have_an_effect() -> None:
    assert {flag.effect for flag in FLAGS if not flag.is_silent} == {Effect.ACTS}


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(line)
    return str(caught.value)


# By rule: a line that breaks it, how the message starts, and a line next to it that is fine.
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
--async-save --ckpt-format torch
  --async-save needs --ckpt-format fsdp_dtensor or torch_dist (found torch):
  --async-save --ckpt-format fsdp_dtensor
--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor
  --use-torch-fsdp2 needs --ckpt-format torch_dist or torch_dcp (found fsdp_dtensor):
  --use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dcp
--use-torch-fsdp2 --no-gradient-accumulation-fusion --use-distributed-optimizer
  --use-torch-fsdp2 contradicts --use-distributed-optimizer:
  --use-torch-fsdp2 --no-gradient-accumulation-fusion
--use-torch-fsdp2 --no-gradient-accumulation-fusion --fp16
  --use-torch-fsdp2 contradicts --fp16:
  --use-torch-fsdp2 --no-gradient-accumulation-fusion --bf16
--use-torch-fsdp2
  --use-torch-fsdp2 needs --no-gradient-accumulation-fusion:
  --use-torch-fsdp2 --no-gradient-accumulation-fusion
"""
CONTRADICTIONS = [[line.strip() for line in rule.splitlines()] for rule in re.split(r"\n(?=-)", LINES.strip())]


@pytest.mark.parametrize(("broken", "message", "fine"), CONTRADICTIONS, ids=lambda value: value)
def test_a_contradiction_is_refused_once_with_both_flags_and_the_set_next_to_it_is_not(
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
