"""Flat buffers as DTensors, and what PyTorch's operators do on it."""

from dbuffer.dtensor.distribution import FlatRows, RaggedShard
from dbuffer.dtensor.flat_dtensor import FlatDTensor

__all__ = ["FlatDTensor", "FlatRows", "RaggedShard"]
