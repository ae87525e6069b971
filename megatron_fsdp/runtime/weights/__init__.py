"""Kinds of weights that ordinary ZeRO-3 does not have."""
