"""Certify that the engine orders streams, memory and collectives correctly: ``python -m tests.certify --help``."""
