"""What a process holds now and held at most: GPU memory allocated, or host memory resident."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """MiB of one kind of memory.

    Attributes:
        kind: "allocated": of a GPU, by tensors of this process. "resident": of the host, all that this process holds.
        now, peak: at this moment, and at most since the process began.
    """

    kind: str
    now: float
    peak: float

    def __str__(self) -> str:
        return f"{self.kind} memory now (MiB): {self.now:.1f} | peak {self.kind} memory (MiB): {self.peak:.1f}"


def memory_use(device: torch.device) -> MemoryUse:
    """Return what this process holds on a GPU, or in host memory where it computes on a CPU."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return MemoryUse("allocated", now / 2**20, peak / 2**20)
    if _STATUS.exists():
        found = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return MemoryUse("resident", *(int(found[key].split()[0]) / 2**10 for key in ("VmRSS", "VmHWM")))
    now_kib = int(subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, check=True).stdout)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return MemoryUse("resident", now_kib / 2**10, most / (2**20 if sys.platform == "darwin" else 2**10))
