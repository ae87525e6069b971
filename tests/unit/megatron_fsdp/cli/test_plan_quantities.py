"""Quantities on the command line."""

import argparse
from collections.abc import Callable

import pytest

from megatron_fsdp.planning.plan_arguments import (
    byte_count,
    bytes_per_second,
    mesh_sizes,
    operations_per_second,
    seconds,
)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (byte_count, "80GiB", 80 * 2**30),
        (byte_count, "1.5 GB", 1_500_000_000),
        (byte_count, "512B", 512),
        (byte_count, "2T", 2 * 10**12),
        (bytes_per_second, "50GB/s", 50e9),
        (bytes_per_second, "50G", 50e9),
        (bytes_per_second, "4e11", 4e11),
        (operations_per_second, "400T", 400e12),
        (operations_per_second, "1.2PFLOPS", 1.2e15),
        (seconds, "5us", 5e-6),
        (seconds, "0", 0.0),
        (seconds, "2ms", 2e-3),
        (mesh_sizes, "64", (64,)),
        (mesh_sizes, "8x128", (8, 128)),
        (mesh_sizes, "8X128", (8, 128)),
    ],
)
def test_amounts_are_read_as_they_are_written(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == pytest.approx(value) if isinstance(value, float) else read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (byte_count, "80"),
        (byte_count, "80Gb"),
        (byte_count, "80gib"),
        (byte_count, "80 apples"),
        (byte_count, "-1GiB"),
        (byte_count, "0GiB"),
        (bytes_per_second, "400Gb/s"),
        (bytes_per_second, "50GB/h"),
        (operations_per_second, "fast"),
        (seconds, "5 minutes"),
        (mesh_sizes, "x8"),
        (mesh_sizes, "-8"),
        (mesh_sizes, "1x2x3"),
    ],
)
def test_what_is_no_amount_is_refused_with_an_example(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write (it as|64) "):
        read(text)
