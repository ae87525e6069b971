"""Check that ranks issue equal collectives on each communicator, and that no two collectives wait for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_fsdp.certify.checker import Issue

_Node = tuple[str, int]


def order_findings(ranks: Sequence[Sequence[Issue]]) -> list[str]:
    """Return the faults in the order of collectives over all ranks, one line each.

    A collective ends when all of its ranks have begun it. A rank begins it when everything before it has ended: the
    previous collective on its communicator, and each collective that its stream has waited for. Every interleaving ends
    if the ranks agree on each communicator's collectives and the union of "comes after" over all ranks has no cycle.
    """
    by_group = [_by_group(issues) for issues in ranks]
    found = [line for group in _all_groups(by_group) for line in _differences(group, by_group)]
    cycle = _cycle(ranks)
    if cycle:
        found.append("the ranks wait for each other: " + " before ".join(f"{name} no. {k}" for name, k in cycle))
    return found


def _by_group(issues: Iterable[Issue]) -> dict[str, list[Issue]]:
    groups: dict[str, list[Issue]] = {}
    for issue in issues:
        groups.setdefault(issue.group, []).append(issue)
    return groups


def _all_groups(ranks: Iterable[Mapping[str, object]]) -> Iterable[str]:
    return dict.fromkeys(itertools.chain.from_iterable(ranks))


def _differences(group: str, ranks: Sequence[Mapping[str, Sequence[Issue]]]) -> Iterator[str]:
    """Compare the collectives that each rank of a communicator issued with those of its first rank."""
    members = [(rank, issues[group]) for rank, issues in enumerate(ranks) if group in issues]
    first_rank, first = members[0]
    for rank, issues in members[1:]:
        pairs = itertools.zip_longest(first, issues)
        for position, (one, other) in enumerate(pairs):
            if one is None or other is None or _meaning(one) != _meaning(other):
                yield (
                    f"{group}, collective {position}: rank {first_rank} issues {_text(one)}, rank {rank} {_text(other)}"
                )
                break


def _meaning(issue: Issue) -> tuple[str, int]:
    """Return the part of a collective that has to be equal on all ranks. The sizes of an all-to-all may differ."""
    return issue.kind, 0 if issue.kind == "all_to_all" else issue.num_bytes


def _text(issue: Issue | None) -> str:
    return "none" if issue is None else f"{issue.kind} of {issue.num_bytes} bytes at {issue.origin}"


def _cycle(ranks: Sequence[Sequence[Issue]]) -> list[_Node]:
    before: dict[_Node, set[_Node]] = {}
    for issue in itertools.chain.from_iterable(ranks):
        node = (issue.group, issue.number)
        earlier = before.setdefault(node, set())
        earlier.update((group, number) for group, number in issue.after.items() if (group, number) != node)
        if issue.number > 1:
            earlier.add((issue.group, issue.number - 1))
    # Kahn 1962: remove nodes without a predecessor until there are none; the remaining nodes contain a cycle.
    while True:
        free = [node for node, earlier in before.items() if not earlier & before.keys()]
        if not free:
            break
        for node in free:
            del before[node]
    return _walk(before)


def _walk(before: Mapping[_Node, set[_Node]]) -> list[_Node]:
    path: list[_Node] = []
    node = next(iter(before), None)
    while node is not None and node not in path:
        path.append(node)
        node = next(iter(sorted(before[node] & before.keys())))
    return [] if node is None else [*reversed(path[path.index(node) :]), path[-1]]
