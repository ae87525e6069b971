"""Whether streams, memory and collectives of the engine are in order: ``python -m tests.certify --help``."""
