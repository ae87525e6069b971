"""The choice between Triton and the reference, and how a test overrides it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from dbuffer_kernels import accumulate, backend, cast_copy, launch, use_backend


def test_the_cpu_runs_the_reference_and_cuda_runs_triton() -> None:
    assert backend("cpu") == "reference"
    assert backend(torch.device("cuda", 3)) == "triton"
    assert backend("meta") == "reference"


def test_without_a_device_the_backend_is_that_of_the_best_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend() == "triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend() == "reference"


def test_an_override_nests_and_ends_with_its_context_even_on_an_error() -> None:
    with use_backend("reference"):
        assert backend("cuda") == "reference"
        with contextlib.suppress(KeyError), use_backend("triton"):
            assert backend("cpu") == "triton"
            raise KeyError
        assert backend("cuda") == "reference"
        with use_backend("auto"):
            assert backend("cuda") == "triton"
    assert backend("cuda") == "triton"


def test_an_override_reaches_the_threads_that_autograd_starts() -> None:
    seen: list[str] = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backend("cuda")))
        thread.start()
        thread.join()
    assert seen == ["reference"]


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'cutlass'"), use_backend("cutlass"):  # type: ignore[arg-type]
        raise AssertionError("entered")


def test_forcing_triton_on_a_cpu_tensor_says_how_to_interpret_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    source, out = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3)
    message = r"found a tensor on cpu.*TRITON_INTERPRET=1"
    with use_backend("triton"):
        with pytest.raises(ValueError, match=message):
            cast_copy(source, out, scale=2.0)
        with pytest.raises(ValueError, match=message):
            accumulate(source, out)
    assert out.tolist() == [0, 0, 0]


def test_ops_leave_no_trace_in_autograd_and_write_into_leaves_that_require_grad() -> None:
    source = torch.ones(4, requires_grad=True)
    out = torch.zeros(4, requires_grad=True)
    assert cast_copy(source, out, scale=2.0) is out
    assert accumulate(source, out, scale=0.5) is out
    assert out.is_leaf
    assert out.tolist() == [2.5] * 4
    assert torch.is_grad_enabled()


def test_no_program_is_started_for_an_empty_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(launch, "jit", fail)
    launch.launch(fail, 0, torch.device("cpu"))
    with pytest.raises(AssertionError, match="compiled"):
        launch.launch(fail, 1, torch.device("cpu"))
