"""The thread that issues collectives on CPU tensors."""

import functools
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dbuffer.comm_thread import issue


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def is_here() -> bool:
    caller = threading.get_ident()
    return bool(issue(threading.get_ident) == caller)


def test_calls_are_made_by_one_other_thread_whoever_asks() -> None:
    found = [issue(threading.get_ident)]
    asking = threading.Thread(target=lambda: found.append(issue(threading.get_ident)))
    asking.start()
    asking.join()
    assert not is_here()
    assert found[0] == found[1]


def test_under_a_dispatch_mode_or_a_profiler_the_caller_makes_the_call_for_them_to_see() -> None:
    with Mode():
        assert is_here()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_here()
    assert not is_here()


def test_an_error_of_the_call_reaches_the_caller_and_the_next_call_is_made() -> None:
    def fail() -> None:
        raise KeyError("nothing there")

    with pytest.raises(KeyError, match="nothing there"):
        issue(fail)
    assert issue(lambda: 7) == 7


def test_a_tensor_made_under_inference_mode_can_be_written_by_the_call() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        issue(lambda: tensor.add_(1))
        assert tensor.tolist() == [1, 1, 1]
    assert not issue(torch.is_inference_mode_enabled)


def test_the_call_may_write_a_leaf_that_is_trained() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    issue(lambda: parameter.add_(1))
    assert parameter.tolist() == [1, 1, 1]


def test_an_interrupted_wait_leaves_nothing_to_the_next_call() -> None:
    def interrupt(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError):
            issue(lambda: time.sleep(0.5) or "first")
        assert issue(lambda: "second") == "second"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_forked_process_has_a_comm_thread_of_its_own() -> None:
    issue(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike forks of threads
        child = os.fork()
    if not child:
        os._exit(7 if issue(lambda: 3) == 3 and not is_here() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_a_call_refers_to_and_returns_goes_with_the_caller_not_when_the_comm_thread_next_runs() -> None:
    class Held:
        """Something whose end is seen."""

    # The caller goes on as soon as it may, with the thread anywhere between its answer and its next order.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5000):
            argument, result = Held(), Held()
            ends = weakref.ref(argument), weakref.ref(result)
            assert issue(functools.partial(lambda argument, result: result, argument, result)) is result
            del argument, result
            assert [end() for end in ends] == [None, None]
    finally:
        sys.setswitchinterval(interval)
