"""A waiter waits instead of the collective itself if the collective writes CPU memory."""

import pytest
import torch
import torch.distributed as dist

from dbuffer.collectives.waits import wait_for, wait_with


class Noted(dist.Work):
    """Counts its waits. ``wait`` has no timeout argument, because NCCL aborts after a timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self) -> bool:  # type: ignore[override]
        self.waits += 1
        return True


@pytest.mark.parametrize(("device", "by_waiter"), [(None, 1), ("cpu", 1), ("meta", 0)])
def test_a_waiter_waits_for_what_writes_memory_of_the_cpu_and_for_nothing_else(
    device: str | None, by_waiter: int
) -> None:
    work, waited = Noted(), list[dist.Work]()
    with wait_with(waited.append):
        wait_for(work, None if device is None else torch.empty(1, device=device))
    assert (len(waited), work.waits) == (by_waiter, 1 - by_waiter)


def test_without_a_waiter_the_work_itself_waits() -> None:
    work = Noted()
    wait_for(work)
    assert work.waits == 1
