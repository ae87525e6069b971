"""Collectives and folds that are wrong in one way each, for the tests that show that the parity check notices."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

from dbuffer import collectives
from dbuffer.mesh import MeshAxis
from dbuffer_kernels import accumulate
from megatron_fsdp.optim import grad_norm
from megatron_fsdp.runtime.step import gradients, reduction

Works = list[dist.Work] | None
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Originals:
    """The collectives themselves, for a fault to call or to leave alone."""

    all_gather: Callable[..., None] = collectives.all_gather
    reduce_scatter: Callable[..., None] = collectives.reduce_scatter
    all_reduce: Callable[..., None] = collectives.all_reduce


_right = Originals()


# ---------------------------------------------------------------------- one call left out


def keep_own_shard(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: Works = None) -> None:
    """All-gather without communication: zeros where other ranks' shards belong."""
    mine = shard.clone()
    output.zero_()
    _slice_of(output, axis).copy_(mine)


def keep_own_sum(output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """Reduce-scatter without communication: this rank's slice, with this rank's addends alone."""
    output.copy_(_slice_of(full, axis))


def keep_own_tensor(tensor: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """All-reduce without communication."""


LEFT_OUT = {"all_gather": keep_own_shard, "reduce_scatter": keep_own_sum, "all_reduce": keep_own_tensor}


class CallCounter:
    """Counts the collectives issued over more than one rank, and leaves one of them out.

    Args:
        left_out: which one, from 0 on; None leaves all of them alone.
    """

    def __init__(self, left_out: int | None = None) -> None:
        self.calls: list[str] = []
        self._left_out = left_out

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand between the engine and its collectives."""
        with replaced(**{kind: functools.partial(self._issue, kind) for kind in KINDS}):
            yield

    def _issue(self, kind: str, *args: object) -> None:
        (axis,) = (argument for argument in args if isinstance(argument, MeshAxis))
        chosen = getattr(_right, kind)
        if axis.size > 1:
            if len(self.calls) == self._left_out:
                chosen = LEFT_OUT[kind]
            self.calls.append(f"{kind} over {axis.name}")
        chosen(*args)


@contextmanager
def replaced(**functions: Callable[..., None]) -> Iterator[None]:
    """Put other functions in the place of collectives, wherever the engine looks for them."""
    with ExitStack() as stack:
        for kind, function in functions.items():
            for place in (collectives, grad_norm):
                if hasattr(place, kind):
                    stack.enter_context(mock.patch.object(place, kind, function))
        yield


# ---------------------------------------------------------------------- every call wrong in the same way


def gather_in_another_order(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: Works = None) -> None:
    """All-gather that deals the shards out one place too far."""
    _right.all_gather(output, shard.clone(), axis)
    output.copy_(output.view(axis.size, -1).roll(1, dims=0).reshape(-1))


class StaleGather:
    """All-gather that sends what a shard held when it was gathered first."""

    def __init__(self) -> None:
        self._first: dict[int, torch.Tensor] = {}

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: Works = None) -> None:
        _right.all_gather(output, self._first.setdefault(shard.data_ptr(), shard.clone()), axis)


def scatter_another_slice(
    output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: Works = None
) -> None:
    """Reduce-scatter that hands each rank its neighbour's slice."""
    rolled = full.view(axis.size, -1).roll(1, dims=0).reshape(-1)
    _right.reduce_scatter(output, rolled, axis, op)


def scatter_to_one_rank(output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """Reduce-scatter whose sum arrives on one rank only."""
    mine = _slice_of(full, axis).clone()
    _right.reduce_scatter(output, full.clone(), axis, op)
    if axis.rank > 0:
        output.copy_(mine)


def reduce_on_one_rank(tensor: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """All-reduce whose result arrives on one rank only."""
    mine = tensor.clone()
    _right.all_reduce(tensor, axis, op)
    if axis.rank > 0:
        tensor.copy_(mine)


def reduce_twice(tensor: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """All-reduce that takes in every rank's addend once per rank."""
    _right.all_reduce(tensor, axis, op)
    _right.all_reduce(tensor, axis, op)


@contextmanager
def without_division() -> Iterator[None]:
    """Gradients are summed over ranks and not divided by their number."""
    right = gradients.GradientBuffer.__init__

    def undivided(self: gradients.GradientBuffer, *args: object, **options: object) -> None:
        right(self, *args, **options)
        self.divisor = 1.0

    with mock.patch.object(gradients.GradientBuffer, "__init__", undivided):
        yield


@contextmanager
def without_later_microbatches() -> Iterator[None]:
    """What should be added to a gradient that is there already is dropped."""

    def first_only(source: torch.Tensor, target: torch.Tensor, *, scale: float, overwrite: bool) -> None:
        if overwrite:
            accumulate(source, target, scale=scale, overwrite=True)

    with mock.patch.object(gradients, "accumulate", first_only), mock.patch.object(reduction, "accumulate", first_only):
        yield


@contextmanager
def without_earlier_microbatches() -> Iterator[None]:
    """What should be added to a gradient that is there already takes its place."""

    def last_only(source: torch.Tensor, target: torch.Tensor, *, scale: float, overwrite: bool) -> None:
        accumulate(source, target, scale=scale, overwrite=True)

    with mock.patch.object(gradients, "accumulate", last_only), mock.patch.object(reduction, "accumulate", last_only):
        yield


def _slice_of(flat: torch.Tensor, axis: MeshAxis) -> torch.Tensor:
    return flat.view(axis.size, -1)[axis.rank]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the strategies that meet it.

    Attributes:
        installed: makes the block in which everything that meets the fault goes wrong.
    """

    installed: Callable[[], AbstractContextManager[None]]
    strategies: tuple[str, ...]


def _wrong(*strategies: str, **functions: Callable[..., None]) -> Fault:
    return Fault(functools.partial(replaced, **functions), strategies)


def _stale() -> AbstractContextManager[None]:
    return replaced(all_gather=StaleGather())


_GATHERING = ("optim", "optim_grads", "optim_grads_params")
_EVERY = ("no_shard", *_GATHERING)

FAULTS = {
    "a gather that is skipped": _wrong(*_GATHERING, all_gather=keep_own_shard),
    "a gather in another order": _wrong(*_GATHERING, all_gather=gather_in_another_order),
    "a gather of stale weights": Fault(_stale, _GATHERING),
    "a reduce-scatter without reduction": _wrong(*_GATHERING, reduce_scatter=keep_own_sum),
    "a reduce-scatter of another slice": _wrong(*_GATHERING, reduce_scatter=scatter_another_slice),
    "a reduce-scatter to one rank only": _wrong(*_GATHERING, reduce_scatter=scatter_to_one_rank),
    "an all-reduce that is skipped": _wrong(*_EVERY, all_reduce=keep_own_tensor),
    "an all-reduce on one rank only": _wrong(*_EVERY, all_reduce=reduce_on_one_rank),
    "an all-reduce that is done twice": _wrong(*_EVERY, all_reduce=reduce_twice),
    "sums in the place of averages": Fault(without_division, _EVERY),
    "later microbatches that are dropped": Fault(without_later_microbatches, _EVERY),
    "earlier microbatches that are overwritten": Fault(without_earlier_microbatches, _EVERY),
}
