"""MemoryMeter: counts the bytes in the engine's storages, current and peak."""

from __future__ import annotations


class MemoryMeter:
    """Counts the bytes that the engine's storages hold now, and their peak since the last reset."""

    __slots__ = ("current_bytes", "num_allocations", "peak_bytes")

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.num_allocations = 0

    def add(self, num_bytes: int) -> None:
        """Record an allocation (positive) or a release (negative)."""
        self.current_bytes += num_bytes
        if num_bytes > 0:
            self.num_allocations += 1
            if self.current_bytes > self.peak_bytes:
                self.peak_bytes = self.current_bytes

    def reset_peak(self) -> None:
        """Set the peak to the bytes held now, and the number of allocations to zero."""
        self.peak_bytes = self.current_bytes
        self.num_allocations = 0


_METER = MemoryMeter()


def memory_meter() -> MemoryMeter:
    """Return the meter that all storages of this process report to."""
    return _METER
