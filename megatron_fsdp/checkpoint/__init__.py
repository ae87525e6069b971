"""Checkpoints: atomic, checksummed folders that load on any number of ranks, in any strategy and precision."""

from megatron_fsdp.checkpoint.api import load_checkpoint, save_checkpoint, start_save, state_bytes

__all__ = ["load_checkpoint", "save_checkpoint", "start_save", "state_bytes"]
