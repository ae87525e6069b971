"""check_gradient_scale: what a reduced gradient is of the sum of what the ranks computed, measured on one microbatch.

The gradients that autograd hands out on each rank are added up beside the engine, by other collectives than its own,
and the gradients that the optimizer would see are compared with that sum (docs/gradient_scale.md).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dbuffer import DBuffer, Partial
from dbuffer.collectives import all_reduce
from dbuffer.collectives_rare import reduce_numbers
from dbuffer.events import listen
from dbuffer.mesh import MeshAxis
from megatron_fsdp.api import microbatch
from megatron_fsdp.checkpoint.random_state import random_state, restore_random_state
from megatron_fsdp.engine.backward import reset
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, GradientScaleError, StateError

__all__ = ["GradientScale", "ParameterScale", "check_gradient_scale"]

# The least, and that beyond which rounding hides what is looked for: a factor of two.
_SMALLEST_LIMIT, _USELESS_LIMIT = 1e-6, 0.25


@dataclass(frozen=True, slots=True)
class ParameterScale:
    """What was measured of one parameter.

    Attributes:
        name: in the model. unit: the unit that owns it. place: the axes that it is reduced over, in words.
        expected: what the factor has to be.
        factor: found; NaN where no rank had a gradient. limit: how far rounding may move it, relative to itself.
        accumulated: what two equal microbatches give of what one gives.
        is_finite: whether there was neither NaN nor infinity in its gradients.
    """

    name: str
    unit: str
    place: str
    expected: float
    factor: float
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
            times = self.factor / self.expected if self.expected else math.inf
            return (
                f"the reduced gradient is {self.factor:.7g} x the sum of all ranks' gradients, expected "
                f"{self.expected:.7g}: {times:.7g} x as large as it has to be. Look at set_gradient_divide_factor, "
                "reduction hooks, what scales gradients after backward; expected=1.0 for a loss per token of all ranks."
            )
        if not abs(self.accumulated - 2) <= 4 * self.limit:
            return (
                f"the same microbatch twice gives {self.accumulated:.7g} x the gradient of one, expected 2: "
                "accumulation, or a weight gradient's product into the buffer, scales what it should add."
            )
        return ""


@dataclass(frozen=True, slots=True)
class GradientScale:
    """What ``check_gradient_scale`` found; ``print`` shows it on a page.

    Attributes:
        parameters: all that are trained, in the order of their units.

    Example:
        found = check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch)
        worst = max(found.parameters, key=lambda each: each.factor)
    """

    parameters: tuple[ParameterScale, ...]

    def complaints(self) -> list[str]:
        """Return what is wrong: a sentence for each parameter."""
        wrong = [each for each in self.parameters if each.complaint]
        if wrong or any(each.is_measured for each in self.parameters):
            return [f"parameter {e.name!r} (unit {e.unit!r}, over {e.place}): {e.complaint}" for e in wrong]
        return [
            "no parameter has a gradient to measure: the loss reaches none, or the ranks' gradients cancel. Call it "
            "with the loss and the data of training, other data on every rank"
        ]

    def __str__(self) -> str:
        lines = ["gradient scale, reduced gradients of the sum over ranks:"]
        for (unit, place, wanted), same in itertools.groupby(self.parameters, lambda e: (e.unit, e.place, e.expected)):
            found = [each for each in same if each.is_measured]
            factors = sorted(each.factor for each in found) or [math.nan]
            ends = " to ".join(dict.fromkeys((f"{factors[0]:.7g}", f"{factors[-1]:.7g}")))
            lines.append(f"  unit {unit!r}, {len(found)} parameters over {place}: factor {ends}, expected {wanted:.7g}")
        return "\n".join(lines)


def check_gradient_scale(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    expected: float | Callable[[str], float] | None = None,
    finish: Callable[[], object] | None = None,
) -> GradientScale:
    """Run one microbatch, and measure for each parameter what its reduced gradient is of the sum over ranks.

    With S the sum over all ranks that hold the parameter of what autograd hands out, and R what ``.grad`` shows in the
    end, the factor is <R, S> / <S, S>. Every rank of the model's mesh calls it after ``zero_grad()``, with data of its
    own. It takes three forwards and backwards, and memory for one unit's
    gradients in FP32 and for three gradient shards; whole gradients where they rest whole. Weights, buffers, random
    state and optimizers are left as they were; generators that the model holds itself are not known here. Parameters
    that are not sharded are not looked at.

    Args:
        model: has units below it, or is one; outside of ``no_sync``, without gradients.
        loss_fn: ``loss_fn(model, batch)`` returns what training calls ``backward()`` on for one microbatch.
        expected: what every factor has to be, or a function of the parameter's name; 1.0 where losses are divided by
            the tokens of all ranks. None: 1 / (ranks of the mesh of the first unit that has parameters).
        finish: called after each backward, before gradients are read, for loops in which something happens to them
            there (Megatron's ``finish_grad_sync`` and ``scale_gradients``).
    Raises:
        GradientScaleError: a factor is wrong, on all ranks; it has the ``report``.
        ConfigError: no module of the model is sharded, or nothing in it is trained.
        StateError: there are gradients already, or a sum of them is under way.

    Example:
        print(check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch))
    """

    def gradients_of(*batches: Any) -> list[DBuffer]:
        """Run the microbatches of one optimizer step, up to its gradients."""
        for index, each in enumerate(batches):
            if index:
                restore_random_state(random)
            with microbatch(model, index == len(batches) - 1):
                torch.autograd.backward(loss_fn(model, each))
        if finish is not None:
            finish()
        return [probe.reduced() for probe in probes]

    named = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    groups = [(unit.name, group) for unit in units_below(model) for group in unit.groups]
    probes = [
        _Probe(*pair, named) for pair in groups if any(p.requires_grad for p in pair[1].fsdp_params.sharded_params)
    ]
    if not probes:
        what = "sharded parameter of the model requires a gradient" if groups else "module of the model is sharded"
        raise ConfigError(f"check_gradient_scale: no {what}; call fully_shard first, and train something")
    random = random_state()
    with _rehearsal(model) as rewind:
        with contextlib.ExitStack() as hooks:
            for probe in probes:
                probe.listen(hooks)
            once = gradients_of(batch)
            for probe in probes:
                probe.add_up_at_end()
        measured = _against(probes, [probe.total for probe in probes], once)
        rewind()
        twice = _against(probes, once, gradients_of(batch, batch))
    usual = measured[0].expected if expected is None else expected
    report = GradientScale(
        tuple(
            replace(one, accumulated=two.factor, expected=usual(one.name) if callable(usual) else usual)
            for one, two in zip(measured, twice, strict=True)
        )
    )
    _raise_together(report, probes)
    return report


def _raise_together(report: GradientScale, probes: Sequence[_Probe]) -> None:
    complaints = report.complaints()
    is_wrong = torch.tensor(float(bool(complaints)), device=probes[0].group.spec.device)
    for axis in {id(axis.gather_group): axis for probe in probes for axis in probe.all_axes}.values():
        all_reduce(is_wrong, axis, "max")
    if is_wrong:
        said = "\n".join(complaints) or "gradients are wrong on another rank; its error says which"
        raise GradientScaleError(said, report)


@contextlib.contextmanager
def _rehearsal(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Let a step be run only to look at it: yield what goes back to the beginning, as the end of the block does.

    Hooks that wait for gradients (optimizers in backward) are not called.
    """
    units, random = list(units_below(model)), random_state()
    _refuse_gradients(model, units)
    hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) or {} for parameter in model.parameters()]
    kept = [dict(each) for each in hooks]
    owners = [module._buffers for module in model.modules()]
    buffers = [(owner, name, buffer) for owner in owners for name, buffer in owner.items() if buffer is not None]
    values = [buffer.detach().clone() for *_, buffer in buffers]

    @torch.no_grad()
    def rewind() -> None:
        model.zero_grad()
        restore_random_state(random)
        for (owner, name, buffer), value in zip(buffers, values, strict=True):
            owner[name] = buffer.copy_(value)

    for each in hooks:
        each.clear()
    try:
        yield rewind
    except BaseException:
        for unit in units:
            reset(unit.root)
        raise
    finally:
        rewind()
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def _refuse_gradients(model: nn.Module, units: Sequence[Unit]) -> None:
    for unit in units:
        if not unit.requires_gradient_sync or not unit.requires_all_reduce:
            raise StateError(f"unit {unit.name!r} is in no_sync: call this outside, between steps")
        if any(gradients.binding.is_under_way for gradients in unit.gradients):
            raise StateError(f"unit {unit.name!r}: gradients are a sum under way; call zero_grad() first")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise StateError(f"parameter {name!r} has a gradient already; call zero_grad() first")


class _Probe:
    """One group: what autograd hands out for it, added up over the ranks beside the engine, in ``total``."""

    def __init__(self, unit: str, group: ParameterGroup, names: Mapping[int, str]) -> None:
        self.unit, self.group = unit, group
        self.trained = [index for index, param in enumerate(group.fsdp_params.sharded_params) if param.requires_grad]
        found = list(group.parameters.items())
        self.names = [names.get(id(found[index][1]), f"{unit}.{found[index][0]}") for index in self.trained]
        self.axes = group.main_weight.axes
        self.num_ranks = math.prod(axis.size for axis in self.axes)
        self.place = " x ".join(f"{axis.name} of {axis.size}" for axis in self.axes)
        # Axes along which ranks hold gradients of their own: the data-parallel ones and those of a split.
        split = group.owned[0].split
        self.all_axes = self.axes if split is None else (*self.axes, *split.sharded_axes)
        self._whole: DBuffer | None = None
        self.squares = [torch.zeros((), dtype=torch.float64, device=group.spec.device) for _ in self.trained]
        assert group.gradients is not None
        self._gradients, self.final = group.gradients, group.gradients.binding.final
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
        if action == "reducing" and subject is self._gradients:
            self.add_up()

    def add_up_at_end(self) -> None:
        if self._gradients.rests_partial:
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
        settled, copy = self._gradients.binding.settled(), self._buffer(self.final.placements)
        if settled is not None:
            copy.local_buffer.copy_(settled.local_buffer)
        return copy


def _against(probes: Sequence[_Probe], bases: Sequence[DBuffer], found: Sequence[DBuffer]) -> list[ParameterScale]:
    """Measure what gradients are of others, for all trained parameters in their order; every rank calls it."""
    numbers: list[tuple[Sequence[MeshAxis], torch.Tensor]] = []
    for probe, base, other in zip(probes, bases, found, strict=True):
        for index, square in zip(probe.trained, probe.squares, strict=True):
            one, two = base.get_local_tensor(index).double(), other.get_local_tensor(index).double()
            numbers += [(probe.spread, (left * right).sum()) for left, right in ((one, two), (one, one), (two, two))]
            numbers.append((probe.all_axes, square))
    totals = iter(torch.stack(reduce_numbers(numbers, "sum")).view(-1, 4).tolist())
    return [_measured(probe, name, *next(totals)) for probe in probes for name in probe.names]


def _measured(probe: _Probe, name: str, product: float, base: float, other: float, own: float) -> ParameterScale:
    """Measure R of S, from <R, S>, <S, S>, <R, R> and the sum of what the ranks' own parts have of <S, S>."""
    is_finite = math.isfinite(product + base + other)
    factor = limit = math.nan
    if is_finite and base:
        factor = product / base
        dtypes = probe.group.spec.dtypes
        epsilon = max(torch.finfo(dtype).eps for dtype in (dtypes.reduce, dtypes.main_grad, probe.final.dtype))
        # Each rank's part is rounded once, and so is each of the sums on the way, whose errors are independent. Where
        # the ranks' gradients cancel, what is left of them is small beside what was rounded.
        limit = max(_SMALLEST_LIMIT, 2 * epsilon * math.sqrt(probe.num_ranks) * max(1.0, math.sqrt(own / base)))
    elif is_finite and other:
        factor, limit = math.inf, 0.0
    usual = 1 / probe.num_ranks
    return ParameterScale(name, probe.unit, probe.place, usual, factor, limit, math.nan, is_finite)
