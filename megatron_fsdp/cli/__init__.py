"""The subcommands of ``megatron-fsdp``."""
