"""Weights on the move: to inference engines, to peers in another layout, without disk."""
