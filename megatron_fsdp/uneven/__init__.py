"""Blocks that let the ranks of a job do different amounts of work."""
