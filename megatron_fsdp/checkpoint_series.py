"""Checkpoints of a training run, by the path that users know; see ``megatron_fsdp.checkpoint.series``."""

from megatron_fsdp.checkpoint.series import CheckpointSeries

__all__ = ["CheckpointSeries"]
