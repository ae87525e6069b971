"""Kernels on flat tensors: Triton on CUDA, plain torch with the same numerics everywhere else."""

# The ops are imported here and not on first use: a later import of the submodule `adamw` or `int8_adamw` would
# rebind that name in this package from the function to the module.
from dbuffer_kernels.adamw import AdamWBuffers, adamw, adamw_row, adamw_rows
from dbuffer_kernels.bit_sums import checksum
from dbuffer_kernels.dynamic_map import QUANT_BLOCK, dequantize_blocks, dynamic_map, num_blocks, quantize_blocks
from dbuffer_kernels.elementwise import accumulate, cast_copy
from dbuffer_kernels.int8_adamw import CodedSegment, CodedSegments, Int8AdamWBuffers, Int8Moments, int8_adamw
from dbuffer_kernels.launch import backend, use_backend
from dbuffer_kernels.muon import MuonWeights, muon_apply, muon_momentum
from dbuffer_kernels.quantize import decode_rows, encode_row
from dbuffer_kernels.segments import Segment, Segments
from dbuffer_kernels.split import join_weight, split_weight

__all__ = [
    "QUANT_BLOCK",
    "AdamWBuffers",
    "CodedSegment",
    "CodedSegments",
    "Int8AdamWBuffers",
    "Int8Moments",
    "MuonWeights",
    "Segment",
    "Segments",
    "accumulate",
    "adamw",
    "adamw_row",
    "adamw_rows",
    "backend",
    "cast_copy",
    "checksum",
    "decode_rows",
    "dequantize_blocks",
    "dynamic_map",
    "encode_row",
    "int8_adamw",
    "join_weight",
    "muon_apply",
    "muon_momentum",
    "num_blocks",
    "quantize_blocks",
    "split_weight",
    "use_backend",
]
