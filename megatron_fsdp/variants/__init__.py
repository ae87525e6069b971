"""Other ways to gather weights and to reduce gradients, which a group holds in place of the ordinary ones."""
