"""Slots explored state by state: three storages of different sizes join a pool, take, release and end in any order.

The pool and the storages are the real classes. They cannot be copied, so each state is reached again from the start.
Two states that differ only in the places of slots of one size count as one.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter, deque

import pytest
import torch

from dbuffer import SlotPool, memory_meter
from dbuffer.slot_pool import can_exchange_memory
from dbuffer.storage import FlatStorage

CPU = torch.device("cpu")
Step = tuple[str, int]
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


class Users:
    """Three storages, one pool, and their history.

    Attributes:
        most: how many of each size held a slot at once; of all sizes, where each slot fits all.
    """

    def __init__(self, sizing: str, numels: tuple[int, ...]) -> None:
        self.before = memory_meter().current_bytes
        self.pool = SlotPool(CPU, sizing)
        self.storages: list[FlatStorage | None] = [
            FlatStorage(numel, torch.float32, CPU, name=str(user)) for user, numel in enumerate(numels)
        ]
        self.joined: set[int] = set()
        self.most: Counter[int] = Counter()
        for storage in self.storages:
            storage.release()

    def do(self, step: Step) -> None:
        name, user = step
        storage = self.storages[user]
        if name == "join":
            self.joined.add(user)
            storage.use_pool(self.pool)
        elif name == "take":
            storage.reallocate()
            storage.tensor.fill_(user + 1.0)
        elif name == "release":
            storage.release()
        else:
            self.joined.discard(user)
            self.storages[user] = storage = None
        held = Counter(size for _, size in self.held())
        self.most |= Counter({0: held.total()}) if self.pool.sizing == "largest" else held

    def steps(self) -> list[Step]:
        found = []
        for user, storage in enumerate(self.storages):
            if storage is not None:
                found += [("release" if storage.is_allocated else "take", user), ("end", user)]
                found += [("join", user)] if user not in self.joined else []
        return found

    def held(self) -> list[tuple[int, int]]:
        present = (storage for storage in self.storages if storage is not None)
        slots = (storage for storage in present if storage.is_allocated and storage._holding.slot is not None)
        return [(storage.tensor.data_ptr(), storage._holding.slot_bytes) for storage in slots]

    def key(self) -> object:
        users = [
            storage
            and (
                user in self.joined,
                storage.is_allocated,
                storage._holding.slot is not None and storage._holding.slot_bytes,
            )
            for user, storage in enumerate(self.storages)
        ]
        free = sorted((size, len(slots)) for size, slots in self.pool._free.items() if slots)
        return tuple(users), tuple(free), self.pool._largest, tuple(sorted(self.most.items()))

    def check(self) -> None:
        own = 0
        for user, storage in enumerate(self.storages):
            if storage is not None and storage.is_allocated:
                assert storage.tensor.unique().tolist() == [user + 1.0]
                own += 0 if storage._holding.slot is not None else storage.nbytes
                assert storage._holding.slot is None or storage._holding.slot_bytes >= storage.nbytes
        held, free = self.held(), self.pool._free
        places = sorted(held + [(slot.data_ptr(), size) for size, slots in free.items() for slot in slots])
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))
        assert all(slot.nbytes() == size for size, slots in free.items() for slot in slots)
        assert (self.pool.num_slots, self.pool.nbytes) == (len(places), sum(size for _, size in places))
        assert memory_meter().current_bytes - self.before == self.pool.nbytes + own
        assert self.pool.num_slots <= self.most.total(), "a slot was made though one was free"

    def end(self) -> None:
        self.storages.clear()
        del self.pool
        assert memory_meter().current_bytes == self.before


def explore(sizing: str, numels: tuple[int, ...]) -> int:
    gc.collect()
    open_: deque[tuple[Step, ...]] = deque([()])
    seen = set()
    while open_:
        path = open_.popleft()
        users = Users(sizing, numels)
        for step in path:
            users.do(step)
        if (key := users.key()) not in seen:
            seen.add(key)
            users.check()
            open_ += [(*path, step) for step in users.steps()]
        users.end()
    return len(seen)


@pytest.mark.parametrize("sizing", ["largest", "by_size"])
@pytest.mark.parametrize("numels", [(4, 8, 8), (4, 6, 8)], ids=["two of a size", "three sizes"])
def test_no_memory_is_held_twice_and_no_slot_is_made_in_vain_in_any_order(sizing: str, numels: tuple[int, ...]) -> None:
    num_states = explore(sizing, numels)
    print(f"{sizing}, {numels}: {num_states} states")
    assert num_states > 300
