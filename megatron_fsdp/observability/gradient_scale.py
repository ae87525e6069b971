"""check_gradient_scale: measure the ratio of reduced gradients to the sum over the ranks, on one microbatch.

The gradients that autograd computes on each rank are summed outside of the engine, by other collectives, and compared
with the gradients that the optimizer would see (docs/gradient_scale.md).
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
from dbuffer.collectives.all_reduce import all_reduce, reduce_numbers
from dbuffer.events import listen
from dbuffer.mesh import MeshAxis
from megatron_fsdp.api import microbatch
from megatron_fsdp.checkpoint.random_state import random_state, restore_random_state
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.recovery import reset
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import ConfigError, GradientScaleError, StateError
from megatron_fsdp.lifecycle.unit_changes import apply_requires_grad, replace_held_gradients

__all__ = ["GradientScale", "ParameterScale", "check_gradient_scale"]

# The smallest limit; and the limit at which rounding would hide an error by a factor of two.
_SMALLEST_LIMIT, _USELESS_LIMIT = 1e-6, 0.25


@dataclass(frozen=True, slots=True)
class ParameterScale:
    """The measurement of one parameter.

    Attributes:
        name: in the model. unit: the unit that owns it. place: the axes that its gradient is reduced over, in words.
        expected: the correct factor.
        factor: the measured factor; NaN if no rank had a gradient. limit: relative error that rounding may cause.
        accumulated: gradient of two equal microbatches, relative to the gradient of one.
        is_finite: whether its gradients have neither NaN nor infinity.
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
        """True if there was a gradient, and it was larger than its rounding errors."""
        return not math.isnan(self.factor) and self.limit < _USELESS_LIMIT

    @property
    def complaint(self) -> str:
        """The first error found, in words; empty if there is none."""
        if not self.is_finite:
            return "there is NaN or infinity in its gradient. fix: take another batch, or find where it comes from"
        if not self.is_measured:
            return ""
        if abs(self.factor - self.expected) > self.limit * abs(self.expected):
            times = self.factor / self.expected if self.expected else math.inf
            return (
                f"the reduced gradient is {self.factor:.7g} x the sum of all ranks' gradients, expected "
                f"{self.expected:.7g}: {times:.7g} x as large as it has to be. fix: check set_gradient_divide_factor, "
                "reduction hooks, and code that scales gradients after backward; expected=1.0 for a loss per token of "
                "all ranks."
            )
        if not abs(self.accumulated - 2) <= 4 * self.limit:
            return (
                f"the same microbatch twice gives {self.accumulated:.7g} x the gradient of one, expected 2: "
                "gradient accumulation, or the fused weight gradient, scales the gradients that it should only add."
            )
        return ""


@dataclass(frozen=True, slots=True)
class GradientScale:
    """The result of ``check_gradient_scale``; ``print`` shows it on a page.

    Attributes:
        parameters: all trained parameters, in the order of their units.

    Example:
        found = check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch)
        worst = max(found.parameters, key=lambda each: each.factor)
    """

    parameters: tuple[ParameterScale, ...]

    def complaints(self) -> list[str]:
        """Return one sentence per parameter with an error."""
        wrong = [each for each in self.parameters if each.complaint]
        if wrong or any(each.is_measured for each in self.parameters):
            return [f"parameter {e.name!r} (unit {e.unit!r}, over {e.place}): {e.complaint}" for e in wrong]
        return [
            "no parameter has a gradient to measure: the loss reaches none, or the ranks' gradients cancel. fix: call "
            "it with the loss and the data of training, with different data on every rank"
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
    """Run one microbatch, and measure each parameter's reduced gradient relative to the sum over the ranks.

    Let S be the sum of autograd's gradients over all ranks that hold the parameter, and R the final ``.grad``. The
    factor is <R, S> / <S, S>. Every rank of the model's mesh must call this after ``zero_grad()``, with its own data.
    It runs three forwards and backwards. It takes memory for one unit's gradients in FP32 and for three gradient shards
    (whole gradients if gradients are not sharded). Weights, buffers, random state and optimizers are unchanged
    afterwards, except generators that the model holds itself. Unsharded parameters are not measured.

    Args:
        model: a unit, or a module with units below it; outside ``no_sync``, and without gradients.
        loss_fn: ``loss_fn(model, batch)`` returns the loss on which training calls ``backward()`` for one microbatch.
        expected: the correct factor, or a function of the parameter's name; 1.0 if losses are divided by the tokens of
            all ranks. None: 1 / (number of ranks in the mesh of the first unit that has parameters).
        finish: called after each backward, before gradients are read, for training loops that process gradients there
            (Megatron's ``finish_grad_sync`` and ``scale_gradients``).
    Raises:
        GradientScaleError: a factor is wrong; raised on all ranks, with the ``report``.
        ConfigError: no module of the model is sharded, or no sharded parameter is trained.
        StateError: a gradient exists already, or gradient accumulation is in progress.

    Example:
        print(check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch))
    """

    def gradients_of(*batches: Any) -> list[DBuffer]:
        """Run the microbatches of one optimizer step, and return its gradients."""
        for index, each in enumerate(batches):
            if index:
                restore_random_state(random)
            with microbatch(model, index == len(batches) - 1):
                torch.autograd.backward(loss_fn(model, each))
        if finish is not None:
            finish()
        return [probe.reduced() for probe in probes]

    _refuse_gradients(model)
    _follow_changes(model)
    named = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    groups = [(unit.name, group) for unit in units_below(model) for group in unit.groups]
    probes = [
        _Probe(*pair, named) for pair in groups if any(p.requires_grad for p in pair[1].fsdp_params.sharded_params)
    ]
    if not probes:
        what = "sharded parameter of the model requires a gradient" if groups else "module of the model is sharded"
        raise ConfigError(
            f"check_gradient_scale: no {what}. fix: call fully_shard first, on a model with trained parameters"
        )
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
    """Allow trial steps that leave no trace. Yields a function that restores the initial state; exit restores it too.

    Hooks that wait for gradients (optimizers in backward) are not called.
    """
    units, random = list(units_below(model)), random_state()
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


def _refuse_gradients(model: nn.Module) -> None:
    for unit in units_below(model):
        if not unit.requires_gradient_sync or not unit.requires_all_reduce:
            raise StateError(f"unit {unit.name!r} is in no_sync. fix: call this outside, between steps")
        if any(gradients.binding.sum is not None for gradients in unit.gradient_buffers):
            raise StateError(f"unit {unit.name!r}: gradient accumulation is under way. fix: call zero_grad() first")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise StateError(f"parameter {name!r} has a gradient already. fix: call zero_grad() first")


def _follow_changes(model: nn.Module) -> None:
    """Do what the next forward would do first: train what was unfrozen, and leave memory whose gradients users keep."""
    for unit in units_below(model):
        for group in unit.groups:
            changed = group.fsdp_params.changed_requires_grad()
            if group.gradient_buffer is not None and group.gradient_buffer.binding.memory.is_held:
                replace_held_gradients(unit, group)
            if changed:
                apply_requires_grad(unit, group, changed)


class _Probe:
    """Sums one group's autograd gradients over the ranks, outside of the engine, in ``total``."""

    def __init__(self, unit: str, group: ParameterGroup, names: Mapping[int, str]) -> None:
        self.unit, self.group = unit, group
        self.trained = [index for index, param in enumerate(group.fsdp_params.sharded_params) if param.requires_grad]
        found = list(group.parameters.items())
        self.names = [names.get(id(found[index][1]), f"{unit}.{found[index][0]}") for index in self.trained]
        self.axes = group.main_weight.axes
        self.num_ranks = math.prod(axis.size for axis in self.axes)
        self.place = " x ".join(f"{axis.name} of {axis.size}" for axis in self.axes)
        # Axes whose ranks have different gradients: the data-parallel axes, and the axes of tensor parallelism.
        tensor_parallel = group.owned[0].tensor_parallel
        self.all_axes = self.axes if tensor_parallel is None else (*self.axes, *tensor_parallel.sharded_axes)
        self._whole: DBuffer | None = None
        self.squares = [torch.zeros((), dtype=torch.float64, device=group.spec.device) for _ in self.trained]
        self.final = self._gradients.binding.final
        # At least FP32, or the gradients' own dtype if that is wider.
        self._dtype = torch.promote_types(torch.float32, self.final.dtype)
        self.total = self._buffer(self.final.placements)
        self.spread = tuple(group.spread_over(self.final.placements))

    @property
    def _gradients(self) -> GradientBuffer:
        """The gradient buffers of the group, which a forward replaces after changes by the user."""
        assert self.group.gradient_buffer is not None
        return self.group.gradient_buffer

    def _buffer(self, placements: Sequence[Any]) -> DBuffer:
        like, device, name = self.group.main_weight, self.group.spec.device, f"{self.unit}: gradient scale"
        return DBuffer.from_plan(like.plan, like.mesh, placements, self._dtype, device, name=name).zero_()

    def listen(self, hooks: contextlib.ExitStack) -> None:
        for index in self.trained:
            # Called on the class: a method call on released gathered weights would raise an error.
            handle = torch.Tensor.register_hook(
                self.group.fsdp_params.unsharded_params[index],
                functools.partial(self._take, index),  # type: ignore[no-untyped-call]  # torch's stub
            )
            hooks.callback(handle.remove)
        hooks.enter_context(listen(self._hear))

    @torch.no_grad()
    def _take(self, index: int, gradient: torch.Tensor) -> None:
        tensor_parallel = self.group.owned[index].tensor_parallel
        mine = gradient.detach() if tensor_parallel is None else tensor_parallel.local_gradient(gradient.detach())
        self._whole = self._whole or self._buffer([Partial("sum") for _ in self.axes])
        self._whole.get_local_tensor(index).add_(mine if mine.layout is torch.strided else mine.to_dense())

    def _hear(self, action: str, subject: object) -> None:
        # All ranks call this at the same point in their order of collectives, because the engine reduces a group on all
        # ranks together; a rank without a gradient reduces zeros.
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
        # All-reduces of the whole buffer differ from the engine's reductions, so that the engine's errors show.
        for axis in self.axes:
            all_reduce(whole.local_buffer, axis, "sum")
        self.total.local_buffer.add_(whole.slice_view(self.final.placements).local_buffer)

    @torch.no_grad()
    def reduced(self) -> DBuffer:
        """Return a copy of the gradients that the optimizer would read now, in compute's memory; zeros if none."""
        settled, copy = self._gradients.binding.final_gradients(), self._buffer(self.final.placements)
        if settled is not None:
            copy.local_buffer.copy_(settled.local_buffer)
        return copy


def _against(probes: Sequence[_Probe], bases: Sequence[DBuffer], found: Sequence[DBuffer]) -> list[ParameterScale]:
    """Measure ``found`` relative to ``bases`` for all trained parameters in order. Every rank must call this."""
    numbers: list[tuple[Sequence[MeshAxis], torch.Tensor]] = []
    for probe, base, other in zip(probes, bases, found, strict=True):
        for index, square in zip(probe.trained, probe.squares, strict=True):
            one, two = base.get_local_tensor(index).double(), other.get_local_tensor(index).double()
            numbers += [(probe.spread, (left * right).sum()) for left, right in ((one, two), (one, one), (two, two))]
            numbers.append((probe.all_axes, square))
    totals = iter(torch.stack(reduce_numbers(numbers, "sum")).view(-1, 4).tolist())
    return [_measured(probe, name, *next(totals)) for probe in probes for name in probe.names]


def _measured(probe: _Probe, name: str, product: float, base: float, other: float, own: float) -> ParameterScale:
    """Measure R relative to S, from <S, R>, <S, S>, <R, R>, and the sum of the squares of the ranks' own gradients."""
    is_finite = math.isfinite(product + base + other)
    factor = limit = math.nan
    if is_finite and base:
        factor = product / base
        dtypes = probe.group.spec.dtypes
        epsilon = max(torch.finfo(dtype).eps for dtype in (dtypes.reduce, dtypes.main_grad, probe.final.dtype))
        # Each rank's gradient is rounded once, and so is each partial sum; these errors are independent. If the ranks'
        # gradients cancel, the sum is small relative to the rounding errors.
        limit = max(_SMALLEST_LIMIT, 2 * epsilon * math.sqrt(probe.num_ranks) * max(1.0, math.sqrt(own / base)))
    elif is_finite and other:
        factor, limit = math.inf, 0.0
    usual = 1 / probe.num_ranks
    return ParameterScale(name, probe.unit, probe.place, usual, factor, limit, math.nan, is_finite)
