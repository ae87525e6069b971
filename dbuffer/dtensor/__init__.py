"""Flat buffers as DTensors, and what PyTorch's operators do on it."""
