"""Checks that raise an error before damage is done, with the names of rank, unit and parameter."""
