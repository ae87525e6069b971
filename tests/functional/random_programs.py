"""Draws a program from a seed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.functional.random_models import COMPOSITES, POLICIES, SHAPES, Part, Wrap, parts_with_paths
from tests.functional.random_side_parts import ENCLOSING, SIDE_KINDS
from tests.functional.random_use import Program, is_below

__all__ = ["draw"]

OPTIMIZERS = ("sgd", "sgd", "adam", "foreach adamw", "fused adamw", "flat adamw", "foreach sgd")
ONE_AXIS = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params")
STRATEGIES = (*ONE_AXIS, "hsdp", "hfsdp")
PLAIN_COMPOSITES = tuple(kind for kind in COMPOSITES if kind not in ("by turn", "detached", "repeat"))

# Each is something unusual to do; a program does none, one or several of them.
ODDITIES: tuple[str, ...] = (
    "side", "side", "side", "bomb", "fuse", "drop", "two forwards", "zero_grad", "accumulate", "freeze", "live freeze",
    "replace", "late tie", "add", "clamped", "renormed", "borrowing", "weight", "load", "unshard", "poke", "grad",
    "functional", "hook", "posthook", "stash", "penalty", "autograd", "copy", "groups", "evaluate", "state", "look",
    "choose", "backward twice", "sometimes", "sometimes", "checkpoint",
)  # fmt: skip


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    return _Draw(random.Random(seed)).program()


class _Draw:
    def __init__(self, source: random.Random) -> None:
        self.source = source
        count = source.choice((0, 1, 1, 1, 1, 2, 2, 3))
        self.odd = set(source.sample(sorted(set(ODDITIES)), count)) if count else set()
        if count and source.random() < 0.15:
            self.odd.add("side")
        if "sometimes" in self.odd:
            # What is not there on all ranks cannot raise on all of them, or be taken from all.
            self.odd -= {"side", "bomb", "fuse", "stash"}

    def chance(self, probability: float) -> bool:
        return self.source.random() < probability

    def program(self) -> Program:
        part = Part("gated", tuple(self.part(2) for _ in range(self.source.randint(1, 3))), self.source.randint(1, 3))
        if self.chance(0.1) and "sometimes" not in self.odd:
            # Each part of it is a model of its own, which other ranks must not do without.
            part = replace(part, kind="chain", parts=tuple(replace(one, is_replicated=False) for one in part.parts))
        num_ranks = self.source.choice((1, 2, 2, 2, 2, 2, 2, 3, 3, 4))
        num_outer = self.source.choice([size for size in range(1, num_ranks + 1) if num_ranks % size == 0])
        wraps = tuple(self.wraps(part, num_ranks, num_ranks // num_outer))
        actions = self.actions()
        optimizer = self.source.choice(OPTIMIZERS)
        return Program(
            part,
            actions,
            wraps,
            self.ties(part, wraps),
            (num_outer, num_ranks // num_outer),
            self.groups(num_ranks),
            optimizer,
            self.chance(0.3),
            self.chance(0.75),
            self.chance(0.1),
        )

    # ------------------------------------------------------------------ the model

    def part(self, depth: int) -> Part:
        if not depth or self.chance(0.35):
            return self.leaf()
        kinds = [*PLAIN_COMPOSITES, "mlp", "mlp"]
        if "side" in self.odd and self.chance(0.6):
            kinds = list(SIDE_KINDS)
        own = [kind for kind in ("clamped", "renormed", "borrowing", "sometimes") if kind in self.odd]
        if own and self.chance(0.5):
            kinds = own
        kind, size = self.source.choice(kinds), self.source.randint(1, 4)
        below = tuple(self.part(depth - 1) for _ in range(self.source.randint(1, 2)))
        if kind == "borrowing":
            below = (Part("linear", size=size), *below)
        if kind == "pick":
            size = self.source.choice((0, 1))
        return Part(kind, below, size, is_replicated=self.chance(0.03))

    def leaf(self) -> Part:
        kind = self.source.choice(["linear"] * 5 + [kind for kind in SHAPES if kind not in ("linear", "scalar")])
        frozen = "" if self.chance(0.85) else self.source.choice(("first", "all"))
        return Part(kind, (), self.source.randint(1, 7), frozen=frozen)

    def wraps(self, part: Part, num_ranks: int, num_inner: int) -> Iterator[Wrap]:
        paths = [path for path, _ in _modules(part)]
        usual = self.source.choice(STRATEGIES)
        is_mixed, reshard = self.chance(0.3), self.source.choice((None, None, None, True, False, 1))
        policy = self.source.choice(["none"] * 8 + [name for name in POLICIES if name not in UNLIKE_ADAM])
        rare = [path for path, one in parts_with_paths(part, enclosing=ENCLOSING) if one.kind == "sometimes"]
        paths = [path for path in paths if not any(is_below(path, one) and path != one for one in rare)]
        chosen = [path for path in paths if path and self.chance(0.55)]
        if part.kind == "chain":
            chosen = [path for path in paths if path.count(".") == 1 or (path and path in chosen)]
        groups = list(self.together(chosen))
        if part.kind != "chain":
            groups.append(("",))
        for group in groups:
            strategy = self.source.choice(STRATEGIES) if is_mixed else usual
            axis = num_inner if strategy in ("hsdp", "hfsdp") else num_ranks
            own = self.source.choice((None, True, False, 1, axis)) if self.chance(0.25) else reshard
            granularity = self.source.choice(("slices", "slices", "slices", "whole", "whole matrices"))
            is_offloaded = strategy in ("optim_grads_params", "hsdp", "hfsdp") and self.chance(0.05)
            yield Wrap(group, strategy, own, policy, granularity, is_offloaded)

    def together(self, chosen: list[str]) -> Iterator[tuple[str, ...]]:
        """Yield the modules of each unit; now and then two neighbours make one."""
        position = 0
        while position < len(chosen):
            one, other = (*chosen[position:], "", "")[:2]
            are_siblings = other and one.rpartition(".")[0] == other.rpartition(".")[0] and one != other
            if are_siblings and self.chance(0.15):
                yield one, other
                position += 1
            else:
                yield (one,)
            position += 1

    def ties(self, part: Part, wraps: tuple[Wrap, ...]) -> tuple[tuple[str, str], ...]:
        linear = [(path, one) for path, one in parts_with_paths(part, enclosing=ENCLOSING) if one.kind == "linear"]
        alike = [(a, b) for a, one in linear for b, other in linear if a < b and one.size == other.size]
        return (self.source.choice(alike),) if alike and self.chance(0.15) else ()

    def groups(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        if "groups" not in self.odd:
            return ()
        sizes = [self.source.randint(1, num_ranks) for _ in range(self.source.randint(1, 3))]
        return tuple(tuple(sorted(self.source.sample(range(num_ranks), size))) for size in sizes)

    # ------------------------------------------------------------------ what is done with it

    def face(self) -> str:
        return self.source.choice(("kept", "shown"))

    def which(self) -> str:
        return self.source.choice(["all", *map(str, range(9))])

    def number(self) -> str:
        return str(self.source.randint(0, 9))

    def actions(self) -> str:
        actions: list[str] = [f"stash {self.number()}"] if "stash" in self.odd else []
        zero = self.source.choice(("none", "none", "zero", "model"))
        clip = self.source.choice(("", "", "", "ours", "torch"))
        for _ in range(self.source.randint(2, 3)):
            actions += self.microbatches()
            actions += [f"clip {clip}"] if clip else []
            actions += ["step", *([f"zero_grad {zero}"] if self.chance(0.9) else [])]
        for oddity in sorted(self.odd):
            for _ in range(self.source.randint(1, 2)):
                for action, place in self.oddity(oddity):
                    self.insert(actions, action, place)
        return ", ".join(actions)

    def microbatches(self) -> Iterator[str]:
        count = self.source.choice((1, 1, 2, 3)) if "accumulate" in self.odd else self.source.choice((1, 1, 1, 2))
        how = self.source.choice(("", "no_sync", "microbatch", "flag")) if "posthook" not in self.odd else ""
        for index in range(count):
            is_last = index == count - 1
            yield f"forward penalty {self.face()}" if "penalty" in self.odd and self.chance(0.5) else "forward"
            if "two forwards" in self.odd and self.chance(0.5):
                yield "forward"
            last = "backward twice" if "backward twice" in self.odd and self.chance(0.5) else "backward"
            yield last if is_last else f"backward {how}".strip()

    def insert(self, actions: list[str], action: str, place: str) -> None:
        """Put an action anywhere, or right behind one that begins with ``place``."""
        spots = (
            [spot for spot, one in enumerate(actions) if one.startswith(place)] if place else list(range(len(actions)))
        )
        spot = self.source.choice(spots) + 1 if spots else len(actions)
        actions.insert(0 if not place and self.chance(0.1) else spot, action)

    def oddity(self, oddity: str) -> Iterator[tuple[str, str]]:
        """Yield actions and after which action each belongs ("" for anywhere)."""
        then = self.source.choice(("remake", "remake", "remake", "keep"))
        error = self.source.choice(("error", "interrupt"))
        weight = self.source.choice(("mul", "copy", "assign", "inplace", "foreach"))
        gradient = self.source.choice(("set", "ones", "scale", "add", "none", "zero"))
        simple: dict[str, Callable[[], tuple[str, str]]] = {
            "bomb": lambda: (f"forward {self.source.choice(('bomb', 'early'))} {self.number()} {error}", ""),
            "drop": lambda: ("drop", "forward"),
            "zero_grad": lambda: (f"zero_grad {self.source.choice(('none', 'zero', 'model'))}", ""),
            "freeze": lambda: (f"{self.source.choice(('freeze', 'thaw'))} {self.which()} {self.face()}", "zero_grad"),
            "live freeze": lambda: (
                f"{self.source.choice(('freeze', 'thaw'))} {self.which()} {self.face()}",
                "forward",
            ),
            "replace": lambda: (f"replace {self.number()} {self.source.choice(('like', 'whole'))} {then}", ""),
            "late tie": lambda: (f"tie {self.number()} {then}", ""),
            "add": lambda: (f"add {self.number()} {then}", ""),
            "weight": lambda: (f"weight {weight} {self.which()} {self.face()}", ""),
            "load": lambda: (f"load {self.source.choice(('sharded', 'whole', 'assign'))}", ""),
            "unshard": lambda: (f"{self.source.choice(('unshard', 'unshard', 'reshard'))} {self.number()}", ""),
            "poke": lambda: (f"poke {self.number()}", ""),
            "grad": lambda: (f"grad {gradient} {self.which()} {self.face()}", ""),
            "functional": lambda: (f"functional {self.source.choice(('sharded', 'whole'))}", ""),
            "hook": lambda: (f"hook {self.which()} {self.face()}", ""),
            "posthook": lambda: (f"posthook {self.which()} {self.face()}", ""),
            "autograd": lambda: (f"autograd {self.face()}", ""),
            "copy": lambda: ("copy", ""),
            "evaluate": lambda: (f"evaluate {self.source.choice(('no_grad', 'inference', 'eval', 'train'))}", ""),
            "state": lambda: ("state", ""),
            "look": lambda: ("look", ""),
            "choose": lambda: (f"choose {self.number()} {self.source.choice(('None', 'True', 'False', '1'))}", ""),
        }
        if oddity in simple:
            yield simple[oddity]()
        elif oddity == "checkpoint":
            yield "save", ""
            yield "restore", ""
            yield "restore", "step"
        elif oddity == "fuse":
            clear = self.source.choice(("zero_grad none", "zero_grad none", "zero_grad none", ""))
            for action in (clear, "backward", f"forward fuse {self.number()} {error}"):
                if action:
                    yield action, "zero_grad"


# Unfrozen weights need main weights of the policy's dtype, and stock optimizers gradients of the weights'.
UNLIKE_ADAM = ("fp64 main weights", "fp64 gradients", "unfused")


def _modules(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """Yield the paths of everything that can be a unit, children first."""
    if part.kind == "again":
        return
    inner = ".".join([*filter(None, [path]), *(["both"] if part.kind in ENCLOSING else [])])
    for number, below in enumerate(part.parts):
        yield from _modules(below, ".".join([*filter(None, [inner]), "parts", str(number)]))
    if inner != path:
        yield inner, part
    if part.kind == "mlp":
        yield from ((".".join([*filter(None, [path]), name]), part) for name in ("up", "down"))
    yield path, part
