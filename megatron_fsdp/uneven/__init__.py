"""Blocks in which the ranks of a job may do different amounts of work."""
