"""SIGTERM is noted while the context is open, once, and is the process's own affair before and after."""

import os
import signal

import torch.distributed as dist

from gpt.signals import StopSignal
from tests.harness import run_ranks


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_nothing_is_received_without_a_signal() -> None:
    with StopSignal() as stop:
        assert not stop.is_received
        assert not stop.is_received_anywhere()


def test_a_signal_is_received_and_the_process_goes_on() -> None:
    with StopSignal() as stop:
        send_sigterm()
        assert stop.is_received
        assert stop.is_received_anywhere()


def test_a_second_signal_goes_where_the_first_would_have_gone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with StopSignal():
            send_sigterm()
            assert seen == []
            send_sigterm()
        assert seen == [signal.SIGTERM]
        send_sigterm()
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_the_last_rank() -> list[bool]:
    with StopSignal() as stop:
        answers = [stop.is_received_anywhere()]
        if dist.get_rank() == dist.get_world_size() - 1:
            send_sigterm()
        return [*answers, stop.is_received_anywhere(), stop.is_received]


def test_all_ranks_stop_when_one_is_asked_to() -> None:
    assert run_ranks(3, stop_the_last_rank) == [[False, True, True]] * 3
