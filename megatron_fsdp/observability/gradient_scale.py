"""check_gradient_scale: what a reduced gradient is of the sum of what the ranks computed, measured on one microbatch.

The gradients that autograd hands out on each rank are added up beside the engine, by other collectives than its own,
and the gradients that the optimizer would see are compared with that sum (docs/gradient_scale.md).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import get_process_group_ranks

from dbuffer import DBuffer, Partial
from dbuffer.collectives import all_reduce
from dbuffer.collectives_rare import reduce_numbers
from dbuffer.events import listen
from dbuffer.mesh import MeshAxis
from megatron_fsdp.api import microbatch
from megatron_fsdp.errors import ConfigError, GradientScaleError
from megatron_fsdp.observability.model_snapshot import ModelSnapshot
from megatron_fsdp.optim.grad_norm import clip_grad_norm_
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.step.unit import units_below

__all__ = ["GradientScale", "NormScale", "ParameterScale", "check_gradient_scale"]

# The least, that of a norm in FP32, and that beyond which rounding hides what is looked for: a factor of two.
_SMALLEST_LIMIT, _NORM_LIMIT, _USELESS_LIMIT = 1e-6, 1e-5, 0.25

Expected = float | Callable[[str], float] | None


@dataclass(frozen=True, slots=True)
class ParameterScale:
    """What was measured of one parameter.

    Attributes:
        name: in the model. unit: the unit that owns it. place: the axes that it is reduced over, in words.
        num_ranks: of these axes together. expected: what the factor has to be.
        factor: found; NaN where no rank had a gradient. residual: the part of the gradient, by norm, that is no
            multiple of the sum. limit: how far rounding may move the two, relative to the factor.
        accumulated: what two equal microbatches give of what one gives.
        is_finite: whether there was neither NaN nor infinity in its gradients.
    """

    name: str
    unit: str
    place: str
    num_ranks: int
    expected: float
    factor: float
    residual: float
    limit: float
    accumulated: float
    is_finite: bool

    @property
    def is_measured(self) -> bool:
        """Whether there was a gradient, and more of it than rounding."""
        return not math.isnan(self.factor) and self.limit < _USELESS_LIMIT

    @property
    def complaint(self) -> str:
        """What is wrong with it, the first thing; empty for nothing."""
        if not self.is_finite:
            return "there is NaN or infinity in its gradient; take another batch, or look for where it is from"
        if not self.is_measured:
            return ""
        if abs(self.factor - self.expected) > self.limit * abs(self.expected):
            return (
                f"the reduced gradient is {self.factor:.7g} x the sum of all ranks' gradients, expected "
                f"{self.expected:.7g}: {_times(self.factor, self.expected)}. Look at set_gradient_divide_factor, "
                "reduction hooks, what scales gradients after backward; expected=1.0 for a loss per token of all ranks."
            )
        if self.residual > 2 * self.limit:
            return (
                f"{self.residual:.3g} of the reduced gradient, by norm, is no multiple of the sum of all ranks' "
                f"gradients, expected at most {2 * self.limit:.3g}: look at reduction hooks, a custom reduce-scatter."
            )
        if not abs(self.accumulated - 2) <= 4 * self.limit:
            return (
                f"the same microbatch twice gives {self.accumulated:.7g} x the gradient of one, expected 2: "
                "accumulation, or a weight gradient's product into the buffer, scales what it should add."
            )
        return ""


@dataclass(frozen=True, slots=True)
class NormScale:
    """What was measured of the gradient norm.

    Attributes:
        found: what training clips by on this rank. expected: the norm of the gradients of all ranks.
        highest, lowest: of ``found`` on any rank.
    """

    found: float
    expected: float
    highest: float
    lowest: float

    @property
    def complaint(self) -> str:
        """What is wrong with it; empty for nothing."""
        if self.highest - self.lowest > _NORM_LIMIT * self.highest:
            return (
                f"the gradient norm is {self.found:.7g} here, and from {self.lowest:.7g} to {self.highest:.7g} on the "
                f"ranks, which clip differently; that of all gradients is {self.expected:.7g}. Experts that other "
                "ranks do not have count where they are: make them DTensors over their axis, or give norm=...; "
                "parameters that are not sharded count on each rank: reduce their gradients in finish=..."
            )
        if abs(self.found - self.expected) > _NORM_LIMIT * max(self.found, self.expected):
            return (
                f"the gradient norm is {self.found:.7g}, that of all ranks' gradients {self.expected:.7g}: "
                f"{_times(self.found, self.expected)}. Look for ranks that count the same elements, or leave some out."
            )
        return ""


def _times(found: float, expected: float) -> str:
    return f"{found / expected if expected else math.inf:.7g} x as large as it has to be"


@dataclass(frozen=True, slots=True)
class GradientScale:
    """What ``check_gradient_scale`` found; ``print`` shows it on a page.

    Attributes:
        parameters: all that are trained, in the order of their units.
        norm: of the gradients; None where it was left out.

    Example:
        found = check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch)
        worst = max(found.parameters, key=lambda each: each.residual)
    """

    parameters: tuple[ParameterScale, ...]
    norm: NormScale | None

    def complaints(self) -> list[str]:
        """Return what is wrong: a sentence for each parameter, and one for the norm."""
        found = [
            f"parameter {each.name!r} (unit {each.unit!r}, over {each.place}): {each.complaint}"
            for each in self.parameters
            if each.complaint
        ]
        if not any(each.is_measured for each in self.parameters) and not found:
            found.append(
                "no parameter has a gradient to measure: the loss reaches none, or the ranks' gradients cancel. Call "
                "it with the loss and the data of training, other data on every rank"
            )
        return [*found, *([self.norm.complaint] if self.norm is not None and self.norm.complaint else ())]

    def __str__(self) -> str:
        lines = ["gradient scale, reduced gradients of the sum over ranks:"]
        parts = itertools.groupby(self.parameters, lambda each: (each.unit, each.place, each.expected))
        for (unit, place, wanted), members in ((key, list(same)) for key, same in parts):
            found = [each for each in members if each.is_measured]
            line = "no gradient to measure"
            if found:
                factors = [each.factor for each in found]
                ends = " to ".join(dict.fromkeys(f"{end:.7g}" for end in (min(factors), max(factors))))
                line = f"factor {ends}, expected {wanted:.7g}; residual {max(each.residual for each in found):.1e}"
            count = f"{len(members)} parameter{'s' * (len(members) != 1)}"
            lines.append(f"  unit {unit!r}, {count} over {place}: {line}")
        if self.norm is not None:
            lines.append(f"  gradient norm {self.norm.found:.7g}, of all gradients {self.norm.expected:.7g}")
        return "\n".join(lines)


def check_gradient_scale(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    expected: Expected = None,
    finish: Callable[[], object] | None = None,
    norm: bool | Callable[[], torch.Tensor | float] = True,
) -> GradientScale:
    """Run one microbatch, and measure for each parameter what its reduced gradient is of the sum over ranks.

    With S the sum over all ranks that hold the parameter of what autograd hands out, and R what ``.grad`` shows in the
    end, the factor is <R, S> / <S, S> and the residual ||R - factor S|| / ||R||. Every rank of the model's mesh calls
    it, between steps, with data of its own. It takes three forwards and backwards, and memory for one unit's gradients
    in FP32 and for three gradient shards; whole gradients where they rest whole. Weights, ``.grad``, buffers, random
    state and optimizers are left as they were; generators that the model holds itself are not known here. Parameters
    that are not sharded are not looked at.

    Args:
        model: has units below it, or is one; outside of ``no_sync``, its gradients no sum under way.
        loss_fn: ``loss_fn(model, batch)`` returns what training calls ``backward()`` on for one microbatch.
        expected: what every factor has to be, or a function of the parameter's name; 1.0 where losses are divided by
            the tokens of all ranks. None: 1 / (ranks of the mesh of the first unit that has parameters).
        finish: called after each backward, before gradients are read, for loops in which something happens to them
            there (Megatron's ``finish_grad_sync`` and ``scale_gradients``).
        norm: returns the gradient norm. True: ``clip_grad_norm_(model, inf)``. False: leave this out, as where other
            stages of a pipeline have gradients that count.
    Raises:
        GradientScaleError: a factor, a residual or the norm is wrong, on all ranks; it has the ``report``.
        ConfigError: no module of the model is sharded, or nothing in it is trained.
        StateError: gradients are a sum under way.

    Example:
        found = check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch)
        print(found)
    """

    def gradients_of(*batches: Any) -> list[DBuffer]:
        """Run the microbatches of one optimizer step, up to its gradients."""
        for index, each in enumerate(batches):
            if index:
                snapshot.rewind_random()
            with microbatch(model, index == len(batches) - 1):
                torch.autograd.backward(loss_fn(model, each))
        if finish is not None:
            finish()
        return [probe.reduced() for probe in probes]

    probes = _probes(model)
    with ModelSnapshot(model) as snapshot:
        with contextlib.ExitStack() as hooks:
            for probe in probes:
                probe.listen(hooks)
            once = gradients_of(batch)
            for probe in probes:
                if probe.is_reduced_at_end:
                    probe.add_up()
        measured = _against(probes, [probe.total for probe in probes], once)
        norms = None if norm is False else _measure_norm(model, norm, probes, measured)
        snapshot.rewind()
        twice = _against(probes, once, gradients_of(batch, batch))
    usual = 1 / math.prod(axis.size for axis in probes[0].axes)
    places = [(probe, probe.names[index]) for probe in probes for index in probe.trained]
    parameters = tuple(
        ParameterScale(
            name, probe.unit, probe.place, probe.num_ranks,
            usual if expected is None else expected(name) if callable(expected) else expected,
            one.factor, one.residual, one.limit, two.factor, math.isfinite(one.base + one.other),
        )
        for (probe, name), one, two in zip(places, measured, twice, strict=True)
    )  # fmt: skip
    report = GradientScale(parameters, norms)
    complaints = report.complaints()
    if _highest([float(bool(complaints))], probes)[0]:
        said = "\n".join(complaints) or "gradients are wrong on another rank; its error says which"
        raise GradientScaleError(said, report)
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


class _Probe:
    """One group: what autograd hands out for it, added up over the ranks beside the engine, in ``total``."""

    def __init__(self, unit: str, group: ParameterGroup, names: Mapping[int, str]) -> None:
        self.unit, self.group = unit, group
        self.names = [names.get(id(param), f"{unit}.{name}") for name, param in group.parameters.items()]
        self.trained = [index for index, param in enumerate(group.fsdp_params.sharded_params) if param.requires_grad]
        self.axes = group.main_weight.axes
        self.num_ranks = math.prod(axis.size for axis in self.axes)
        self.place = " x ".join(f"{axis.name} of {axis.size}" for axis in self.axes)
        # Axes along which ranks hold gradients of their own: the data-parallel ones and those of a split.
        split = group.owned[0].split
        self.all_axes = self.axes if split is None else (*self.axes, *split.sharded_axes)
        self._whole: DBuffer | None = None
        self.is_reduced_at_end = True
        self.squares = [torch.zeros((), dtype=torch.float64, device=group.spec.device) for _ in self.trained]
        if self.trained:
            assert group.gradients is not None
            self.is_reduced_at_end = group.gradients.rests_partial
            self.final = group.gradients.binding.final
            # Wide enough for what follows, and no wider than gradients that are large already.
            self._dtype = torch.promote_types(torch.float32, self.final.dtype)
            self.total = self._buffer(self.final.placements)
            self.spread = tuple(group.spread_over(self.final.placements))

    def _buffer(self, placements: Sequence[Any]) -> DBuffer:
        like, device, name = self.group.main_weight, self.group.spec.device, f"{self.unit}: gradient scale"
        return DBuffer.from_plan(like.plan, like.mesh, placements, self._dtype, device, name=name).zero_()

    def listen(self, hooks: contextlib.ExitStack) -> None:
        for index in self.trained:
            # Not as a method: gathered weights refuse what reads them while they are released.
            handle = torch.Tensor.register_hook(
                self.group.fsdp_params.unsharded_params[index],
                functools.partial(self._take, index),  # type: ignore[no-untyped-call]  # torch's stub
            )
            hooks.callback(handle.remove)
        hooks.enter_context(listen(self._hear))

    @torch.no_grad()
    def _take(self, index: int, gradient: torch.Tensor) -> None:
        split = self.group.owned[index].split
        mine = gradient.detach() if split is None else split.local_gradient(gradient.detach())
        self._whole = self._whole or self._buffer([Partial("sum") for _ in self.axes])
        self._whole.get_local_tensor(index).add_(mine if mine.layout is torch.strided else mine.to_dense())

    def _hear(self, action: str, subject: object) -> None:
        # All ranks are here at the same point of their collectives: none of them would have reduced the group before
        # others had, and those that have no gradient of it reduce zeros.
        if action == "reducing" and subject is self.group.gradients:
            self.add_up()

    @torch.no_grad()
    def add_up(self) -> None:
        whole, self._whole = self._whole or self._buffer([Partial("sum") for _ in self.axes]), None
        for square, index in zip(self.squares, self.trained, strict=True):
            square += whole.get_local_tensor(index).double().square().sum()
        # Not reduce-scatters, and the whole buffer: another way than that of the engine, whose errors it is to show.
        for axis in self.axes:
            all_reduce(whole.local_buffer, axis, "sum")
        self.total.local_buffer.add_(whole.slice_view(self.final.placements).local_buffer)

    @torch.no_grad()
    def reduced(self) -> DBuffer:
        """Return a copy of what the optimizer would read now, on the device of compute; zeros where it has nothing."""
        assert self.group.gradients is not None
        settled, copy = self.group.gradients.binding.settled(), self._buffer(self.final.placements)
        if settled is not None:
            copy.local_buffer.copy_(settled.local_buffer)
        return copy


class _Measured(NamedTuple):
    """How gradients compare with others of the same parameter: ``base`` and ``other`` are squared norms."""

    factor: float
    residual: float
    limit: float
    base: float
    other: float


def _against(probes: Sequence[_Probe], bases: Sequence[DBuffer], found: Sequence[DBuffer]) -> list[_Measured]:
    """Measure what gradients are of others, for all trained parameters in their order; every rank calls it."""
    numbers: list[tuple[Sequence[MeshAxis], torch.Tensor]] = []
    for probe, base, other in zip(probes, bases, found, strict=True):
        for index, square in zip(probe.trained, probe.squares, strict=True):
            one, two = base.get_local_tensor(index).double(), other.get_local_tensor(index).double()
            numbers += [(probe.spread, (left * right).sum()) for left, right in ((one, two), (one, one), (two, two))]
            numbers.append((probe.all_axes, square))
    totals = iter(torch.stack(reduce_numbers(numbers, "sum")).view(-1, 4).tolist())
    return [_measured(probe, *next(totals)) for probe in probes for _ in probe.trained]


def _measured(probe: _Probe, product: float, base: float, other: float, own: float) -> _Measured:
    if not math.isfinite(product + base + other):
        return _Measured(math.nan, math.nan, 0.0, base, other)
    if base == 0:
        return _Measured(math.nan if other == 0 else math.inf, 0.0, 0.0, base, other)
    factor = product / base
    # ||R - fS||^2 = <R, R> - f^2 <S, S> at that f; rounding may make it negative.
    residual = math.sqrt(max(other - factor * factor * base, 0.0) / other) if other else 0.0
    dtypes = probe.group.spec.dtypes
    epsilon = max(torch.finfo(dtype).eps for dtype in (dtypes.reduce, dtypes.main_grad, probe.final.dtype))
    # Each rank's part is rounded once, and so is each of the sums on the way, whose errors are independent. Where the
    # ranks' gradients cancel, what is left of them is small beside what was rounded.
    limit = 2 * epsilon * math.sqrt(probe.num_ranks) * max(1.0, math.sqrt(own / base))
    return _Measured(factor, residual, max(_SMALLEST_LIMIT, limit), base, other)


def _measure_norm(
    model: nn.Module, norm: bool | Callable[[], Any], probes: Sequence[_Probe], found: Sequence[_Measured]
) -> NormScale:
    """Return the norm that training would clip by, and that of the gradients of all ranks."""
    used = float(norm() if callable(norm) else clip_grad_norm_(model, math.inf))
    numbers = iter(found)
    squares = torch.zeros((), dtype=torch.float64, device=probes[0].group.spec.device)
    around = set(probes[0].group.main_weight.mesh.mesh.flatten().tolist())
    for probe in probes:
        # Ranks of the largest mesh that do not hold this group hold others like it, which count as well.
        groups = [get_process_group_ranks(axis.gather_group) for axis in probe.all_axes]
        copies = math.prod(len(around.intersection(ranks)) for ranks in groups)
        squares += sum(next(numbers).other for _ in probe.trained) / copies
    for axis in probes[0].axes:
        all_reduce(squares, axis, "sum")
    plain = [p.grad for p in model.parameters() if p.grad is not None and group_of_parameter(p) is None]
    total = float(squares) + sum(float(each.double().square().sum()) for each in plain)
    highest, lowest = _highest([used, -used], probes)
    return NormScale(used, math.sqrt(total), highest, -lowest)


def _highest(values: Sequence[float], probes: Sequence[_Probe]) -> list[float]:
    """Return the largest values on any rank that shares a mesh with this one."""
    found = torch.tensor(values, dtype=torch.float64, device=probes[0].group.spec.device)
    for axis in {id(axis.gather_group): axis for probe in probes for axis in probe.all_axes}.values():
        all_reduce(found, axis, "max")
    highest: list[float] = found.tolist()
    return highest
