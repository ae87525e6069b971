"""SlotPool: permanent blocks of memory that storages use in turns as they are released and reallocated.

An allocator gives a storage different memory each time. A slot's address never changes, so a CUDA graph can record it,
a communicator can register it, and a step calls no allocator. In an ``ArenaPool`` all slots lie in one block, and each
storage of a step has a place that was planned ahead (docs/design/storage.md, "Slots", "A static arena").
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.utils import dlpack

from dbuffer.errors import StorageError
from dbuffer.events import listeners, tell
from dbuffer.memory_meter import memory_meter
from dbuffer.planner.arena import ALIGNMENT, ArenaPlan, Lifetime, Recorder, Span, aligned, hole, plan_arena
from dbuffer.slot_memory import Allocate

# PyTorch 2.11 lacks it.
_CAN_EXCHANGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
_LOG = logging.getLogger(__name__)
MAX_PLANS = 6
"""Most orders of storages that a pool plans for. Later storages without a place are allocated."""
# Longest recorded round. After a longer one, e.g. a long evaluation between two steps, recording starts again.
_MAX_EVENTS = 20_000
SIZINGS = ("by_size", "largest", "static")


def can_exchange_memory() -> bool:
    """Return whether storages of this PyTorch can exchange their memory, which slots need."""
    return _CAN_EXCHANGE


class SlotPool:
    """Slots of memory on one device. A slot is made when no free one fits, and kept until the pool is freed.

    Args:
        device: the device of the memory.
        sizing: "largest": each slot can hold the largest storage that the pool serves. "by_size": a slot has the size
            of its first storage and serves only storages of that size. "static": as "by_size", for storages without a
            place in an ``ArenaPool``.
        allocate: allocates the slots. None: the device's allocator.
    Raises:
        StorageError: ``sizing`` is unknown, or this PyTorch's storages cannot exchange their memory.
    """

    def __init__(self, device: torch.device, sizing: str, allocate: Allocate | None = None) -> None:
        if sizing not in SIZINGS:
            raise StorageError(f"SlotPool: sizing={sizing!r}; give one of {', '.join(map(repr, SIZINGS))}")
        if not can_exchange_memory():
            raise StorageError(
                f"SlotPool: storages of PyTorch {torch.__version__} cannot exchange their memory. "
                "fix: install PyTorch 2.13 or newer, or leave the buffers to the allocator: set_slot_pool(None)"
            )
        self.sizing = sizing
        self._device = device
        self._allocate = allocate
        # A storage detects that NumPy has its address when it is no longer resizable. Other memory never is.
        self.shows_arrays = allocate is None and sizing != "static"
        self._largest = 0
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self.num_slots = 0
        self._counted = [0]
        weakref.finalize(self, lambda counted: memory_meter().add(-counted[0]), self._counted)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._counted[0]

    def serve(self, num_bytes: int) -> None:
        """Prepare for storages of this size; drop free slots that are now too small."""
        if num_bytes > self._largest:
            self._largest = num_bytes
            for size in [size for size in self._free if size < self.slot_bytes(size)]:
                for slot in self._free.pop(size):
                    self.lose(slot, size)

    def slot_bytes(self, num_bytes: int) -> int:
        """Return the slot size in bytes for a storage of ``num_bytes``."""
        return max(self._largest, num_bytes) if self.sizing == "largest" else num_bytes

    def take(self, num_bytes: int, user: int) -> torch.UntypedStorage:
        """Return a free slot for ``num_bytes`` bytes, with undefined content; ``user`` identifies the storage."""
        size = self.slot_bytes(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        slot = self._new(size)
        self._count(1, size)
        return slot.untyped_storage()

    def _new(self, num_bytes: int) -> torch.Tensor:
        # A training step could not write memory that was allocated under inference_mode.
        with torch.inference_mode(False):
            if self._allocate is None:
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return self._allocate(num_bytes)

    def give_back(self, slot: torch.UntypedStorage, size: int) -> None:
        """Return a slot of ``size`` bytes to the pool; a slot that is now too small is dropped."""
        if size < self.slot_bytes(size):
            self.lose(slot, size)
        else:
            self._free[size].append(slot)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Stop counting a slot whose memory was freed together with its storage."""
        self._count(-1, -size)

    def _count(self, num_slots: int, num_bytes: int) -> None:
        self.num_slots += num_slots
        self._counted[0] += num_bytes
        memory_meter().add(num_bytes)

    def __repr__(self) -> str:
        return f"SlotPool({self.sizing!r}, {self.num_slots} slots, {self.nbytes} bytes on {self._device})"


@dataclass(slots=True)
class Holding:
    """The memory that a storage holds now: its own bytes, a slot of a pool, or nothing."""

    own_bytes: int = 0
    pool: SlotPool | None = None
    slot: torch.UntypedStorage | None = None
    slot_bytes: int = 0

    def take_slot(self, pool: SlotPool, storage: torch.UntypedStorage, num_bytes: int, user: int) -> None:
        """Take a slot from ``pool`` and move its memory into ``storage``, under all of the storage's views."""
        slot = pool.take(num_bytes, user)
        self.pool, self.slot_bytes, self.slot = pool, slot.nbytes(), slot
        self.exchange(storage, slot)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Move the memory back into the slot, and return the slot to its pool."""
        pool, slot = self.pool, self.slot
        assert pool is not None
        assert slot is not None
        if storage.nbytes():
            self.exchange(storage, slot)
        # Cleared first: once the pool has the slot, another storage may take it.
        self.slot = self.pool = None
        pool.give_back(slot, self.slot_bytes)

    @staticmethod
    def exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Exchange the memory of two storages. Tensors stay with their storage and then see the other memory."""
        one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # torch's stubs lack it
        if listeners:
            tell("exchanged", (one, other))

    def forget(self) -> None:
        """Stop counting memory whose storage was collected; views of it may still be alive."""
        memory_meter().add(-self.own_bytes)
        if self.pool is not None and self.slot is not None:
            self.pool.lose(self.slot, self.slot_bytes)


@dataclass(eq=False, slots=True)
class _Arena:
    """The memory that an arena's slots are cut from: ``memory`` is the part of ``block`` from an aligned address on."""

    block: torch.Tensor
    memory: torch.Tensor
    slots: dict[Span, torch.UntypedStorage] = field(default_factory=dict)

    def slot(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return the slot at an offset, as a separate storage, because a view cannot exchange its memory."""
        key = offset, num_bytes
        if key not in self.slots:
            part = self.memory[offset : offset + num_bytes]
            self.slots[key] = dlpack.from_dlpack(dlpack.to_dlpack(part)).untyped_storage()  # type: ignore[attr-defined]
        return self.slots[key]


@dataclass(slots=True)
class _Turn:
    """A use of a slot by a storage.

    Attributes:
        user: identifies the storage. number: counts its turns in this round from 0; None: it began in an earlier round.
        arena, span: the slot's bytes in an arena; arena is None for a slot outside the arena.
    """

    user: int
    num_bytes: int
    number: int | None
    arena: _Arena | None = None
    span: Span = (0, 0)


class ArenaPool(SlotPool):
    """A pool with one arena, for storages that come in a repeating order.

    A round ends at the end of a backward when the held storages are the same as at the round's start or at an earlier
    backward of it. (Accumulated gradients, for instance, are held until a later backward.) A storage's first turn gets
    the same place in all rounds, so does its second, and so on. Orders that were planned for therefore never conflict.
    The first round is not planned for: it prefetches nothing, so its order does not repeat.

    Attributes:
        plan: the arena's plan; None until the second round ends. num_plans: how often it was made.
        num_misses: turns since the first plan that found no place and got a slot outside the arena.
    """

    def __init__(self, device: torch.device, allocate: Allocate | None = None) -> None:
        super().__init__(device, "static", allocate)
        self.plan: ArenaPlan | None = None
        self.num_plans = self.num_misses = 0
        self._arena: _Arena | None = None
        # Keyed by (storage, turn in a round): its offset, and its lifetimes in the rounds that were planned for.
        self._places: dict[tuple[int, int | None], int] = {}
        self._lived: defaultdict[tuple[int, int | None], list[Lifetime]] = defaultdict(list)
        self._planned_until = 0
        # Keyed by the identity of the slot.
        self._turns: dict[int, _Turn] = {}
        self._is_first, self._misses_before = True, -1
        # The sets of storages held at the start of the round and after each of its backwards.
        self._settled = {frozenset[int]()}
        self._record()

    def take(self, num_bytes: int, user: int) -> torch.UntypedStorage:
        """Return the planned place of a storage, or a slot outside the arena, with undefined content."""
        for key in [key for key, turn in list(self._turns.items()) if turn.user == user]:
            self._end_turn(key)  # an interrupt stopped the storage from taking the slot or from returning it
        slot, turn = None, _Turn(user, num_bytes, self._num_turns[user])
        if self.plan is not None:
            slot = self._placed(turn, self._arena or self._make_arena(self.plan))
        if slot is None:
            slot = super().take(num_bytes, user)
        self._turns[id(slot)] = turn
        if self._recorder.now >= _MAX_EVENTS:
            self._record()
        else:
            self._recorder.begin((user, turn.number), num_bytes)
            self._num_turns[user] += 1
        return slot

    def give_back(self, slot: torch.UntypedStorage, size: int) -> None:
        """Return a slot to the pool; a slot outside the arena is dropped."""
        if self._end_turn(id(slot)) is None:
            super().lose(slot, size)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Stop counting a slot whose memory was freed with its storage. Views may live on, so its arena is dropped."""
        arena = self._end_turn(id(slot))
        if arena is None:
            super().lose(slot, size)
        elif arena is self._arena:
            self._drop_arena()

    def settle(self) -> None:
        """End the round if it is complete, and plan for it if a storage found no place. Called after each backward."""
        held = frozenset(turn.user for turn in list(self._turns.values()))
        if held not in self._settled:
            self._settled.add(held)
        elif self._recorder.now != self._num_first:
            if self.num_misses != self._misses_before and not self._is_first and self.num_plans < MAX_PLANS:
                self._make_plan()
            self._is_first, self._settled = False, {held}
            self._misses_before = -1 if self.plan is None else self.num_misses
            self._record()
        if self.plan is not None and self._arena is None:
            self._make_arena(self.plan)

    def _record(self) -> None:
        """Start recording a round, beginning with the storages held now."""
        self._recorder, self._num_turns = Recorder(), Counter[int]()
        for turn in list(self._turns.values()):
            turn.number = None
            self._recorder.begin((turn.user, None), turn.num_bytes)
        self._num_first = self._recorder.now

    def _end_turn(self, slot: int) -> _Arena | None:
        turn = self._turns.pop(slot)
        self._recorder.end((turn.user, turn.number))
        return turn.arena

    def _placed(self, turn: _Turn, arena: _Arena) -> torch.UntypedStorage | None:
        """Return a slot: at this turn's place, at the place of the first turn, or in the lowest hole; else None."""
        taken = sorted(other.span for other in list(self._turns.values()) if other.arena is arena)
        size = aligned(turn.num_bytes)
        places = self._places.get((turn.user, turn.number)), self._places.get((turn.user, 0)), hole(taken, size)
        for offset in (place for place in places if place is not None):
            stop = offset + size
            if stop <= len(arena.memory) and all(stop <= start or end <= offset for start, end in taken):
                turn.arena, turn.span, slot = arena, (offset, stop), arena.slot(offset, turn.num_bytes)
                if listeners:
                    tell("placed", (slot, arena.memory))
                return slot
        self.num_misses += 1
        return None

    def _make_arena(self, plan: ArenaPlan) -> _Arena:
        block = self._new(plan.num_bytes + ALIGNMENT)
        # Allocators need not align a block to ALIGNMENT, but offsets assume it.
        start = -block.data_ptr() % ALIGNMENT
        with torch.inference_mode(False):
            self._arena = _Arena(block, block[start : start + plan.num_bytes])
        self._count(1, block.numel())
        return self._arena

    def _drop_arena(self) -> None:
        """Make the next turn start a new arena; the old one lives until its last slot is given back."""
        if self._arena is not None:
            self._count(-1, -self._arena.block.numel())
            self._arena = None

    def _make_plan(self) -> None:
        """Plan for this round and all earlier planned ones, with one place per turn of a storage."""
        # The next round starts where this one ends, so storages held at both ends keep one place.
        last = {turn.user: turn.number for turn in list(self._turns.values())}
        for each in self._recorder.lifetimes(self._planned_until):
            user, number = cast(tuple[int, "int | None"], each.name)
            self._lived[user, last.get(user) if number is None else number].append(each)
        self._planned_until += self._recorder.now + 2
        plan = plan_arena(
            [
                Lifetime(max(each.num_bytes for each in same), tuple(span for each in same for span in each.spans))
                for same in self._lived.values()
            ]
        )
        self._places = dict(zip(self._lived, plan.offsets, strict=True))
        self._drop_arena()
        self.plan, self.num_plans = plan, self.num_plans + 1
        _LOG.info("%s", self)
        if self.num_plans == MAX_PLANS:
            _LOG.warning(
                "static arena: units came in %d different orders, so no more orders are planned for; storages without "
                "a place are allocated. fix: set_slot_pool('largest') if the order changes from step to step.",
                MAX_PLANS,
            )

    def __repr__(self) -> str:
        plan = self.plan
        what = "not planned yet" if plan is None else f"most held at once {plan.lower_bound}, gap {plan.gap:.2%}"
        return f"ArenaPool({self.nbytes} bytes on {self._device}, {what})"
