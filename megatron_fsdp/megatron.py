"""The interface for Megatron: Megatron-FSDP's functions, megatron-core's classes, and a launcher for its scripts.

``python -m megatron_fsdp.megatron pretrain_gpt.py ...`` runs a script of a Megatron-LM checkout (docs/megatron.md).
"""

import sys

from megatron_fsdp.integrations.megatron.adapter import __getattr__ as __getattr__
from megatron_fsdp.integrations.megatron.adapter import get_megatron_optimizer, install, uninstall
from megatron_fsdp.integrations.megatron.fully_shard_model import fully_shard_model, fully_shard_model_and_optimizer
from megatron_fsdp.integrations.megatron.launcher import main
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from megatron_fsdp.integrations.megatron.torch_dist import load_torch_dist

__all__ = [  # noqa: F822  (ShardedDataParallel is made when asked for)
    "MegatronFSDP",
    "ShardedDataParallel",
    "fully_shard_model",
    "fully_shard_model_and_optimizer",
    "get_megatron_optimizer",
    "install",
    "load_torch_dist",
    "main",
    "uninstall",
]


if __name__ == "__main__":
    sys.exit(main())
