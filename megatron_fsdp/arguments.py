"""Megatron-LM's flags around FSDP, as one table: the parser, the documentation and the notices are made from it.

``python -m megatron_fsdp.arguments > docs/flags.md`` writes the documentation.
"""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["FLAGS", "RULES", "Effect", "Flag", "Rule", "add_megatron_fsdp_args", "flag_of", "flags_markdown"]

Value = bool | int | float | str | tuple[str, ...] | None
P = TypeVar("P", bound=argparse.ArgumentParser)


class Effect(enum.Enum):
    """What a flag does here. All but ACTS and SCRIPT are accepted and do nothing; the value says why."""

    ACTS = "acted on"
    SCRIPT = "for the training script"
    ALWAYS = "always so"
    HARDWARE = "needs hardware that is not used"
    PACKAGE = "needs a package that is not used"
    NOTHING = "nothing to change"
    LATER = "not supported yet"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: as on the command line. A bool flag that is True by default and names another ``dest`` switches that off.
        default: Megatron-LM's.
        effect: whether it does anything here, and if not, why.
        meaning: what it means in Megatron-LM.
        here: what happens here.
        choices: legal values; empty for any.
        kind: type of the value; a tuple takes several words.
        dest: attribute of the namespace, and field of ``FsdpConfig``.
    """

    name: str
    default: Value
    effect: Effect
    meaning: str
    here: str
    choices: tuple[str | int, ...] = ()
    kind: type = bool
    dest: str = ""

    def __post_init__(self) -> None:
        if not self.dest:
            object.__setattr__(self, "dest", _attribute(self.name))

    @property
    def is_off_switch(self) -> bool:
        """Whether giving the flag makes its attribute False."""
        return self.kind is bool and self.default is True and self.dest != _attribute(self.name)

    @property
    def is_silent(self) -> bool:
        """Whether giving the flag changes nothing here."""
        return self.effect not in (Effect.ACTS, Effect.SCRIPT)

    def spell(self, value: object) -> str:
        """Return how the command line says ``value``: ``--bf16``, ``--optimizer sgd``, ``--no-align-param-gather``."""
        if self.kind is bool:
            is_pair = self.default is True and not self.is_off_switch
            return self.name.replace("--", "--no-", 1) if is_pair and value is False else self.name
        return f"{self.name} {' '.join(value) if isinstance(value, tuple) else value}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Two flags that are refused together, or one that needs another.

    Attributes:
        first: a flag, with its value where that matters.
        relation: "contradicts" or "needs".
        second: a flag and the values that are refused or needed.
        reason: why, and where it does not follow, what to do.
        is_broken: whether an ``FsdpConfig`` breaks it.
    """

    first: str
    relation: str
    second: str
    reason: str
    is_broken: Callable[[Any], bool]

    def refusal(self, config: Any) -> str:
        """Return the message for a config that breaks it, with the values found."""
        first, second = flag_of(self.first.split()[0]), flag_of(self.second.split()[0])
        values = getattr(config, first.dest), getattr(config, second.dest)
        if self.relation == "contradicts":
            return f"{first.spell(values[0])} contradicts {second.spell(values[1])}: {self.reason}"
        found = "" if second.kind is bool else f" (found {values[1]})"
        return f"{first.spell(values[0])} needs {self.second}{found}: {self.reason}"


def _attribute(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _is_torch_fsdp2(config: Any) -> bool:
    # Beside --use-megatron-fsdp it is refused anyway, and once is enough.
    return bool(config.use_torch_fsdp2 and not config.use_megatron_fsdp)


_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_DTYPES = ("fp32", "bf16", "fp16", "auto")
_STATE_DTYPES = ("fp32", "fp16", "bf16", "fp8")
_STRICTNESS = ("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
               "return_unexpected", "return_all", "ignore_all")  # fmt: skip

# Rows stay rows: the formatter would give every field a line of its own.
# fmt: off
_FSDP = (
    Flag("--use-megatron-fsdp", False, Effect.ACTS, "shard the model with Megatron FSDP", "turns this engine on"),
    Flag("--megatron-fsdp-version", 1, Effect.NOTHING, "engine version; 2 excludes --use-distributed-optimizer",
         "this engine serves both", choices=(1, 2), kind=int),
    Flag("--data-parallel-sharding-strategy", "optim_grads_params", Effect.ACTS, "what is sharded",
         "optim is ZeRO-1, optim_grads ZeRO-2, optim_grads_params ZeRO-3", choices=_STRATEGIES, kind=str),
    Flag("--outer-dp-sharding-strategy", "no_shard", Effect.ACTS, "what is sharded over the outer axis, too",
         "optim shards optimizer state and main weights over both axes", choices=("no_shard", "optim"), kind=str),
    Flag("--num-distributed-optimizer-instances", 1, Effect.ACTS, "outer replicas; more than 1 is hybrid sharding",
         "the size of the outer axis of a 2-D mesh", kind=int),
    Flag("--enable-full-sharding-in-hsdp", False, Effect.ACTS, "older form of --outer-dp-sharding-strategy optim",
         "the same"),
    Flag("--init-model-with-meta-device", False, Effect.LATER, "build the model without memory, shard, then initialise",
         "the model is initialised before it is sharded"),
    Flag("--megatron-fsdp-main-params-dtype", "fp32", Effect.ACTS, "dtype of main weights; auto: the model's",
         "of the weights that the optimizer steps; auto is the compute dtype", choices=_DTYPES, kind=str),
    Flag("--megatron-fsdp-main-grads-dtype", "auto", Effect.ACTS, "dtype of accumulated gradients; auto: the model's",
         "auto is fp16 with --fp16, bf16 with --bf16 --grad-reduce-in-bf16, else fp32", choices=_DTYPES, kind=str),
    Flag("--megatron-fsdp-grad-comm-dtype", "auto", Effect.ACTS, "dtype of the reduction; auto: main gradients'",
         "of the reduce-scatter; an outer axis, and no_shard and optim, reduce in the main gradients' dtype",
         choices=_DTYPES, kind=str),
    Flag("--megatron-fsdp-enable-fine-grained-param-gather", False, Effect.LATER, "gather per submodule",
         "a unit is gathered as a whole"),
    Flag("--suggested-communication-unit-size", None, Effect.LATER, "elements per communication step",
         "a unit is one step, and the next one is prefetched", kind=int),
    Flag("--create-all-gather-group", False, Effect.ALWAYS, "a second communicator, so gather and reduction overlap",
         "gathers and reductions have a communicator each"),
    Flag("--keep-fp8-transpose-cache", False, Effect.PACKAGE, "keep the transpose of FP8 weights",
         "FP8 weights need Transformer Engine"),
    Flag("--fsdp-double-buffer", False, Effect.LATER, "two reusable buffers for gathered weights",
         "buffers come from the allocator of the device, two units at a time"),
    Flag("--megatron-fsdp-max-pool-double-buffer", False, Effect.LATER, "buffers as large as the largest unit",
         "see --fsdp-double-buffer"),
    Flag("--fsdp-db-use-persist-buf-on-alloc-fail", False, Effect.LATER, "keep what does not fit the two buffers",
         "see --fsdp-double-buffer"),
    Flag("--use-nccl-ub", False, Effect.LATER, "register buffers with NCCL; implies --fsdp-double-buffer",
         "NCCL copies through its own buffers", dest="nccl_ub"),
    Flag("--disable-symmetric-registration", False, Effect.LATER, "with --use-nccl-ub: no symmetric windows",
         "see --use-nccl-ub"),
    Flag("--fsdp-manual-registration", False, Effect.LATER, "with --use-nccl-ub: register when the first step is over",
         "see --use-nccl-ub"),
    Flag("--use-torch-fsdp2", False, Effect.NOTHING, "shard with PyTorch's FSDP2 instead",
         "PyTorch's engine is not started from here; code written for it runs after changing the import"),
    Flag("--torch-fsdp2-no-reshard-after-forward", True, Effect.NOTHING, "with --use-torch-fsdp2: keep weights whole",
         "here that is --data-parallel-sharding-strategy optim_grads", dest="torch_fsdp2_reshard_after_forward"),
)
_DDP = (
    Flag("--overlap-grad-reduce", False, Effect.ALWAYS, "reduce while backward computes", "reductions overlap"),
    Flag("--overlap-param-gather", False, Effect.ALWAYS, "gather while forward computes", "gathers overlap"),
    Flag("--overlap-param-gather-with-optimizer-step", False, Effect.LATER, "gather the first bucket during the step",
         "the first gather starts with the forward"),
    Flag("--no-align-param-gather", True, Effect.NOTHING, "pipeline stages start their gathers independently",
         "there are no pipeline stages", dest="align_param_gather"),
    Flag("--no-gradient-reduce-div-fusion", True, Effect.NOTHING, "divide gradients in a pass of its own",
         "the division is part of the accumulation and costs no pass", dest="gradient_reduce_div_fusion"),
    Flag("--ddp-num-buckets", None, Effect.NOTHING, "number of gradient buckets", "units are the buckets", kind=int),
    Flag("--ddp-bucket-size", None, Effect.NOTHING, "elements in a bucket", "units are the buckets", kind=int),
    Flag("--ddp-pad-buckets-for-high-nccl-busbw", False, Effect.LATER, "round buckets up to a large power of two",
         "buffers are padded to rows and 16 bytes"),
    Flag("--ddp-reduce-scatter-with-fp32-accumulation", False, Effect.LATER, "send low precision, add up in FP32",
         "--megatron-fsdp-grad-comm-dtype fp32 adds up in FP32, at twice the bytes"),
    Flag("--ddp-param-name-patterns-for-fp32-local-accumulation", (), Effect.LATER,
         "parameters whose gradients accumulate in FP32", "--megatron-fsdp-main-grads-dtype holds for all", kind=tuple),
    Flag("--ddp-average-in-collective", False, Effect.NOTHING, "average in the collective",
         "sums are reduced, and the division is part of the accumulation"),
    Flag("--grad-reduce-in-bf16", False, Effect.ACTS, "with --bf16: gradients in bf16, not FP32",
         "reduced in bf16, and accumulated so unless --megatron-fsdp-main-grads-dtype says otherwise"),
    Flag("--calculate-per-token-loss", False, Effect.LATER, "normalise by tokens, not by samples and ranks",
         "gradients are averaged over ranks, the same where every rank has as many tokens"),
    Flag("--no-gradient-accumulation-fusion", True, Effect.ACTS, "add weight gradients after the GEMM, not in it",
         "without it the GEMMs of linear layers write into the unit's buffer where that has the weights' dtype",
         dest="gradient_accumulation_fusion"),
    Flag("--use-distributed-optimizer", False, Effect.NOTHING, "shard the optimizer state",
         "--data-parallel-sharding-strategy says what is sharded"),
    Flag("--use-sharp", False, Effect.HARDWARE, "reduce inside the network", "it takes switches with SHARP"),
    Flag("--sharp-enabled-group", None, Effect.HARDWARE, "which groups --use-sharp serves", "see --use-sharp",
         choices=("dp", "dp_replica"), kind=str),
    Flag("--high-priority-stream-groups", (), Effect.ALWAYS, "groups whose collectives get high-priority streams",
         "gathers and reductions run on high-priority streams", kind=tuple),
)
_OTHER = (
    Flag("--bf16", False, Effect.ACTS, "bf16 model weights", "weights are gathered and used in bf16"),
    Flag("--fp16", False, Effect.ACTS, "fp16 model weights", "weights are gathered and used in fp16"),
    Flag("--optimizer", "adam", Effect.SCRIPT, "the optimizer; Megatron FSDP takes adam and sgd",
         "any elementwise optimizer of PyTorch works over the sharded parameters; the flag takes adam and sgd",
         choices=("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"), kind=str),
    Flag("--use-precision-aware-optimizer", False, Effect.PACKAGE, "optimizer state in low precision",
         "its FusedAdam is Transformer Engine's"),
    Flag("--main-grads-dtype", "fp32", Effect.NOTHING, "of the precision-aware optimizer",
         "--megatron-fsdp-main-grads-dtype replaces it", choices=("fp32", "bf16"), kind=str),
    Flag("--main-params-dtype", "fp32", Effect.NOTHING, "of the precision-aware optimizer",
         "--megatron-fsdp-main-params-dtype replaces it", choices=("fp32", "fp16"), kind=str),
    Flag("--exp-avg-dtype", "fp32", Effect.PACKAGE, "of the precision-aware optimizer's first moment",
         "see --use-precision-aware-optimizer", choices=_STATE_DTYPES, kind=str),
    Flag("--exp-avg-sq-dtype", "fp32", Effect.PACKAGE, "of the precision-aware optimizer's second moment",
         "see --use-precision-aware-optimizer", choices=_STATE_DTYPES, kind=str),
    Flag("--fp8-param-gather", False, Effect.PACKAGE, "gather FP8 weights", "FP8 weights need Transformer Engine"),
    Flag("--fp4-param-gather", False, Effect.PACKAGE, "gather FP4 weights", "FP4 weights need Transformer Engine"),
    Flag("--optimizer-cpu-offload", False, Effect.LATER, "optimizer state and step on the CPU", "no offload"),
    Flag("--optimizer-offload-fraction", 1.0, Effect.LATER, "share of it", "see --optimizer-cpu-offload", kind=float),
    Flag("--overlap-cpu-optimizer-d2h-h2d", False, Effect.LATER, "overlap its copies", "see --optimizer-cpu-offload"),
    Flag("--optimizer-cuda-graph", False, Effect.LATER, "capture the optimizer step", "nothing is captured"),
    Flag("--cuda-graph-impl", "none", Effect.LATER, "what CUDA graphs capture", "nothing is captured",
         choices=("none", "local", "transformer_engine", "full_iteration"), kind=str),
    Flag("--ckpt-format", "torch_dist", Effect.ACTS, "format of checkpoints; Megatron FSDP takes fsdp_dtensor",
         "with --use-megatron-fsdp checkpoints are fsdp_dtensor, and torch_dist, the default, counts as not given",
         choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"), kind=str),
    Flag("--strict-fsdp-dtensor-load", True, Effect.LATER, "refuse checkpoints with other names or shapes",
         "loading is always strict, and the differences are listed"),
    Flag("--dist-ckpt-strictness", "assume_ok_unexpected", Effect.NOTHING, "of torch_dist checkpoints",
         "a checkpoint of another model is refused", choices=_STRICTNESS, kind=str),
    Flag("--async-save", False, Effect.LATER, "write checkpoints while training goes on", "saving waits for the disk"),
    Flag("--no-check-for-nan-in-loss-and-grad", True, Effect.NOTHING, "do not look for NaN",
         "the training script looks, by check_gradients", dest="check_for_nan_in_loss_and_grad"),
    Flag("--check-for-large-grads", False, Effect.LATER, "look for very large gradients", "the engine does not look"),
    Flag("--dump-param-to-param-group-map", None, Effect.LATER, "file to write the optimizer's groups to",
         "nothing is written", kind=str),
    Flag("--fake-process-group", False, Effect.LATER, "one GPU, no communication, to measure memory",
         "the ranks are those that the launcher starts"),
)
RULES = (
    Rule("--use-megatron-fsdp", "contradicts", "--use-torch-fsdp2", "only one engine can shard the model",
         lambda c: c.use_megatron_fsdp and c.use_torch_fsdp2),
    Rule("--use-megatron-fsdp", "needs", "--ckpt-format fsdp_dtensor", "sharded checkpoints have no other format",
         lambda c: c.use_megatron_fsdp and c.ckpt_format not in ("fsdp_dtensor", "torch_dist")),
    Rule("--use-megatron-fsdp", "needs", "--optimizer adam or sgd", "Megatron FSDP shards the state of no other",
         lambda c: c.use_megatron_fsdp and c.optimizer not in ("adam", "sgd")),
    Rule("--outer-dp-sharding-strategy optim", "needs", "--data-parallel-sharding-strategy optim_grads_params",
         "what is sharded over both axes must be sharded over the inner one",
         lambda c: c.outer_dp_sharding_strategy == "optim" and not c.is_zero3),
    Rule("--enable-full-sharding-in-hsdp", "needs", "--data-parallel-sharding-strategy optim_grads_params",
         "what is sharded over both axes must be sharded over the inner one",
         lambda c: c.enable_full_sharding_in_hsdp and not c.is_zero3),
    Rule("--init-model-with-meta-device", "contradicts", "--data-parallel-sharding-strategy no_shard",
         "a model that is not sharded needs its whole memory anyway",
         lambda c: c.init_model_with_meta_device and c.data_parallel_sharding_strategy == "no_shard"),
    Rule("--megatron-fsdp-version 2", "contradicts", "--use-distributed-optimizer", "version 2 shards by itself",
         lambda c: c.megatron_fsdp_version == 2 and c.use_distributed_optimizer),
    Rule("--fsdp-manual-registration", "needs", "--use-megatron-fsdp", "it registers this engine's buffers",
         lambda c: c.fsdp_manual_registration and not c.use_megatron_fsdp),
    Rule("--fsdp-manual-registration", "needs", "--use-nccl-ub", "without it no buffer is registered",
         lambda c: c.fsdp_manual_registration and not c.nccl_ub),
    Rule("--overlap-param-gather", "needs", "--overlap-grad-reduce", "Megatron overlaps gathers only beside reductions",
         lambda c: c.overlap_param_gather and not c.overlap_grad_reduce),
    Rule("--overlap-param-gather", "needs", "--use-megatron-fsdp",
         "or --use-distributed-optimizer, or --use-torch-fsdp2: without a sharded optimizer there is nothing to gather",
         lambda c: c.overlap_param_gather
         and not (c.use_megatron_fsdp or c.use_distributed_optimizer or c.use_torch_fsdp2)),
    Rule("--ddp-num-buckets", "contradicts", "--ddp-bucket-size", "each of them decides the other",
         lambda c: c.ddp_num_buckets is not None and c.ddp_bucket_size is not None),
    Rule("--bf16", "contradicts", "--fp16", "weights compute in one dtype", lambda c: c.bf16 and c.fp16),
    Rule("--grad-reduce-in-bf16", "contradicts", "--megatron-fsdp-grad-comm-dtype fp32 or fp16",
         "gradients travel in one dtype",
         lambda c: c.grad_reduce_in_bf16 and c.megatron_fsdp_grad_comm_dtype in ("fp32", "fp16")),
    Rule("--async-save", "needs", "--ckpt-format fsdp_dtensor or torch_dist", "the others write in the foreground only",
         lambda c: c.async_save and c.ckpt_format not in ("fsdp_dtensor", "torch_dist")),
    Rule("--use-torch-fsdp2", "needs", "--ckpt-format torch_dist or torch_dcp", "PyTorch's engine has no other format",
         lambda c: _is_torch_fsdp2(c) and c.ckpt_format not in ("torch_dist", "torch_dcp")),
    Rule("--use-torch-fsdp2", "contradicts", "--use-distributed-optimizer", "PyTorch's engine shards by itself",
         lambda c: _is_torch_fsdp2(c) and c.use_distributed_optimizer),
    Rule("--use-torch-fsdp2", "contradicts", "--fp16", "PyTorch's engine does not scale the loss",
         lambda c: _is_torch_fsdp2(c) and c.fp16),
    Rule("--use-torch-fsdp2", "needs", "--no-gradient-accumulation-fusion", "PyTorch's engine has no main gradients",
         lambda c: _is_torch_fsdp2(c) and c.gradient_accumulation_fusion),
)
# fmt: on
_SECTIONS = {
    "Sharding": _FSDP,
    "Overlap, reduction and data parallelism": _DDP,
    "Precision, optimizer, checkpoints and checks": _OTHER,
}
FLAGS: tuple[Flag, ...] = (*_FSDP, *_DDP, *_OTHER)
_BY_NAME = {key: flag for flag in FLAGS for key in (flag.name, flag.dest)}


def flag_of(name: str) -> Flag:
    """Return the flag of a name (``--use-nccl-ub``) or an attribute (``nccl_ub``).

    Raises:
        KeyError: there is no such flag.
    """
    return _BY_NAME[name]


def add_megatron_fsdp_args(parser: P) -> P:
    """Add Megatron-LM's FSDP flags to a parser, with its names, defaults and choices, and return the parser.

    Flags that the parser has already are left as they are. ``FsdpConfig.from_args`` reads and checks the result.
    """
    for title, flags in _SECTIONS.items():
        group = parser.add_argument_group(f"Megatron FSDP: {title[0].lower()}{title[1:]}")
        for flag in flags:
            if flag.name not in parser._option_string_actions:
                group.add_argument(flag.name, **_options(flag))
    return parser


def _options(flag: Flag) -> dict[str, Any]:
    here = "" if flag.effect is Effect.ACTS else f" (here: {flag.effect.value}; {flag.here})"
    options: dict[str, Any] = {"dest": flag.dest, "help": f"{flag.meaning}{here}".replace("%", "%%")}
    if flag.kind is bool:
        if flag.default is True and not flag.is_off_switch:
            return {**options, "action": argparse.BooleanOptionalAction, "default": True}
        return {**options, "action": "store_false" if flag.is_off_switch else "store_true"}
    if flag.kind is tuple:
        return {**options, "nargs": "*", "default": [], "metavar": "NAME"}
    options |= {"type": flag.kind, "default": flag.default}
    return {**options, "choices": flag.choices} if flag.choices else options


def flags_markdown() -> str:
    """Return docs/flags.md: a table of all flags, and which of them are refused together."""
    lines = [
        "# Flags",
        "",
        "Megatron-LM's flags around FSDP, with its names, defaults and choices. `add_megatron_fsdp_args(parser)` adds",
        "them to a parser, `FsdpConfig.from_args(args)` checks them. `config.explain()` says which flag caused what,",
        "`config.notices()` which of the given flags do nothing here, and why.",
        "",
        "This file is written by `python -m megatron_fsdp.arguments > docs/flags.md`.",
    ]
    for title, flags in _SECTIONS.items():
        lines += _heading(title, "Flag | Default, and other values | Meaning | Effect here")
        lines += [_row(flag) for flag in flags]
    lines += _heading("Refused", "Flag | | | Reason")
    lines += [f"| `{rule.first}` | {rule.relation} | `{rule.second}` | {rule.reason} |" for rule in RULES]
    return "\n".join(lines) + "\n"


def _heading(title: str, columns: str) -> list[str]:
    return ["", f"## {title}", "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]


def _row(flag: Flag) -> str:
    values = ["none" if flag.default in (None, ()) else f"`{flag.default}`"]
    values += [f"`{choice}`" for choice in flag.choices if choice != flag.default]
    attribute = "" if flag.dest == _attribute(flag.name) else f"`{flag.dest}`: "
    return f"| `{flag.name}` | {attribute}{', '.join(values)} | {flag.meaning} | {flag.effect.value}: {flag.here} |"


if __name__ == "__main__":
    sys.stdout.write(flags_markdown())
