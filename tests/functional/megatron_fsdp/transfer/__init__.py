"""Weights on the move, between processes."""
