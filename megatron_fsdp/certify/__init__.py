"""Proof that the engine's streams are in order: on CPU ranks with CUDA's meaning, or on a GPU from what it did."""
