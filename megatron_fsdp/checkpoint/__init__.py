"""Checkpoints: atomic, checksummed folders that load on any number of ranks, in any strategy and precision."""
