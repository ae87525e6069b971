"""Collectives on the simulated link take their time, one after the other, while the host goes on."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import simulated_link
from benchmarks.bench_link import least_exposed
from benchmarks.simulated_link import Link, link_world, take_waited_seconds

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Clock:
    """Stands in for the module ``time``: only sleeping takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(simulated_link, "time", clock)
    take_waited_seconds()
    return clock


@pytest.mark.parametrize(("num_ranks", "seconds"), [(1, 0.5), (2, 0.5 + 2.0), (4, 0.5 + 3.0)])
def test_a_rank_receives_what_the_others_have(num_ranks: int, seconds: float) -> None:
    assert Link(0.5, 10.0).collective_seconds(40, num_ranks) == pytest.approx(seconds)


def test_two_collectives_of_one_group_take_twice_as_long() -> None:
    with link_world(2, Link(2.0, 1e12)):
        works = [gather(torch.empty(4), torch.empty(2), async_op=True) for _ in range(2)]
        works[1].wait()
        assert take_waited_seconds() == pytest.approx(4.0)
        works[0].wait()
    assert take_waited_seconds() == 0.0


def test_groups_have_links_of_their_own() -> None:
    with link_world(2, Link(2.0, 1e12)):
        other = dist.new_group([0, 1])
        works = [gather(torch.empty(4), torch.empty(2), group=group, async_op=True) for group in (None, other)]
        for work in works:
            work.wait()
    assert take_waited_seconds() == pytest.approx(2.0)


def test_a_collective_on_the_simulated_link_does_not_wait_for_the_host(clock: Clock) -> None:
    with link_world(2, Link(2.0, 1e12)):
        work = gather(torch.empty(4), torch.empty(2), async_op=True)
        clock.now += 1.5
        assert not work.is_completed()
        work.wait()
        assert take_waited_seconds() == pytest.approx(0.5)
        work = gather(torch.empty(4), torch.empty(2), async_op=True)
        clock.now += 2.5
        assert work.is_completed()
        work.wait()
    assert take_waited_seconds() == 0.0


@pytest.mark.parametrize(("forward", "least"), [(2.0, 2.0), (1.0, 2.0), (0.5, 2.0 + 3 * 0.5), (0.25, 2.0 + 3 * 1.25)])
def test_the_least_exposed_is_two_collectives_and_what_compute_is_too_short_for(forward: float, least: float) -> None:
    assert least_exposed(4, 1.0, forward) == pytest.approx(least)
