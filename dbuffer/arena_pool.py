"""ArenaPool: one block of memory in which every storage of a step has a place that was chosen before it comes.

The first step is noted while the allocator serves it; then the places of all that came are planned at once
(dbuffer/planner/arena.py), and from the next step on nothing is allocated. What is free is looked at before every
turn, so an order that was not planned costs memory, never a value (docs/design/storage.md, "A static arena").
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils import dlpack

from dbuffer.events import listeners, tell
from dbuffer.memory_meter import memory_meter
from dbuffer.planner.arena import ALIGNMENT, ArenaPlan, Lifetime, Recorder, aligned, hole, plan_arena
from dbuffer.slot_pool import Allocate, SlotPool, SlotUser

__all__ = ["MAX_PLANS", "ArenaPool"]

_LOG = logging.getLogger(__name__)
MAX_PLANS = 6
"""Orders that a pool plans for; what is still without a place then has a slot of its own."""
# Of one round. A longer one, such as a long evaluation between two steps, is no good for a plan.
_MAX_EVENTS = 20_000


class _Arena:
    """The block, and slots cut from it. A slot keeps the block alive by itself."""

    def __init__(self, block: torch.Tensor, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.block_bytes = block.numel()
        start = -block.data_ptr() % ALIGNMENT
        self.memory = block[start : start + num_bytes]
        self._slots: dict[tuple[int, int], torch.UntypedStorage] = {}
        # By the identity of a slot in use: its first byte and the one after its last, rounded up.
        self.taken: dict[int, tuple[int, int]] = {}

    def fits(self, offset: int, size: int) -> bool:
        """Whether bytes are free from an offset on."""
        stop = offset + size
        return stop <= self.num_bytes and all(stop <= other[0] or other[1] <= offset for other in self.taken.values())

    def free(self, size: int) -> int | None:
        """Return where the smallest hole for ``size`` begins, or None."""
        offset = hole(sorted(self.taken.values()), size, fits_tightly=True)
        return offset if offset + size <= self.num_bytes else None

    def take(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return the slot at an offset."""
        key = (offset, num_bytes)
        if key not in self._slots:
            # A storage of its own, which can exchange its memory, unlike a view's.
            view = dlpack.from_dlpack(dlpack.to_dlpack(self.memory[offset : offset + num_bytes]))  # type: ignore[attr-defined]
            self._slots[key] = view.untyped_storage()
        slot = self._slots[key]
        self.taken[id(slot)] = offset, offset + aligned(num_bytes)
        return slot


@dataclass(slots=True)
class _Order:
    """The orders in which storages come, and where each of them lies then.

    Attributes:
        users: who comes, order after order. offsets: where it lies. following: the position after each, and after the
            last of an order its first.
    """

    users: list[SlotUser] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    _positions: dict[SlotUser, list[int]] = field(default_factory=dict)
    _begins: set[int] = field(default_factory=set)
    _next: int = 0
    _last: SlotUser | None = None

    def add(self, users: list[SlotUser], offsets: list[int]) -> None:
        """Add one order."""
        begin = len(self.users)
        self._begins.add(begin)
        self.users += users
        self.offsets += offsets
        self.following += [*range(begin + 1, len(self.users)), begin] if users else []
        for position in range(begin, len(self.users)):
            self._positions.setdefault(self.users[position], []).append(position)

    def offset(self, user: SlotUser, is_free: Callable[[int], bool]) -> int | None:
        """Return where a storage should lie that comes now: the first of its places that is free, None for none."""
        candidates = self._candidates(user)
        at = next((position for position in candidates if is_free(self.offsets[position])), None)
        self._last = user
        if at is None:
            return None
        self._next = self.following[at]
        return self.offsets[at]

    def _candidates(self, user: SlotUser) -> Iterator[int]:
        """Yield where it is expected; where it came after what came last; where an order begins with it; all others."""
        if self._next < len(self.users) and self.users[self._next] == user:
            yield self._next
        known = self._positions.get(user, [])
        later = [position for position in known if position >= self._next] + known
        yield from (position for position in later if self._follows(position))
        yield from (position for position in later if position in self._begins)
        yield from later

    def _follows(self, position: int) -> bool:
        return position not in self._begins and self.users[position - 1] == self._last


@dataclass(frozen=True, slots=True)
class _Turn:
    """A slot in use: who has it, the bytes asked for, and the arena that it was cut from, None for one of its own."""

    user: SlotUser
    num_bytes: int
    arena: _Arena | None


class ArenaPool(SlotPool):
    """Places in one arena for storages that come in an order that repeats itself.

    Attributes:
        plan: of the arena; None until an order has begun to repeat itself. num_plans: how often it was made.
        num_misses: turns since the first plan that found no place and had a slot of their own.
    """

    def __init__(self, device: torch.device, allocate: Allocate | None = None) -> None:
        super().__init__(device, "static", allocate)
        self.plan: ArenaPlan | None = None
        self.num_plans = 0
        self.num_misses = 0
        self._arena: _Arena | None = None
        self._order = _Order()
        self._recorder: Recorder | None = Recorder()
        self._recorded: list[Recorder] = []
        # Who came and who was there then; and who was there at the start of the round, and after each backward in it.
        self._seen: set[Hashable] = set()
        self._settled: set[Hashable] = {frozenset()}
        self._has_settled = False
        # Whether the recorder began with a round, and whether something found no place in it.
        self._is_whole = True
        self._has_missed = False
        self._has_warned = False
        # By the identity of the slot.
        self._turns: dict[int, _Turn] = {}
        self._counted = [0]
        weakref.finalize(self, _forget, self._counted)

    def forecast_bytes(self, num_bytes: int) -> int:
        """Return 0: a storage has a place in the arena."""
        return 0

    def take(self, num_bytes: int, user: SlotUser | None = None) -> torch.UntypedStorage:
        """Return the place of a storage, or a slot of its own, with undefined content."""
        user = user or SlotUser(0)
        if self._recorder is not None:
            self._record(user, num_bytes)
        slot = None if self.plan is None else self._place(self.plan, user, num_bytes)
        arena = None if slot is None else self._arena
        if slot is None:
            slot = super().take(num_bytes)
        self._turns[id(slot)] = _Turn(user, num_bytes, arena)
        return slot

    def give_back(self, slot: torch.UntypedStorage, size: int) -> None:
        """Take a slot back. One of its own is kept only where no other plan will be made."""
        arena = self._end_turn(slot)
        if arena is not None:
            del arena.taken[id(slot)]
        elif self.num_plans < MAX_PLANS:
            super().lose(slot, size)
        else:
            super().give_back(slot, size)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Forget a slot that went with the storage that had it: views of it may live on, so its arena goes with it."""
        arena = self._end_turn(slot)
        if arena is None:
            super().lose(slot, size)
        elif arena is self._arena:
            self._drop_arena()

    def settle(self) -> None:
        """Plan for what was recorded if that found no place, and make the arena: a backward is over.

        A round goes on while other storages are held than at its start and at earlier backwards of it: gradients, say,
        that are summed up here until a later one.
        """
        self._has_settled = True
        held = frozenset(turn.user for turn in self._turns.values())
        if held in self._settled:
            self._end_round()
        self._settled.add(held)
        if self.plan is not None and self._arena is None:
            self._make_arena(self.plan)

    def _end_turn(self, slot: torch.UntypedStorage) -> _Arena | None:
        turn = self._turns.pop(id(slot))
        if self._recorder is not None:
            self._recorder.end(turn.user)
        return turn.arena

    # ------------------------------------------------------------------ places

    def _place(self, plan: ArenaPlan, user: SlotUser, num_bytes: int) -> torch.UntypedStorage | None:
        arena = self._arena or self._make_arena(plan)
        size = aligned(num_bytes)
        offset = self._order.offset(user, lambda place: arena.fits(place, size))
        if offset is None:
            offset = arena.free(size)
        if offset is not None:
            slot = arena.take(offset, num_bytes)
            if listeners:
                tell("placed", (slot, arena.memory))
            return slot
        self.num_misses += 1
        self._has_missed = True
        if self.num_plans == MAX_PLANS:
            self._warn()
        elif self._recorder is None:
            # What came before is not known, so this round is good for no plan: the next one is.
            self._start_round(is_whole=False)
        return None

    def _make_arena(self, plan: ArenaPlan) -> _Arena:
        # The address of a block need not be a multiple of what offsets are.
        with torch.inference_mode(False):
            self._arena = _Arena(self._new(plan.num_bytes + ALIGNMENT), plan.num_bytes)
        self._counted[0] = self._arena.block_bytes
        self._count(1, self._arena.block_bytes)
        return self._arena

    def _drop_arena(self) -> None:
        """Let the next turn begin a new arena; this one is there until the last slot of it is given back."""
        if self._arena is not None:
            self._count(-1, -self._arena.block_bytes)
            self._arena, self._counted[0] = None, 0

    # ------------------------------------------------------------------ orders

    def _record(self, user: SlotUser, num_bytes: int) -> None:
        """Note that a storage comes.

        As long as there was no backward, a round is over where one comes that has come before with the same ones there.
        """
        if not self._has_settled:
            state = user, frozenset(turn.user for turn in self._turns.values())
            if state in self._seen:
                self._end_round()
            self._seen.add(state)
        if self._recorder is not None:
            if len(self._recorder) >= _MAX_EVENTS:
                self._start_round(is_whole=False)
            self._recorder.begin(user, num_bytes, comes_ahead=user.comes_ahead)

    def _start_round(self, *, is_whole: bool) -> None:
        self._seen.clear()
        self._settled = {frozenset(turn.user for turn in self._turns.values())}
        self._is_whole, self._has_missed = is_whole, False
        self._recorder = Recorder({turn.user: turn.num_bytes for turn in self._turns.values()})

    def _end_round(self) -> None:
        """Plan with what was recorded, if something found no place; stop to record if nothing did."""
        recorder = self._recorder
        if recorder is None or not len(recorder):
            return
        is_needed = self.plan is None or self._has_missed or not self._is_whole
        if is_needed and self._is_whole:
            self._make_plan(recorder)
        self._recorder = None
        if is_needed and self.num_plans < MAX_PLANS:
            self._start_round(is_whole=True)

    def _make_plan(self, recorder: Recorder) -> None:
        """Plan for all orders that were recorded."""
        self._recorded.append(recorder)
        self._drop_arena()
        lifetimes: list[Lifetime] = []
        self._order = _Order()
        comers: list[range] = []
        for each in self._recorded:
            lifetimes += each.lifetimes(start=max((span[1] for one in lifetimes for span in one.spans), default=0))
            comers.append(range(len(lifetimes) - each.num_begun, len(lifetimes)))
        self.plan = plan_arena(lifetimes)
        self.num_plans += 1
        for positions in comers:
            names = [lifetimes[position].name for position in positions]
            users = [name for name in names if isinstance(name, SlotUser)]
            self._order.add(users, [self.plan.offsets[position] for position in positions])
        _LOG.info("%s", self)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "static arena: after %d plans units still come in another order; what finds no place has a slot of its "
                "own. set_slot_pool('largest') suits an order that changes from step to step.",
                self.num_plans,
            )

    def __repr__(self) -> str:
        if self.plan is None:
            return f"ArenaPool({self.nbytes} bytes on {self._device}, not planned yet)"
        return (
            f"ArenaPool({self.plan.num_bytes} bytes on {self._device}, most held at once {self.plan.lower_bound}, gap "
            f"{self.plan.gap:.2%}, {len(self._order.users)} buffers a step)"
        )


def _forget(counted: list[int]) -> None:
    memory_meter().add(-counted[0])
