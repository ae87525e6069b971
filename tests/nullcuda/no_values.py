"""A plugin of pytest for the null machine, whose kernels compute nothing: a test's own assertions decide nothing.

A test with any other failure fails here as well: an exception of the engine, of PyTorch or of a rank, a call that CUDA
refuses, or a hang. A failed assertion of a value ends the test, so code after it does not run.
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
