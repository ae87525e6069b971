"""The bench of the kernels measures every op of the package, and counts the bytes that it moves."""

from __future__ import annotations

import argparse

import torch

import dbuffer_kernels
from benchmarks import bench_kernels
from benchmarks.bench_kernels import makers


def test_every_op_of_the_package_is_measured_with_a_copy_for_comparison() -> None:
    rows = bench_kernels.run(argparse.Namespace(numel=1000, rounds=1, device=None))
    names = {str(row.case["kernel"]).partition(" ")[0] for row in rows}
    ops = "accumulate adamw cast_copy checksum join_weight split_weight".split()
    assert names == set(ops)
    assert names < set(dbuffer_kernels.__all__)
    assert {row.metric for row in rows} == {"rate", "rate over that of a copy"}
    assert all(row.samples.median > 0 for row in rows)


def test_bytes_are_those_that_the_docstrings_state() -> None:
    works = {name: make().num_bytes / 1600 for name, make in makers(1600, torch.device("cpu")).items()}
    assert works == {
        "cast_copy fp32 to bf16": 6,
        "accumulate bf16 into fp32": 10,
        "checksum fp32": 4,
        "split_weight": 8,
        "join_weight": 8,
        "adamw (all fp32, bf16 model weight)": 30,
        "adamw (bf16 gradient, bf16 model weight)": 28,
        "adamw (fp32 weight as bf16 and remainder)": 26,
        "adamw (all bf16)": 14,
    }
