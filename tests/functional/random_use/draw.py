"""Draws a program from a seed."""

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.functional.random_use.models import ENCLOSING, LEAVES, POLICIES, SIDE_KINDS, Part, Wrap, parts_with_paths
from tests.functional.random_use.program import Program, is_below

__all__ = ["draw"]

OPTIMIZERS = ("sgd", "sgd", "adam", "foreach adamw", "fused adamw", "flat adamw", "foreach sgd")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params", "hsdp", "hfsdp")
COMPOSITES = ("chain", "gated", "sum", "checkpoint", "pick", "mlp", "mlp")
# Thawed weights need main weights of the policy's dtype, and stock optimizers need gradients of the weights' dtype.
USUAL_POLICIES = [name for name in POLICIES if name not in ("fp64 main weights", "fp64 gradients", "unfused")]
# Unusual actions; a program has none, one or several of them. "@" names the action that they follow.
ACTIONS = {
    "bomb": "forward bomb|early NUMBER error|interrupt",
    "fuse": "zero_grad none @zero_grad, backward @zero_grad, forward fuse NUMBER error|interrupt @zero_grad",
    "drop": "drop @forward",
    "zero_grad": "zero_grad none|zero|model",
    "freeze": "freeze|thaw WHICH FACE @zero_grad",
    "live freeze": "freeze|thaw WHICH FACE @forward",
    "replace": "replace NUMBER like|whole remake|remake|remake|keep",
    "late tie": "tie NUMBER remake|remake|remake|keep",
    "add": "add NUMBER remake|remake|remake|keep",
    "weight": "weight mul|copy|assign|inplace|foreach WHICH FACE",
    "load": "load sharded|whole|assign",
    "unshard": "unshard|unshard|reshard NUMBER",
    "poke": "poke NUMBER",
    "grad": "grad set|ones|scale|add|none|zero WHICH FACE",
    "functional": "functional sharded|whole",
    "hook": "hook WHICH FACE",
    "posthook": "posthook WHICH FACE",
    "autograd": "autograd FACE",
    "copy": "copy",
    "evaluate": "evaluate no_grad|inference|eval|train",
    "state": "state",
    "look": "look",
    "choose": "choose NUMBER None|True|False|1",
    "checkpoint": "save, restore, restore @step",
}
WORDS = {
    "NUMBER": "0|1|2|3|4|5|6|7|8|9", "WHICH": "all|0|1|2|3|4|5|6|7|8", "FACE": "kept|shown",
}  # fmt: skip
# Other oddities are about the model, or about the actions of a step.
OWN_PARTS = ("clamped", "renormed", "borrowing", "sometimes")
ODDITIES = sorted(
    {*ACTIONS, *OWN_PARTS, "side", "two forwards", "accumulate", "stash", "penalty", "groups", "backward twice"}
)


def draw(seed: int) -> Program:
    """Draw the program of a seed."""
    return _Draw(random.Random(seed)).program()


class _Draw:
    def __init__(self, source: random.Random) -> None:
        self.choice, self.source = source.choice, source
        count = self.choice((0, 1, 1, 1, 1, 2, 2, 3))
        self.odd = set(source.sample(ODDITIES, count))
        if count and self.chance(0.15):
            self.odd.add("side")
        if "sometimes" in self.odd:
            # A part that exists on some ranks cannot raise on all of them.
            self.odd -= {"side", "bomb", "fuse", "stash"}

    def chance(self, probability: float) -> bool:
        return self.source.random() < probability

    def program(self) -> Program:
        count = self.source.randint
        part = Part("gated", tuple(self.part(2) for _ in range(count(1, 3))), count(1, 3))
        if self.chance(0.1) and "sometimes" not in self.odd:
            # Each part is a separate model, which all ranks have to use.
            part = replace(part, kind="chain", parts=tuple(replace(one, is_replicated=False) for one in part.parts))
        num_ranks = self.choice((1, 2, 2, 2, 2, 2, 2, 3, 3, 4))
        num_outer = self.choice([size for size in range(1, num_ranks + 1) if num_ranks % size == 0])
        return Program(
            part,
            ", ".join(self.actions()),
            tuple(self.wraps(part, num_ranks, num_ranks // num_outer)),
            self.ties(part),
            (num_outer, num_ranks // num_outer),
            self.groups(num_ranks),
            self.choice(OPTIMIZERS),
            is_adapted=self.chance(0.3),
            is_guarded=self.chance(0.75),
            keeps_weights=self.chance(0.1),
        )

    # ------------------------------------------------------------------ the model

    def part(self, depth: int) -> Part:
        if not depth or self.chance(0.35):
            kind = self.choice(["linear"] * 4 + [kind for kind in LEAVES if kind != "scalar"])
            frozen = "" if self.chance(0.85) else self.choice(("first", "all"))
            return Part(kind, (), self.source.randint(1, 7), frozen=frozen)
        kinds: tuple[str, ...] = COMPOSITES
        if "side" in self.odd and self.chance(0.6):
            kinds = SIDE_KINDS
        own = tuple(kind for kind in OWN_PARTS if kind in self.odd)
        if own and self.chance(0.5):
            kinds = own
        kind, size = self.choice(kinds), self.source.randint(1, 4)
        below = tuple(self.part(depth - 1) for _ in range(self.source.randint(1, 2)))
        if kind == "borrowing":
            below = (Part("linear", size=size), *below)
        return Part(kind, below, size % 2 if kind == "pick" else size, is_replicated=self.chance(0.03))

    def wraps(self, part: Part, num_ranks: int, num_inner: int) -> Iterator[Wrap]:
        paths = list(_modules(part))
        usual, is_mixed = self.choice(STRATEGIES), self.chance(0.3)
        reshard = self.choice((None, None, None, True, False, 1))
        policy = self.choice(["none"] * 8 + USUAL_POLICIES)
        rare = [path for path, one in parts_with_paths(part) if one.kind == "sometimes"]
        paths = [path for path in paths if not any(is_below(path, one) and path != one for one in rare)]
        chosen = [path for path in paths if path and self.chance(0.55)]
        if part.kind == "chain":
            chosen = [path for path in paths if path.count(".") == 1 or path in chosen]
        groups = [*self.together(chosen), *([("",)] if part.kind != "chain" else [])]
        for group in groups:
            strategy = self.choice(STRATEGIES) if is_mixed else usual
            axis = num_inner if strategy in ("hsdp", "hfsdp") else num_ranks
            own = self.choice((None, True, False, 1, axis)) if self.chance(0.25) else reshard
            granularity = self.choice(("slices", "slices", "slices", "whole", "whole matrices"))
            is_offloaded = strategy in ("optim_grads_params", "hsdp", "hfsdp") and self.chance(0.05)
            yield Wrap(group, strategy, own, policy, granularity, is_offloaded)

    def together(self, chosen: list[str]) -> Iterator[tuple[str, ...]]:
        """Yield the modules of each unit; sometimes two neighbours form one unit."""
        rest = list(chosen)
        while rest:
            one = rest.pop(0)
            are_siblings = rest and one.rpartition(".")[0] == rest[0].rpartition(".")[0]
            yield (one, rest.pop(0)) if are_siblings and self.chance(0.15) else (one,)

    def ties(self, part: Part) -> tuple[tuple[str, str], ...]:
        linear = [(path, one) for path, one in parts_with_paths(part) if one.kind == "linear"]
        alike = [(a, b) for a, one in linear for b, other in linear if a < b and one.size == other.size]
        return (self.choice(alike),) if alike and self.chance(0.15) else ()

    def groups(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        if "groups" not in self.odd:
            return ()
        sizes = [self.source.randint(1, num_ranks) for _ in range(self.source.randint(1, 3))]
        return tuple(tuple(sorted(self.source.sample(range(num_ranks), size))) for size in sizes)

    # ------------------------------------------------------------------ actions

    def spoken(self, text: str) -> str:
        """Choose one of the alternatives of each word."""
        return " ".join(self.choice(WORDS.get(word, word).split("|")) for word in text.split())

    def actions(self) -> list[str]:
        actions = [self.spoken("stash NUMBER")] if "stash" in self.odd else []
        zero, clip = self.choice(("none", "none", "zero", "model")), self.choice(("", "", "", "ours", "torch"))
        for _ in range(self.source.randint(2, 3)):
            actions += self.microbatches()
            actions += [f"clip {clip}"] if clip else []
            actions += ["step", *([f"zero_grad {zero}"] if self.chance(0.9) else [])]
        for oddity in sorted(self.odd & ACTIONS.keys()):
            for _ in range(self.source.randint(1, 2)):
                for action in ACTIONS[oddity].split(", "):
                    text, _, place = action.partition(" @")
                    self.insert(actions, self.spoken(text), place)
        return actions

    def microbatches(self) -> Iterator[str]:
        count = self.choice((1, 1, 2, 3)) if "accumulate" in self.odd else self.choice((1, 1, 1, 2))
        how = self.choice(("", "no_sync", "microbatch", "flag")) if "posthook" not in self.odd else ""
        for index in range(count):
            yield self.spoken("forward penalty FACE") if "penalty" in self.odd and self.chance(0.5) else "forward"
            if "two forwards" in self.odd and self.chance(0.5):
                yield "forward"
            last = "backward twice" if "backward twice" in self.odd and self.chance(0.5) else "backward"
            yield last if index == count - 1 else f"backward {how}".strip()

    def insert(self, actions: list[str], action: str, place: str) -> None:
        """Insert an action at a random position, or right after one that begins with ``place``."""
        spots = [spot + 1 for spot, one in enumerate(actions) if one.startswith(place)]
        spots = [*spots, 0] if not place else spots
        actions.insert(self.choice(spots) if spots else len(actions), action)


def _modules(part: Part, path: str = "") -> Iterator[str]:
    """Yield the paths of all modules that can be units, children first."""
    if part.kind == "again":
        return
    prefix = f"{path}." if path else ""
    inner = f"{prefix}both" if part.kind in ENCLOSING else path
    for number, below in enumerate(part.parts):
        yield from _modules(below, f"{inner}.parts.{number}" if inner else f"parts.{number}")
    if inner != path:
        yield inner
    if part.kind == "mlp":
        yield from (f"{prefix}up", f"{prefix}down")
    yield path
