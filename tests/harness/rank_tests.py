"""A test whose body every rank runs: what it asserts is asserted on each of them."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tests.harness.ranks import run_ranks

Test = Callable[..., None]


def on_ranks(world_size: int | Callable[..., int], **options: Any) -> Callable[[Test], Test]:
    """Make a test of a function that every rank of a new process group is to run, from its first line to its last.

    What pytest passes it (parameters, ``tmp_path``) travels to the ranks, so it must be picklable. Of an assertion that
    fails, the error shows the local variables. Write it below marks: they belong to the test.

    Args:
        world_size: number of ranks, or a function of those of the test's parameters that it names.
        options: those of ``run_ranks``.
    """

    def number(arguments: dict[str, object]) -> int:
        if isinstance(world_size, int):
            return world_size
        return world_size(**{name: arguments[name] for name in inspect.signature(world_size).parameters})

    def decorate(function: Test) -> Test:
        @functools.wraps(function)
        def test(**arguments: object) -> None:
            run_ranks(number(arguments), _Body(function), arguments, **options)

        return test

    return decorate


class _Body:
    """What a decorator has wrapped; a rank finds it by its name, which is that of the wrapper."""

    def __init__(self, function: Test) -> None:
        self.module, self.__qualname__ = function.__module__, function.__qualname__

    def __call__(self, arguments: dict[str, object]) -> None:
        inspect.unwrap(getattr(importlib.import_module(self.module), self.__qualname__))(**arguments)
