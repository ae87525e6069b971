"""Options of a run on several ranks."""

import time

import torch.distributed as dist

from gpt.signals import StopSignal
from tests.harness import run_ranks


def stop_by_the_clock_of_the_last_rank() -> tuple[bool, str, bool]:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with StopSignal(1e-9 if is_last else 60) as stop:
        time.sleep(0.001)
        return stop.is_received_anywhere(), stop.received, stop.is_time_up


def test_all_ranks_stop_when_the_time_of_one_is_up() -> None:
    assert run_ranks(2, stop_by_the_clock_of_the_last_rank) == [(True, "", True)] * 2
