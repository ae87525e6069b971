"""Flat distributed buffers: plans, placements, releasable storage and in-place collectives."""

from dbuffer.buffer import DBuffer
from dbuffer.dtensor.flat_dtensor import FlatDTensor, FlatRows, RaggedShard
from dbuffer.errors import DBufferError, LayoutError, MeshError, PaddingWarning, PlacementError, ReadError, StorageError
from dbuffer.events import CollectiveCall, observe_collectives
from dbuffer.layout import first_dimension_granularity
from dbuffer.memory_meter import MemoryMeter, memory_meter
from dbuffer.placements import BufferPlacement, Flat, Partial, Replicate
from dbuffer.planner.granularity import Block, Element, Granularity, Row, Whole
from dbuffer.planner.plan import PaddingLimits, Plan, Region
from dbuffer.planner.regions import plan, plan_regions
from dbuffer.slot_pool import SlotPool

__all__ = [
    "Block",
    "BufferPlacement",
    "CollectiveCall",
    "DBuffer",
    "DBufferError",
    "Element",
    "Flat",
    "FlatDTensor",
    "FlatRows",
    "Granularity",
    "LayoutError",
    "MemoryMeter",
    "MeshError",
    "PaddingLimits",
    "PaddingWarning",
    "Partial",
    "PlacementError",
    "Plan",
    "RaggedShard",
    "ReadError",
    "Region",
    "Replicate",
    "Row",
    "SlotPool",
    "StorageError",
    "Whole",
    "first_dimension_granularity",
    "memory_meter",
    "observe_collectives",
    "plan",
    "plan_regions",
]
