"""What no shard can be shorter than, whatever the order of the tensors in a flat buffer.

Everything here counts in pieces of the alignment; docs/design/planner.md, "Proof" 2 to 4, says why each bound holds.
"""

import math
from collections import Counter
from dataclasses import dataclass

from dbuffer.planner.granularity import two_piece_shard


@dataclass(frozen=True, slots=True)
class ShardBound:
    """What a shard length must satisfy.

    Attributes:
        floor: shards hold all data, and every unit whole.
        crowded: the unit size that sets ``floor``, 0 where the data does.
        forcing: distinct units, in descending order of ``halves``.
        halves: a shard shorter than this must be a multiple of the unit.
        multiples: entry n is the least common multiple of the first n of ``forcing``.
    """

    floor: int
    crowded: int
    forcing: tuple[int, ...]
    halves: tuple[int, ...]
    multiples: tuple[int, ...]

    def least(self, at_least: int) -> int:
        """Return the smallest permitted shard length that is no shorter than ``at_least``."""
        forced = sum(half > at_least for half in self.halves)
        while forced:
            shard = -(-at_least // self.multiples[forced]) * self.multiples[forced]
            if shard < self.halves[forced - 1]:
                return shard
            at_least = self.halves[forced - 1]
            forced -= 1
        return at_least


def shard_bound(kinds: Counter[tuple[int, int]], num_shards: int) -> ShardBound:
    """Derive the bound from how many tensors there are of each (slots, unit)."""
    half_of: dict[int, int] = {}
    pieces: Counter[int] = Counter()
    data = 0
    for (slots, unit), count in kinds.items():
        half = two_piece_shard(slots, unit)
        if half > half_of.get(unit, 0):
            half_of[unit] = half
        whole, tail = divmod(slots, unit)
        pieces[unit] += whole * count
        if tail:
            pieces[tail] += count
        data += slots * count
    forcing = sorted(half_of, key=lambda unit: (-half_of[unit], unit))
    multiples = [1]
    for unit in forcing:
        # Past the largest half no multiple is ever tried: stop before hundreds of odd widths make huge integers.
        multiples.append(multiples[-1] if multiples[-1] > half_of[forcing[0]] else math.lcm(multiples[-1], unit))
    floor, crowded, seen = -(-data // num_shards), 0, 0
    for size in sorted(pieces, reverse=True):
        seen += pieces[size]
        if -(-seen // num_shards) * size > floor:
            floor, crowded = -(-seen // num_shards) * size, size
    return ShardBound(floor, crowded, tuple(forcing), tuple(half_of[unit] for unit in forcing), tuple(multiples))
