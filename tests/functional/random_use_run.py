"""Runs a program on the sharded and on the plain model, action by action, and says how it ended.

``REFUSALS`` is the closed list of errors by which the engine may refuse what a plain model would do.
"""

import copy
import datetime
import functools
import pickle
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import FlatDTensor
from megatron_fsdp import CPUOffloadPolicy, Placements, fsdp_no_shard, fully_shard
from megatron_fsdp.runtime.weights.gathered_weight import GatheredWeight
from tests.functional.random_meddling import whole
from tests.functional.random_models import GRANULARITIES, POLICIES, build, parts_with_paths
from tests.functional.random_side_parts import ENCLOSING, KINDS, SIDE_KINDS
from tests.functional.random_use import Bomb, Interrupt, Program, Trainee
from tests.harness import run_ranks
from tests.harness.failures import FailureKind, RankError
from tests.harness.storage_guard import guard_released_storage

__all__ = ["Verdict", "outcome"]

# fp32 rounding of values near 1, summed over ranks and calls in another order, and what a few steps on badly
# conditioned models make of it.
TOLERANCE = 1e-5
PATIENCE = datetime.timedelta(seconds=8)
# After these a refusal is no reason to stop: nothing has changed.
HARMLESS = ("functional", "copy", "autograd", "state", "hook", "posthook")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that may be raised instead of doing what a plain model does.

    Attributes:
        kind: its class's name. pattern: a regular expression that its message contains.
        causes: what a program must have done for it to be in order; one of them. See ``causes``.
    """

    kind: str
    pattern: str
    causes: tuple[str, ...]

    def allows(self, kind: str, message: str, found: set[str]) -> bool:
        """Whether an error in a program with these causes so far is this refusal."""
        return self.kind == kind and bool(re.search(self.pattern, message)) and not found.isdisjoint(self.causes)


REFUSALS = (
    # At fully_shard.
    Refusal("OwnershipError", r"is the same tensor as '.*' of unit '.*', which owns it already", ("tie",)),
    # A plain tensor of unknown origin beside a sharded one.
    Refusal("PlacementError", r"found a plain tensor of shape .* beside a sharded one", ("borrowing",)),
    # Copies.
    Refusal("StateError", r"cannot be deep-copied: its parameters are views of buffers", ("copy",)),
    # The flat optimizer steps a unit's parameters together.
    Refusal(
        "StateError",
        r"has no gradient, but others have that share a flat parameter with it",
        ("grad none", "freeze", "thaw", "spare", "pick", "sometimes", *SIDE_KINDS),
    ),
    # The gradient of what one rank computes with.
    Refusal("StateError", r"torch.autograd.grad .* was asked for its gradient", ("autograd",)),
    # Second thoughts on what was sharded.
    Refusal("StateError", r"was frozen when it was sharded, so it has no main weight of", ("thaw",)),
    # Registered in a parameter's place, or beside the parameters, after fully_shard.
    Refusal("StateError", r"was replaced by .* after fully_shard", ("replace", "tie", "functional")),
    Refusal("StateError", r"was taken out of its module", ("replace", "tie")),
    Refusal("StateError", r"was added after fully_shard and requires a gradient", ("add", "tie", "thaw")),
    # Gathered weights that compute or the user changes, or reads after they were released.
    Refusal(
        "StateError",
        r"was changed in place while it was gathered",
        ("clamped", "renormed", "weight", "poke", "load", "replace"),
    ),
    Refusal("CheckpointError", r"was changed in place while it was gathered", ("weight",)),
    Refusal("ConfigError", r"max_norm", ("renormed",)),
    Refusal(
        "StorageError", r"of its gathered weight, which was released", ("weight", "poke", "stash", "unshard", "load")
    ),
    # What is taken out of the middle of a unit, and made after its output.
    Refusal("RuntimeError", r"is at version 1000000000", ("stash",)),
    # Hooks that autograd would never call.
    Refusal("PlacementError", r"register_hook on a sharded parameter would never be called", ("hook",)),
    # Sums under way, and those that a backward left incomplete.
    Refusal(
        "StateError",
        r"is a sum under way, not reduced over all ranks yet",
        ("backward flag", "backward no_sync", "backward microbatch"),
    ),
    Refusal(
        "StateError",
        r"was dropped or replaced while its sum is under way",
        ("backward flag", "backward no_sync", "backward microbatch"),
    ),
    # Weights of a new step are gathered, and nobody has said what becomes of the sums before it.
    Refusal("StateError", r"clip_grad_norm_ before gradients are final", ("drop",)),
    Refusal("StateError", r"is incomplete, because the last backward raised", ("forward error", "forward interrupt")),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a program ended.

    Attributes:
        outcome: "same", "refused" and "plain raises too" are in order; "differs", "wrong error", "no error" and "ranks
            disagree" are not.
        refused: actions that were refused, with the error's class. action: the one it ended with.
        text: what differs, or the error.
    """

    outcome: str
    action: str = ""
    text: str = ""
    refused: tuple[str, ...] = ()

    @property
    def is_in_order(self) -> bool:
        """Whether the program did what a plain model does, or was refused by name."""
        return self.outcome in ("same", "refused", "plain raises too")


class Diverged(Exception):
    """Another rank did not come to where this one stands."""


def causes(program: Program, done: Sequence[str]) -> set[str]:
    """Return the words by which refusals name what a program did: kinds of parts, and the first words of actions."""
    found = {part.kind for _, part in parts_with_paths(program.part, enclosing=ENCLOSING)}
    found |= {"tie"} if program.ties else set()
    for action in done:
        words = action.split()
        found |= {" ".join(words[:count]) for count in (1, 2)}
        found |= {f"{words[0]} {word}" for word in words[2:]}
    return found


TIMEOUT_S = 15.0
OUTCOMES = {
    FailureKind.DIED: "died",
    FailureKind.STUCK: "hang",
    FailureKind.RAISED: "harness error",
    FailureKind.UNCLEAN: "left something behind",
}


def outcome(program: Program) -> Verdict:
    """Run a program on its ranks, and say how it ended; a hang or the death of a rank is an outcome too."""
    try:
        verdicts = run_ranks(program.num_ranks, run, program, timeout=TIMEOUT_S)
    except RankError as error:
        kinds = {failure.kind for failure in error.failures}
        if "DistStoreError" in str(error) or "Diverged" in str(error):
            return Verdict("hang", text=str(error))
        return Verdict(OUTCOMES[next(kind for kind in FailureKind if kind in kinds)], text=str(error))
    return next((verdict for verdict in verdicts if not verdict.is_in_order), verdicts[0])


def run(program: Program) -> Verdict:
    """Run a program on this rank, and return how it ended; every rank calls it."""
    return _Run(program).verdict()


class _Run:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_exchanges = 0
        # One process group may run several programs.
        self.name = f"use-{dist.distributed_c10d._get_default_store().add(f'uses-{self.rank}', 1)}"
        self.refused: list[str] = []
        self.done: list[str] = []
        torch.manual_seed(0)
        oracle = build(program.part, program.ties, KINDS)
        model = copy.deepcopy(oracle)
        self.plain = Trainee(program, oracle, range(self.num_ranks), self.rank, is_sharded=False)
        self.sharded = Trainee(program, model, [self.rank], self.rank, is_sharded=True)

    def verdict(self) -> Verdict:
        """Run it all."""
        for position, action in enumerate(("shard", *self.program.steps)):
            self.done.append(action)
            found = self._step(action)
            if found is not None:
                outcome, text = found
                return Verdict(outcome, f"{position}: {action}", text, tuple(self.refused))
        return Verdict("same", refused=tuple(self.refused))

    def _step(self, action: str) -> tuple[str, str] | None:
        """Do one action on both; return the outcome and text of a verdict if that is the end."""
        self.sharded.is_tampered = self.sharded.is_tampered and not action.startswith(("forward", "evaluate"))
        mine = self._try(self.sharded, action)
        errors = self._exchange(mine)
        if any((one is None) != (mine is None) or (one and mine and one[0] != mine[0]) for one in errors):
            texts = [
                f"rank {rank}: {one[0]}: {one[1]}" if one else f"rank {rank}: no error"
                for rank, one in enumerate(errors)
            ]
            return "ranks disagree", "\n".join(texts)
        if mine is not None and mine[0] not in ("Bomb", "Interrupt"):
            if not all(self._is_listed(one) for one in errors):
                theirs = self._try(self.plain, action)
                is_shared = theirs is not None and theirs[0] == mine[0]
                return "plain raises too" if is_shared else "wrong error", f"{mine[0]}: {mine[1]}"
            self.refused.append(f"{action.split()[0]}: {mine[0]}")
            self.plain.counter = self.sharded.counter
            if action.split()[0] not in HARMLESS:
                return "refused", f"{mine[0]}: {mine[1].splitlines()[-1]}"
            return self._compared([])
        theirs = self._try(self.plain, action)
        if theirs is not None and theirs[0] not in ("Bomb", "Interrupt"):
            return "plain raises too", f"{theirs[0]}: {theirs[1]}"
        if (mine and mine[0]) != (theirs and theirs[0]):
            return "no error", f"the sharded model raised {mine}, the plain one {theirs}"
        if theirs is not None and action.startswith("backward"):
            self.plain.is_doubtful = True
        return self._compared(list(self._seen()))

    def _try(self, trainee: Trainee, action: str) -> tuple[str, str] | None:
        is_compute = action.startswith(("forward", "backward", "evaluate", "autograd"))
        guarded = trainee.is_sharded and self.program.is_guarded and is_compute
        guard: AbstractContextManager[None] = guard_released_storage() if guarded else nullcontext()
        try:
            with guard:
                if action == "shard":
                    _shard(trainee)
                else:
                    trainee.do(action)
        except (Bomb, Interrupt) as error:
            return type(error).__name__, ""
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            return type(error).__name__, f"{where}{error}"
        return None

    def _is_listed(self, error: tuple[str, str] | None) -> bool:
        assert error is not None
        found = causes(self.program, self.done)
        return any(refusal.allows(error[0], error[1], found) for refusal in REFUSALS)

    # ------------------------------------------------------------------ comparison

    def _compared(self, differences: list[str]) -> tuple[str, str] | None:
        """Compare weights and gradients; return a verdict if they or what is known already differ on any rank."""
        if self.sharded.is_tampered:
            return None
        pairs = list(self._pairs())
        for name, mine, theirs in pairs:
            differences += _apart(name, mine, theirs)
        held = [0 if mine is None else _local(mine).numel() for _, mine, _ in pairs]
        found, parts = zip(*self._exchange((differences[:4], held)), strict=True)
        if not any(found):
            numbers = zip(pairs, zip(*parts, strict=True), strict=True)
            lost = [name for (name, _, theirs), held in numbers if theirs is not None and sum(held) < theirs.numel()]
            return ("differs", f"ranks hold not all of {lost}") if lost else None
        texts = [f"rank {rank}: {'; '.join(one)}" for rank, one in enumerate(found) if one]
        return "differs", "\n".join(texts)

    def _seen(self) -> Iterator[str]:
        mine, theirs = dict(self.sharded.seen), dict(self.plain.seen)
        if mine.keys() != theirs.keys():
            yield f"found {sorted(mine)}, wanted {sorted(theirs)}"
            return
        for name, value in mine.items():
            yield from _apart(name, value, theirs[name])

    def _pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield every weight and every gradient of both sides that can be compared now."""
        shown = dict(self.sharded.model.named_parameters(remove_duplicate=False))
        names: dict[int, str] = {}
        for name, one in self.plain.model.named_parameters(remove_duplicate=False):
            if name in self.sharded.kept:
                names.setdefault(id(one), name)
        for name, wanted in self.plain.model.named_parameters(remove_duplicate=False):
            mine, kept = shown.get(name), self.sharded.kept.get(names.get(id(wanted), name))
            # While weights are gathered the model shows other tensors, which "look" looks at.
            is_gathered = isinstance(kept, DTensor) and not isinstance(mine, DTensor)
            is_own = mine is self.sharded.late.get(name) and not isinstance(mine, GatheredWeight)
            holder = kept if is_gathered and not is_own else mine
            yield f"weight of {name}", holder, wanted
            if not self.plain.is_synced or self.plain.is_doubtful or holder is None:
                continue
            yield f"gradient of {name}", holder.grad, wanted.grad

    def _exchange(self, mine: Any) -> list[Any]:
        """Return what every rank says, by way of the store: collectives of the engine may be under way."""
        store = dist.distributed_c10d._get_default_store()
        self.num_exchanges += 1
        store.set(f"{self.name}-{self.num_exchanges}-{self.rank}", pickle.dumps(mine))
        result = []
        for rank in range(self.num_ranks):
            key = f"{self.name}-{self.num_exchanges}-{rank}"
            try:
                store.wait([key], PATIENCE)
            except dist.DistStoreError as error:
                raise Diverged(
                    f"rank {rank} did not come to the end of {self.done[-1]!r} (action {len(self.done) - 1}), which "
                    f"ended here with {mine}"
                ) from error
            result.append(pickle.loads(store.get(key)))
        return result


def _apart(name: str, mine: Any, theirs: Any) -> Iterator[str]:
    if (mine is None) != (theirs is None):
        yield f"{name} is {'missing' if mine is None else 'there'}, wanted the contrary"
        return
    if mine is None:
        return
    theirs = whole(theirs)
    if mine.shape != theirs.shape:
        yield f"{name} is {tuple(mine.shape)}, wanted {tuple(theirs.shape)}"
        return
    # Each rank looks at its own part: to gather all of them would take most of a program's time.
    local = _local(mine)
    theirs = mine.distribution.cut(theirs) if local.shape != theirs.shape else theirs
    mine = local
    if mine.numel():
        worst = float((mine.double() - theirs.double()).abs().max())
        most = float(theirs.double().abs().max())
        if not worst <= TOLERANCE * max(1.0, most):
            yield f"{name} is off by {worst:.3g} of {most:.3g}"


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, the whole one where it is not sharded."""
    if isinstance(value, FlatDTensor):
        return value.to_local().detach()
    found = whole(value)
    assert isinstance(found, torch.Tensor)
    return found


# ---------------------------------------------------------------------- sharding


def _shard(trainee: Trainee) -> None:
    if trainee.is_sharded:
        for ranks in trainee.program.groups:
            dist.new_group(list(ranks))
        _fully_shard(trainee.program, trainee.model)
    trainee.begin()


def _fully_shard(program: Program, model: nn.Module) -> None:
    for path, below in parts_with_paths(program.part, enclosing=ENCLOSING):
        if below.is_replicated and below.kind != "again":
            fsdp_no_shard(model.get_submodule(path))
    one_axis = functools.cache(lambda: init_device_mesh("cpu", (program.num_ranks,), mesh_dim_names=("all",)))
    two_axes = functools.cache(lambda: init_device_mesh("cpu", program.mesh, mesh_dim_names=("outer", "inner")))
    for wrap in program.wraps:
        modules = [model.get_submodule(path) for path in wrap.paths]
        mesh = two_axes() if wrap.strategy in ("hsdp", "hfsdp") else one_axis()
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh,
            getattr(Placements, wrap.strategy)(*range(mesh.ndim)),
            reshard_after_forward=wrap.reshard,
            mp_policy=POLICIES[wrap.policy],
            offload_policy=CPUOffloadPolicy(pin_memory=False) if wrap.is_offloaded else None,
            granularity=GRANULARITIES[wrap.granularity],
        )
