"""Where tensors sit in flat buffers of equal shards, with as little padding as a bounded search finds."""

from dbuffer.planner.regions import plan, plan_regions

__all__ = ["plan", "plan_regions"]
