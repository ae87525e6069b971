"""Exports of the package, and the cost of importing it."""

from __future__ import annotations

import importlib
import types

import dbuffer_kernels


def test_the_package_exports_exactly_its_documented_names() -> None:
    ops = (
        "accumulate adamw cast_copy checksum decode_rows dequantize_blocks dynamic_map encode_row int8_adamw "
        "join_weight muon_apply muon_momentum num_blocks quantize_blocks split_weight"
    )
    functions = [*ops.split(), "adamw_row", "adamw_rows", "backend", "use_backend"]
    classes = [
        "AdamWBuffers",
        "CodedSegment",
        "CodedSegments",
        "Int8AdamWBuffers",
        "Int8Moments",
        "MuonWeights",
    ]
    classes += ["Segment", "Segments"]
    assert dbuffer_kernels.__all__ == sorted([*functions, *classes, "QUANT_BLOCK"], key=_constants_first)
    kinds = (
        dict.fromkeys(functions, types.FunctionType)
        | dict.fromkeys(classes, type)
        | {"QUANT_BLOCK": int, "dynamic_map": object}
    )
    for name in dbuffer_kernels.__all__:
        assert isinstance(getattr(dbuffer_kernels, name), kinds.get(name, types.ModuleType)), name


def _constants_first(name: str) -> tuple[bool, str]:
    return not name.isupper(), name


def test_importing_a_submodule_leaves_the_op_of_the_same_name_in_place() -> None:
    for name in ("adamw", "elementwise", "split"):
        importlib.import_module(f"dbuffer_kernels.{name}")
    for op in ("adamw", "int8_adamw"):
        assert isinstance(getattr(dbuffer_kernels, op), types.FunctionType), op
