"""join: train or evaluate on ranks that have different numbers of batches, or of microbatches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dbuffer.collectives.all_reduce import all_reduce
from megatron_fsdp.checks.agreement import mesh_ranks
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import AgreementError, ConfigError, StateError
from megatron_fsdp.formatting import rank_list

__all__ = ["JoinedBatches", "join"]

MeanOver = Literal["ranks with data", "all ranks"]
_OPEN: list[JoinedBatches] = []
_NOTHING = object()
_NO_LENGTH = -1


class JoinedBatches:
    """The batches of one rank, followed by repetitions of the last one until every rank has used all of its batches.

    ``join`` makes it. Iterate over it once, on every rank.

    Attributes:
        has_data: whether the current batch is new. False: it is a repetition, whose loss and gradients do not count.
        num_with_data: number of ranks with a new batch now.
        is_last: whether no rank has a further batch: the argument for ``microbatch(model, is_last=...)``.

    Example:
        with join(model, batches) as joined:
            for part in joined:
                model(part).sum().backward()
                print(joined.has_data, joined.num_with_data, joined.is_last)
    """

    def __init__(
        self, models: Sequence[nn.Module], batches: Iterable[Any], filler: object, mean_over: MeanOver
    ) -> None:
        self.has_data, self.num_with_data, self.is_last = True, 0, False
        self._groups: list[ParameterGroup] = [
            group for model in models for unit in units_below(model) for group in unit.groups
        ]
        self._widest, self._mean_over = _widest_group(self._groups), mean_over
        self._ranks = mesh_ranks(self._widest.spec.mesh)
        # Of this rank's gradients in the mean; None before the first batch and after the last.
        self._weight: float | None = None
        # In a nested join: whether this rank has data in the outer one.
        self._outer = _OPEN[-1] if _OPEN else None
        self._batches, self._filler, self._number = batches, filler, 0
        self._lengths: dict[int, int] = {}

    @property
    def _counts(self) -> bool:
        return self._outer is None or self._outer._weight != 0.0

    def __iter__(self) -> Iterator[Any]:
        """Yield as many batches as the rank with most has.

        Raises:
            StateError: a rank has no batch and no filler; or fewer than its ``len()``.
            AgreementError: another rank did not draw a batch.
        """
        own = iter(self._batches)
        following = next(own, _NOTHING)
        self._exchange_lengths(following)
        with_data = self._ranks_with_data(following)
        while with_data:
            current, following = following, (_NOTHING if following is _NOTHING else next(own, _NOTHING))
            has_own = current is not _NOTHING
            if has_own:
                self._filler = current
            self._number += 1
            self.has_data, self.num_with_data = has_own and self._counts, len(with_data)
            with_data = self._ranks_with_data(following)
            self.is_last = not with_data
            self._weight = 0.0
            if self.has_data:
                self._weight = len(self._ranks) / self.num_with_data if self._mean_over == "ranks with data" else 1.0
            _weigh_open()
            yield self._filler
        # Not in a ``finally``: a caller that draws one batch, by ``next(iter(joined))``, runs its backward afterwards.
        self._end_weight()

    def _end_weight(self) -> None:
        """Give the groups the weight that they had outside of this block."""
        self._weight = None
        weigh(self._groups, 1.0)
        _weigh_open()

    def _exchange_lengths(self, first: object) -> None:
        """Exchange the number of batches of each rank; raise if a rank has none and no filler."""
        try:
            length = len(self._batches)  # type: ignore[arg-type]  # those that have no length raise
        except TypeError:
            length = _NO_LENGTH
        is_empty = first is _NOTHING
        length = length if self._counts or length == _NO_LENGTH else 0
        can_fill = not is_empty or self._filler is not _NOTHING
        # Lengths are sent plus one, because 0 stands for a rank without a length.
        said = self._sum_over_ranks([length - _NO_LENGTH, int(not can_fill)])
        lost = [rank for rank, (_, is_lost) in said.items() if is_lost]
        if lost:
            raise StateError(
                f"join: {rank_list(lost)} has no batch at all, so nothing to take part with. fix: "
                "join(model, batches, filler=batch) with any batch of the right shape, on every rank"
            )
        lengths = {rank: value + _NO_LENGTH for rank, (value, _) in said.items()}
        # If one rank has no length, all ranks ask before each batch.
        self._lengths = {} if _NO_LENGTH in lengths.values() else lengths

    def _ranks_with_data(self, following: object) -> list[int]:
        """Return the ranks that have a further batch."""
        is_own = following is not _NOTHING and self._counts
        if self._lengths:
            me = dist.get_rank() if dist.is_initialized() else 0
            found = [rank for rank, length in self._lengths.items() if length > self._number]
            if is_own != (me in found):
                raise StateError(
                    f"join: len() of the batches of rank {me} is {self._lengths[me]}, but batch {self._number + 1} is "
                    f"{'there' if is_own else 'missing'}. fix: give iter(batches), whose length is not asked"
                )
            return found
        return [rank for rank, (has_own,) in self._sum_over_ranks([int(is_own)]).items() if has_own]

    def _sum_over_ranks(self, numbers: list[int]) -> dict[int, list[int]]:
        """Return one number from each rank."""
        me = dist.get_rank() if dist.is_initialized() else self._ranks[0]
        device = self._widest.spec.compute_device
        said = torch.zeros(len(self._ranks), len(numbers), dtype=torch.int64, device=device)
        said[self._ranks.index(me)] = torch.tensor(numbers, device=device)
        try:
            for axis in self._widest.main_weight.axes:
                all_reduce(said, axis, "sum")
            return dict(zip(self._ranks, said.tolist(), strict=True))
        except RuntimeError as error:
            AgreementError.raise_for(self._widest.name, f"join() before batch {self._number + 1}", error)


@contextmanager
def join(
    model: nn.Module | Sequence[nn.Module],
    batches: Iterable[Any],
    *,
    filler: Any = _NOTHING,
    mean_over: MeanOver = "ranks with data",
) -> Generator[JoinedBatches, None, None]:
    """Run the same number of batches on all ranks, although their data have different lengths.

    A rank without further batches gets its last batch again until all ranks have finished. The rank runs the same code,
    so every collective has its partner: gathers, reductions, clipping, ``optimizer.step()``, metrics. Its gradients do
    not count: the rank contributes zeros.

    Draw a batch, then run its backward, before you draw the next one. Buffers that a forward changes (running
    statistics) see repeated batches, too; ``has_data`` identifies them. If every rank's ``batches`` has a ``len()``,
    lengths are exchanged once. Otherwise a small all-reduce precedes each batch, and the host waits for it.

    Args:
        model: a sharded model, or several that are trained together.
        batches: this rank's own.
        filler: the batch to repeat on a rank without any batch.
        mean_over: average gradients over the ranks with a new batch now, or over all ranks.
    Raises:
        ConfigError: another ``mean_over``; or gradients are summed invariantly, and not over all ranks.
        StateError: no sharded module in ``model``, or units that are trained over different ranks; see
            ``JoinedBatches`` for more.

    Example:
        with join(model, batches[: 2 - dist.get_rank()]) as joined:
            for part in joined:
                model(part).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if mean_over not in ("ranks with data", "all ranks"):
        raise ConfigError(f"join: mean_over={mean_over!r}. fix: 'ranks with data' or 'all ranks'")
    if not any(unit.groups for each in models for unit in units_below(each)):
        raise StateError("join: the model holds no sharded parameters. fix: call fully_shard on it first")
    if mean_over == "ranks with data" and torch.is_grad_enabled():
        _refuse_invariant(models)
    joined = JoinedBatches(models, batches, filler, mean_over)
    _OPEN.append(joined)
    try:
        yield joined
    finally:
        _OPEN.remove(joined)
        joined._end_weight()


def _refuse_invariant(models: Iterable[nn.Module]) -> None:
    """Raise for units whose gradients may not be weighed by the number of ranks with data."""
    for unit in (unit for model in models for unit in units_below(model)):
        if unit.groups and unit.policy.reduction == "invariant":
            raise ConfigError(
                f'join: unit {unit.name!r} has MixedPrecisionPolicy(reduction="invariant"), whose sums must not depend '
                'on the number of ranks, and mean_over="ranks with data" multiplies gradients by a factor that does. '
                'fix: join(model, batches, mean_over="all ranks"), and set_gradient_divide_factor(G) on every unit, '
                "where G is the number of microbatches of a step on all ranks together"
            )


def _widest_group(groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """Return the group that is sharded over the most ranks, which draw batches together.

    Raises:
        StateError: another group is trained over other ranks.
    """
    widest = max(groups, key=lambda group: group.spec.mesh.size())
    ranks = mesh_ranks(widest.spec.mesh)
    for other in groups:
        found = mesh_ranks(other.spec.mesh)
        is_trained = other.requires_grad and torch.is_grad_enabled()
        if found != ranks and (is_trained or not set(found) <= set(ranks)):
            raise StateError(
                f"join: unit {widest.name!r} is sharded over {rank_list(ranks)}, and parameter "
                f"{next(iter(other.parameters))!r} of unit {other.name!r} over {rank_list(found)}, as experts are. "
                "They would learn from repeated batches of other ranks. fix: give every rank the same number of "
                "batches; in evaluation, enter torch.no_grad() first"
            )
    return widest


def _weigh_open() -> None:
    """Give the groups of all open blocks their weights; the innermost block that has drawn a batch decides."""
    for joined in _OPEN:
        if joined._weight is not None:
            weigh(joined._groups, joined._weight)


def weigh(groups: Iterable[ParameterGroup], weight: float) -> None:
    """Multiply this rank's gradients of some groups; 0 stands for zeros."""
    for group in groups:
        # The group may get another gradient buffer before its next backward.
        group.gradient_weight = weight
        if group.gradient_buffer is not None:
            group.gradient_buffer.weigh(weight)
