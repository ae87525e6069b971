"""What differs for Megatron-LM's flags under ``python -m megatron_fsdp.megatron``, for docs/flags.md."""

from __future__ import annotations

__all__ = ["UNDER_THE_LAUNCHER"]

_TEXT = """\
## Under the launcher

`python -m megatron_fsdp.megatron` ([megatron.md](megatron.md)) hands the flags on to Megatron, whose configs this
engine reads. The tables hold there too, but for these:

- `--ckpt-format fsdp_dtensor` has to be given.
- `--optimizer-cpu-offload`, `--use-precision-aware-optimizer`, `--check-for-large-grads`, `--fp8-param-gather`, a
  `--cuda-graph-impl` other than `none` and optimizers besides adam and sgd are refused.
- `--fp16` trains with Megatron's grad scaler.
- `--no-gradient-accumulation-fusion` changes nothing: the fusion of Megatron's layers is off in any case.
- `--data-parallel-random-init`, Megatron's own: ranks that drew different weights get the first rank's.
- Checkpoints and their strictness, the limit of `--clip-grad`, `--async-save`, `--dump-param-to-param-group-map`
  and `--fake-process-group` are Megatron's own code.
- Flags that are "not supported yet", or need hardware or a package that is not used, are said at the start.
"""
UNDER_THE_LAUNCHER = tuple(_TEXT.splitlines())
