"""Benchmarks: measurements, and comparisons with other engines. ``python -m benchmarks --help``."""
