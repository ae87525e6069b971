"""Megatron-LM's FSDP flags as one table, with their meaning there and their effect here, and their parser.

``python docs/settings.py`` writes docs/flags.md from this table.
"""

from __future__ import annotations

import argparse
import enum
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

__all__ = ["FLAGS", "SECTIONS", "Effect", "Flag", "FlagValues", "add_megatron_fsdp_args", "flag_of"]

P = TypeVar("P", bound=argparse.ArgumentParser)
Value = bool | int | float | str | tuple[str, ...] | None


class Effect(enum.Enum):
    """The effect of a flag here. Flags other than ACTS are accepted and do nothing; the value says why."""

    ACTS = "acted on"
    ALWAYS = "always so"
    HARDWARE = "needs hardware that is not used"
    PACKAGE = "needs a package that is not used"
    NOTHING = "nothing to change"
    LATER = "not supported yet"


@dataclass(frozen=True, slots=True)
class Flag:
    """One of Megatron-LM's flags.

    Attributes:
        name, default: Megatron's.
        effect: whether the flag has an effect here, and if not, why. meaning: in Megatron. here: its effect here.
        choices: legal values; empty: any value. kind: type of the value; a tuple takes several values.
        dest: name of its attribute in the namespace, and of its field in ``FsdpConfig``.
    """

    name: str
    default: Value
    effect: Effect
    meaning: str
    here: str
    choices: tuple[str | int, ...] = ()
    kind: type = bool
    dest: str = ""

    @property
    def is_silent(self) -> bool:
        """True if giving the flag changes nothing here."""
        return self.effect is not Effect.ACTS

    def notice(self, given: str) -> str:
        """Return the notice for a flag that was given, spelled ``given``, and does nothing."""
        return f"{given} does nothing here; {self.effect.value}: {self.here}"

    @property
    def is_off_switch(self) -> bool:
        """True if giving the flag makes its attribute False."""
        return self.default is True and self.name != _name_of(self.dest)

    def spell(self, value: object) -> str:
        """Return the command-line form of a value: ``--bf16``, ``--optimizer sgd``, ``--no-align-param-gather``."""
        if self.kind is bool:
            is_pair = self.default is True and not self.is_off_switch
            return self.name.replace("--", "--no-", 1) if is_pair and value is False else self.name
        return f"{self.name} {' '.join(value) if isinstance(value, tuple) else value}"


def _name_of(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"


_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

_DTYPES = ("fp32", "bf16", "fp16", "auto")

_STATE_DTYPES = ("fp32", "fp16", "bf16", "fp8")

_STRICTNESS = ("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
               "return_unexpected", "return_all", "ignore_all")  # fmt: skip


def _flag(
    default: Value, effect: Effect, meaning: str, here: str, choices: tuple[str | int, ...] = (), name: str = ""
) -> Any:
    """Return the dataclass field of a flag; see ``Flag``. ``name``: by default the field's name with dashes."""
    row = {"default": default, "effect": effect, "meaning": meaning, "here": here, "choices": choices, "name": name}
    return field(default=default, metadata=row)


# Unformatted, because the formatter would put every argument on its own line.
# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class FlagValues:
    """A value for each flag, with Megatron-LM's defaults."""

    use_megatron_fsdp: bool = _flag(False, Effect.ACTS, "shard the model with Megatron FSDP", "turns this engine on")
    megatron_fsdp_version: int = _flag(1, Effect.NOTHING, "engine version; 2 excludes --use-distributed-optimizer",
        "this engine serves both", choices=(1, 2))
    data_parallel_sharding_strategy: str = _flag("optim_grads_params", Effect.ACTS, "what is sharded",
        "optim is ZeRO-1, optim_grads ZeRO-2, optim_grads_params ZeRO-3", choices=_STRATEGIES)
    outer_dp_sharding_strategy: str = _flag("no_shard", Effect.ACTS, "tensors also sharded over the outer axis",
        "optim shards optimizer state and main weights over both axes", choices=("no_shard", "optim"))
    num_distributed_optimizer_instances: int = _flag(1, Effect.ACTS, "outer replicas; more than 1 is hybrid sharding",
        "the size of the outer axis of a 2-D mesh")
    enable_full_sharding_in_hsdp: bool = _flag(False, Effect.ACTS, "older form of --outer-dp-sharding-strategy optim",
        "the same")
    init_model_with_meta_device: bool = _flag(False, Effect.ACTS,
        "build the model without memory, shard, then initialise",
        "each rank allocates its shards, and one whole tensor at a time; the values equal those of one process")
    megatron_fsdp_main_params_dtype: str = _flag("fp32", Effect.ACTS, "dtype of main weights; auto: the model's",
        "the dtype of the weights that the optimizer steps; auto is the compute dtype", choices=_DTYPES)
    megatron_fsdp_main_grads_dtype: str = _flag("auto", Effect.ACTS,
        "dtype of accumulated gradients; auto: the model's",
        "auto is fp16 with --fp16, bf16 with --bf16 --grad-reduce-in-bf16, else fp32", choices=_DTYPES)
    megatron_fsdp_grad_comm_dtype: str = _flag("auto", Effect.ACTS, "dtype of the reduction; auto: main gradients'",
        "the dtype of the reduce-scatter; an outer axis, no_shard and optim reduce in the dtype of main gradients",
        choices=_DTYPES)
    megatron_fsdp_enable_fine_grained_param_gather: bool = _flag(False, Effect.LATER, "gather per submodule",
        "a unit is gathered as a whole")
    suggested_communication_unit_size: int | None = _flag(None, Effect.ACTS, "elements per communication step",
        "gathers run ahead of compute by units with at least this many elements together; default: by one unit")
    create_all_gather_group: bool = _flag(False, Effect.ALWAYS,
        "a second communicator, so gather and reduction overlap", "gathers and reductions use separate communicators")
    keep_fp8_transpose_cache: bool = _flag(False, Effect.PACKAGE, "keep the transpose of FP8 weights",
        "FP8 weights need Transformer Engine")
    fsdp_double_buffer: bool = _flag(False, Effect.ACTS, "two reusable buffers for gathered weights",
        "units of equal size take turns in permanent buffers, also for gradients; needs PyTorch 2.13")
    megatron_fsdp_max_pool_double_buffer: bool = _flag(False, Effect.ACTS, "buffers as large as the largest unit",
        "all units take turns in permanent buffers; needs PyTorch 2.13")
    fsdp_db_use_persist_buf_on_alloc_fail: bool = _flag(False, Effect.ALWAYS,
        "a permanent buffer for each unit that does not fit the two buffers", "such units have separate buffers")
    nccl_ub: bool = _flag(False, Effect.ACTS, "register buffers with NCCL; implies --fsdp-double-buffer",
        "on GPUs buffers are symmetric memory", name="--use-nccl-ub")
    disable_symmetric_registration: bool = _flag(False, Effect.ACTS, "with --use-nccl-ub: no symmetric windows",
        "buffers come from NCCL's own allocator")
    fsdp_manual_registration: bool = _flag(False, Effect.NOTHING, "with --use-nccl-ub: register when a step is over",
        "each buffer is registered when it is made, in the first step")
    use_torch_fsdp2: bool = _flag(False, Effect.NOTHING, "shard with PyTorch's FSDP2 instead",
        "`examples/pretrain_gpt.py` can train with FSDP2; code for FSDP2 runs here after one import is changed")
    torch_fsdp2_reshard_after_forward: bool = _flag(True, Effect.NOTHING, "with --use-torch-fsdp2: keep weights whole",
        "use --data-parallel-sharding-strategy optim_grads", name="--torch-fsdp2-no-reshard-after-forward")

    overlap_grad_reduce: bool = _flag(False, Effect.ALWAYS, "reduce while backward computes", "reductions overlap")
    overlap_param_gather: bool = _flag(False, Effect.ALWAYS, "gather while forward computes", "gathers overlap")
    overlap_param_gather_with_optimizer_step: bool = _flag(False, Effect.LATER,
        "gather the first bucket during the step", "the first gather starts with the forward")
    align_param_gather: bool = _flag(True, Effect.NOTHING, "pipeline stages start their gathers independently",
        "there are no pipeline stages", name="--no-align-param-gather")
    gradient_reduce_div_fusion: bool = _flag(True, Effect.NOTHING, "divide gradients in a separate pass",
        "the division is part of the accumulation and costs no pass", name="--no-gradient-reduce-div-fusion")
    ddp_num_buckets: int | None = _flag(None, Effect.NOTHING, "number of gradient buckets", "units are the buckets")
    ddp_bucket_size: int | None = _flag(None, Effect.NOTHING, "elements in a bucket", "units are the buckets")
    ddp_pad_buckets_for_high_nccl_busbw: bool = _flag(False, Effect.LATER, "round buckets up to a large power of two",
        "buffers are padded to rows and 16 bytes")
    ddp_reduce_scatter_with_fp32_accumulation: bool = _flag(False, Effect.ACTS, "send low precision, add up in FP32",
        "with --megatron-fsdp-grad-comm-dtype bf16 or fp16: each rank adds up the parts of the others")
    ddp_param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = _flag((), Effect.LATER,
        "parameters whose gradients accumulate in FP32", "--megatron-fsdp-main-grads-dtype sets one dtype for all")
    ddp_average_in_collective: bool = _flag(False, Effect.NOTHING, "average in the collective",
        "sums are reduced, and the division is part of the accumulation")
    grad_reduce_in_bf16: bool = _flag(False, Effect.ACTS, "with --bf16: gradients in bf16, not FP32",
        "gradients are reduced in bf16, and accumulated in bf16 unless --megatron-fsdp-main-grads-dtype is given")
    calculate_per_token_loss: bool = _flag(False, Effect.ACTS, "normalise by tokens, not by samples and ranks",
        "losses and tokens are summed over microbatches and ranks; gradients are divided by all tokens of the step")
    gradient_accumulation_fusion: bool = _flag(True, Effect.ACTS, "add weight gradients after the GEMM, not in it",
        "without the flag, GEMMs of linear layers write weight gradients into the packed buffer",
        name="--no-gradient-accumulation-fusion")
    use_distributed_optimizer: bool = _flag(False, Effect.NOTHING, "shard the optimizer state",
        "use --data-parallel-sharding-strategy")
    use_sharp: bool = _flag(False, Effect.HARDWARE, "reduce inside the network", "it takes switches with SHARP")
    sharp_enabled_group: str | None = _flag(None, Effect.HARDWARE, "which groups --use-sharp serves", "see --use-sharp",
        choices=("dp", "dp_replica"))
    fsdp_invariant_reduction: bool = _flag(False, Effect.ACTS,
        "this engine's own: the same bits on any number of ranks",
        "gradients of microbatches are exchanged one by one and added up in FP32 in the order of their numbers")
    fsdp_forward_order: bool = _flag(False, Effect.ACTS,
        "this engine's own: ranks may skip units",
        "all ranks gather and reduce units in the order in which modules are registered (docs/ranks_that_differ.md)")
    high_priority_stream_groups: tuple[str, ...] = _flag((), Effect.ALWAYS,
        "groups whose collectives get high-priority streams", "gathers and reductions run on high-priority streams")

    bf16: bool = _flag(False, Effect.ACTS, "bf16 model weights", "weights are gathered and used in bf16")
    fp16: bool = _flag(False, Effect.ACTS, "fp16 model weights",
        "weights are gathered and used in fp16; the training script raises an error, because it has no loss scaling")
    optimizer: str = _flag("adam", Effect.ACTS, "the optimizer; Megatron FSDP takes adam and sgd",
        "adam, sgd and muon (docs/muon.md); in code any elementwise optimizer of PyTorch works as well",
        choices=("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"))
    use_precision_aware_optimizer: bool = _flag(False, Effect.PACKAGE, "optimizer state in low precision",
        "its FusedAdam is Transformer Engine's")
    main_grads_dtype: str = _flag("fp32", Effect.NOTHING, "gradient dtype of the precision-aware optimizer",
        "--megatron-fsdp-main-grads-dtype replaces it", choices=("fp32", "bf16"))
    main_params_dtype: str = _flag("fp32", Effect.NOTHING, "weight dtype of the precision-aware optimizer",
        "--megatron-fsdp-main-params-dtype replaces it", choices=("fp32", "fp16"))
    exp_avg_dtype: str = _flag("fp32", Effect.PACKAGE, "dtype of the precision-aware optimizer's first moment",
        "see --use-precision-aware-optimizer", choices=_STATE_DTYPES)
    exp_avg_sq_dtype: str = _flag("fp32", Effect.PACKAGE, "dtype of the precision-aware optimizer's second moment",
        "see --use-precision-aware-optimizer", choices=_STATE_DTYPES)
    fp8_param_gather: bool = _flag(False, Effect.PACKAGE, "gather FP8 weights", "FP8 weights need Transformer Engine")
    fp4_param_gather: bool = _flag(False, Effect.PACKAGE, "gather FP4 weights", "FP4 weights need Transformer Engine")
    optimizer_cpu_offload: bool = _flag(False, Effect.ACTS, "optimizer state and step on the CPU",
        "main weights and gradients are in CPU memory too; a shard is copied to the device when its unit is gathered")
    optimizer_offload_fraction: float = _flag(1.0, Effect.LATER, "share of the state that is offloaded",
        "--optimizer-cpu-offload offloads all of it")
    overlap_cpu_optimizer_d2h_h2d: bool = _flag(False, Effect.ALWAYS, "overlap the copies of offloaded state",
        "copies run with their collectives, while compute runs")
    optimizer_cuda_graph: bool = _flag(False, Effect.LATER, "capture the optimizer step", "nothing is captured")
    cuda_graph_impl: str = _flag("none", Effect.LATER, "what CUDA graphs capture", "nothing is captured",
        choices=("none", "local", "transformer_engine", "full_iteration"))
    ckpt_format: str = _flag("torch_dist", Effect.ACTS, "format of checkpoints; Megatron FSDP takes fsdp_dtensor",
        "with --use-megatron-fsdp checkpoints are fsdp_dtensor, and torch_dist, the default, counts as not given",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"))
    strict_fsdp_dtensor_load: bool = _flag(True, Effect.ACTS, "refuse checkpoints with other names or shapes",
        "the error lists the differences; --no-strict-fsdp-dtensor-load loads the matching tensors and logs the others")
    dist_ckpt_strictness: str = _flag("assume_ok_unexpected", Effect.NOTHING, "strictness for torch_dist checkpoints",
        "a checkpoint of another model raises an error", choices=_STRICTNESS)
    async_save: bool = _flag(False, Effect.ACTS, "write checkpoints while training goes on",
        "copied to host memory, then written; the next save, SIGTERM, Ctrl-C and the end of the run wait for it")
    clip_grad: float = _flag(1.0, Effect.ACTS, "largest global norm of the gradients",
        "over all ranks and units; 0 only measures")
    check_for_nan_in_loss_and_grad: bool = _flag(True, Effect.ACTS, "look for NaN; switched off by --no-check-...",
        "NaN or infinity ends the run before any weight changes, and the error names the parameter")
    check_for_large_grads: bool = _flag(False, Effect.ACTS, "look for very large gradients",
        "a norm above 10 times the largest of the previous steps is logged")
    dump_param_to_param_group_map: str | None = _flag(None, Effect.ACTS, "file to write the optimizer's groups to",
        "JSON: each parameter's name, and the index of its group")
    fake_process_group: bool = _flag(False, Effect.ACTS, "one GPU, no communication, to measure memory",
        "one process stands for WORLD_SIZE ranks; losses mean nothing")
# fmt: on


def _of_field(each: Field[Any]) -> Flag:
    kind = _KINDS[str(each.type).split(" ")[0].split("[")[0]]
    return Flag(
        **{**each.metadata, "name": each.metadata["name"] or _name_of(each.name), "kind": kind, "dest": each.name}
    )


_KINDS = {kind.__name__: kind for kind in (bool, int, float, str, tuple)}

FLAGS: tuple[Flag, ...] = tuple(map(_of_field, fields(FlagValues)))

_NAMES = [flag.dest for flag in FLAGS]
_DDP, _OTHER = _NAMES.index("overlap_grad_reduce"), _NAMES.index("bf16")

SECTIONS = {
    "Sharding": FLAGS[:_DDP],
    "Overlap, reduction and data parallelism": FLAGS[_DDP:_OTHER],
    "Precision, optimizer, checkpoints and checks": FLAGS[_OTHER:],
}

_BY_NAME = {key: flag for flag in FLAGS for key in (flag.name, flag.dest)}


def flag_of(name: str) -> Flag:
    """Return the flag with a name (``--use-nccl-ub``) or an attribute name (``nccl_ub``)."""
    return _BY_NAME[name]


def add_megatron_fsdp_args(parser: P) -> P:
    """Add Megatron-LM's FSDP flags to a parser, with its names, defaults and choices, and return the parser.

    Flags that the parser already has are not changed. ``FsdpConfig.from_args`` reads and checks the parsed arguments.

    Example:
        parser = add_megatron_fsdp_args(argparse.ArgumentParser())
        args = parser.parse_args(["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"])
        config = FsdpConfig.from_args(args)
    """
    for title, flags in SECTIONS.items():
        group = parser.add_argument_group(f"Megatron FSDP: {title[0].lower()}{title[1:]}")
        for flag in flags:
            if flag.name not in parser._option_string_actions:
                group.add_argument(flag.name, **_options(flag))
    return parser


def _options(flag: Flag) -> dict[str, Any]:
    here = f" (here: {flag.effect.value}; {flag.here})" if flag.is_silent else ""
    options: dict[str, Any] = {"dest": flag.dest, "help": f"{flag.meaning}{here}".replace("%", "%%")}
    if flag.kind is bool:
        if flag.default is True and not flag.is_off_switch:
            return {**options, "action": argparse.BooleanOptionalAction, "default": True}
        return {**options, "action": "store_false" if flag.is_off_switch else "store_true"}
    if flag.kind is tuple:
        return {**options, "nargs": "*", "default": [], "metavar": "NAME"}
    options |= {"type": flag.kind, "default": flag.default}
    return {**options, "choices": flag.choices} if flag.choices else options
