"""SIGTERM and Ctrl-C are noted while the context is open, once, and are the process's own affair before and after."""

import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gpt.signals import StopSignal
from tests.harness import run_ranks


def send_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_nothing_is_received_without_a_signal() -> None:
    with StopSignal() as stop:
        assert not stop.received
        assert not stop.is_received_anywhere()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_is_received_and_the_process_goes_on(number: int, name: str) -> None:
    with StopSignal() as stop:
        signal.raise_signal(number)
        assert stop.received == name
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


@pytest.fixture
def interrupts() -> Iterator[None]:
    """A job that a shell has put into the background is told to ignore Ctrl-C, and all that it starts with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_says_what_happens_and_a_second_one_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignal(on_interrupt="the step is finished"):
        send_sigterm()
        assert capfd.readouterr().err == ""
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == "\nthe step is finished\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def stop_the_last_rank(number: int) -> tuple[bool, bool, str]:
    with StopSignal() as stop:
        before = stop.is_received_anywhere()
        if dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(number)
        return before, stop.is_received_anywhere(), stop.received


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_all_ranks_stop_when_one_is_asked_to(number: int, name: str) -> None:
    assert run_ranks(3, stop_the_last_rank, number) == [(False, True, name)] * 3
