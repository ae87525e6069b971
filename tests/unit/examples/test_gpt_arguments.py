"""The command line: defaults, refusals that name both sides, and the page that explains it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from gpt.arguments import build_parser, flags_without_engine, idle_flags, parse_arguments
from gpt.megatron_flags import NOT_HERE
from gpt.model import GptConfig
from gpt.optimizer import learning_rate
from megatron_fsdp import ConfigError

VALID = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 12 --train-iters 50 --lr 0.01"
)
ENGINE = "--use-megatron-fsdp"
TENSOR, EXPERT = "--tensor-model-parallel-size", "--expert-model-parallel-size"
PAGE = (Path(__file__).parents[3] / "docs" / "training_script.md").read_text()


def refusal(flags: str, num_ranks: int = 2, valid: str = VALID) -> str:
    """Return the error message for a command line."""
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*valid.split(), *flags.split()], num_ranks=num_ranks)
    return str(caught.value)


def test_missing_flags_are_derived_from_given_ones() -> None:
    args = parse_arguments(VALID.replace("--global-batch-size 12", "").split(), num_ranks=3)
    derived = (args.ffn_hidden_size, args.max_position_embeddings, args.global_batch_size, args.lr_decay_iters)
    assert derived == (96, 16, 6, 50)
    assert flags_without_engine(args) == []
    given = "--ffn-hidden-size 40 --max-position-embeddings 20 --lr-decay-iters 30"
    args = parse_arguments([*VALID.split(), *given.split()], num_ranks=2)
    assert (args.ffn_hidden_size, args.max_position_embeddings, args.lr_decay_iters) == (40, 20, 30)


def test_the_defaults_are_megatron_s() -> None:
    args = vars(parse_arguments(VALID.split(), num_ranks=1))
    wanted = {"seed": 1234, "min_lr": 0.0, "lr_decay_style": "linear", "lr_warmup_iters": 0, "weight_decay": 0.01}
    wanted |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 1.0, "init_method_std": 0.02}
    wanted |= {"log_interval": 100, "eval_interval": 1000, "eval_iters": 100, "distributed_timeout_minutes": 10}
    wanted |= dict.fromkeys(["save", "save_interval", "load", "exit_interval"])
    wanted |= dict.fromkeys(["untie_embeddings_and_output_weights", "bf16", "use_megatron_fsdp"], False)
    assert {name: args[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--num-layer 3", "--num-layers"),
        ("--micro_batch_size=3", "--micro-batch-size"),
        ("--use-megatron-fdsp", "--use-megatron-fsdp"),
        ("--hidden 3", "--hidden-size"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_valid_one(given: str, nearest: str) -> None:
    wanted = f"unknown option {re.split('[ =]', given)[0]}. fix: use {nearest}, the most similar one"
    assert refusal(given) == wanted
    assert refusal(given, valid="") == wanted, "rather than that others are missing"
    for flag in [flag for flag in VALID.split()[::2] if flag != "--global-batch-size"]:
        missing = refusal("", valid=re.sub(rf"{flag} \S+", "", VALID))
        assert missing.startswith(f"required flags are missing: {flag}. fix: ")


def test_all_unknown_flags_are_reported_at_once() -> None:
    wanted = "unknown options --num-layer, --hidden. fix: use --num-layers, --hidden-size, the most similar ones"
    assert refusal("--num-layer 3 --hidden=7 --num-layer 4") == wanted


def test_flags_of_megatron_are_not_taken_for_misspelled_ones() -> None:
    said = "--pipeline-model-parallel-size, --use-flash-attn are flags of Megatron-LM that this script does not have"
    assert refusal("--pipeline-model-parallel-size 2 --use-flash-attn").startswith(said)
    assert "unknown" not in refusal("--sequence-parallel")
    both = refusal("--sequence-parallel --num-layer 3")
    assert both.startswith(f"{refusal('--num-layer 3')}. --sequence-parallel is a flag of")


def test_no_flag_of_the_script_is_listed_as_missing() -> None:
    has = {option for action in build_parser()._actions for option in action.option_strings}
    assert has & NOT_HERE == set()


def test_samples_decide_the_length_and_the_schedule() -> None:
    flags = VALID.replace("--train-iters 50", "--train-samples 100 --lr-warmup-samples 18 --lr-decay-style cosine")
    args = parse_arguments(flags.split(), num_ranks=2)
    assert (args.train_iters, args.lr_decay_iters, args.lr_warmup_iters) == (8, 100 / 12, 1.5)
    args = parse_arguments([*VALID.split(), "--lr-warmup-fraction", "0.1"], num_ranks=2)
    assert args.lr_warmup_iters == 5
    assert learning_rate(args, 1) == pytest.approx(0.01 / 5)
    assert learning_rate(args, 5) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-samples 5", "--train-iters 50 contradicts --train-samples 5"),
        ("--lr-warmup-samples 5", "--lr-warmup-samples 5 contradicts --train-iters: "),
        ("--lr-decay-samples 5", "--lr-decay-samples 5 contradicts --train-iters: "),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-fraction 0.1 contradicts --lr-warmup-iters 2"),
        ("--mock-data --data-path text", "--mock-data contradicts --data-path"),
        ("--finetune", "--finetune needs --load"),
        ("--finetune --load . --save .", "--finetune contradicts --save . and --load ., the same folder"),
        ("--no-save-optim", "--no-save-optim needs --save"),
        ("--no-load-optim", "--no-load-optim needs --load"),
        ("--wandb-exp-name a", "--wandb-exp-name a and --wandb-save-dir None need --wandb-project"),
        (f"{ENGINE} {TENSOR} 2 --attention-dropout 0.1", f"--attention-dropout 0.1 contradicts {TENSOR} 2"),
        (
            f"{ENGINE} --check-gradient-scale --hidden-dropout 0.1",
            "--check-gradient-scale contradicts --hidden-dropout",
        ),
        ("stray", "unexpected argument 'stray'"),
        ("--num-layers 0", "argument --num-layers: found '0'. fix: give a whole number >= 1"),
        ("--num-layers 2.5", "argument --num-layers: found '2.5'. fix: give a whole number >= 1"),
        ("--lr nan", "argument --lr: found 'nan'. fix: give a number > 0"),
        ("--clip-grad -1", "argument --clip-grad: found '-1'. fix: give a number >= 0"),
        ("--adam-beta2 1", "argument --adam-beta2: found '1'. fix: give a number from 0 to below 1"),
        ("--prompt=", "argument --prompt: found ''. fix: give at least one character"),
        ("--hidden-size 25", "--hidden-size 25 is not divisible by --num-attention-heads 4, "),
        ("--max-position-embeddings 15", "--seq-length 16 exceeds --max-position-embeddings 15, "),
        ("--global-batch-size 13", "--global-batch-size 13 is not divisible by --micro-batch-size 2 x 2 data-parallel"),
        ("--save-interval 5", "--save-interval 5 and --keep-last None need --save"),
        ("--keep-last 2", "--save-interval None and --keep-last 2 need --save"),
        ("--min-lr 0.1", "--min-lr 0.1 exceeds --lr 0.01"),
        ("--lr-warmup-iters 20 --lr-decay-iters 20", "--lr-warmup-iters 20 leaves no decay before --lr-decay-iters 20"),
        ("--num-query-groups 2", "--num-query-groups 2 needs --group-query-attention"),
        ("--group-query-attention --num-query-groups 3", "--num-attention-heads 4 is not divisible by --num-query-gro"),
        ("--position-embedding-type rope --hidden-size 12", "--position-embedding-type rope turns pairs of features"),
        ("--num-experts 1", "--moe-router-topk 2 exceeds --num-experts 1"),
        ("--num-experts 3 --moe-router-topk 1", "--moe-router-topk 1 needs --moe-router-pre-softmax"),
        ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1 needs --num-experts"),
        ("--fp16", "--fp16 needs loss scaling"),
        ("--skip-nonfinite-steps --no-check-for-nan-in-loss-and-grad", "--skip-nonfinite-steps contradicts --no-check"),
        ("--profile --profile-step-start 4 --profile-step-end 4", "--profile-step-start 4 is not before --profile-st"),
        ("--optimizer lion", "--optimizer"),
        ("--adam-moments int8 --optimizer sgd", "--adam-moments int8 contradicts --optimizer sgd"),
        ("--slot-pool largest", "--weight-gather None and --slot-pool largest need --use-megatron-fsdp"),
        ("--use-torch-fsdp2 --save run", "--use-torch-fsdp2 contradicts --save run and --load None"),
        (
            "--use-torch-fsdp2 --num-distributed-optimizer-instances 2",
            "--use-torch-fsdp2 contradicts --num-distributed",
        ),
        (f"{TENSOR} 2", f"{TENSOR} 2 with {EXPERT} 1 needs --use-megatron-fsdp"),
        (f"{ENGINE} {TENSOR} 3", f"{TENSOR} 3 does not divide 4, the number of ranks"),
        (f"{ENGINE} {TENSOR} 2 --num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances 3 doe"),
        (f"{ENGINE} {EXPERT} 2", f"{EXPERT} 2 does not divide --num-experts None"),
        (f"{ENGINE} {EXPERT} 2 --num-experts 3", f"{EXPERT} 2 does not divide --num-experts 3"),
        (f"{ENGINE} {TENSOR} 2 {EXPERT} 4 --num-experts 4", f"{EXPERT} 4 does not divide 2"),
        (f"{ENGINE} {TENSOR} 2 --swiglu", f"{TENSOR} 2 contradicts --swiglu"),
        (f"{ENGINE} {EXPERT} 2 --num-experts 4 --optimizer muon", f"{TENSOR} 1 with {EXPERT} 2 contradicts --optimize"),
        (f"{ENGINE} {TENSOR} 2 --adam-moments int8", f"{TENSOR} 2 with {EXPERT} 1 contradicts --adam-moments int8"),
        (f"{ENGINE} {TENSOR} 2 --num-attention-heads 3", f"{TENSOR} 2 does not divide the 3 heads of keys and values"),
        (f"{ENGINE} {TENSOR} 2 --ffn-hidden-size 5", f"{TENSOR} 2 does not divide the 5 columns of --ffn-hidden-size"),
        (f"{ENGINE} {TENSOR} 2 --log-checksum 2", f"--log-checksum contradicts {TENSOR} 2"),
        ("--check-gradient-scale", "--check-gradient-scale needs --use-megatron-fsdp"),
        ("--fake-process-group --load run", "--fake-process-group contradicts --save None and --load run"),
        ("--use-torch-fsdp2 --optimizer muon", "--use-torch-fsdp2 contradicts --optimizer muon"),
        *(
            (
                f"{ENGINE} --global-batch-size 16 --weight-gather int8_block {flag}",
                "--weight-gather int8_block needs --data-parallel-sharding",
            )
            for flag in ("--data-parallel-sharding-strategy optim", "--optimizer-cpu-offload")
        ),
        ("--seed 18446744073709551616", "argument --seed: found '18446744073709551616'. fix: give a whole number"),
        ("--data-path=", "argument --data-path: found ''. fix: give at least one character"),
        ("--num-layers", "argument --num-layers: expected one argument. fix: follow pretrain_gpt.py --help"),
    ],
)
def test_values_out_of_range_or_contradicting_flags_are_refused_by_name(flags: str, message: str) -> None:
    found = refusal(flags, num_ranks=4 if ENGINE in flags else 2)
    assert found.startswith(message), found
    assert "fix: " in found


def test_flags_that_do_nothing_without_another_one_are_named_with_it() -> None:
    given = "--sgd-momentum 0.5 --async-save --profile-step-start 3 --replica-interval 2 --moe-router-pre-softmax"
    args = parse_arguments([*VALID.split(), *given.split()], num_ranks=2)
    assert sorted(idle_flags(args)) == [
        "--async-save does nothing: it needs --save",
        "--moe-router-pre-softmax does nothing: it needs --num-experts",
        "--profile-step-start 3 does nothing: it needs --profile",
        "--replica-interval 2 does nothing: it needs --use-megatron-fsdp",
        "--sgd-momentum 0.5 does nothing: it needs --optimizer sgd",
    ]
    used = f"{given} {ENGINE} --optimizer sgd --profile --num-experts 2 --save run"
    assert idle_flags(parse_arguments([*VALID.split(), *used.split()], num_ranks=2)) == []


def test_the_model_s_flags_reach_its_configuration() -> None:
    given = "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 50 --disable-bias-linear"
    experts = "--num-experts 3 --moe-aux-loss-coeff 0.1 --group-query-attention"
    config = GptConfig.from_args(parse_arguments([*VALID.split(), *given.split(), *experts.split()], num_ranks=1))
    wanted = GptConfig(2, 24, 4, 64, 16, swiglu=True, normalization="RMSNorm", position_embedding_type="rope")
    more: dict[str, Any] = {"num_experts": 3, "moe_aux_loss_coeff": 0.1, "num_query_groups": 1}
    assert config == dataclasses.replace(wanted, rotary_base=50, disable_bias_linear=True, **more)


def test_every_flag_on_the_page_exists_and_every_flag_of_the_architecture_is_on_it() -> None:
    parser = build_parser()
    valid = {option for action in parser._actions for option in action.option_strings}
    elsewhere = {"--help", "--nproc-per-node", "--max-restarts"}
    assert set(re.findall(r"--[a-z][a-z0-9-]*", PAGE)) - elsewhere <= valid
    (group,) = (group for group in parser._action_groups if group.title == "architecture")
    flags = [option for action in group._group_actions for option in action.option_strings]
    assert len(flags) > 10
    assert [action.option_strings for action in parser._actions if not action.help] == []
    assert [flag for flag in flags if f"`{flag}`" not in PAGE] == []
