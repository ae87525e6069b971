"""Flag: what one row of the table of Megatron-LM's flags says."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["FLAGS", "SECTIONS", "Effect", "Flag", "Value", "attribute", "flag_of"]

Value = bool | int | float | str | tuple[str, ...] | None


class Effect(enum.Enum):
    """What a flag does here. All but ACTS are accepted and do nothing; the value says why."""

    ACTS = "acted on"
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
            object.__setattr__(self, "dest", attribute(self.name))

    @property
    def is_off_switch(self) -> bool:
        """Whether giving the flag makes its attribute False."""
        return self.kind is bool and self.default is True and self.dest != attribute(self.name)

    @property
    def is_silent(self) -> bool:
        """Whether giving the flag changes nothing here."""
        return self.effect is not Effect.ACTS

    def spell(self, value: object) -> str:
        """Return how the command line says ``value``: ``--bf16``, ``--optimizer sgd``, ``--no-align-param-gather``."""
        if self.kind is bool:
            is_pair = self.default is True and not self.is_off_switch
            return self.name.replace("--", "--no-", 1) if is_pair and value is False else self.name
        return f"{self.name} {' '.join(value) if isinstance(value, tuple) else value}"


def attribute(name: str) -> str:
    """Return the attribute that argparse makes of a flag's name."""
    return name.removeprefix("--").replace("-", "_")


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
         "optim shards optimizer state and main weights over both axes", choices=("no_shard", "optim"),
         kind=str),
    Flag("--num-distributed-optimizer-instances", 1, Effect.ACTS, "outer replicas; more than 1 is hybrid sharding",
         "the size of the outer axis of a 2-D mesh", kind=int),
    Flag("--enable-full-sharding-in-hsdp", False, Effect.ACTS, "older form of --outer-dp-sharding-strategy optim",
         "the same"),
    Flag("--init-model-with-meta-device", False, Effect.ACTS, "build the model without memory, shard, then initialise",
         "each rank allocates its shards only, and one whole tensor at a time; values are those of one process"),
    Flag("--megatron-fsdp-main-params-dtype", "fp32", Effect.ACTS, "dtype of main weights; auto: the model's",
         "of the weights that the optimizer steps; auto is the compute dtype", choices=_DTYPES,
         kind=str),
    Flag("--megatron-fsdp-main-grads-dtype", "auto", Effect.ACTS, "dtype of accumulated gradients; auto: the model's",
         "auto is fp16 with --fp16, bf16 with --bf16 --grad-reduce-in-bf16, else fp32", choices=_DTYPES,
         kind=str),
    Flag("--megatron-fsdp-grad-comm-dtype", "auto", Effect.ACTS, "dtype of the reduction; auto: main gradients'",
         "of the reduce-scatter; an outer axis, and no_shard and optim, reduce in the main gradients' dtype",
         choices=_DTYPES, kind=str),
    Flag("--megatron-fsdp-enable-fine-grained-param-gather", False, Effect.LATER, "gather per submodule",
         "a unit is gathered as a whole"),
    Flag("--suggested-communication-unit-size", None, Effect.ACTS, "elements per communication step",
         "gathers run ahead of compute by units of at least so many elements together; not given: by one unit",
         kind=int),
    Flag("--create-all-gather-group", False, Effect.ALWAYS, "a second communicator, so gather and reduction overlap",
         "gathers and reductions have a communicator each"),
    Flag("--keep-fp8-transpose-cache", False, Effect.PACKAGE, "keep the transpose of FP8 weights",
         "FP8 weights need Transformer Engine"),
    Flag("--fsdp-double-buffer", False, Effect.ACTS, "two reusable buffers for gathered weights",
         "units of equal size take turns in memory that stays, gradients too; PyTorch 2.13"),
    Flag("--megatron-fsdp-max-pool-double-buffer", False, Effect.ACTS, "buffers as large as the largest unit",
         "all units take turns in memory that stays; PyTorch 2.13"),
    Flag("--fsdp-db-use-persist-buf-on-alloc-fail", False, Effect.ALWAYS, "keep what does not fit the two buffers",
         "units that fit no buffer have one of their own"),
    Flag("--use-nccl-ub", False, Effect.ACTS, "register buffers with NCCL; implies --fsdp-double-buffer",
         "on GPUs buffers are symmetric memory", dest="nccl_ub"),
    Flag("--disable-symmetric-registration", False, Effect.ACTS, "with --use-nccl-ub: no symmetric windows",
         "buffers come from NCCL's own allocator"),
    Flag("--fsdp-manual-registration", False, Effect.NOTHING, "with --use-nccl-ub: register when a step is over",
         "each buffer is registered when it is made, in the first step"),
    Flag("--use-torch-fsdp2", False, Effect.NOTHING, "shard with PyTorch's FSDP2 instead",
         "`examples/pretrain_gpt.py` trains by it to compare; code written for it runs after changing the import"),
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
    Flag("--ddp-reduce-scatter-with-fp32-accumulation", False, Effect.ACTS, "send low precision, add up in FP32",
         "with --megatron-fsdp-grad-comm-dtype bf16 or fp16: each rank adds up what the others sent it"),
    Flag("--ddp-param-name-patterns-for-fp32-local-accumulation", (), Effect.LATER,
         "parameters whose gradients accumulate in FP32", "--megatron-fsdp-main-grads-dtype holds for all", kind=tuple),
    Flag("--ddp-average-in-collective", False, Effect.NOTHING, "average in the collective",
         "sums are reduced, and the division is part of the accumulation"),
    Flag("--grad-reduce-in-bf16", False, Effect.ACTS, "with --bf16: gradients in bf16, not FP32",
         "reduced in bf16, and accumulated so unless --megatron-fsdp-main-grads-dtype says otherwise"),
    Flag("--calculate-per-token-loss", False, Effect.ACTS, "normalise by tokens, not by samples and ranks",
         "losses and tokens are summed over microbatches and ranks; gradients are divided by all tokens of the step"),
    Flag("--no-gradient-accumulation-fusion", True, Effect.ACTS, "add weight gradients after the GEMM, not in it",
         "without it the GEMMs of linear layers write into the unit's buffer, in its dtype or in FP32",
         dest="gradient_accumulation_fusion"),
    Flag("--use-distributed-optimizer", False, Effect.NOTHING, "shard the optimizer state",
         "--data-parallel-sharding-strategy says what is sharded"),
    Flag("--use-sharp", False, Effect.HARDWARE, "reduce inside the network", "it takes switches with SHARP"),
    Flag("--sharp-enabled-group", None, Effect.HARDWARE, "which groups --use-sharp serves", "see --use-sharp",
         choices=("dp", "dp_replica"), kind=str),
    Flag("--fsdp-invariant-reduction", False, Effect.ACTS, "this engine's own: the same bits on any number of ranks",
         "gradients of microbatches are exchanged one by one and added up in FP32 in the order of their numbers"),
    Flag("--high-priority-stream-groups", (), Effect.ALWAYS, "groups whose collectives get high-priority streams",
         "gathers and reductions run on high-priority streams", kind=tuple),
)

_OTHER = (
    Flag("--bf16", False, Effect.ACTS, "bf16 model weights", "weights are gathered and used in bf16"),
    Flag("--fp16", False, Effect.ACTS, "fp16 model weights",
         "weights are gathered and used in fp16; the training script refuses it, for want of loss scaling"),
    Flag("--optimizer", "adam", Effect.ACTS, "the optimizer; Megatron FSDP takes adam and sgd",
         "adam, sgd and muon (docs/muon.md); in code any elementwise optimizer of PyTorch works as well",
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
    Flag("--optimizer-cpu-offload", False, Effect.ACTS, "optimizer state and step on the CPU",
         "weights at rest and gradients go with them; a shard is copied to the device when its unit is gathered"),
    Flag("--optimizer-offload-fraction", 1.0, Effect.LATER, "share of it", "all of it, or nothing", kind=float),
    Flag("--overlap-cpu-optimizer-d2h-h2d", False, Effect.ALWAYS, "overlap its copies",
         "copies run beside compute, with the collectives that they belong to"),
    Flag("--optimizer-cuda-graph", False, Effect.LATER, "capture the optimizer step", "nothing is captured"),
    Flag("--cuda-graph-impl", "none", Effect.LATER, "what CUDA graphs capture", "nothing is captured",
         choices=("none", "local", "transformer_engine", "full_iteration"), kind=str),
    Flag("--ckpt-format", "torch_dist", Effect.ACTS, "format of checkpoints; Megatron FSDP takes fsdp_dtensor",
         "with --use-megatron-fsdp checkpoints are fsdp_dtensor, and torch_dist, the default, counts as not given",
         choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"), kind=str),
    Flag("--strict-fsdp-dtensor-load", True, Effect.ACTS, "refuse checkpoints with other names or shapes",
         "differences are listed; with --no-strict-fsdp-dtensor-load what matches is loaded, the rest said and left"),
    Flag("--dist-ckpt-strictness", "assume_ok_unexpected", Effect.NOTHING, "of torch_dist checkpoints",
         "a checkpoint of another model is refused", choices=_STRICTNESS, kind=str),
    Flag("--async-save", False, Effect.ACTS, "write checkpoints while training goes on",
         "copied to host memory, then written; the next save, SIGTERM, Ctrl-C and the end of the run wait for it"),
    Flag("--clip-grad", 1.0, Effect.ACTS, "largest global norm of the gradients",
         "over all ranks and units; 0 only measures", kind=float),
    Flag("--check-for-nan-in-loss-and-grad", True, Effect.ACTS, "look for NaN; switched off by --no-check-...",
         "NaN or infinity ends the run with the parameter's name, before any weight changes"),
    Flag("--check-for-large-grads", False, Effect.ACTS, "look for very large gradients",
         "a norm above 10 times the largest of the steps before is said in the log"),
    Flag("--dump-param-to-param-group-map", None, Effect.ACTS, "file to write the optimizer's groups to",
         "JSON: each parameter's name, and the index of its group", kind=str),
    Flag("--fake-process-group", False, Effect.ACTS, "one GPU, no communication, to measure memory",
         "one process stands for WORLD_SIZE ranks; losses mean nothing"),
)

# fmt: on
SECTIONS = {
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
