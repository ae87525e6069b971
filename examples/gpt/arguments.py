"""The command line: Megatron-LM's flag names and defaults, checked against each other before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from gpt.checkpoint import check_load
from gpt.flags import build_parser
from gpt.meshes import data_parallel_size
from gpt.tensorboard import check_tensorboard
from gpt.tokenizer import vocabulary_size
from megatron_fsdp import ConfigError, FsdpConfig
from megatron_fsdp.config.parser import FLAGS

# Flags of the table that a replicated model serves as well.
_OF_THE_SCRIPT = frozenset(
    "use_megatron_fsdp calculate_per_token_loss bf16 fp16 optimizer ckpt_format strict_fsdp_dtensor_load async_save "
    "clip_grad check_for_nan_in_loss_and_grad check_for_large_grads dump_param_to_param_group_map "
    "fake_process_group use_torch_fsdp2 torch_fsdp2_reshard_after_forward".split()
)
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "train_iters", "lr")


def parse_arguments(arguments: Sequence[str], *, num_ranks: int) -> argparse.Namespace:
    """Return checked arguments with every default filled in.

    Args:
        arguments: the command line without the program's name.
        num_ranks: of the job.
    Raises:
        ConfigError: a flag is unknown (the nearest valid one is named), missing, out of range, or contradicts another
            (both are named).
    """
    parser = build_parser()
    args = parser.parse_args(arguments)
    missing = [_flag(name) for name in _REQUIRED if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"required flags are missing: {', '.join(missing)}; --help explains them")
    args.data_parallel_size = data_parallel_size(args, num_ranks)
    _fill_defaults(args, args.data_parallel_size)
    _check_model(args)
    _check_architecture(args)
    _check_parallelism(args)
    _check_checksum(args)
    _check_training(args, args.data_parallel_size)
    _check_torch_fsdp2(args)
    _check_schedule(args)
    _check_log(args)
    if args.fake_process_group:
        _settle_fake_ranks(args)
    if args.use_megatron_fsdp:
        FsdpConfig.from_args(args)
    else:
        _check_without_engine(args)
    if args.load is not None and not args.load.is_dir():
        check_load(args, args.load, "there is no such folder")
    return args


def _fill_defaults(args: argparse.Namespace, num_ranks: int) -> None:
    if args.data_path is not None and len(args.data_path) == 1:
        args.data_path = Path(args.data_path[0])
    args.padded_vocab_size = vocabulary_size(args)
    if args.ffn_hidden_size is None:
        # Megatron's rule for SwiGLU: about as many weights as without, in steps of 64
        gated = max(64, int(4 * args.hidden_size * 2 / 3) // 64 * 64)
        args.ffn_hidden_size = gated if args.swiglu else 4 * args.hidden_size
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


def _check_architecture(args: argparse.Namespace) -> None:
    head_dim = args.hidden_size // args.num_attention_heads
    if args.position_embedding_type == "rope" and head_dim % 2:
        raise ConfigError(
            f"--position-embedding-type rope turns pairs of features: --hidden-size {args.hidden_size} / "
            f"--num-attention-heads {args.num_attention_heads} = {head_dim} is odd"
        )
    if args.group_query_attention and args.num_attention_heads % args.num_query_groups:
        raise ConfigError(
            f"--num-attention-heads {args.num_attention_heads} is not divisible by --num-query-groups "
            f"{args.num_query_groups}; every group must have as many query heads"
        )
    if not args.group_query_attention and args.num_query_groups != 1:
        raise ConfigError(f"--num-query-groups {args.num_query_groups} without --group-query-attention; give both")
    if args.num_experts is None:
        if args.moe_aux_loss_coeff:
            raise ConfigError(f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} without --num-experts; give both")
        return
    if args.moe_router_topk > args.num_experts:
        raise ConfigError(
            f"--moe-router-topk {args.moe_router_topk} exceeds --num-experts {args.num_experts}; lower the first"
        )
    if args.moe_router_topk == 1 and not args.moe_router_pre_softmax:
        raise ConfigError(
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one chosen expert is always 1, and "
            "the router would learn nothing"
        )


def _check_parallelism(args: argparse.Namespace) -> None:
    if args.check_gradient_scale and (not args.use_megatron_fsdp or args.fake_process_group):
        which = "contradicts --fake-process-group" if args.fake_process_group else "needs --use-megatron-fsdp"
        raise ConfigError(f"--check-gradient-scale {which}: it measures what the sharding engine makes of gradients")
    if args.check_gradient_scale and args.fsdp_invariant_reduction:
        raise ConfigError(
            "--check-gradient-scale contradicts --fsdp-invariant-reduction: it measures one microbatch, and gradients "
            "are divided by the number of those of a step; measure without the second"
        )
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if tensor * expert > 1 and not args.use_megatron_fsdp:
        flag = "--tensor-model-parallel-size" if tensor > 1 else "--expert-model-parallel-size"
        raise ConfigError(f"{flag} {max(tensor, expert)} needs --use-megatron-fsdp: a replicated model is whole")
    if expert > 1 and (args.num_experts is None or args.num_experts % expert):
        raise ConfigError(
            f"--expert-model-parallel-size {expert} does not divide --num-experts {args.num_experts}; every rank has "
            "as many experts"
        )
    if tensor * expert > 1:
        _refuse_whole_tensors(args)
    if tensor == 1:
        return
    num_groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    for what, size in (
        ("heads of keys and values", num_groups),
        ("columns of --ffn-hidden-size", args.ffn_hidden_size),
    ):
        if size % tensor:
            raise ConfigError(
                f"--tensor-model-parallel-size {tensor} does not divide the {size} {what}; every rank has as many"
            )
    if args.swiglu:
        raise ConfigError(
            f"--tensor-model-parallel-size {tensor} contradicts --swiglu: PyTorch's ColwiseParallel would give one "
            "rank all gates and another all values. Leave one of them out; the sharding of --use-megatron-fsdp needs "
            "no tensor parallelism to fit a model"
        )


def _refuse_whole_tensors(args: argparse.Namespace) -> None:
    """Refuse what works on whole parameters of the data-parallel ranks alone."""
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    flag = f"--tensor-model-parallel-size {tensor}" if tensor > 1 else f"--expert-model-parallel-size {expert}"
    if args.optimizer in ("muon", "dist_muon"):
        raise ConfigError(
            f"{flag} contradicts --optimizer {args.optimizer}, which needs whole matrices on the data-parallel ranks; "
            "use --optimizer adam, or leave the first out"
        )
    if args.adam_moments == "int8":
        raise ConfigError(
            f"{flag} contradicts --adam-moments int8, whose blocks of 256 elements would depend on it; leave one out"
        )


def _check_checksum(args: argparse.Namespace) -> None:
    if args.log_checksum_per_unit and args.log_checksum is None:
        raise ConfigError("--log-checksum-per-unit needs --log-checksum N: how often")
    is_cut = args.tensor_model_parallel_size * args.expert_model_parallel_size > 1
    if args.log_checksum is not None and (is_cut or args.use_torch_fsdp2):
        which = "--use-torch-fsdp2" if args.use_torch_fsdp2 else "tensor and expert parallelism"
        raise ConfigError(f"--log-checksum contradicts {which}: where elements lie in whole weights is not known there")


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
    if args.adam_moments != "fp32" and args.optimizer != "adam":
        raise ConfigError(
            f"--adam-moments {args.adam_moments} contradicts --optimizer {args.optimizer}; leave one away"
        )
    if args.adam_moments_seed is not None and args.adam_moments != "int8":
        raise ConfigError(f"--adam-moments-seed {args.adam_moments_seed} needs --adam-moments int8, which it rounds")
    if args.optimizer not in ("adam", "sgd", "muon", "dist_muon"):
        raise ConfigError(f"--optimizer {args.optimizer} is not here yet; wanted adam, sgd or muon")


def _check_without_engine(args: argparse.Namespace) -> None:
    if args.fsdp_invariant_reduction:
        raise ConfigError("--fsdp-invariant-reduction needs --use-megatron-fsdp, which keeps the order of sums")
    for name, what in (("weight_gather", "whose gather it is"), ("slot_pool", "whose buffers take turns in it")):
        if getattr(args, name) is not None:
            raise ConfigError(f"{_flag(name)} {getattr(args, name)} needs --use-megatron-fsdp, {what}")


def _check_torch_fsdp2(args: argparse.Namespace) -> None:
    if args.use_torch_fsdp2 and not args.use_megatron_fsdp:
        for name in ("save", "load"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--use-torch-fsdp2 contradicts {_flag(name)} {getattr(args, name)}: this script saves and loads "
                    "what megatron_fsdp sharded, or replicas; leave it away (the log goes to runs/gpt)"
                )
        if args.num_distributed_optimizer_instances != 1:
            raise ConfigError(
                f"--use-torch-fsdp2 contradicts --num-distributed-optimizer-instances "
                f"{args.num_distributed_optimizer_instances}: it shards over all ranks here; leave one away"
            )


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

    if args.lr_decay_style == "WSD":
        _check_wsd(args)
    elif args.lr_wsd_decay_iters is not None:
        raise ConfigError(
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters} without --lr-decay-style WSD; give both or none"
        )


def _check_wsd(args: argparse.Namespace) -> None:
    if args.lr_wsd_decay_iters is None:
        raise ConfigError("--lr-decay-style WSD needs --lr-wsd-decay-iters: how many iterations the end takes")
    if args.lr_wsd_decay_iters > args.lr_decay_iters - args.lr_warmup_iters:
        raise ConfigError(
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters} exceeds --lr-decay-iters {args.lr_decay_iters} minus "
            f"--lr-warmup-iters {args.lr_warmup_iters}; WSD would decay before the warm-up has ended"
        )


def _check_log(args: argparse.Namespace) -> None:
    if args.tensorboard_dir is not None:
        check_tensorboard()
    if args.profile and args.profile_step_start >= args.profile_step_end:
        raise ConfigError(
            f"--profile-step-start {args.profile_step_start} is not before --profile-step-end "
            f"{args.profile_step_end}; no step would be recorded"
        )


def _settle_fake_ranks(args: argparse.Namespace) -> None:
    """Leave out what makes no sense without other ranks."""
    for name in ("save", "load", "tensorboard_dir"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--fake-process-group contradicts {_flag(name)} {getattr(args, name)}: weights and losses mean nothing"
            )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--fake-process-group is for one process: WORLD_SIZE=64 python examples/pretrain_gpt.py ...")
    args.check_for_nan_in_loss_and_grad = args.skip_nonfinite_steps = False
    args.num_tokens_to_generate = 0


def flags_without_engine(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given and do nothing without ``--use-megatron-fsdp``."""
    return [
        flag.spell(getattr(args, flag.dest))
        for flag in FLAGS
        if flag.dest not in _OF_THE_SCRIPT and getattr(args, flag.dest) not in (flag.default, [])
    ]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
