"""Layers that are alike: which ones there are, and what all of them do if that is known of a few."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_fsdp.planning.model_spec import Call, ModelFacts, UnitFacts, Use
from megatron_fsdp.planning.step_events import Event, Phase, Segments

__all__ = ["AlikeLayers", "NotAlikeError", "settings_of", "unrolled"]


class NotAlikeError(Exception):
    """One more layer does not do what those around it do."""


def settings_of(unit: UnitFacts) -> tuple[object, ...]:
    """Return what of a unit, beside its groups, decides what the engine does with it."""
    return (
        unit.policy, unit.reshard_after_forward, unit.reshards_after_backward, unit.unshards_in_backward,
        unit.max_packed_buffers, unit.forward_prefetch, unit.backward_prefetch, unit.slots,
    )  # fmt: skip


class _Place(NamedTuple):
    """Where a unit stands: which kind of repeated call it is in, the number of that, and which unit of it it is."""

    kind: object
    layer: int
    inner: int


class AlikeLayers:
    """Which calls of a model are alike and follow each other."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._call = facts.call
        self._kinds: dict[int, object] = {}
        # By the position of each unit in a run of alike calls; and the other way.
        self.places: dict[int, _Place] = {}
        self.positions: dict[_Place, int] = {}
        self.num_layers: Counter[object] = Counter()
        for call in facts.call.inner():
            for number, run in enumerate(self._runs(call)):
                if isinstance(run[0], Call) and len(run) > 1:
                    self._note((call.unit, number), run)

    def _note(self, kind: object, run: Sequence[Any]) -> None:
        self.num_layers[kind] = len(run)
        for layer, call in enumerate(run):
            for inner, each in enumerate(call.inner()):
                # Runs inside of runs are parts of the outer ones.
                if each.unit not in self.places:
                    place = _Place(kind, layer, inner)
                    self.places[each.unit], self.positions[place] = place, each.unit

    def _kind(self, step: Use | Call) -> object:
        """Return what is the same for calls that are alike."""
        if isinstance(step, Use):
            return step.group, step.position
        if id(step) not in self._kinds:
            unit = self._facts.units[step.unit]
            groups = tuple(map(id, unit.groups))
            self._kinds[id(step)] = groups, settings_of(unit), tuple(map(self._kind, step.steps))
        return self._kinds[id(step)]

    def _runs(self, call: Call) -> list[list[Use | Call]]:
        return [list(run) for _, run in itertools.groupby(call.steps, self._kind)]

    def surplus(self, most: int) -> dict[object, int]:
        """Return, for each kind of call that follows its own like more often, how many are too many."""
        return {kind: count - most for kind, count in self.num_layers.items() if count > most}

    def trimmed(self, most: int, longer: object = None) -> Call:
        """Return the model's call with at most so many alike calls in a row: the first ones, and the last two."""

        def trim(call: Call) -> Call:
            kept: list[Use | Call] = []
            for number, run in enumerate(self._runs(call)):
                limit = most + ((call.unit, number) == longer)
                is_long = isinstance(run[0], Call) and len(run) > limit
                chosen = [*run[: limit - 2], *run[-2:]] if is_long else run
                kept += [trim(step) if isinstance(step, Call) else step for step in chosen]
            return Call(call.unit, tuple(kept))

        return trim(self._call)

    def like(self, position: int, known: Mapping[int, object]) -> int:
        """Return a unit among those known that is alike."""
        place = self.places[position]
        return next(
            found
            for layer in range(self.num_layers[place.kind])
            if (found := self.positions.get(place._replace(layer=layer), -1)) in known
        )

    def layer_in_run(self, place: _Place, ran: int) -> int:
        """Return the number of a layer among those that ran."""
        skipped = self.num_layers[place.kind] - ran
        return place.layer if place.layer < ran - 2 else place.layer - skipped


@dataclass(frozen=True, slots=True)
class _Row:
    """The layers of one kind, in a run of ``ran`` of them and in the whole model."""

    alike: AlikeLayers
    kind: object
    ran: int

    def numbered(self, event: Event, *, from_end: bool = False) -> object:
        """Return an event with its layer counted among those that ran, from the first one or back from the last."""
        place = self.alike.places.get(event.unit)
        if place is None or place.kind != self.kind:
            return event
        layer = self.alike.layer_in_run(place, self.ran)
        return (layer - self.ran * from_end, place.inner), event[1:]

    def moved(self, event: Event, layers: int) -> Event:
        """Return an event as it would be as many layers later in the whole model."""
        place = self.alike.places.get(event.unit)
        if place is None or place.kind != self.kind:
            return event
        layer = self.alike.layer_in_run(place, self.ran) + layers
        return event._replace(unit=self.alike.positions[place._replace(layer=layer)])


def unrolled(
    alike: AlikeLayers, base: Segments, longer: Mapping[object, Segments], most: int
) -> Iterator[tuple[Phase | None, tuple[Event, ...]]]:
    """Yield the events of a step of all layers.

    Raises:
        NotAlikeError: one more layer does not only add what it does itself.
    """
    surplus = alike.surplus(most)
    for number, (phase, events) in enumerate(base):
        whole = list(events)
        inserted = []
        for kind, run in longer.items():
            short, long, extra = _Row(alike, kind, most), _Row(alike, kind, most + 1), surplus[kind]
            more = run[number][1]
            # Forward goes through the layers from the first one, backward from the last.
            before, copies, after = 0, range(extra), extra
            at = _split(events, more, short, long, from_end=False)
            if at is None:
                before, copies, after = extra, range(extra)[::-1], 0
                at = _split(events, more, short, long, from_end=True)
            if at is None:
                raise NotAlikeError
            added = more[at : at + len(more) - len(events)]
            inserted.append((at, [long.moved(event, layers) for layers in copies for event in added]))
            whole = [short.moved(event, before if position < at else after) for position, event in enumerate(whole)]
        for at, events_of_more in sorted(inserted, key=lambda each: -each[0]):
            whole[at:at] = events_of_more
        yield phase, tuple(whole)


def _split(events: Sequence[Event], more: Sequence[Event], short: _Row, long: _Row, *, from_end: bool) -> int | None:
    """Return where one more layer's events begin: before it all is as without it, and after what it adds as well.

    Args:
        from_end: layers before it count back from the last one, those after it from the first; else the other way.
    Returns:
        None where there is no such place.
    """
    prefix = _num_equal(
        (short.numbered(event, from_end=from_end) for event in events),
        (long.numbered(event, from_end=from_end) for event in more),
    )
    suffix = _num_equal(
        (short.numbered(event, from_end=not from_end) for event in reversed(events)),
        (long.numbered(event, from_end=not from_end) for event in reversed(more)),
    )
    if len(more) < len(events) or prefix + suffix < len(events):
        return None
    return max(len(events) - suffix, 0)


def _num_equal(these: Iterable[object], those: Iterable[object]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(these, those, strict=False)))
