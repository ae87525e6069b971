"""The flags of the training script: names, defaults and ranges as in Megatron-LM."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gpt.learning_rate import DECAY_STYLES, WSD_DECAY_STYLES
from gpt.tokenizer import add_tokenizer_flags
from megatron_fsdp import ConfigError, add_megatron_fsdp_args
from megatron_fsdp.command_parser import CommandParser
from megatron_fsdp.muon import COEFFICIENT_SETS

EXAMPLES = """\
  torchrun --nproc-per-node 2 examples/pretrain_gpt.py --use-megatron-fsdp --num-layers 4 --hidden-size 192 \\
      --num-attention-heads 6 --seq-length 128 --micro-batch-size 8 --train-iters 300 --lr 2e-3 --save runs/gpt
  the same with --load runs/gpt --train-iters 600     go on from the latest checkpoint
  the same with --data-path my/text                   learn other files"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags: the script's own and those of the sharding engine."""
    parser = _Parser("pretrain_gpt.py", "Train a byte-level GPT, sharded by megatron_fsdp.", EXAMPLES)
    _add_model_flags(parser)
    _add_architecture_flags(parser)
    _add_parallelism_flags(parser)
    _add_training_flags(parser)
    _add_optimizer_flags(parser)
    _add_io_flags(parser)
    add_megatron_fsdp_args(parser)
    return parser


class _Parser(CommandParser):
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


def _add_architecture_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("architecture")
    group.add_argument("--swiglu", action="store_true", help="gated MLP; --ffn-hidden-size is then 8/3 x --hidden-size")
    group.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="of the blocks")
    group.add_argument("--norm-epsilon", type=_positive_float, default=1e-5, help="added to the variance")
    group.add_argument(
        "--position-embedding-type",
        choices=["learned_absolute", "rope", "none"],
        default="learned_absolute",
        help="how the model knows positions: added vectors, turned queries and keys, or by the causal mask alone",
    )
    group.add_argument("--rotary-base", type=_positive_int, default=10_000, help="longest wave of rope")
    group.add_argument("--group-query-attention", action="store_true", help="query heads share keys and values")
    group.add_argument("--num-query-groups", type=_positive_int, default=1, help="heads of keys and values then")
    group.add_argument("--disable-bias-linear", action="store_true", help="no biases in linear layers")
    group.add_argument("--num-experts", type=_positive_int, help="MLPs per block for a router to choose from")
    group.add_argument("--moe-router-topk", type=_positive_int, default=2, help="experts that each token uses")
    group.add_argument(
        "--moe-router-pre-softmax", action="store_true", help="weigh experts by the softmax over all, not the chosen"
    )
    group.add_argument(
        "--moe-aux-loss-coeff", type=_natural_float, default=0.0, help="of the load balancing loss; 1e-2 is usual"
    )


def _add_parallelism_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    group.add_argument(
        "--tensor-model-parallel-size", type=_positive_int, default=1, help="ranks that share each layer of a block"
    )
    group.add_argument(
        "--expert-model-parallel-size", type=_positive_int, default=1, help="ranks that share the experts of a block"
    )


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=_positive_int, help="samples per rank and forward pass")
    group.add_argument(
        "--global-batch-size", type=_positive_int, help="samples per step, default --micro-batch-size x ranks"
    )
    group.add_argument("--train-iters", type=_positive_int, help="optimizer steps in all")
    group.add_argument("--exit-interval", type=_positive_int, help="stop after a step divisible by this")
    group.add_argument("--exit-duration-in-mins", type=_positive_float, help="save and stop after this many minutes")
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
        "--check-gradient-scale",
        action="store_true",
        help="before the first step, measure what reduced gradients are of the ranks' own",
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
    group.add_argument(
        "--replica-interval", type=_natural_int, default=0, help="steps between comparisons of replicas; 0 = none"
    )


def _add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--lr", type=_positive_float, help="peak learning rate")
    group.add_argument("--min-lr", type=_natural_float, default=0.0, help="learning rate at the end of the decay")
    group.add_argument("--lr-decay-style", choices=DECAY_STYLES, default="linear", help="shape after the warm-up")
    group.add_argument(
        "--lr-wsd-decay-style", choices=WSD_DECAY_STYLES, default="exponential", help="shape of WSD's end"
    )
    group.add_argument("--lr-wsd-decay-iters", type=_positive_int, help="iterations of WSD's end")
    group.add_argument("--lr-warmup-iters", type=_natural_int, default=0, help="iterations of linear warm-up")
    group.add_argument("--lr-decay-iters", type=_positive_int, help="end of the decay, default --train-iters")
    group.add_argument("--weight-decay", type=_natural_float, default=0.01, help="for weights of two dims and more")
    group.add_argument("--adam-beta1", type=_fraction, default=0.9, help="decay of the first moment")
    group.add_argument("--adam-beta2", type=_fraction, default=0.999, help="decay of the second moment")
    group.add_argument("--adam-eps", type=_positive_float, default=1e-8, help="added to the denominator")
    group.add_argument("--sgd-momentum", type=_fraction, default=0.9, help="with --optimizer sgd")
    _add_muon_flags(group)
    group.add_argument("--clip-grad", type=_natural_float, default=1.0, help="largest global norm; 0 = measure only")
    group.add_argument(
        "--skip-nonfinite-steps",
        action="store_true",
        help="leave steps out whose gradients have NaN, instead of stopping",
    )


def _add_muon_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--muon-momentum", type=_fraction, default=0.95, help="with --optimizer muon")
    group.add_argument(
        "--muon-no-split-qkv",
        action="store_false",
        dest="muon_split_qkv",
        help="make one matrix of queries, keys and values instead of three",
    )
    group.add_argument("--muon-use-nesterov", action="store_true", help="look ahead by one momentum")
    group.add_argument(
        "--muon-scale-mode",
        choices=["spectral", "unit_rms_norm", "shape_scaling"],
        default="spectral",
        help="factor of a matrix's learning rate",
    )
    group.add_argument(
        "--muon-extra-scale-factor",
        type=_positive_float,
        default=1.0,
        help="multiplies it; 0.2 makes spectral updates as large as AdamW's",
    )
    group.add_argument("--muon-num-ns-steps", type=_positive_int, default=5, help="steps of Newton-Schulz")
    group.add_argument(
        "--muon-coefficient-type",
        choices=list(COEFFICIENT_SETS),
        default="quintic",
        help="coefficients of the steps",
    )
    group.add_argument(
        "--muon-fp32-matmul-prec",
        choices=["low", "medium", "high", "highest"],
        default="medium",
        help="low and medium: bf16 products on GPUs; the others, and all on the CPU: FP32",
    )

    group.add_argument(
        "--adam-moments",
        choices=["fp32", "int8"],
        default="fp32",
        help="of Adam: int8 keeps 8-bit codes with a scale for each 256 elements, 2.03 bytes per parameter for both",
    )
    group.add_argument(
        "--weight-gather",
        choices=["fp8", "mxfp8", "int8_block"],
        default=None,
        help="with --use-megatron-fsdp: matrices travel in 8 bits, quantized from the main weights",
    )
    group.add_argument(
        "--slot-pool",
        choices=["by_size", "largest", "static"],
        help="with --use-megatron-fsdp: gathered weights and packed gradients lie in memory that stays",
    )
    group.add_argument(
        "--adam-moments-seed", type=int, default=None, help="round these codes stochastically, by this seed"
    )


def _add_io_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data, checkpoints, log")
    group.add_argument(
        "--data-path",
        nargs="+",
        metavar="WORD",
        help="text file or folder, prefix of an indexed data set, or a blend (0.3 a 0.7 b); default Python's sources",
    )
    group.add_argument("--split", help="shares of training, validation and test in indexed data, default 969,30,1")
    add_tokenizer_flags(group)
    group.add_argument("--make-vocab-size-divisible-by", type=_positive_int, default=128, help="pads the vocabulary")
    group.add_argument("--eod-mask-loss", action="store_true", help="what follows the end of a document does not count")
    group.add_argument("--eval-interval", type=_positive_int, default=1000, help="steps between validations")
    group.add_argument("--eval-iters", type=_natural_int, default=100, help="global batches per validation; 0 = none")
    group.add_argument("--save", type=Path, help="folder of checkpoints, log and loss curve")
    group.add_argument("--save-interval", type=_positive_int, help="steps between checkpoints, default only at the end")
    group.add_argument("--keep-last", type=_positive_int, help="checkpoints to keep in --save, default all")
    group.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    group.add_argument("--load", type=Path, help="folder of checkpoints to resume from; may be new if it is --save")
    group.add_argument("--log-interval", type=_positive_int, default=100, help="steps between log lines")
    group.add_argument(
        "--log-checksum", type=_positive_int, metavar="N", help="log 64 bits of weights and moments every N steps"
    )
    group.add_argument("--log-checksum-per-unit", action="store_true", help="and those of each unit, for bisect")
    group.add_argument("--tensorboard-dir", type=Path, help="write the log's numbers for TensorBoard too")
    group.add_argument(
        "--profile", action="store_true", help="write a Chrome trace and a picture of some steps into --save"
    )
    group.add_argument("--profile-step-start", type=_positive_int, default=10, help="first step of the trace")
    group.add_argument("--profile-step-end", type=_positive_int, default=12, help="first step after the trace")
    group.add_argument("--profile-ranks", type=_natural_int, nargs="+", default=[0], help="ranks that write a trace")
    add_sampling_flags(group)


def add_sampling_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of a text that the model continues."""
    parser.add_argument("--prompt", type=_text, default="def ", help="what the trained model continues")
    parser.add_argument("--num-tokens-to-generate", type=_natural_int, default=200, help="tokens it adds; 0 = none")
    parser.add_argument("--temperature", type=_natural_float, default=0.7, help="of that sample; 0 = most likely token")


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
