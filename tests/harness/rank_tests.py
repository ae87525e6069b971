"""A test whose body runs on every rank, with its assertions."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tests.harness.ranks import run_ranks

Test = Callable[..., None]


def on_ranks(world_size: int | Callable[..., int], **options: Any) -> Callable[[Test], Test]:
    """Make a test of a function that every rank of a new process group is to run, from its first line to its last.

    pytest's arguments (parameters, ``tmp_path``) are sent to the ranks, so they must be picklable. For a failed
    assertion, the error shows the local variables. Write the decorator below marks, which belong to the test.

    Args:
        world_size: number of ranks, or a function of some of the test's parameters.
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
    """The function inside a decorator. A rank finds it by its name, which equals the wrapper's."""

    def __init__(self, function: Test) -> None:
        self.module, self.__qualname__ = function.__module__, function.__qualname__

    def __call__(self, arguments: dict[str, object]) -> None:
        inspect.unwrap(getattr(importlib.import_module(self.module), self.__qualname__))(**arguments)
