"""Rules for Megatron-LM's flags: which flags contradict each other, and which need another flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.config.flags import flag_of

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Two flags that contradict each other, or a flag that needs another.

    Attributes:
        first: a flag, with its value if the value matters.
        relation: "contradicts" or "needs".
        second: a flag, and the values that are refused or needed.
        reason: why, and what to do if that does not follow.
        is_broken: returns whether an ``FsdpConfig`` breaks the rule.
    """

    first: str
    relation: str
    second: str
    reason: str
    is_broken: Callable[[Any], bool]

    def refusal(self, config: Any) -> str:
        """Return the error message for a config that breaks the rule, with the values found."""
        first, second = flag_of(self.first.split()[0]), flag_of(self.second.split()[0])
        values = getattr(config, first.dest), getattr(config, second.dest)
        if self.relation == "contradicts":
            both = f"{first.spell(values[0])} contradicts {second.spell(values[1])}"
            return f"{both}: {self.reason}. fix: leave out one of them"
        found = "" if second.kind is bool else f" (found {values[1]})"
        return f"{first.spell(values[0])} needs {self.second}{found}: {self.reason}. fix: give both or neither"


# Unformatted, because the formatter would put every field on its own line.
# fmt: off
RULES = (
    Rule("--use-megatron-fsdp", "contradicts", "--use-torch-fsdp2", "only one engine can shard the model",
         lambda c: c.use_megatron_fsdp and c.use_torch_fsdp2),
    Rule("--use-megatron-fsdp", "needs", "--ckpt-format fsdp_dtensor", "sharded checkpoints have no other format",
         lambda c: c.use_megatron_fsdp and c.ckpt_format not in ("fsdp_dtensor", "torch_dist")),
    Rule("--use-megatron-fsdp", "needs", "--optimizer adam, sgd or muon", "the state of no other is sharded",
         lambda c: c.use_megatron_fsdp and c.optimizer not in ("adam", "sgd", "muon", "dist_muon")),
    Rule("--outer-dp-sharding-strategy optim", "needs", "--data-parallel-sharding-strategy optim_grads_params",
         "a tensor sharded over both axes must be sharded over the inner one",
         lambda c: c.outer_dp_sharding_strategy == "optim" and not c.is_zero3),
    Rule("--enable-full-sharding-in-hsdp", "needs", "--data-parallel-sharding-strategy optim_grads_params",
         "a tensor sharded over both axes must be sharded over the inner one",
         lambda c: c.enable_full_sharding_in_hsdp and not c.is_zero3),
    Rule("--init-model-with-meta-device", "contradicts", "--data-parallel-sharding-strategy no_shard",
         "a model that is not sharded needs its whole memory anyway",
         lambda c: c.init_model_with_meta_device and c.data_parallel_sharding_strategy == "no_shard"),
    Rule("--optimizer-cpu-offload", "needs", "--data-parallel-sharding-strategy optim_grads_params",
         "weights that are whole on every rank are used where they are",
         lambda c: c.optimizer_cpu_offload and not c.is_zero3),
    Rule("--megatron-fsdp-version 2", "contradicts", "--use-distributed-optimizer", "version 2 shards by itself",
         lambda c: c.megatron_fsdp_version == 2 and c.use_distributed_optimizer),
    Rule("--fsdp-manual-registration", "needs", "--use-megatron-fsdp", "it registers this engine's buffers",
         lambda c: c.fsdp_manual_registration and not c.use_megatron_fsdp),
    Rule("--fsdp-manual-registration", "needs", "--use-nccl-ub", "without it no buffer is registered",
         lambda c: c.fsdp_manual_registration and not c.nccl_ub),
    Rule("--overlap-param-gather", "needs", "--overlap-grad-reduce", "Megatron overlaps gathers only with reductions",
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
    Rule("--fsdp-invariant-reduction", "needs", "--use-megatron-fsdp", "no other engine keeps an order of sums",
         lambda c: c.fsdp_invariant_reduction and not c.use_megatron_fsdp),
    Rule("--fsdp-forward-order", "needs", "--use-megatron-fsdp", "with other engines all ranks run all units",
         lambda c: c.fsdp_forward_order and not (c.use_megatron_fsdp or getattr(c, "hugging_face", None))),
    Rule("--async-save", "needs", "--ckpt-format fsdp_dtensor or torch_dist", "the others write in the foreground only",
         lambda c: c.async_save and c.ckpt_format not in ("fsdp_dtensor", "torch_dist")),
)
# fmt: on
