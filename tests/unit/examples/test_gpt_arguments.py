"""The command line: defaults, and refusals that name both sides."""

from pathlib import Path

import pytest

from gpt.arguments import parse_arguments
from gpt.flags import build_parser
from gpt.model_config import GptConfig
from megatron_fsdp import ConfigError

VALID = {
    "--num-layers": "2",
    "--hidden-size": "24",
    "--num-attention-heads": "3",
    "--seq-length": "16",
    "--micro-batch-size": "2",
    "--global-batch-size": "12",
    "--train-iters": "50",
    "--lr": "0.01",
}


def command_line(*extra: str, without: str | None = None, **changes: str) -> list[str]:
    """Return a valid command line with flags changed (as keywords, underscores for dashes), added or left out."""
    flags = {**VALID, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return [word for flag, value in flags.items() if flag != without for word in (flag, value)] + list(extra)


def refusal(*extra: str, num_ranks: int = 2, without: str | None = None, **changes: str) -> str:
    """Return the message with which a command line is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_arguments(command_line(*extra, without=without, **changes), num_ranks=num_ranks)
    return str(caught.value)


def test_what_is_not_given_follows_from_what_is() -> None:
    args = parse_arguments(command_line(without="--global-batch-size"), num_ranks=3)
    derived = (args.ffn_hidden_size, args.max_position_embeddings, args.global_batch_size, args.lr_decay_iters)
    assert derived == (96, 16, 6, 50)


def test_what_is_given_is_kept() -> None:
    args = parse_arguments(
        command_line(ffn_hidden_size="40", max_position_embeddings="20", lr_decay_iters="30", data_path="a/b"),
        num_ranks=2,
    )
    kept = (args.ffn_hidden_size, args.max_position_embeddings, args.lr_decay_iters, args.data_path)
    assert kept == (40, 20, 30, Path("a/b"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1234),
        ("min_lr", 0.0),
        ("lr_decay_style", "linear"),
        ("lr_warmup_iters", 0),
        ("weight_decay", 0.01),
        ("adam_beta1", 0.9),
        ("adam_beta2", 0.999),
        ("adam_eps", 1e-8),
        ("clip_grad", 1.0),
        ("init_method_std", 0.02),
        ("log_interval", 100),
        ("eval_interval", 1000),
        ("eval_iters", 100),
        ("save", None),
        ("save_interval", None),
        ("load", None),
        ("exit_interval", None),
        ("distributed_timeout_minutes", 10),
        ("untie_embeddings_and_output_weights", False),
        ("bf16", False),
        ("use_megatron_fsdp", False),
    ],
)
def test_the_defaults_are_megatron_s(name: str, value: object) -> None:
    assert getattr(parse_arguments(command_line(), num_ranks=1), name) == value


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        (("--num-layer", "3"), "--num-layers"),
        (("--micro_batch_size=3",), "--micro-batch-size"),
        (("--use-megatron-fdsp",), "--use-megatron-fsdp"),
        (("--hidden", "3"), "--hidden-size"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_valid_one(given: tuple[str, ...], nearest: str) -> None:
    assert refusal(*given) == f"unknown option {given[0].split('=')[0]}; did you mean {nearest}?"


def test_a_misspelt_required_flag_is_called_unknown_rather_than_missing() -> None:
    assert "did you mean --num-layers?" in refusal("--num-layer", "3", without="--num-layers")


def test_a_value_without_a_flag_is_refused() -> None:
    assert "unexpected argument 'stray'" in refusal("stray")


@pytest.mark.parametrize("flag", [flag for flag in VALID if flag != "--global-batch-size"])
def test_a_required_flag_that_is_missing_is_named(flag: str) -> None:
    assert refusal(without=flag).startswith(f"required flags are missing: {flag};")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": "0"}, "argument --num-layers: found '0', wanted a whole number >= 1"),
        ({"num_layers": "2.5"}, "argument --num-layers: found '2.5', wanted a whole number >= 1"),
        ({"lr": "nan"}, "argument --lr: found 'nan', wanted a number > 0"),
        ({"clip_grad": "-1"}, "argument --clip-grad: found '-1', wanted a number >= 0"),
        ({"adam_beta2": "1"}, "argument --adam-beta2: found '1', wanted a number from 0 to below 1"),
        ({"prompt": ""}, "argument --prompt: found nothing, wanted at least one character"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(changes: dict[str, str], message: str) -> None:
    assert refusal(**changes) == message


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"hidden_size": "25"}, ("--hidden-size 25", "--num-attention-heads 3")),
        ({"max_position_embeddings": "15"}, ("--seq-length 16", "--max-position-embeddings 15")),
        ({"global_batch_size": "13"}, ("--global-batch-size 13", "--micro-batch-size 2 x 2 ranks = 4")),
        ({"save_interval": "5"}, ("--save-interval 5", "--save:")),
        ({"min_lr": "0.1"}, ("--min-lr 0.1", "--lr 0.01")),
        ({"lr_warmup_iters": "51"}, ("--lr-warmup-iters 51", "--train-iters 50")),
        ({"lr_warmup_iters": "20", "lr_decay_iters": "20"}, ("--lr-warmup-iters 20", "--lr-decay-iters 20")),
        ({"num_query_groups": "3"}, ("--num-query-groups 3", "--group-query-attention")),
        ({"position_embedding_type": "rope", "hidden_size": "27"}, ("--hidden-size 27", "rope")),
        ({"num_experts": "1"}, ("--moe-router-topk 2", "--num-experts 1")),
        ({"num_experts": "3", "moe_router_topk": "1"}, ("--moe-router-topk 1", "--moe-router-pre-softmax")),
        ({"moe_aux_loss_coeff": "0.1"}, ("--moe-aux-loss-coeff 0.1", "--num-experts")),
    ],
    ids=lambda value: next(iter(value)),
)
def test_flags_that_contradict_each_other_are_both_named(changes: dict[str, str], both: tuple[str, str]) -> None:
    message = refusal(**changes)
    assert all(flag in message for flag in both), message


def test_a_global_batch_that_does_not_divide_gets_the_nearest_that_does() -> None:
    assert refusal(global_batch_size="13", num_ranks=3).endswith("the nearest that fits is 12")
    assert refusal(global_batch_size="1", num_ranks=3).endswith("the nearest that fits is 6")


def test_whether_the_global_batch_divides_depends_on_the_ranks() -> None:
    assert parse_arguments(command_line(), num_ranks=3).global_batch_size == 12
    assert "x 4 ranks = 8" in refusal(num_ranks=4)


def test_fp16_is_refused_for_want_of_loss_scaling() -> None:
    assert "--fp16 needs loss scaling" in refusal("--fp16")
    assert "contradicts --bf16" in refusal("--fp16", "--bf16")


def test_recompute_activations_means_selective() -> None:
    assert parse_arguments(command_line("--recompute-activations"), num_ranks=2).recompute_granularity == "selective"
    assert "contradicts" in refusal("--recompute-activations", "--recompute-granularity", "full")


def test_query_groups_divide_the_heads() -> None:
    message = refusal("--group-query-attention", num_query_groups="2")
    assert "--num-attention-heads 3 is not divisible by --num-query-groups 2" in message


def test_the_model_s_flags_reach_its_configuration() -> None:
    given = "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 50 --disable-bias-linear"
    experts = "--num-experts 3 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --group-query-attention"
    config = GptConfig.from_args(parse_arguments(command_line(*given.split(), *experts.split()), num_ranks=1))
    assert config == GptConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        ffn_hidden_size=64,
        max_position_embeddings=16,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        rotary_base=50,
        disable_bias_linear=True,
        num_experts=3,
        moe_aux_loss_coeff=0.1,
        num_query_groups=1,
    )


def test_a_gated_mlp_has_megatron_s_width() -> None:
    args = parse_arguments(command_line("--swiglu", hidden_size="192"), num_ranks=1)
    assert args.ffn_hidden_size == 512


def test_every_flag_explains_itself() -> None:
    assert [action.option_strings for action in build_parser()._actions if not action.help] == []
