"""Optimizers of sharded weights, gradient norms and clipping, and the handling of NaN gradients."""
