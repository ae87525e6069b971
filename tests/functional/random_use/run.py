"""Run a program on the sharded and on the plain model, action by action, and return the outcome.

``REFUSALS`` is the closed list of errors with which the engine may refuse a program that a plain model can run.
"""

import copy
import datetime
import functools
import pickle
import re
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import FlatDTensor
from megatron_fsdp import CPUOffloadPolicy, Placements, fsdp_no_shard, fully_shard
from megatron_fsdp.engine.unsharded_param import UnshardedParam
from tests.functional.random_use.models import GRANULARITIES, POLICIES, SIDE_KINDS, build, parts_with_paths
from tests.functional.random_use.program import RAISED, Program, Trainee, whole
from tests.harness import run_ranks
from tests.harness.failures import FailureKind, RankError
from tests.harness.storage_guard import guard_released_storage

__all__ = ["Verdict", "outcome", "outcomes"]

# fp32 rounding of values near 1, summed over ranks and calls in another order, and amplified by a few steps on badly
# conditioned models.
TOLERANCE = 1e-5
# Limits that only a hang reaches: a program takes 2 to 5 seconds, and 10 on a machine that runs four other jobs.
PATIENCE = datetime.timedelta(seconds=90)
TIMEOUT_S = 180.0
# The program goes on after these actions were refused: they changed nothing.
HARMLESS = ("functional", "copy", "autograd", "state", "hook", "posthook")
SUM = ("backward flag", "backward no_sync", "backward microbatch")
# The class of an error; a regular expression that its message contains; and kinds of parts and first words of actions
# (``_causes``). A refusal is legitimate if the program has one of these causes.
REFUSALS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Refusals of fully_shard.
    ("OwnershipError", r"is the same tensor as '.*' of unit '.*', which owns it already", ("tie",)),
    # This error names no parameter. Its causes are a weight that stays gathered after forward and is used in another
    # unit, a tensor from the middle of a unit, computed after the unit's output, and a penalty on gathered weights that
    # a second backward reads.
    ("RuntimeError", r"is at version 1000000000; expected version 0", ("borrowing", "stash", "kept penalty")),
    # The hook of a weight that is also used outside of its unit.
    ("StateError", r"has a post-accumulate-grad hook, and this backward reached it twice", ("posthook",)),
    ("StateError", r"cannot be deep-copied: its parameters are views of buffers", ("copy",)),
    # The flat optimizer steps a unit's parameters together.
    ("StateError", r"has no gradient, but others have that share a flat parameter with it",
     ("grad none", "freeze", "thaw", "spare", "pick", "sometimes", *SIDE_KINDS)),
    # The gradient of the unsharded parameters.
    ("StateError", r"torch.autograd.grad .* was asked for its gradient", ("autograd",)),
    # Changes of settings after fully_shard.
    ("StateError", r"was frozen when it was sharded, so it has no main weight of", ("thaw",)),
    # Parameters replaced or added after fully_shard.
    ("StateError", r"was replaced by .* after fully_shard", ("replace", "tie", "functional")),
    ("StateError", r"was taken out of its module", ("replace", "tie")),
    ("StateError", r"was added after fully_shard and requires a gradient", ("add", "tie", "thaw")),
    # Gathered weights changed in compute or by the user, or read after their release.
    ("StateError", r"was changed in place while it was gathered",
     ("clamped", "renormed", "weight", "poke", "load", "replace")),
    ("CheckpointError", r"was changed in place while it was gathered", ("weight",)),
    ("ConfigError", r"max_norm", ("renormed",)),
    ("StorageError", r"of its gathered weight, which was released",
     ("weight", "poke", "stash", "unshard", "load", "tie")),
    # Two forwards before one backward, and a rank that uses a unit's parameters in one of them only.
    ("MeshError", r"run other units, or in another order.*fix: root.set_forward_order\(\)", ("sometimes", "pick")),
    # Hooks that autograd would never call.
    ("PlacementError", r"register_hook on a sharded parameter would never be called", ("hook",)),
    # Sums in progress, and sums that a failed backward left incomplete.
    ("StateError", r"is a sum under way, not reduced over all ranks yet", SUM),
    ("StateError", r"was dropped or replaced while its sum is under way", SUM),
    # Weights of a new step are gathered, and the caller has not decided about the old sums.
    ("StateError", r"clip_grad_norm_ before gradients are final", ("drop",)),
    ("StateError", r"is incomplete, because the last backward raised", ("forward error", "forward interrupt")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a program.

    Attributes:
        outcome: "same", "refused" and "plain raises too" are in order; "differs", "wrong error", "no error" and "ranks
            disagree" are not. action: the one it ended with. text: what differs, or the error.
    """

    outcome: str
    action: str = ""
    text: str = ""

    @property
    def is_in_order(self) -> bool:
        """Return whether the program equals the plain model, or was refused by name."""
        return self.outcome in ("same", "refused", "plain raises too")


class Diverged(Exception):
    """Another rank did not reach the same action."""


OUTCOMES = {
    FailureKind.DIED: "died",
    FailureKind.STUCK: "hang",
    FailureKind.RAISED: "harness error",
    FailureKind.UNCLEAN: "left something behind",
}


def outcome(program: Program) -> Verdict:
    """Run a program on its ranks, and return its verdict; a hang or the death of a rank is an outcome too."""
    try:
        return outcomes([program], TIMEOUT_S)[0]
    except RankError as error:
        kinds = {failure.kind for failure in error.failures}
        if "DistStoreError" in str(error) or "Diverged" in str(error):
            return Verdict("hang", text=str(error))
        return Verdict(OUTCOMES[next(kind for kind in FailureKind if kind in kinds)], text=str(error))


def outcomes(programs: list[Program], timeout: float) -> list[Verdict]:
    """Run programs with equal numbers of ranks one after the other; a hang or the death of a rank is an error."""
    by_rank = run_ranks(programs[0].num_ranks, run_all, programs, timeout=timeout)
    return [next((one for one in found if not one.is_in_order), found[0]) for found in zip(*by_rank, strict=True)]


def run_all(programs: list[Program]) -> list[Verdict]:
    """Run programs on this rank, and return their verdicts; every rank calls it."""
    return [_Run(program, number).verdict() for number, program in enumerate(programs)]


class _Run:
    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number = program, number
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_exchanges = 0
        self.done: list[str] = []
        torch.manual_seed(0)
        plain = build(program.part, program.ties)
        model = copy.deepcopy(plain)
        self.plain = Trainee(program, plain, range(self.num_ranks), self.rank, is_sharded=False)
        self.sharded = Trainee(program, model, [self.rank], self.rank, is_sharded=True)

    def verdict(self) -> Verdict:
        """Run all actions and return the verdict."""
        for position, action in enumerate(("shard", *self.program.steps)):
            self.done.append(action)
            found = self._step(action)
            if found is not None:
                outcome, text = found
                return Verdict(outcome, f"{position}: {action}", text)
        return Verdict("same")

    def _step(self, action: str) -> tuple[str, str] | None:
        """Perform one action on both models; return outcome and text of a verdict if the program ends here."""
        # A change made by forward shows when the weights are released: with its backward at the latest. A backward
        # without a graph releases none.
        clamps = any(part.kind == "clamped" for _, part in parts_with_paths(self.program.part))
        is_pass = action.startswith(("forward", "evaluate"))
        self.sharded.is_tampered = self.sharded.is_tampered and not is_pass
        mine = self._try(self.sharded, action)
        errors = self._exchange(mine)
        if len({one and one[0] for one in errors}) > 1:
            return "ranks disagree", "\n".join(f"rank {rank}: {one}" for rank, one in enumerate(errors))
        if mine is not None and mine[0] not in ("Bomb", "Interrupt"):
            if not all(self._is_listed(*one) for one in errors):
                theirs = self._try(self.plain, action)
                is_shared = theirs is not None and theirs[0] == mine[0]
                return "plain raises too" if is_shared else "wrong error", f"{mine[0]}: {mine[1]}"
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
        self.sharded.is_tampered |= clamps and is_pass
        return self._compared(list(self._seen()))

    def _try(self, trainee: Trainee, action: str) -> tuple[str, str] | None:
        is_compute = action.startswith(("forward", "backward", "evaluate", "autograd"))
        is_guarded = trainee.is_sharded and self.program.is_guarded and is_compute
        try:
            with guard_released_storage() if is_guarded else nullcontext():
                if action == "shard":
                    if trainee.is_sharded:
                        _fully_shard(self.program, trainee.model)
                    trainee.begin()
                else:
                    trainee.do(action)
        except tuple(RAISED.values()) as error:
            return type(error).__name__, ""
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            return type(error).__name__, f"{where}{error}"
        return None

    def _is_listed(self, kind: str, message: str) -> bool:
        found = self._causes()
        return any(
            kind == name and re.search(pattern, message) and not found.isdisjoint(causes)
            for name, pattern, causes in REFUSALS
        )

    def _causes(self) -> set[str]:
        found = {part.kind for _, part in parts_with_paths(self.program.part)} | (
            {"tie"} if self.program.ties else set()
        )
        for first, *others in map(str.split, self.done):
            found |= {first, *(f"{first} {word}" for word in others)}
        if {"forward penalty", "forward shown", "backward twice"} <= found:
            found.add("kept penalty")
        return found

    # ------------------------------------------------------------------ comparison

    def _compared(self, differences: list[str]) -> tuple[str, str] | None:
        """Compare weights and gradients; return a verdict if they, or earlier results, differ on any rank."""
        if self.sharded.is_tampered:
            return None
        pairs = list(self._pairs())
        for name, mine, theirs in pairs:
            differences += _apart(name, mine, theirs)
        held = [0 if mine is None else _local(mine).numel() for _, mine, _ in pairs]
        found, parts = zip(*self._exchange((differences[:4], held)), strict=True)
        if any(found):
            return "differs", "\n".join(f"rank {rank}: {'; '.join(one)}" for rank, one in enumerate(found) if one)
        numbers = zip(pairs, zip(*parts, strict=True), strict=True)
        lost = [name for (name, _, theirs), held in numbers if theirs is not None and sum(held) < theirs.numel()]
        return ("differs", f"ranks hold not all of {lost}") if lost else None

    def _seen(self) -> Iterator[str]:
        mine, theirs = dict(self.sharded.seen), dict(self.plain.seen)
        if mine.keys() != theirs.keys():
            yield f"found {sorted(mine)}, wanted {sorted(theirs)}"
            return
        for name, value in mine.items():
            yield from _apart(name, value, theirs[name])

    def _pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield all weights and gradients of both models that can be compared now."""
        shown = dict(self.sharded.model.named_parameters(remove_duplicate=False))
        names: dict[int, str] = {}
        for name, one in self.plain.model.named_parameters(remove_duplicate=False):
            if name in self.sharded.kept:
                names.setdefault(id(one), name)
        for name, wanted in self.plain.model.named_parameters(remove_duplicate=False):
            mine, kept = shown.get(name), self.sharded.kept.get(names.get(id(wanted), name))
            # While weights are gathered the model shows other tensors; the action "look" compares those.
            is_gathered = isinstance(kept, DTensor) and not isinstance(mine, DTensor)
            is_own = mine is self.sharded.late.get(name) and not isinstance(mine, UnshardedParam)
            holder = kept if is_gathered and not is_own else mine
            yield f"weight of {name}", holder, wanted
            if self.plain.is_synced and not self.plain.is_doubtful and holder is not None:
                yield f"gradient of {name}", holder.grad, wanted.grad

    def _exchange(self, mine: Any) -> list[Any]:
        """Return every rank's message. The store carries them, because collectives of the engine may be in flight."""
        store: Any = dist.distributed_c10d._get_default_store()
        self.num_exchanges += 1
        keys = [f"use-{self.number}-{self.num_exchanges}-{rank}" for rank in range(self.num_ranks)]
        store.set(keys[self.rank], pickle.dumps(mine))
        for rank, key in enumerate(keys):
            try:
                store.wait([key], PATIENCE)
            except dist.DistStoreError as error:
                raise Diverged(
                    f"rank {rank} did not come to the end of {self.done[-1]!r} (action {len(self.done) - 1}), which "
                    f"ended here with {mine}"
                ) from error
        return [pickle.loads(store.get(key)) for key in keys]


def _apart(name: str, mine: Any, theirs: Any) -> Iterator[str]:
    if mine is None or theirs is None:
        if mine is not theirs:
            yield f"{name} is {'missing' if mine is None else 'there'}, wanted the contrary"
        return
    theirs = whole(theirs)
    if mine.shape != theirs.shape:
        yield f"{name} is {tuple(mine.shape)}, wanted {tuple(theirs.shape)}"
        return
    # Each rank compares its own part: gathering all of them would take most of a program's time.
    local = _local(mine)
    theirs = mine.distribution.cut(theirs) if local.shape != theirs.shape else theirs
    if local.numel():
        worst = float((local.double() - theirs.double()).abs().max())
        most = float(theirs.double().abs().max())
        if not worst <= TOLERANCE * max(1.0, most):
            yield f"{name} is off by {worst:.3g} of {most:.3g}"


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, or the whole of an unsharded one."""
    found: torch.Tensor = value.to_local().detach() if isinstance(value, FlatDTensor) else whole(value)
    return found


def _fully_shard(program: Program, model: nn.Module) -> None:
    for ranks in program.groups:
        dist.new_group(list(ranks))
    for path, below in parts_with_paths(program.part):
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
