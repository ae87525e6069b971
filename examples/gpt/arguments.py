"""The command line: Megatron-LM's flag names and defaults, checked against each other before anything starts."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpt.data import build_tokenizer
from gpt.megatron_flags import NOT_HERE
from megatron_fsdp import ConfigError, FsdpConfig, add_megatron_fsdp_args
from megatron_fsdp.command_parser import CommandParser
from megatron_fsdp.config.flags import FLAGS
from megatron_fsdp.muon import COEFFICIENT_SETS

_EXAMPLES = """\
  torchrun --nproc-per-node 2 examples/pretrain_gpt.py --use-megatron-fsdp --num-layers 4 --hidden-size 192 \\
      --num-attention-heads 6 --seq-length 128 --micro-batch-size 8 --train-iters 300 --lr 2e-3 --save runs/gpt
  the same with --load runs/gpt --train-iters 600     go on from the latest checkpoint"""
# Name; how to read the value, bool for a switch, list for several words, or the choices; default; meaning.
_Row = tuple[str, Any, Any, str]


_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")
# Flags of the library's table that a replicated model serves as well.
_OF_THE_SCRIPT = frozenset(
    "use_megatron_fsdp calculate_per_token_loss bf16 fp16 optimizer ckpt_format strict_fsdp_dtensor_load async_save "
    "clip_grad check_for_nan_in_loss_and_grad check_for_large_grads dump_param_to_param_group_map "
    "fake_process_group use_torch_fsdp2 torch_fsdp2_reshard_after_forward".split()
)


def parse_arguments(arguments: Sequence[str], *, num_ranks: int) -> argparse.Namespace:
    """Return the checked arguments of a job of ``num_ranks``, with every default filled in.

    Raises:
        ConfigError: flags are unknown (the nearest are named), missing, out of range, or contradict each other.
    """
    args = build_parser().parse_args(arguments)
    missing = [_flag(name) for name in _REQUIRED if getattr(args, name) is None]
    if args.train_iters is None and args.train_samples is None:
        missing.append("--train-iters")
    if missing:
        raise ConfigError(f"required flags are missing: {', '.join(missing)}. fix: give them; --help explains them")
    _check_units_of_time(args)
    _fill_defaults(args, num_ranks)
    spelled = {name: f"{_flag(name)} {value}" for name, value in vars(args).items()}
    for is_wrong, message in _REFUSALS:
        if is_wrong(args):
            raise ConfigError(message.format(**spelled, found=args))
    if args.use_megatron_fsdp:
        FsdpConfig.from_args(args)
    if args.fake_process_group:
        args.check_for_nan_in_loss_and_grad = args.skip_nonfinite_steps = False
        args.num_tokens_to_generate = 0
    if args.load is not None and not args.load.is_dir():
        check_load(args, args.load, "there is no such folder")
    return args


def check_load(args: argparse.Namespace, folder: Path, found: str) -> None:
    """Raise ConfigError if ``--load`` has no checkpoint; ``found`` describes the folder.

    If ``--load`` and ``--save`` name the same folder, the run starts from the beginning instead.
    """
    if args.save is None or folder.resolve() != args.save.resolve():
        raise ConfigError(
            f"--load {folder}: {found}. fix: give the --save folder of an earlier run, or leave --load out to start "
            "from new weights; if --save and --load name the same folder, the first start is from new weights and "
            "later starts resume"
        )


def flags_without_engine(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given and do nothing without ``--use-megatron-fsdp``."""
    given = [flag for flag in FLAGS if getattr(args, flag.dest) not in (flag.default, [])]
    return [flag.spell(getattr(args, flag.dest)) for flag in given if flag.dest not in _OF_THE_SCRIPT]


def idle_flags(args: argparse.Namespace) -> list[str]:
    """Return a sentence for each of the script's own flags that was given and does nothing without another one."""
    parser, found = build_parser(), []
    for name, is_used, needed in _NEEDS:
        value = getattr(args, name)
        if value != parser.get_default(name) and not is_used(args):
            spelled = _flag(name) if value is True else f"{_flag(name)} {value}"
            found.append(f"{spelled} does nothing: it needs {needed}")
    return found


def _check_units_of_time(args: argparse.Namespace) -> None:
    """Raise ConfigError for two lengths of the run or its warm-up, or for iterations mixed with samples."""
    if args.train_iters is not None and args.train_samples is not None:
        raise ConfigError(
            f"--train-iters {args.train_iters} contradicts --train-samples {args.train_samples}. fix: give one of them"
        )
    given = [name for name in ("iters", "samples") if getattr(args, f"lr_warmup_{name}")]
    if args.lr_warmup_fraction is not None and given:
        raise ConfigError(
            f"--lr-warmup-fraction {args.lr_warmup_fraction} contradicts --lr-warmup-{given[0]} "
            f"{getattr(args, f'lr_warmup_{given[0]}')}. fix: give one of them"
        )
    right, wrong = ("iters", "samples") if args.train_samples is None else ("samples", "iters")
    for name in ("lr_warmup", "lr_decay"):
        if value := getattr(args, f"{name}_{wrong}"):
            raise ConfigError(
                f"{_flag(name)}-{wrong} {value} contradicts --train-{right}: the schedule counts what the run counts. "
                f"fix: give {_flag(name)}-{right}"
            )


def _fill_defaults(args: argparse.Namespace, num_ranks: int) -> None:
    """Set the values that follow from the given flags, and those that error messages name."""
    size, multiple = build_tokenizer(args.tokenizer_model).vocabulary_size, args.make_vocab_size_divisible_by
    args.padded_vocab_size = -(-size // multiple) * multiple
    args.num_ranks, args.data_parallel_size = num_ranks, num_ranks // args.tensor_model_parallel_size
    args.ranks_per_instance = args.data_parallel_size // args.num_distributed_optimizer_instances
    args.head_dim = args.hidden_size // args.num_attention_heads
    args.key_heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    # Megatron's rule for SwiGLU: about as many weights as without, in steps of 64
    gated = max(64, int(4 * args.hidden_size * 2 / 3) // 64 * 64)
    derived = {
        "ffn_hidden_size": gated if args.swiglu else 4 * args.hidden_size,
        "max_position_embeddings": args.seq_length,
        "global_batch_size": args.micro_batch_size * args.data_parallel_size,
    }
    for name, value in derived.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    batch = args.global_batch_size
    if args.train_samples is not None:
        args.train_iters = args.train_samples // batch
        # Megatron's schedule counts samples: its iterations need not be whole.
        args.lr_decay_iters = (args.lr_decay_samples or args.train_samples) / batch
        args.lr_warmup_iters = args.lr_warmup_samples / batch
    elif args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if args.lr_warmup_fraction is not None:
        args.lr_warmup_iters = args.lr_warmup_fraction * args.lr_decay_iters


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_cut(args: argparse.Namespace) -> bool:
    return bool(args.tensor_model_parallel_size * args.expert_model_parallel_size > 1)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags: the script's own and those of the sharding engine."""
    parser = _Parser("pretrain_gpt.py", "Train a byte-level GPT, sharded by megatron_fsdp.", _EXAMPLES)
    for title, rows in _FLAGS.items():
        add_flags(parser.add_argument_group(title), rows)
    return add_megatron_fsdp_args(parser)


def add_flags(parser: argparse._ActionsContainer, rows: Sequence[_Row]) -> None:
    """Add rows of a table of flags."""
    for name, kind, default, meaning in rows:
        options: dict[str, Any] = {"type": kind, "default": default}
        if kind is bool:
            options = {"action": "store_true"}
        elif isinstance(kind, tuple):
            options = {"choices": kind, "default": default}
        elif kind is list:
            options = {"type": _text, "nargs": "+", "default": default, "metavar": "WORD"}
        parser.add_argument(name, help=meaning, **options)


class _Parser(CommandParser):
    """Raises ConfigError where argparse would print the whole usage and exit, on every rank."""

    def unknown(self, flags: Sequence[str]) -> str:
        """Return what to say of flags that the script does not have: Megatron-LM's own are no misspelled ones."""
        others = [flag for flag in flags if flag in NOT_HERE]
        misspelled = [flag for flag in flags if flag not in NOT_HERE]
        verb, them = ("is a flag", "it") if len(others) == 1 else ("are flags", "them")
        told = f"{', '.join(others)} {verb} of Megatron-LM that this script does not have. fix: leave {them} out"
        return ". ".join([super().unknown(misspelled)] * bool(misspelled) + [told] * bool(others))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.with_fix(message))


def _checked(cast: Callable[[str], Any], is_valid: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_valid(value := cast(text)):
                return value
        raise argparse.ArgumentTypeError(f"found {text!r}. fix: give {wanted}")

    return parse


_count = _checked(int, lambda value: value >= 1, "a whole number >= 1")
_natural = _checked(int, lambda value: value >= 0, "a whole number >= 0")
_positive = _checked(float, lambda value: 0 < value < float("inf"), "a number > 0")
_nonnegative = _checked(float, lambda value: 0 <= value < float("inf"), "a number >= 0")
_seed = _checked(int, lambda value: 0 <= value < 2**64, "a whole number from 0 to below 2**64")
_text = _checked(str, bool, "at least one character")
_fraction = _checked(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")

# Rows stay rows: the formatter would give every field a line of its own.
# fmt: off
SAMPLING: tuple[_Row, ...] = (
    ("--prompt", _text, "def ", "what the trained model continues"),
    ("--num-tokens-to-generate", _natural, 200, "tokens it adds; 0 = none"),
    ("--temperature", _nonnegative, 0.7, "of that sample; 0 = most likely token"),
)
_FLAGS: dict[str, tuple[_Row, ...]] = {
    "model": (
        ("--num-layers", _count, None, "number of transformer layers"),
        ("--hidden-size", _count, None, "width of the residual stream"),
        ("--num-attention-heads", _count, None, "must divide --hidden-size"),
        ("--ffn-hidden-size", _count, None, "width of the MLP, default 4 x --hidden-size"),
        ("--seq-length", _count, None, "tokens per sample"),
        ("--max-position-embeddings", _count, None, "longest sequence, default --seq-length"),
        ("--untie-embeddings-and-output-weights", bool, False, "give the output layer its own weight"),
        ("--init-method-std", _positive, 0.02, "standard deviation of weights"),
    ),
    "architecture": (
        ("--swiglu", bool, False, "gated MLP; --ffn-hidden-size is then 8/3 x --hidden-size"),
        ("--normalization", ("LayerNorm", "RMSNorm"), "LayerNorm", "of the blocks"),
        ("--norm-epsilon", _positive, 1e-5, "added to the variance"),
        ("--position-embedding-type", ("learned_absolute", "rope", "none"), "learned_absolute",
         "how the model knows positions: added vectors, turned queries and keys, or by the causal mask alone"),
        ("--rotary-base", _count, 10_000, "longest wave of rope"),
        ("--group-query-attention", bool, False, "query heads share keys and values"),
        ("--num-query-groups", _count, 1, "heads of keys and values then"),
        ("--disable-bias-linear", bool, False, "no biases in linear layers"),
        ("--num-experts", _count, None, "MLPs per block for a router to choose from"),
        ("--moe-router-topk", _count, 2, "experts that each token uses"),
        ("--moe-router-pre-softmax", bool, False, "weigh experts by the softmax over all, not the chosen"),
        ("--moe-aux-loss-coeff", _nonnegative, 0.0, "of the load balancing loss; 1e-2 is usual"),
    ),
    "parallelism": (
        ("--tensor-model-parallel-size", _count, 1, "ranks that share each layer of a block"),
        ("--expert-model-parallel-size", _count, 1, "ranks that share the experts of a block"),
        ("--weight-gather", ("int8_block",), None, "matrices travel in 8 bits"),
        ("--slot-pool", ("by_size", "largest"), None,
         "with --use-megatron-fsdp: gathered weights and packed gradients lie in memory that stays"),
        ("--distributed-backend", ("nccl", "gloo"), None, "nccl = GPUs, gloo = CPU; default by what is there"),
        ("--distributed-timeout-minutes", _positive, 10, "limit of a collective"),
        ("--agreement-interval", _natural, 1, "steps between comparisons of what ranks did; 0 = none"),
        ("--replica-interval", _natural, 0, "steps between comparisons of replicas; 0 = none"),
    ),
    "training": (
        ("--micro-batch-size", _count, None, "samples per rank and forward pass"),
        ("--global-batch-size", _count, None, "samples per step, default --micro-batch-size x ranks"),
        ("--train-iters", _count, None, "optimizer steps in all"),
        ("--train-samples", _count, None, "samples in all, in place of --train-iters"),
        ("--exit-interval", _count, None, "stop after a step divisible by this"),
        ("--seed", _seed, 1234, "of weights, data order and sampling"),
        ("--bf16", bool, False, "compute in bfloat16"),
        ("--fp16", bool, False, "refused: it needs loss scaling, which is not here yet"),
        ("--hidden-dropout", _fraction, 0.0, "of embeddings and of what blocks add to the stream; Megatron: 0.1"),
        ("--attention-dropout", _fraction, 0.0, "of attention's weights; Megatron: 0.1"),
        ("--recompute-granularity", ("full",), None, "recompute whole blocks in backward"),
        ("--skip-nonfinite-steps", bool, False, "leave steps out whose gradients have NaN, instead of stopping"),
        ("--check-gradient-scale", bool, False,
         "before the first step, measure what reduced gradients are of the ranks' own"),
    ),
    "optimizer": (
        ("--lr", _positive, None, "peak learning rate"),
        ("--min-lr", _nonnegative, 0.0, "learning rate at the end of the decay"),
        ("--lr-decay-style", ("constant", "linear", "cosine"), "linear", "shape after the warm-up"),
        ("--lr-warmup-iters", _natural, 0, "iterations of linear warm-up"),
        ("--lr-warmup-fraction", _fraction, None, "the same as a share of the decay"),
        ("--lr-warmup-samples", _natural, 0, "the same in samples; with --train-samples"),
        ("--lr-decay-iters", _count, None, "end of the decay, default --train-iters"),
        ("--lr-decay-samples", _count, None, "the same in samples; default --train-samples"),
        ("--weight-decay", _nonnegative, 0.01, "for weights of two dims and more"),
        ("--adam-beta1", _fraction, 0.9, "decay of the first moment"),
        ("--adam-beta2", _fraction, 0.999, "decay of the second moment"),
        ("--adam-eps", _positive, 1e-8, "added to the denominator"),
        ("--adam-moments", ("fp32", "int8"), "fp32", "int8: codes with a scale for each 256 elements"),
        ("--sgd-momentum", _fraction, 0.9, "with --optimizer sgd"),
        ("--muon-momentum", _fraction, 0.95, "with --optimizer muon"),
        ("--muon-no-split-qkv", bool, False, "make one matrix of queries, keys and values instead of three"),
        ("--muon-use-nesterov", bool, False, "look ahead by one momentum"),
        ("--muon-scale-mode", ("spectral", "unit_rms_norm", "shape_scaling"), "spectral",
         "factor of a matrix's learning rate"),
        ("--muon-extra-scale-factor", _positive, 1.0, "multiplies it; 0.2 makes spectral updates as large as AdamW's"),
        ("--muon-num-ns-steps", _count, 5, "steps of Newton-Schulz"),
        ("--muon-coefficient-type", tuple(COEFFICIENT_SETS), "quintic", "coefficients of the steps"),
        ("--muon-fp32-matmul-prec", ("low", "medium", "high", "highest"), "medium",
         "low and medium: bf16 products on GPUs; the others, and all on the CPU: FP32"),
        ("--clip-grad", _nonnegative, 1.0, "largest global norm; 0 = measure only"),
    ),
    "data, checkpoints, log": (
        ("--data-path", list, None,
         "text file or folder, prefix of an indexed data set, or a blend (0.3 a 0.7 b); default Python's sources"),
        ("--mock-data", bool, False, "train on random bytes, to measure; in place of --data-path"),
        ("--num-workers", _natural, 0, "threads that read the next step's samples; 0 = the step reads them itself"),
        ("--split", str, None, "shares of training, validation and test in indexed data, default 969,30,1"),
        ("--tokenizer-model", Path, None, "local tokenizer.json of indexed data; default bytes"),
        ("--make-vocab-size-divisible-by", _count, 128, "pads the vocabulary"),
        ("--eod-mask-loss", bool, False, "what follows the end of a document does not count"),
        ("--eval-interval", _count, 1000, "steps between validations"),
        ("--eval-iters", _natural, 100, "global batches per validation; 0 = none"),
        ("--save", Path, None, "folder of checkpoints, log and loss curve"),
        ("--save-interval", _count, None, "steps between checkpoints, default only at the end"),
        ("--keep-last", _count, None, "checkpoints to keep in --save, default all"),
        ("--async-save", bool, False, "write checkpoints while training goes on"),
        ("--load", Path, None, "folder of checkpoints to resume from; may be new if it is --save"),
        ("--finetune", bool, False, "take weights alone from --load, and start at iteration 0"),
        ("--no-load-optim", bool, False, "go on without the optimizer state of --load"),
        ("--no-save-optim", bool, False, "save no optimizer state; --no-load-optim goes on from there"),
        ("--log-throughput", bool, False, "log TFLOP/s of each rank, and MFU where the GPU's peak is known"),
        ("--tensorboard-dir", Path, None, "folder for TensorBoard's events"),
        ("--wandb-project", str, None, "project of Weights & Biases to log to"),
        ("--wandb-exp-name", str, None, "name of the run there"),
        ("--wandb-save-dir", Path, None, "folder for its files"),
        ("--log-interval", _count, 100, "steps between log lines"),
        ("--log-checksum", _count, None, "log 64 bits of weights and moments every so many steps"),
        ("--log-checksum-per-unit", bool, False, "and those of each unit"),
        ("--profile", bool, False, "write a Chrome trace of some steps into --save"),
        ("--profile-step-start", _count, 10, "first step of the trace"),
        ("--profile-step-end", _count, 12, "first step after the trace"),
        *SAMPLING,
    ),
}

# Flags that act only together with others; what they need, in words.
_NEEDS: tuple[tuple[str, Callable[[argparse.Namespace], bool], str], ...] = (
    ("rotary_base", lambda a: a.position_embedding_type == "rope", "--position-embedding-type rope"),
    ("moe_router_topk", lambda a: a.num_experts is not None, "--num-experts"),
    ("moe_router_pre_softmax", lambda a: a.num_experts is not None, "--num-experts"),
    ("agreement_interval", lambda a: a.use_megatron_fsdp, "--use-megatron-fsdp"),
    ("replica_interval", lambda a: a.use_megatron_fsdp, "--use-megatron-fsdp"),
    ("min_lr", lambda a: a.lr_decay_style != "constant", "--lr-decay-style linear or cosine"),
    *((f"adam_{name}", lambda a: a.optimizer != "sgd", "--optimizer adam or muon")
      for name in ("beta1", "beta2", "eps")),
    ("sgd_momentum", lambda a: a.optimizer == "sgd", "--optimizer sgd"),
    *((f"muon_{name}", lambda a: a.optimizer in ("muon", "dist_muon"), "--optimizer muon")
      for name in ("momentum", "no_split_qkv", "use_nesterov", "scale_mode", "extra_scale_factor", "num_ns_steps",
                   "coefficient_type", "fp32_matmul_prec")),
    ("async_save", lambda a: a.save is not None, "--save"),
    ("eval_interval", lambda a: a.eval_iters > 0, "--eval-iters"),
    ("profile_step_start", lambda a: a.profile, "--profile"),
    ("profile_step_end", lambda a: a.profile, "--profile"),
)

# Checks in this order, with their error messages: {lr} is the flag with its value, {found.lr} the value alone.
_REFUSALS: tuple[tuple[Callable[[argparse.Namespace], Any], str], ...] = (
    (lambda a: a.num_ranks % a.tensor_model_parallel_size,
     "{tensor_model_parallel_size} does not divide {found.num_ranks}, the number of ranks. fix: use a divisor"),
    (lambda a: a.data_parallel_size % a.num_distributed_optimizer_instances,
     "{num_distributed_optimizer_instances} does not divide {found.data_parallel_size}, the data-parallel ranks. fix: "
     "use a divisor"),
    (lambda a: a.ranks_per_instance % a.expert_model_parallel_size,
     "{expert_model_parallel_size} does not divide {found.ranks_per_instance}, the data-parallel ranks of an "
     "instance. fix: use a divisor"),
    (lambda a: _is_cut(a) and not a.use_megatron_fsdp,
     "{tensor_model_parallel_size} with {expert_model_parallel_size} needs --use-megatron-fsdp, because a replica is "
     "whole. fix: give it"),
    (lambda a: a.expert_model_parallel_size > 1 and (a.num_experts or 1) % a.expert_model_parallel_size,
     "{expert_model_parallel_size} does not divide {num_experts}, and every rank has as many experts. fix: use a "
     "divisor"),
    (lambda a: _is_cut(a) and a.optimizer in ("muon", "dist_muon"),
     "{tensor_model_parallel_size} with {expert_model_parallel_size} contradicts {optimizer}, which needs whole "
     "matrices on the data-parallel ranks. fix: use --optimizer adam"),
    (lambda a: _is_cut(a) and a.adam_moments == "int8",
     "{tensor_model_parallel_size} with {expert_model_parallel_size} contradicts {adam_moments}, whose blocks of 256 "
     "elements would depend on it. fix: leave one out"),
    (lambda a: a.key_heads % a.tensor_model_parallel_size,
     "{tensor_model_parallel_size} does not divide the {found.key_heads} heads of keys and values. fix: use a divisor"),
    (lambda a: a.ffn_hidden_size % a.tensor_model_parallel_size,
     "{tensor_model_parallel_size} does not divide the {found.ffn_hidden_size} columns of --ffn-hidden-size. fix: use "
     "a divisor"),
    (lambda a: a.tensor_model_parallel_size > 1 and a.swiglu,
     "{tensor_model_parallel_size} contradicts --swiglu: PyTorch's ColwiseParallel would give one rank all gates and "
     "another all values. fix: leave one out"),
    (lambda a: a.hidden_size % a.num_attention_heads,
     "{hidden_size} is not divisible by {num_attention_heads}, and heads have one width. fix: use a multiple"),
    (lambda a: a.seq_length > a.max_position_embeddings,
     "{seq_length} exceeds {max_position_embeddings}, beyond which no position has an embedding. fix: raise the "
     "second"),
    (lambda a: a.position_embedding_type == "rope" and a.head_dim % 2,
     "{position_embedding_type} turns pairs of features: {hidden_size} / {num_attention_heads} is odd. fix: make it "
     "even"),
    (lambda a: a.num_attention_heads % a.key_heads,
     "{num_attention_heads} is not divisible by {num_query_groups}, and groups have equal numbers of heads. fix: use "
     "a divisor for the second"),
    (lambda a: a.num_query_groups != 1 and not a.group_query_attention,
     "{num_query_groups} needs --group-query-attention. fix: give both"),
    (lambda a: a.moe_aux_loss_coeff and a.num_experts is None,
     "{moe_aux_loss_coeff} needs --num-experts. fix: give both"),
    (lambda a: a.num_experts is not None and a.moe_router_topk > a.num_experts,
     "{moe_router_topk} exceeds {num_experts}. fix: lower the first"),
    (lambda a: a.num_experts is not None and a.moe_router_topk == 1 and not a.moe_router_pre_softmax,
     "{moe_router_topk} needs --moe-router-pre-softmax: the softmax over one chosen expert is always 1, and the router "
     "would learn nothing. fix: give it"),
    (lambda a: a.check_gradient_scale and (not a.use_megatron_fsdp or a.fake_process_group),
     "--check-gradient-scale needs --use-megatron-fsdp without --fake-process-group, because it measures reductions. "
     "fix: leave it out, or change these two"),
    (lambda a: a.check_gradient_scale and a.fsdp_invariant_reduction,
     "--check-gradient-scale contradicts --fsdp-invariant-reduction: it measures one microbatch, and gradients are "
     "divided by the number of those of a step. fix: measure without the second"),
    (lambda a: a.check_gradient_scale and (a.hidden_dropout or a.attention_dropout),
     "--check-gradient-scale contradicts {hidden_dropout} and {attention_dropout}: it compares backwards of one "
     "microbatch, whose dropped elements differ. fix: measure without dropout"),
    (lambda a: a.attention_dropout and a.tensor_model_parallel_size > 1,
     "{attention_dropout} contradicts {tensor_model_parallel_size}: these ranks drop the same elements, of different "
     "heads. fix: use --hidden-dropout alone"),
    (lambda a: a.train_iters < 1,
     "{train_samples} is less than {global_batch_size}: not one step. fix: raise the first"),
    (lambda a: a.mock_data and a.data_path,
     "--mock-data contradicts --data-path. fix: give one of them"),
    (lambda a: a.finetune and a.load is None,
     "--finetune needs --load. fix: name the --save folder of the run whose weights it takes"),
    (lambda a: a.finetune and a.save is not None and a.save.resolve() == a.load.resolve(),
     "--finetune contradicts {save} and {load}, the same folder: it would write iteration 1 next to the old ones. "
     "fix: name "
     "another --save"),
    (lambda a: a.no_save_optim and a.save is None, "--no-save-optim needs --save. fix: name the folder"),
    (lambda a: a.no_load_optim and a.load is None, "--no-load-optim needs --load. fix: name the folder"),
    (lambda a: a.wandb_project is None and (a.wandb_exp_name or a.wandb_save_dir),
     "{wandb_exp_name} and {wandb_save_dir} need --wandb-project. fix: give it"),
    (lambda a: a.log_checksum_per_unit and a.log_checksum is None,
     "--log-checksum-per-unit needs --log-checksum N. fix: give both"),
    (lambda a: a.log_checksum and a.use_torch_fsdp2,
     "--log-checksum contradicts --use-torch-fsdp2: where elements lie in whole weights is not known there. fix: "
     "leave out --log-checksum"),
    (lambda a: a.log_checksum and _is_cut(a),
     "--log-checksum contradicts {tensor_model_parallel_size} with {expert_model_parallel_size}: where elements lie in "
     "whole weights is not known there. fix: leave out --log-checksum"),
    (lambda a: a.skip_nonfinite_steps and not a.check_for_nan_in_loss_and_grad,
     "--skip-nonfinite-steps contradicts --no-check-for-nan-in-loss-and-grad. fix: give one of them"),
    (lambda a: a.global_batch_size % (a.micro_batch_size * a.data_parallel_size),
     "{global_batch_size} is not divisible by {micro_batch_size} x {found.data_parallel_size} data-parallel ranks. "
     "fix: use a multiple"),
    (lambda a: a.fp16, "--fp16 needs loss scaling, which is not here yet. fix: use --bf16 or neither (fp32)"),
    (lambda a: a.save is None and (a.save_interval or a.keep_last),
     "{save_interval} and {keep_last} need --save. fix: name the folder"),
    (lambda a: a.optimizer not in ("adam", "sgd", "muon", "dist_muon"),
     "{optimizer} is not supported. fix: --optimizer adam, sgd or muon"),
    (lambda a: a.adam_moments != "fp32" and a.optimizer != "adam",
     "{adam_moments} contradicts {optimizer}. fix: leave one out"),
    (lambda a: a.fsdp_invariant_reduction and not a.use_megatron_fsdp,
     "--fsdp-invariant-reduction needs --use-megatron-fsdp, which keeps the order of sums. fix: give both"),
    (lambda a: not a.use_megatron_fsdp and (a.weight_gather or a.slot_pool),
     "{weight_gather} and {slot_pool} need --use-megatron-fsdp. fix: give it"),
    (lambda a: a.use_torch_fsdp2 and not a.use_megatron_fsdp and (a.save or a.load),
     "--use-torch-fsdp2 contradicts {save} and {load}: this script saves and loads what megatron_fsdp sharded, or "
     "replicas. fix: leave them out (the log goes to runs/gpt)"),
    (lambda a: a.use_torch_fsdp2 and not a.use_megatron_fsdp and a.num_distributed_optimizer_instances != 1,
     "--use-torch-fsdp2 contradicts {num_distributed_optimizer_instances}: it shards over all ranks here. fix: leave "
     "one out"),
    (lambda a: a.use_torch_fsdp2 and not a.use_megatron_fsdp and a.optimizer in ("muon", "dist_muon"),
     "--use-torch-fsdp2 contradicts {optimizer}, which shares out the matrices that megatron_fsdp sharded. fix: use "
     "--optimizer adam"),
    (lambda a: a.weight_gather and (a.data_parallel_sharding_strategy != "optim_grads_params"
                                    or a.outer_dp_sharding_strategy == "optim" or a.enable_full_sharding_in_hsdp
                                    or a.optimizer_cpu_offload),
     "{weight_gather} needs --data-parallel-sharding-strategy optim_grads_params without --outer-dp-sharding-strategy "
     "optim and --optimizer-cpu-offload: weights are packed where the main weights' shards are. fix: leave one out"),
    (lambda a: a.min_lr > a.lr,
     "{min_lr} exceeds {lr}, and the rate decays from the second to the first. fix: lower the first"),
    (lambda a: a.lr_warmup_iters >= a.lr_decay_iters,
     "{lr_warmup_iters} leaves no decay before {lr_decay_iters} (default: --train-iters). fix: lower the first"),
    (lambda a: a.profile and a.profile_step_start >= a.profile_step_end,
     "{profile_step_start} is not before {profile_step_end}: no step would be recorded. fix: raise the second"),
    (lambda a: a.fake_process_group and (a.save or a.load),
     "--fake-process-group contradicts {save} and {load}: weights and losses mean nothing. fix: leave them out"),
    (lambda a: a.fake_process_group and "TORCHELASTIC_RUN_ID" in os.environ,
     "--fake-process-group is for one process. fix: WORLD_SIZE=64 python examples/pretrain_gpt.py ..."),
)
# fmt: on
