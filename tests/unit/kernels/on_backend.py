"""The backend of kernel tests: interpreter, device, and a check that kernels do not fall back on references.

Here ops run as their references. ``tests/functional/kernels/test_triton.py`` runs the same files in new processes, by
the interpreter of Triton and on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from dbuffer_kernels import launch, use_backend
from tests.harness.grids import covering

KERNELS = os.environ.get("KERNELS", "reference")
INTERPRETS = KERNELS == "interpreted"
DEVICE = "cuda" if KERNELS == "compiled" else "cpu"
# test_triton.py runs each value once in `make test`, and all combinations in nightly tests and on a GPU.
CHOOSE = list if os.environ.get("GRID", "whole") == "whole" else partial(covering, strength=1)
SIZES = (0, 1, 3, 7, 1023, 4096, 4097, 9001)


@pytest.fixture(autouse=True)
def only_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run only the chosen kernels; the references raise for ops with a Triton kernel."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the reference ran where the Triton kernel was wanted")

    if KERNELS != "reference" and "reference_allowed" not in request.keywords:
        for module in [module for name, module in sys.modules.items() if name.startswith("dbuffer_kernels.")]:
            for name in list(vars(module)):
                if name.startswith("reference_"):
                    monkeypatch.setattr(module, name, fail)
    with use_backend("reference" if KERNELS == "reference" else "triton"):
        yield


def random(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal numbers, rounded once to a dtype, on the device."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(DEVICE)


def guarded(numel: int, dtype: torch.dtype, fill: float = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer filled with one value, and a view of ``numel`` of its elements from the fourth on."""
    buffer = torch.full((numel + 8,), fill, dtype=dtype, device=DEVICE)
    return buffer, buffer[3 : 3 + numel]


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that each launch of a kernel extends by its number of programs."""
    started: list[int] = []
    jit = launch.jit

    class Counter:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            started.append(grid[0])
            return jit(self.kernel)[grid]

    monkeypatch.setattr(launch, "jit", Counter)
    return started
