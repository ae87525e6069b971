"""Shapes of published models, by the path that users know; see ``megatron_fsdp.planning.catalog``."""

from megatron_fsdp.planning.catalog import SUPPORTED, Architecture, UnitShapes, architecture, load, names

__all__ = ["SUPPORTED", "Architecture", "UnitShapes", "architecture", "load", "names"]
