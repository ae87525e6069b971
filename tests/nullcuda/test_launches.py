"""How Triton kernels are started: the first time by Triton's own call, afterwards by the compiled kernel's."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from dbuffer_kernels import cast_copy, launch
from dbuffer_kernels.elementwise_kernels import elementwise_kernel
from tests.nullcuda import machine

SIZE = 5000


@pytest.fixture
def searches() -> Any:
    """Count the calls in which Triton looks for the compiled kernel."""
    kernel = launch.jit(elementwise_kernel)
    with mock.patch.dict(launch._COMPILED, clear=True), mock.patch.object(kernel, "run", wraps=kernel.run) as run:
        yield run


def copied(source: torch.Tensor) -> list[int]:
    """Return the kernels that two scaled copies launched."""
    out = torch.empty(source.numel(), device="cuda")
    with machine.logged():
        for _ in range(2):
            cast_copy(source, out, scale=0.5)
    return [call.object for call in machine.calls() if call.kind == "launch"]


def test_triton_looks_for_a_compiled_kernel_once(searches: mock.Mock) -> None:
    launched = copied(torch.zeros(SIZE, dtype=torch.bfloat16, device="cuda"))
    assert Counter(launched).most_common() == [(launched[0], 2)]
    assert searches.call_count == 1


def test_other_dtypes_and_alignments_are_other_kernels(searches: mock.Mock) -> None:
    whole = torch.zeros(SIZE + 1, dtype=torch.bfloat16, device="cuda")
    kernels = [copied(source)[0] for source in (whole[:SIZE], whole[1:], whole[:SIZE].half(), whole[: SIZE - 16])]
    assert len({*kernels[:3]}) == searches.call_count == 3
    assert kernels[3] == kernels[0]


def test_each_launch_is_a_plain_call_where_triton_returns_no_compiled_kernel(searches: mock.Mock) -> None:
    searches.side_effect = lambda *args, **kwargs: None
    cast_copy(torch.zeros(SIZE, dtype=torch.bfloat16, device="cuda"), torch.empty(SIZE, device="cuda"), scale=0.5)
    cast_copy(torch.zeros(SIZE, dtype=torch.bfloat16, device="cuda"), torch.empty(SIZE, device="cuda"), scale=0.5)
    assert searches.call_count == 2
