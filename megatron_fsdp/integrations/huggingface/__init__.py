"""Hugging Face: transformers models, ``Trainer``, accelerate."""
