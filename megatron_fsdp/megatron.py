"""``python -m megatron_fsdp.megatron`` and ``install()``; see ``megatron_fsdp.integrations.megatron.launcher``."""

import sys

from megatron_fsdp.integrations.megatron.launcher import Launch, install, main, plan_launch, run, uninstall

__all__ = ["Launch", "install", "main", "plan_launch", "run", "uninstall"]

if __name__ == "__main__":
    sys.exit(main())
