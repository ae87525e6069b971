"""The command line: Megatron-LM's flag names and defaults, checked against each other before anything starts."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_fsdp import ConfigError, FsdpConfig, add_megatron_fsdp_args

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "train_iters", "lr")


def parse_arguments(arguments: Sequence[str], *, num_ranks: int) -> argparse.Namespace:
    """Return checked arguments with every default filled in.

    Args:
        arguments: the command line without the program's name.
        num_ranks: data-parallel size, which the global batch must divide by.
    Raises:
        ConfigError: a flag is unknown (the nearest valid one is named), missing, out of range, or contradicts another
            (both are named).
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown_message(unknown, parser))
    missing = [_flag(name) for name in _REQUIRED if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"required flags are missing: {', '.join(missing)}; --help explains them")
    _fill_defaults(args, num_ranks)
    _check_model(args)
    _check_training(args, num_ranks)
    _check_schedule(args)
    if args.use_megatron_fsdp:
        FsdpConfig.from_args(args)
    return args


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags: the script's own and those of the sharding engine."""
    parser = _Parser(description="Train a byte-level GPT, sharded by megatron_fsdp.", allow_abbrev=False)
    _add_model_flags(parser)
    _add_training_flags(parser)
    _add_optimizer_flags(parser)
    _add_io_flags(parser)
    add_megatron_fsdp_args(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print the whole usage and exit, on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=_positive_int, help="number of transformer layers")
    group.add_argument("--hidden-size", type=_positive_int, help="width of the residual stream")
    group.add_argument("--num-attention-heads", type=_positive_int, help="must divide --hidden-size")
    group.add_argument("--ffn-hidden-size", type=_positive_int, help="width of the MLP, default 4 x --hidden-size")
    group.add_argument("--seq-length", type=_positive_int, help="bytes per sample")
    group.add_argument("--max-position-embeddings", type=_positive_int, help="longest sequence, default --seq-length")
    group.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="give the output layer its own weight"
    )
    group.add_argument("--init-method-std", type=_positive_float, default=0.02, help="standard deviation of weights")


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=_positive_int, help="samples per rank and forward pass")
    group.add_argument(
        "--global-batch-size", type=_positive_int, help="samples per step, default --micro-batch-size x ranks"
    )
    group.add_argument("--train-iters", type=_positive_int, help="optimizer steps in all")
    group.add_argument("--exit-interval", type=_positive_int, help="stop after a step divisible by this")
    group.add_argument("--seed", type=_natural_int, default=1234, help="of weights, data order and sampling")
    group.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    group.add_argument("--fp16", action="store_true", help="refused: it needs loss scaling, which is not here yet")
    group.add_argument(
        "--recompute-granularity",
        choices=["full", "selective"],
        help="recompute in backward: full = whole blocks, selective = the core attention",
    )
    group.add_argument(
        "--recompute-activations", action="store_true", help="the same as --recompute-granularity selective"
    )
    group.add_argument(
        "--distributed-backend", choices=["nccl", "gloo"], help="nccl = GPUs, gloo = CPU; default by what is there"
    )
    group.add_argument("--distributed-timeout-minutes", type=_positive_float, default=10, help="limit of a collective")
    group.add_argument(
        "--agreement-interval",
        type=_natural_int,
        default=1,
        help="steps between comparisons of what ranks did; 0 = none",
    )


def _add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--lr", type=_positive_float, help="peak learning rate")
    group.add_argument("--min-lr", type=_natural_float, default=0.0, help="learning rate at the end of the decay")
    group.add_argument("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear", help="shape")
    group.add_argument("--lr-warmup-iters", type=_natural_int, default=0, help="iterations of linear warm-up")
    group.add_argument("--lr-decay-iters", type=_positive_int, help="end of the decay, default --train-iters")
    group.add_argument("--weight-decay", type=_natural_float, default=0.01, help="for weights of two dims and more")
    group.add_argument("--adam-beta1", type=_fraction, default=0.9, help="decay of the first moment")
    group.add_argument("--adam-beta2", type=_fraction, default=0.999, help="decay of the second moment")
    group.add_argument("--adam-eps", type=_positive_float, default=1e-8, help="added to the denominator")
    group.add_argument("--sgd-momentum", type=_fraction, default=0.9, help="with --optimizer sgd")
    group.add_argument("--clip-grad", type=_natural_float, default=1.0, help="largest global norm; 0 = measure only")
    group.add_argument(
        "--skip-nonfinite-steps",
        action="store_true",
        help="leave steps out whose gradients have NaN, instead of stopping",
    )


def _add_io_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data, checkpoints, log")
    group.add_argument("--data-path", type=Path, help="text file or folder, default the Python library's sources")
    group.add_argument("--eval-interval", type=_positive_int, default=1000, help="steps between validations")
    group.add_argument("--eval-iters", type=_natural_int, default=100, help="global batches per validation; 0 = none")
    group.add_argument("--save", type=Path, help="folder of checkpoints, log and loss curve")
    group.add_argument("--save-interval", type=_positive_int, help="steps between checkpoints, default only at the end")
    group.add_argument("--keep-last", type=_positive_int, help="checkpoints to keep in --save, default all")
    group.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    group.add_argument("--load", type=Path, help="folder of checkpoints to resume from, when it holds any")
    group.add_argument("--log-interval", type=_positive_int, default=100, help="steps between log lines")
    group.add_argument("--prompt", type=_text, default="def ", help="what the trained model continues at the end")
    group.add_argument("--num-tokens-to-generate", type=_natural_int, default=200, help="bytes it adds; 0 = none")
    group.add_argument("--temperature", type=_natural_float, default=0.7, help="of that sample; 0 = most likely byte")


def _fill_defaults(args: argparse.Namespace, num_ranks: int) -> None:
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * num_ranks
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters


def _check_model(args: argparse.Namespace) -> None:
    if args.hidden_size % args.num_attention_heads:
        raise ConfigError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {args.num_attention_heads}; "
            f"every head must have the same width"
        )
    if args.seq_length > args.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {args.seq_length} exceeds --max-position-embeddings {args.max_position_embeddings}; "
            f"positions beyond it have no embedding"
        )
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise ConfigError(
                "--recompute-activations means --recompute-granularity selective and contradicts "
                "--recompute-granularity full; give one of them"
            )
        args.recompute_granularity = "selective"


def _check_training(args: argparse.Namespace, num_ranks: int) -> None:
    if args.skip_nonfinite_steps and not args.check_for_nan_in_loss_and_grad:
        raise ConfigError("--skip-nonfinite-steps contradicts --no-check-for-nan-in-loss-and-grad; give one of them")
    samples = args.micro_batch_size * num_ranks
    if args.global_batch_size % samples:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
            f"{args.micro_batch_size} x {num_ranks} ranks = {samples}; the nearest that fits is "
            f"{max(1, round(args.global_batch_size / samples)) * samples}"
        )
    if args.fp16:
        also = " and contradicts --bf16" if args.bf16 else ""
        raise ConfigError(f"--fp16 needs loss scaling, which is not here yet{also}; use --bf16 or neither (fp32)")
    if args.save_interval is not None and args.save is None:
        raise ConfigError(f"--save-interval {args.save_interval} without --save: name the folder with --save")
    if args.keep_last is not None and args.save is None:
        raise ConfigError(f"--keep-last {args.keep_last} without --save: name the folder with --save")
    if args.optimizer not in ("adam", "sgd"):
        raise ConfigError(f"--optimizer {args.optimizer} is not here yet; wanted adam or sgd")


def _check_schedule(args: argparse.Namespace) -> None:
    if args.min_lr > args.lr:
        raise ConfigError(f"--min-lr {args.min_lr} exceeds --lr {args.lr}; the rate decays from --lr to --min-lr")
    if args.lr_warmup_iters > args.train_iters:
        raise ConfigError(
            f"--lr-warmup-iters {args.lr_warmup_iters} exceeds --train-iters {args.train_iters}; "
            f"training would end before the warm-up"
        )
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ConfigError(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves no decay before --lr-decay-iters {args.lr_decay_iters} "
            f"(default: --train-iters)"
        )


def _unknown_message(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    valid = [option for action in parser._actions for option in action.option_strings]
    given = [word.split("=")[0] for word in unknown if word.startswith("-")]
    if not given:
        return f"unexpected argument {unknown[0]!r}: every option is a --flag, and its flag takes no such value"
    messages = []
    for flag in given:
        nearest = difflib.get_close_matches(flag, valid, n=1, cutoff=0.0)[0]
        messages.append(f"unknown flag {flag}; the nearest valid flag is {nearest}")
    return "\n".join(messages)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(cast: Callable[[str], float], is_valid: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = cast(text)
        except ValueError:
            value = float("nan")
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"found {text!r}, wanted {wanted}")
        return value

    return parse


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("found nothing, wanted at least one character")
    return text


_positive_int = _number(int, lambda value: value >= 1, "a whole number >= 1")
_natural_int = _number(int, lambda value: value >= 0, "a whole number >= 0")
_positive_float = _number(float, lambda value: 0 < value < float("inf"), "a number > 0")
_natural_float = _number(float, lambda value: 0 <= value < float("inf"), "a number >= 0")
_fraction = _number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
