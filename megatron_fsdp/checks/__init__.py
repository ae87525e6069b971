"""Checks that raise errors with the names of parameter and unit, and comparisons between ranks."""
