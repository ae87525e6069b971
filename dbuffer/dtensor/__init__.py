"""Flat buffers as DTensors, and what PyTorch's operators do on it."""

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.dtensor.placement import FlatRows, RaggedShard

__all__ = ["FlatDTensor", "FlatRows", "RaggedShard"]
