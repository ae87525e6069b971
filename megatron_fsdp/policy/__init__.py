"""What a user asks for: strategy, precision, offload, mesh. Plain data, and the checks of it."""
