"""Optimizers over sharded weights, norms and clipping, and what happens to steps with NaN."""
