"""Interrupt training steps: by an exception in one of the engine's calls, or by a failing allocation.

A ``Trial`` trains a sharded model and a reference model. In each round it interrupts one step of the sharded model and
drops the gradients, as after any error. Then both models train on and have to stay equal. A ``Sweep`` does so at every
n-th place.
"""

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dbuffer
import dbuffer_kernels
import megatron_fsdp
from dbuffer import SlotPool
from megatron_fsdp import (
    AdamW,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    no_sync,
)
from tests.harness.models import WIDTH, Block, inputs
from tests.harness.oracle import sharded, whole

__all__ = ["SETUPS", "SWEEPS", "Found", "Sweep", "run"]

_ROOTS = tuple(str(Path(package.__file__ or "").parent) for package in (dbuffer, dbuffer_kernels, megatron_fsdp))


# ---------------------------------------------------------------- what breaks a step off


@dataclass(slots=True)
class Fault:
    """Count the places that can raise, and raise at one of them.

    Attributes:
        at: its number, from 1. met: how many there were. where: that one, in words.
    """

    at: int
    met: int = 0
    where: str = ""

    def meet(self, where: Callable[[], str], error: type[BaseException]) -> None:
        """Count one more place."""
        self.met += 1
        if self.met == self.at:
            self.where = where()
            raise error("simulated")


@functools.cache
def _of_engine(code: CodeType) -> bool:
    # Timing decides how often a rank checks whether other ranks have arrived.
    return code.co_filename.startswith(_ROOTS) and not code.co_filename.endswith("rendezvous.py")


def _words(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


@contextmanager
def interrupts_at_calls(fault: Fault, of: str = "") -> Iterator[None]:
    """Interrupt calls of the engine's functions, chosen by the pattern ``of`` in "file.py function"."""

    @functools.cache
    def is_asked_for(code: CodeType) -> bool:
        return _of_engine(code) and re.search(of, f"{Path(code.co_filename).name} {code.co_name} ") is not None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_asked_for(frame.f_code):
            fault.meet(lambda: _words(frame), KeyboardInterrupt)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class _Operators(TorchDispatchMode):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if not schema.is_mutable and not func.is_view and any(str(one.type) == "Tensor" for one in schema.returns):
            self._fault.meet(lambda: f"{func} in {_caller()}", torch.OutOfMemoryError)
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _of_engine(frame.f_code):
        frame = frame.f_back
    return "the model" if frame is None else _words(frame)


@contextmanager
def no_memory(fault: Fault) -> Iterator[None]:
    """Run out of memory when an operator, of the model or the engine, makes a tensor, or a storage allocates."""
    resize, new_slot = torch.UntypedStorage.resize_, SlotPool._new

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if size:
            fault.meet(lambda: f"resize_ in {_caller()}", torch.OutOfMemoryError)
        return resize(storage, size)

    def new(pool: SlotPool, size: int) -> torch.Tensor:
        fault.meet(lambda: f"a slot in {_caller()}", torch.OutOfMemoryError)
        return new_slot(pool, size)

    patched = mock.patch.object(torch.UntypedStorage, "resize_", resized), mock.patch.object(SlotPool, "_new", new)
    with patched[0], patched[1], _Operators(fault):
        yield


_KINDS: dict[str, Callable[[Fault], AbstractContextManager[None]]] = {
    "memory": no_memory,
    "calls": interrupts_at_calls,
}


# ---------------------------------------------------------------- models


class Net(nn.Module):
    """Blocks, the second recomputed in backward; a wide parameter and a head that the root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(hidden=1), Block(hidden=17)])
        # More elements than gradients that wait to be copied together may have.
        self.wide = nn.Parameter(torch.randn(WIDTH, 2400) / 50)
        self.head = nn.Linear(WIDTH, 3)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        if not self.skips or x[0, 0] > 0:
            x = first(x)
        x = third(checkpoint(second, x, use_reentrant=False))
        return self.head(x) + (x @ self.wide.to(x.dtype)).tanh().mean()


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is sharded and stepped.

    Attributes:
        strategy: a classmethod of ``Placements``. slots: of ``set_slot_pool``. optimizer: "sgd", with momentum;
            "refreshed", the same, which refreshes compute weights itself; or "adamw", ours. policy: of precision; then
            the reference model is sharded with it too, because a whole model rounds elsewhere. options: of
            ``fully_shard``. num_ranks: at least. is_frozen: norms are frozen; their buffers are gathered separately.
            is_ordered: a forward order is set, and some data skip the first block.
    """

    strategy: str
    slots: str | None = None
    optimizer: str = "sgd"
    policy: MixedPrecisionPolicy | None = None
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    is_frozen: bool = False
    is_ordered: bool = False

    def shard(self, model: Any) -> None:
        """Shard a model over all ranks."""
        size, is_nested = dist.get_world_size(), self.strategy in ("hsdp", "hfsdp")
        mesh = (min(size, 2), max(size // 2, 1)) if is_nested else (size,)
        sharded(model, self.strategy, units=lambda m: m.blocks, mesh=mesh, mp_policy=self.policy, **self.options)
        if self.slots is not None:
            model.set_slot_pool(self.slots)
        if self.is_ordered:
            model.set_forward_order()

    def step_with(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model, sharded or whole."""
        is_sharded = isinstance(model, FSDPModule)
        if self.optimizer == "adamw":
            return (AdamW if is_sharded else torch.optim.AdamW)(model.parameters(), lr=0.01, eps=1e-3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return fully_shard_optimizer(sgd) if self.optimizer == "refreshed" and is_sharded else sgd


_MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_ZERO3 = "optim_grads_params"

SETUPS = {
    **{name: Setup(name) for name in ("no_shard", "optim", "optim_grads", _ZERO3, "hsdp", "hfsdp")},
    "optim, refreshed": Setup("optim", optimizer="refreshed"),
    "optim_grads, adamw": Setup("optim_grads", optimizer="adamw"),
    "adamw": Setup(_ZERO3, optimizer="adamw"),
    "slots largest": Setup(_ZERO3, "largest"),
    "slots by_size": Setup("optim_grads", "by_size"),
    "mixed": Setup(_ZERO3, policy=_MIXED),
    "optim, mixed": Setup("optim", optimizer="refreshed", policy=_MIXED),
    "split": Setup(_ZERO3, optimizer="adamw", policy=MixedPrecisionPolicy(torch.bfloat16, split_main_params=True)),
    "packed": Setup(_ZERO3, policy=MixedPrecisionPolicy(gather_dtype="int8_block")),
    "wide sums": Setup(
        _ZERO3, policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, accumulate_dtype=torch.float32)
    ),
    "offload": Setup(_ZERO3, options={"offload_policy": CPUOffloadPolicy()}),
    "kept": Setup(_ZERO3, options={"reshard_after_forward": False}),
    "at once": Setup(_ZERO3, options={"reshard_after_forward": True}),
    "frozen": Setup(_ZERO3, is_frozen=True),
    "ordered": Setup(_ZERO3, is_ordered=True),
    "a part kept": Setup(_ZERO3, options={"reshard_after_forward": 2}, num_ranks=4),
}
_TOLERANCE = 2e-6


class Trial:
    """A sharded model, and a reference without faults on the same data: whole, or sharded with the same policy.

    Attributes:
        phase: of the step that runs, or was broken off.
    """

    def __init__(self, setup: Setup) -> None:
        self.phase = ""
        self._setup = setup
        torch.manual_seed(0)
        self._model: Any = Net()
        self._model.skips = setup.is_ordered
        for block in self._model.blocks if setup.is_frozen else ():
            block.norm.requires_grad_(False)
        self._other: Any = copy.deepcopy(self._model)
        setup.shard(self._model)
        if setup.policy is not None:
            setup.shard(self._other)
        self._optimizer, self._others_optimizer = map(setup.step_with, (self._model, self._other))
        self._number = 0
        self._kept: BaseException | None = None

    def break_off(self, kind: str, at: int) -> Fault:
        """Interrupt a step of two microbatches, and drop the gradients.

        With several ranks, interrupt before the optimizer's step, because ranks make different calls in the step.
        """
        fault, self._kept = Fault(at), None
        self._number += 1
        try:
            with (
                _KINDS.get(kind, functools.partial(interrupts_at_calls, of=kind))(fault),
                mock.patch.object(sys, "unraisablehook", _swallow),
            ):
                self._train(self._model, is_last=False)
                self._train(self._model)
                if dist.get_world_size() == 1:
                    self.phase = "step"
                    self._optimizer.step()
        except (KeyboardInterrupt, torch.OutOfMemoryError) as error:
            # In every second round the traceback stays alive, as in a notebook.
            self._kept = error if self._number % 2 else None
        (self._optimizer if self._number % 3 else self._model).zero_grad()
        if self.phase == "step":
            # An interrupted step may have changed some parameters and not others, in a whole model too.
            self._take_over_weights()
            self._take_over_state()
        return fault

    def difference(self) -> str:
        """Train both models on. Return their difference as text, empty if they are equal."""
        both = (self._model, self._other)
        for has_microbatch in (False, True):
            if has_microbatch:
                self._number += 1
                for model in both:
                    self._train(model, is_last=False)
            self._number += 1
            mine, wanted = map(self._train, both)
            found = [] if abs(mine - wanted) <= _TOLERANCE else [f"the loss is {mine}, not {wanted}"]
            found += _differing(*both, of_gradients=True)
            self._optimizer.step()
            self._others_optimizer.step()
            for model in both:
                model.zero_grad()
            found += _differing(*both, of_gradients=False)
            if found:
                return found[0]
            # Rounding errors must not add up from round to round.
            self._take_over_weights()
        return ""

    def _train(self, model: nn.Module, *, is_last: bool = True) -> float:
        """Run forward and backward on the data of this rank, or of all ranks; return the loss on this rank's."""
        rank, size = dist.get_rank(), dist.get_world_size()
        is_sharded = isinstance(model, FSDPModule)
        losses = {}
        with nullcontext() if is_last or not is_sharded else no_sync(model):
            for each in (rank,) if is_sharded else range(size):
                self.phase = "forward"
                loss = model(inputs(each, self._number)).square().mean()
                self.phase = "backward"
                (loss if is_sharded else loss / size).backward()
                losses[each] = loss.item()
        return losses[rank]

    def _take_over_weights(self) -> None:
        has_remainders = self._setup.policy is not None and self._setup.policy.split_main_params
        with torch.no_grad():
            for one, other in zip(self._model.parameters(), self._other.parameters(), strict=True):
                other.copy_(one if isinstance(other, DTensor) else whole(one, one))
                if has_remainders:
                    # A written weight has no remainder, so both models continue from rounded weights.
                    one.copy_(other)

    def _take_over_state(self) -> None:
        if isinstance(self._other, FSDPModule):
            self._others_optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
            return
        for one, other in zip(self._model.parameters(), self._other.parameters(), strict=True):
            state = self._optimizer.state.get(one, {})
            self._others_optimizer.state[other] = {key: whole(value, value) for key, value in state.items()}


def _swallow(unraisable: Any) -> None:
    """Ignore an interrupt that Python itself cannot pass on, for example while a generator is closed."""
    if str(unraisable.exc_value) != "simulated":
        sys.__unraisablehook__(unraisable)


def _differing(model: nn.Module, other: nn.Module, *, of_gradients: bool) -> Iterator[str]:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        if of_gradients and not one.requires_grad:
            continue
        found, wanted = (one.grad, two.grad) if of_gradients else (one, two)
        what = f"the gradient of {name}" if of_gradients else name
        if found is wanted is None and getattr(model, "skips", False):
            continue
        if found is None or wanted is None:
            yield f"{what} is None"
        else:
            off = (whole(found, one).float() - whole(wanted, two)).abs().max().item()
            if not off <= _TOLERANCE:
                yield f"{what} is off by {off:.2g}"


# ---------------------------------------------------------------- sweeps


@dataclass(frozen=True, slots=True)
class Sweep:
    """Interrupt one step at every ``stride``-th place.

    Attributes:
        setup: a key of ``SETUPS``. kind: "memory", "calls", or a pattern of calls. is_fresh: each time in a
            model's first step; else in one model, which has trained and trains on. num_ranks: all of them break off at
            the same place.
    """

    setup: str
    kind: str
    stride: int
    is_fresh: bool = False
    num_ranks: int = 1


@dataclass(slots=True)
class Found:
    """The number of steps that a sweep interrupted, and the differences found, with the place of each."""

    num_steps: int = 0
    wrong: list[str] = field(default_factory=list)


def run(sweep: Sweep) -> Found:
    """Run the sweep; every rank calls it."""
    setup, found = SETUPS[sweep.setup], Found()
    trial: Trial | None = None
    at = 1
    while True:
        if trial is None or sweep.is_fresh:
            trial = Trial(setup)
            assert sweep.is_fresh or not trial.difference()
        fault = Fault(at)
        try:
            fault = trial.break_off(sweep.kind, at)
            if _is_anywhere(fault.met < at):
                return found
            wrong = trial.difference()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        found.num_steps += 1
        if _is_anywhere(bool(wrong)):
            found.wrong.append(f"{sweep.kind} {at} in {trial.phase}, {fault.where}: {wrong}")
            trial = None
        at += sweep.stride


def _is_anywhere(flag: bool) -> bool:
    flags = [flag] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def _full() -> list[Sweep]:
    sweeps = []
    for name, setup in SETUPS.items():
        num_ranks = setup.num_ranks
        sweeps += [Sweep(name, "memory", 1, is_fresh, num_ranks) for is_fresh in (False, True)]
        sweeps += [Sweep(name, "calls", 7, num_ranks=num_ranks), Sweep(name, "calls", 21, True, num_ranks)]
    # Sweeps with work on other threads.
    for name in ("optim", "optim_grads", _ZERO3, "slots largest", "mixed", "wide sums", "optim_grads, adamw"):
        sweeps += [Sweep(name, "memory", 5, is_fresh, 2) for is_fresh in (False, True)]
        sweeps += [Sweep(name, "calls", 35, is_fresh, 2) for is_fresh in (False, True)]
    return sweeps


SWEEPS = _full()
"""All of them, which take minutes."""
