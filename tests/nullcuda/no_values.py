"""A plugin of pytest for the null machine, whose kernels compute nothing: a test's own assertions decide nothing.

A test that fails otherwise fails here as well: with an exception of the engine, of PyTorch or of a rank, with a call
that CUDA refuses, or by hanging. What a test asserts is asserted after it has done all that it does.
"""

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed and call.excinfo is not None:
        is_of_the_test = call.excinfo.traceback[-1].path == item.path
        if call.excinfo.errisinstance(AssertionError) and is_of_the_test:
            report.outcome = "passed"
            report.longrepr = None
    return report
