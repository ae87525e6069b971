"""Sharded parameters in optimizers of ``torch.optim`` and of users."""
