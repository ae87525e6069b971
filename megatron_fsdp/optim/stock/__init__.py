"""Optimizers of ``torch.optim`` and of users over sharded parameters."""
