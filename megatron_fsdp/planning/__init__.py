"""What a model takes to train, from shapes or from a live model: memory, collectives, time."""
