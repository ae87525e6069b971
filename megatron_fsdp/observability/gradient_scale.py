"""check_gradient_scale: what a reduced gradient is of the sum of what the ranks computed, measured on one microbatch.

A gradient that is too large or too small by a constant trains with a falling loss, so no curve shows it. Here the
gradients that autograd hands out on each rank, before anything is packed or reduced, are added up beside the engine, by
other collectives than its own, and the gradients that the optimizer would see are compared with that sum
(docs/gradient_scale.md).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import get_process_group_ranks

from dbuffer import DBuffer, Partial
from dbuffer.collectives import all_reduce
from dbuffer.events import listen
from dbuffer.mesh import MeshAxis
from megatron_fsdp.api import microbatch
from megatron_fsdp.errors import ConfigError, GradientScaleError
from megatron_fsdp.observability.model_snapshot import ModelSnapshot
from megatron_fsdp.observability.scale_report import GradientScale, Measured, NormScale, ParameterScale
from megatron_fsdp.optim.grad_norm import clip_grad_norm_
from megatron_fsdp.runtime.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.unit import units_below

__all__ = ["check_gradient_scale"]

_SMALLEST_LIMIT = 1e-6

Expected = float | Callable[[str], float] | None


@dataclass(frozen=True, slots=True)
class _Task:
    """What is run: the loss of a batch, and what follows its backward."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    finish: Callable[[], object] | None


def check_gradient_scale(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    expected: Expected = None,
    duplicate: bool | Callable[[Any], Any] = True,
    finish: Callable[[], object] | None = None,
    norm: bool | Callable[[], torch.Tensor | float] = True,
) -> GradientScale:
    """Run one microbatch, and measure for each parameter what its reduced gradient is of the sum over ranks.

    With L_r what autograd hands out on rank r, before anything of it is packed, scaled or reduced, S the sum of L_r
    over all ranks that hold the parameter, and R what ``.grad`` shows in the end, the factor is <R, S> / <S, S> and the
    residual ||R - factor S|| / ||R||. Where a loss is a mean over a rank's data, every factor has to be 1 / (number of
    ranks with data of their own): also those of experts, which fewer ranks hold, because their tokens come from all.

    Four more things are measured: that the same microbatch twice, accumulated and without the hooks that a first
    pass needs (so that weight gradients are multiplied into buffers where training does that), gives twice the
    gradient; that the gradient norm is that of the gradients, and the same on all ranks; and, as a statement and not
    as a demand, what a batch with each sample twice gives: a mean's gradient stays, a sum's doubles.

    Every rank of the model's mesh calls it, between steps, with data of its own. It takes four forwards and
    backwards, and memory for one unit's gradients in FP32 and for three of this rank's gradient shards; whole gradients
    where they rest whole on every rank. Weights, ``.grad``, buffers, random state and optimizers are left as they were;
    generators that the model holds itself are not known here. Parameters that are not sharded are not looked at.

    Args:
        model: has units below it, or is one; outside of ``no_sync``, its gradients no sum under way.
        loss_fn: ``loss_fn(model, batch)`` returns what training calls ``backward()`` on for one microbatch.
        batch: passed on.
        expected: what every factor has to be; 1.0 where losses are divided by the tokens of all ranks
            (``calculate_per_token_loss``). A function of the parameter's name where they differ. None: 1 / (ranks of
            the mesh of the first unit that has parameters, the outermost first).
        duplicate: returns a batch with each sample twice. True: every tensor of one dimension or more in ``batch``
            (lists, tuples and dictionaries are entered), concatenated with itself. False: leave this out.
        finish: called after each backward, before gradients are read, for loops in which something happens to them
            there (Megatron's ``finish_grad_sync`` and ``scale_gradients``).
        norm: returns the gradient norm. True: ``clip_grad_norm_(model, inf)``. False: leave this out, as where other
            stages of a pipeline have gradients that count.
    Returns:
        What was found; ``print`` shows it.
    Raises:
        GradientScaleError: a factor, a residual or the norm is wrong, on all ranks; the error names parameters, what
            was found and wanted, and has the ``report``.
        ConfigError: no module of the model is sharded, or nothing in it is trained.
        StateError: gradients are a sum under way.

    Example:
        found = check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch)
        print(found)
    """
    probes = _probes(model)
    wanted = _wanted(probes, expected)
    task = _Task(model, loss_fn, finish)
    with ModelSnapshot(model) as snapshot:
        with contextlib.ExitStack() as hooks:
            for probe in probes:
                hooks.enter_context(probe)
            _run(task, [batch])
            for probe in probes:
                probe.complete()
        once = [probe.reduced() for probe in probes]
        measured = _against(probes, [probe.total for probe in probes], once)
        norms = _measure_norm(task, norm, probes, measured)
        snapshot.rewind()
        _run(task, [batch, batch], between=snapshot.rewind_random)
        twice = _against(probes, once, [probe.reduced() for probe in probes])
        doubled: list[Measured] | None = None
        if duplicate is not False:
            more = _doubled(batch) if duplicate is True else duplicate(batch)
            snapshot.rewind()
            _run(task, [more])
            doubled = _against(probes, once, [probe.reduced() for probe in probes])
    scales = zip(wanted, measured, twice, strict=True)
    report = GradientScale(
        tuple(_scale(scale, found, after) for scale, found, after in scales),
        norm=norms,
        duplicated=None if doubled is None else _overall(doubled),
    )
    _raise_together(report, probes)
    return report


def _probes(model: nn.Module) -> list[_Probe]:
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    probes = [_Probe(unit.name, group, names) for unit in units_below(model) for group in unit.groups]
    if not probes:
        raise ConfigError("check_gradient_scale: no module of the model has parameters that fully_shard took")
    probes = [probe for probe in probes if probe.trained]
    if not probes:
        raise ConfigError("check_gradient_scale: no sharded parameter of the model requires a gradient")
    return probes


def _wanted(probes: Sequence[_Probe], expected: Expected) -> list[ParameterScale]:
    scales = []
    for probe in probes:
        for index in probe.trained:
            name = probe.names[index]
            if expected is None:
                value = 1 / math.prod(axis.size for axis in probes[0].axes)
            else:
                value = expected(name) if callable(expected) else expected
            scales.append(ParameterScale(name, probe.unit, probe.place, probe.num_ranks, float(value)))
    return scales


def _scale(scale: ParameterScale, once: Measured, twice: Measured) -> ParameterScale:
    return replace(
        scale,
        factor=once.factor,
        residual=once.residual,
        limit=once.limit,
        accumulated=twice.factor,
        is_finite=math.isfinite(once.base + once.other),
    )


class _Probe:
    """One group: what autograd hands out for it, added up over the ranks beside the engine.

    Attributes:
        unit: its name. names: of all its parameters in the model. trained: positions of those that require gradients.
        axes: the data-parallel ones. place: them in words. num_ranks: how many ranks they have.
        total: the sum, laid out as the gradients that the optimizer reads.
    """

    def __init__(self, unit: str, group: ParameterGroup, names: Mapping[int, str]) -> None:
        self.unit, self.group = unit, group
        self.names = [names.get(id(param), f"{unit}.{name}") for name, param in group.parameters.items()]
        self.trained = [index for index, param in enumerate(group.fsdp_params.sharded_params) if param.requires_grad]
        self.axes = group.main_weight.axes
        self.num_ranks = math.prod(axis.size for axis in self.axes)
        self.place = " x ".join(f"{axis.name} of {axis.size}" for axis in self.axes)
        self._whole: DBuffer | None = None
        self._hooks = contextlib.ExitStack()
        self._is_reduced_at_end = True
        self._squares = [torch.zeros((), dtype=torch.float64, device=group.spec.device) for _ in self.names]
        if self.trained:
            assert group.gradients is not None
            self._is_reduced_at_end = group.gradients.rests_partial
            self.final = group.gradients.binding.final
            # Wide enough for what follows, and no wider than gradients that are large already.
            self._dtype = torch.promote_types(torch.float32, self.final.dtype)
            self.total = self._buffer(self.final.placements, self._dtype).zero_()
            self.spread = tuple(group.spread_over(self.final.placements))

    @property
    def all_axes(self) -> tuple[MeshAxis, ...]:
        """Axes along which ranks hold gradients of their own: the data-parallel ones and those of a split."""
        split = self.group.owned[0].split
        return self.axes if split is None else (*self.axes, *split.sharded_axes)

    def _buffer(self, placements: Sequence[Any], dtype: torch.dtype) -> DBuffer:
        like, device = self.group.main_weight, self.group.spec.device
        return DBuffer.from_plan(like.plan, like.mesh, placements, dtype, device, name=f"{self.unit}: gradient scale")

    def __enter__(self) -> None:
        for index in self.trained:
            # Not as a method: gathered weights refuse what reads them while they are released.
            handle = torch.Tensor.register_hook(
                self.group.fsdp_params.unsharded_params[index],
                functools.partial(self._take, index),  # type: ignore[no-untyped-call]  # torch's stub
            )
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(listen(self._hear))

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @torch.no_grad()
    def _take(self, index: int, gradient: torch.Tensor) -> None:
        mine = self.group.fsdp_params.local_gradient(index, gradient.detach())
        if mine.layout is not torch.strided:
            mine = mine.to_dense()
        if self._whole is None:
            self._whole = self._own()
        self._whole.get_local_tensor(index).add_(mine)

    def _own(self) -> DBuffer:
        return self._buffer(tuple(Partial("sum") for _ in self.axes), self._dtype).zero_()

    def _hear(self, action: str, subject: object) -> None:
        # All ranks are here at the same point of their collectives: none of them would have reduced the group before
        # others had, and those that have no gradient of it reduce zeros.
        if action == "reducing" and subject is self.group.gradients:
            self._add_up()

    def complete(self) -> None:
        """Add up what is left after the backward."""
        if self._is_reduced_at_end:
            self._add_up()

    @torch.no_grad()
    def _add_up(self) -> None:
        whole, self._whole = self._whole or self._own(), None
        for index in self.trained:
            self._squares[index] += whole.get_local_tensor(index).double().square().sum()
        # Not reduce-scatters, and the whole buffer: another way than that of the engine, whose errors it is to show.
        for axis in self.axes:
            all_reduce(whole.local_buffer, axis, "sum")
        self.total.local_buffer.add_(whole.slice_view(self.final.placements).local_buffer)

    def squares(self) -> list[torch.Tensor]:
        """Return the squared norm of each trained parameter's gradient on this rank, before any reduction."""
        return [self._squares[index] for index in self.trained]

    @torch.no_grad()
    def reduced(self) -> DBuffer:
        """Return a copy of what the optimizer would read now, on the device of compute; zeros where it has nothing."""
        assert self.group.gradients is not None
        settled = self.group.gradients.binding.settled()
        copy = self._buffer(self.final.placements, self._dtype)
        return copy.zero_() if settled is None else _filled(copy, settled)


def _filled(copy: DBuffer, source: DBuffer) -> DBuffer:
    copy.local_buffer.copy_(source.local_buffer)
    return copy


def _run(task: _Task, batches: Sequence[Any], between: Callable[[], None] | None = None) -> None:
    """Run the microbatches of one optimizer step, up to its gradients."""
    for index, batch in enumerate(batches):
        if index and between is not None:
            between()
        with microbatch(task.model, index == len(batches) - 1):
            torch.autograd.backward(task.loss_fn(task.model, batch))
    if task.finish is not None:
        task.finish()


def _doubled(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return torch.cat([batch, batch]) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _doubled(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_doubled, batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(_doubled, batch))
    return batch


def _against(probes: Sequence[_Probe], bases: Sequence[DBuffer], found: Sequence[DBuffer]) -> list[Measured]:
    """Measure what gradients are of others, for all trained parameters in their order; every rank calls it."""
    products: list[list[torch.Tensor]] = []
    by_axes: dict[tuple[int, ...], tuple[tuple[MeshAxis, ...], list[torch.Tensor]]] = {}

    def sum_over(axes: tuple[MeshAxis, ...], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        taken = list(values)
        by_axes.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].extend(taken)
        return taken

    for probe, base, other in zip(probes, bases, found, strict=True):
        for index, own in zip(probe.trained, probe.squares(), strict=True):
            one, two = base.get_local_tensor(index).double(), other.get_local_tensor(index).double()
            dots = sum_over(probe.spread, ((one * two).sum(), (one * one).sum(), (two * two).sum()))
            products.append([*dots, *sum_over(probe.all_axes, [own.clone()])])
    for axes, values in by_axes.values():
        stacked = torch.stack(values)
        for axis in axes:
            all_reduce(stacked, axis, "sum")
        for value, total in zip(values, stacked, strict=True):
            value.copy_(total)
    numbers = iter([torch.stack(each).tolist() for each in products])
    return [_measured(probe, *next(numbers)) for probe in probes for _ in probe.trained]


def _measured(probe: _Probe, product: float, base: float, other: float, own: float) -> Measured:
    if not math.isfinite(product + base + other):
        return Measured(math.nan, math.nan, 0.0, base, other)
    if base == 0:
        return Measured(math.nan if other == 0 else math.inf, 0.0, 0.0, base, other)
    factor = product / base
    # ||R - fS||^2 = <R, R> - f^2 <S, S> at that f; rounding may make it negative.
    rest = max(other - factor * factor * base, 0.0)
    residual = math.sqrt(rest / other) if other else 0.0
    dtypes = probe.group.spec.dtypes
    epsilon = max(torch.finfo(dtype).eps for dtype in (dtypes.reduce, dtypes.main_grad, probe.final.dtype))
    # Each rank's part is rounded once, and so is each of the sums on the way, whose errors are independent. Where the
    # ranks' gradients cancel, what is left of them is small beside what was rounded.
    cancelled = max(1.0, math.sqrt(own / base)) if own else 1.0
    limit = max(_SMALLEST_LIMIT, 2 * epsilon * math.sqrt(probe.num_ranks) * cancelled)
    return Measured(factor, residual, limit, base, other)


def _overall(measured: Sequence[Measured]) -> float:
    """Return the factor of all gradients together; NaN where there are none."""
    base = sum(each.base for each in measured)
    return sum(each.factor * each.base for each in measured if each.base) / base if base else math.nan


def _measure_norm(
    task: _Task, norm: bool | Callable[[], torch.Tensor | float], probes: Sequence[_Probe], found: Sequence[Measured]
) -> NormScale | None:
    """Return the norm that training would clip by, and that of the gradients of all ranks."""
    if norm is False:
        return None
    used = float(clip_grad_norm_(task.model, math.inf) if norm is True else norm())
    numbers = iter(found)
    squares = torch.zeros((), dtype=torch.float64, device=probes[0].group.spec.device)
    around = set(probes[0].group.main_weight.mesh.mesh.flatten().tolist())
    for probe in probes:
        # Ranks of the largest mesh that do not hold this group hold others like it, which count as well.
        copies = math.prod(
            len(around.intersection(get_process_group_ranks(axis.gather_group))) for axis in probe.all_axes
        )
        squares += sum(next(numbers).other for _ in probe.trained) / copies
    for axis in probes[0].axes:
        all_reduce(squares, axis, "sum")
    plain = [p.grad for p in task.model.parameters() if p.grad is not None and group_of_parameter(p) is None]
    total = float(squares) + sum(float(each.double().square().sum()) for each in plain)
    extremes = torch.tensor([used, -used], dtype=torch.float64)
    _over_all(extremes, probes)
    return NormScale(used, math.sqrt(total), extremes[0].item(), -extremes[1].item())


def _over_all(values: torch.Tensor, probes: Sequence[_Probe]) -> None:
    """Make values the largest on any rank that shares a mesh with this one."""
    device = probes[0].group.spec.device
    moved = values.to(device)
    seen: set[int] = set()
    for axis in (axis for probe in probes for axis in probe.all_axes):
        if id(axis.gather_group) not in seen:
            seen.add(id(axis.gather_group))
            all_reduce(moved, axis, "max")
    values.copy_(moved)


def _raise_together(report: GradientScale, probes: Sequence[_Probe]) -> None:
    complaints = report.complaints()
    is_wrong = torch.tensor([float(bool(complaints))])
    _over_all(is_wrong, probes)
    if complaints:
        raise GradientScaleError("\n".join(complaints), report)
    if is_wrong.item():
        raise GradientScaleError("gradients are wrong on another rank; its error says which", report)
