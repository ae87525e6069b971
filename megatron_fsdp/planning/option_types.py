"""Quantities as people write them on a command line: ``80GiB``, ``50GB/s``, ``400T``, ``8x128``."""

from __future__ import annotations

import argparse
import math
import re

__all__ = ["byte_count", "bytes_per_second", "mesh_sizes", "operations_per_second", "positive_integer", "seconds"]

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def positive_integer(text: str) -> int:
    """Return an integer of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def byte_count(text: str) -> int:
    """Return bytes: ``80GiB`` is 80 * 2**30, ``80GB`` 80 * 10**9; a number without a unit is refused."""
    if not _parts(text, "80GiB or 80GB")[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write it as 80GiB or 80GB")
    return round(_amount(text, "B", "80GiB or 80GB"))


def bytes_per_second(text: str) -> float:
    """Return bytes per second: ``50GB/s`` or, without the unit, ``50G``; bits are refused."""
    return _amount(text, "B/S", "50GB/s")


def operations_per_second(text: str) -> float:
    """Return operations per second: ``400T``, ``400TFLOPS`` or ``4e14``."""
    return _amount(text, "FLOPS", "400T")


def seconds(text: str) -> float:
    """Return seconds from ``5us``, ``0.1ms`` or ``0``."""
    number, unit = _parts(text, "5us")
    scale = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}.get(unit)
    if scale is None:
        raise argparse.ArgumentTypeError(f"{text!r}: {unit!r} is no unit of time; write it as 5us")
    return number * scale


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Return the axes of a mesh: ``64`` is one axis, ``8x128`` two (outer, inner)."""
    parts = re.split(r"[x,*]", text.strip().lower())
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write 64 for one axis, 8x128 for outer x inner")
    return tuple(int(part) for part in parts)


def _amount(text: str, unit: str, example: str) -> float:
    number, found = _parts(text, example)
    upper = found.upper()
    # The unit may be left out, the prefix stands before it.
    prefix = upper.removesuffix(unit)
    scales: dict[str, int] = {**_DECIMAL, **_BINARY}
    if prefix not in scales or re.search(r"b(/|$)", found):
        raise argparse.ArgumentTypeError(f"{text!r}: {found!r} is no unit that fits here; write it as {example}")
    value = number * scales[prefix]
    if value <= 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0; write it as {example}")
    return value


def _parts(text: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; write it as {example}")
    return float(found[1]), found[2]
