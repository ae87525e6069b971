"""Benchmarks: measurements that a claim may cite, and what compares two of them. ``python -m benchmarks --help``."""
