"""SlotPool: memory that stays, in slots that released and reallocated storages take turns in.

An allocator gives a storage other bytes each time. A slot is always the same memory, so a CUDA graph can hold it and a
communicator can register it, and a step calls no allocator. In an ``ArenaPool`` all slots lie in one block, where every
storage of a step has a place that was chosen before it comes (docs/design/storage.md, "Slots", "A static arena").
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

# Not in PyTorch 2.11.
_CAN_EXCHANGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
_LOG = logging.getLogger(__name__)
MAX_PLANS = 6
"""Orders that a pool plans for; what is still without a place then is allocated."""
# Of one round. A longer one, such as a long evaluation between two steps, is planned for from there on.
_MAX_EVENTS = 20_000
SIZINGS = ("by_size", "largest", "static")


def can_exchange_memory() -> bool:
    """Whether this PyTorch's storages can, as slots need."""
    return _CAN_EXCHANGE


class SlotPool:
    """Slots of memory on one device, made when none is free that fits and kept until the pool is gone.

    Args:
        device: of the memory.
        sizing: "largest": each slot can hold the largest storage that the pool serves. "by_size": a slot has the size
            of the storage it was made for and serves storages of just that size. "static": likewise, for those that
            ``ArenaPool`` has no place for.
        allocate: where slots come from. None: from the device's allocator.
    Raises:
        StorageError: another ``sizing``, or a PyTorch whose storages cannot exchange their memory.
    """

    def __init__(self, device: torch.device, sizing: str, allocate: Allocate | None = None) -> None:
        if sizing not in SIZINGS:
            raise StorageError(f"SlotPool: sizing={sizing!r}; give one of {', '.join(map(repr, SIZINGS))}")
        if not can_exchange_memory():
            raise StorageError(
                f"SlotPool: storages of PyTorch {torch.__version__} cannot exchange their memory; PyTorch 2.13 can. "
                "Leave the buffers to the allocator."
            )
        self.sizing = sizing
        self._device = device
        self._allocate = allocate
        # Other memory is never resizable, which is how a storage knows that NumPy has its address.
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
        """Be ready for storages of this size."""
        if num_bytes > self._largest:
            self._largest = num_bytes
            for size in [size for size in self._free if size < self.slot_bytes(size)]:
                for slot in self._free.pop(size):
                    self.lose(slot, size)

    def slot_bytes(self, num_bytes: int) -> int:
        """Return how many bytes the slot of a storage of ``num_bytes`` has."""
        return max(self._largest, num_bytes) if self.sizing == "largest" else num_bytes

    def take(self, num_bytes: int, user: int) -> torch.UntypedStorage:
        """Return a free slot for a storage of ``num_bytes``, with undefined content; ``user``: its identity."""
        size = self.slot_bytes(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        slot = self._new(size)
        self._count(1, size)
        return slot.untyped_storage()

    def _new(self, num_bytes: int) -> torch.Tensor:
        # Memory made under inference_mode could never be written by a training step later on.
        with torch.inference_mode(False):
            if self._allocate is None:
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return self._allocate(num_bytes)

    def give_back(self, slot: torch.UntypedStorage, size: int) -> None:
        """Take a slot of ``size`` bytes back; one that has become too small is dropped."""
        if size < self.slot_bytes(size):
            self.lose(slot, size)
        else:
            self._free[size].append(slot)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Forget a slot that went with the storage that had it."""
        self._count(-1, -size)

    def _count(self, num_slots: int, num_bytes: int) -> None:
        self.num_slots += num_slots
        self._counted[0] += num_bytes
        memory_meter().add(num_bytes)

    def __repr__(self) -> str:
        return f"SlotPool({self.sizing!r}, {self.num_slots} slots, {self.nbytes} bytes on {self._device})"


@dataclass(slots=True)
class Holding:
    """What a storage holds now: bytes of its own, a slot of a pool, or nothing."""

    own_bytes: int = 0
    pool: SlotPool | None = None
    slot: torch.UntypedStorage | None = None
    slot_bytes: int = 0

    def take_slot(self, pool: SlotPool, storage: torch.UntypedStorage, num_bytes: int, user: int) -> None:
        """Let a storage have the memory of a slot, and every view of it; the slot has none from here on."""
        slot = pool.take(num_bytes, user)
        self.pool, self.slot_bytes, self.slot = pool, slot.nbytes(), slot
        self.exchange(storage, slot)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Give the slot its memory back, and the pool its slot."""
        pool, slot = self.pool, self.slot
        assert pool is not None
        assert slot is not None
        if storage.nbytes():
            self.exchange(storage, slot)
        # First: what another storage can take is nobody's.
        self.slot = self.pool = None
        pool.give_back(slot, self.slot_bytes)

    @staticmethod
    def exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Exchange the memory of two storages; tensors stay with their storage, whose memory is another then."""
        one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # torch's stubs lack it
        if listeners:
            tell("exchanged", (one, other))

    def forget(self) -> None:
        """Take leave of memory whose storage is gone; views of it may live on."""
        memory_meter().add(-self.own_bytes)
        if self.pool is not None and self.slot is not None:
            self.pool.lose(self.slot, self.slot_bytes)


@dataclass(eq=False, slots=True)
class _Arena:
    """Memory that slots are cut from, and kept alive by: the part of a block that begins at an aligned address."""

    block: torch.Tensor
    memory: torch.Tensor
    slots: dict[Span, torch.UntypedStorage] = field(default_factory=dict)

    def slot(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return the slot at an offset: a storage of its own, which can exchange its memory, unlike a view's."""
        key = offset, num_bytes
        if key not in self.slots:
            part = self.memory[offset : offset + num_bytes]
            self.slots[key] = dlpack.from_dlpack(dlpack.to_dlpack(part)).untyped_storage()  # type: ignore[attr-defined]
        return self.slots[key]


@dataclass(slots=True)
class _Turn:
    """A slot in use.

    Attributes:
        user: the storage that has it. number: which turn of that in this round; None: it began before.
        arena, span: the bytes of it; of none if the slot is one of its own.
    """

    user: int
    num_bytes: int
    number: int | None
    arena: _Arena | None = None
    span: Span = (0, 0)


class ArenaPool(SlotPool):
    """Places in one arena for storages that come in an order that repeats itself.

    A round is over at the end of a backward at which the same storages are held as at its start, or at an earlier
    backward of it: gradients that are summed up here, say, are held until a later one. In all rounds a storage has the
    same place at its first turn, the same at its second and so on, so no two orders that were planned for get in each
    other's way. Nothing is gathered ahead in a first round, so it will not come again, and is not planned for.

    Attributes:
        plan: of the arena; None until the second round is over. num_plans: how often it was made.
        num_misses: turns since the first plan that found no place and had a slot of their own.
    """

    def __init__(self, device: torch.device, allocate: Allocate | None = None) -> None:
        super().__init__(device, "static", allocate)
        self.plan: ArenaPlan | None = None
        self.num_plans = self.num_misses = 0
        self._arena: _Arena | None = None
        # By a storage and which turn of it in a round: where that lies, and when it was held in rounds planned for.
        self._places: dict[tuple[int, int | None], int] = {}
        self._lived: defaultdict[tuple[int, int | None], list[Lifetime]] = defaultdict(list)
        self._planned_until = 0
        # By the identity of the slot.
        self._turns: dict[int, _Turn] = {}
        self._is_first, self._misses_before = True, -1
        # Who was there at the start of the round, and after each backward in it.
        self._settled = {frozenset[int]()}
        self._record()

    def take(self, num_bytes: int, user: int) -> torch.UntypedStorage:
        """Return the place of a storage, or a slot of its own, with undefined content."""
        for key in [key for key, turn in list(self._turns.items()) if turn.user == user]:
            self._end_turn(key)  # an interrupt kept the storage from having it, or from giving it back
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
        """Take a slot back, which stays if it is one of the arena."""
        if self._end_turn(id(slot)) is None:
            super().lose(slot, size)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Forget a slot that went with the storage that had it: views of it may live on, so its arena goes with it."""
        arena = self._end_turn(id(slot))
        if arena is None:
            super().lose(slot, size)
        elif arena is self._arena:
            self._drop_arena()

    def settle(self) -> None:
        """End the round if it is over, and plan for it too if something found no place in it: a backward is over."""
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
        """Begin to record a round, with what is there."""
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
        """Return the slot at the place of this turn of a storage, of its first turn, or in the lowest hole, or None."""
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
        # The address of a block need not be a multiple of what offsets are.
        start = -block.data_ptr() % ALIGNMENT
        with torch.inference_mode(False):
            self._arena = _Arena(block, block[start : start + plan.num_bytes])
        self._count(1, block.numel())
        return self._arena

    def _drop_arena(self) -> None:
        """Let the next turn begin a new arena; this one is there until the last slot of it is given back."""
        if self._arena is not None:
            self._count(-1, -self._arena.block.numel())
            self._arena = None

    def _make_plan(self) -> None:
        """Plan for this round and all that were planned for, with one place for each turn of a storage."""
        # What is there at both ends of a round is at one place then: the end is followed by the start.
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
                "static arena: units came in %d orders, and no more are planned for; what finds no place is allocated. "
                "set_slot_pool('largest') suits an order that changes from step to step.",
                MAX_PLANS,
            )

    def __repr__(self) -> str:
        plan = self.plan
        what = "not planned yet" if plan is None else f"most held at once {plan.lower_bound}, gap {plan.gap:.2%}"
        return f"ArenaPool({self.nbytes} bytes on {self._device}, {what})"
