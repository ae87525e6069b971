"""Predicted memory, collectives and time of training, from a model's shapes or from a live model."""
