"""GradientScale: what ``check_gradient_scale`` found, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

__all__ = ["GradientScale", "Measured", "NormScale", "ParameterScale"]

# Of a norm that is computed in FP32.
_NORM_LIMIT = 1e-5
# Beyond it rounding hides what is looked for: a factor of two.
_USELESS_LIMIT = 0.25


class Measured(NamedTuple):
    """How gradients compare with others of the same parameter.

    Attributes:
        factor: what they are of the others; NaN where both are zero, or one is not finite. residual: the part of them,
            by norm, that is no multiple of the others. limit: how far rounding may move the two.
        base, other: squared norms, of the others and of them.
    """

    factor: float
    residual: float
    limit: float
    base: float
    other: float


@dataclass(frozen=True, slots=True)
class ParameterScale:
    """What was measured of one parameter.

    Attributes:
        name: in the model. unit: the unit that owns it. place: the axes that it is reduced over, in words.
        num_ranks: of these axes together. expected: what the factor has to be.
        factor: found; NaN where no rank had a gradient. residual: as in ``Measured``. limit: how far rounding may move
            them, relative to the factor. accumulated: what two equal microbatches give of what one gives.
        is_finite: whether there was neither NaN nor infinity in its gradients.
    """

    name: str
    unit: str
    place: str
    num_ranks: int
    expected: float
    factor: float = math.nan
    residual: float = 0.0
    limit: float = 0.0
    accumulated: float = math.nan
    is_finite: bool = True

    @property
    def is_measured(self) -> bool:
        """Whether there was a gradient, and more of it than rounding."""
        return not math.isnan(self.factor) and self.limit < _USELESS_LIMIT

    def complaint(self) -> str | None:
        """Return what is wrong with it, None for nothing."""
        if not self.is_finite:
            return (
                f"parameter {self.name!r} (unit {self.unit!r}): there is NaN or infinity in its gradient, so nothing "
                "can be measured; take another batch, or look for where it comes from"
            )
        if not self.is_measured:
            return None
        where = f"parameter {self.name!r} (unit {self.unit!r}, over {self.place})"
        if abs(self.factor - self.expected) > self.limit * abs(self.expected):
            times = self.factor / self.expected if self.expected else math.inf
            return (
                f"{where}: the reduced gradient is {self.factor:.7g} x the sum of all ranks' gradients, expected "
                f"{self.expected:.7g}: {times:.7g} x as large as it has to be. Look at grad_divisor, "
                "set_gradient_divide_factor, reduction hooks and what scales gradients after backward; for a loss that "
                "is divided by the tokens of all ranks the expected factor is 1 (expected=1.0)."
            )
        if self.residual > 2 * self.limit:
            return (
                f"{where}: {self.residual:.3g} of the reduced gradient, by norm, is no multiple of the sum of all "
                f"ranks' gradients, expected at most {2 * self.limit:.3g}: some ranks or elements are weighted "
                "otherwise than others. Look at reduction hooks and a custom reduce-scatter."
            )
        if not abs(self.accumulated - 2) <= 4 * self.limit:
            return (
                f"{where}: the same microbatch twice gives {self.accumulated:.7g} x the gradient of one, expected 2: "
                "accumulation, or a weight gradient's product into the buffer, scales what it should add."
            )
        return None


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

    def complaint(self) -> str | None:
        """Return what is wrong with it, None for nothing."""
        if self.highest - self.lowest > _NORM_LIMIT * self.highest:
            return (
                f"the gradient norm is {self.found:.7g} here, and from {self.lowest:.7g} to {self.highest:.7g} on the "
                f"ranks, which clip differently; that of all gradients is {self.expected:.7g}. Parameters that other "
                "ranks do not have (experts) count where they are: make them DTensors over the axis that they are "
                "divided over, or say how training gets the norm over all ranks: norm=... Parameters that are not "
                "sharded (ignored_params) count as they are on each rank: reduce their gradients in finish=..."
            )
        if abs(self.found - self.expected) > _NORM_LIMIT * max(self.found, self.expected):
            times = self.found / self.expected if self.expected else math.inf
            return (
                f"the gradient norm is {self.found:.7g}, that of all ranks' gradients {self.expected:.7g}: {times:.7g} "
                "x as large as it has to be, so clipping is too hard or too soft. Look for ranks that count the same "
                "elements, or that leave some out."
            )
        return None


@dataclass(frozen=True, slots=True)
class GradientScale:
    """What ``check_gradient_scale`` found.

    Attributes:
        parameters: all that are trained, in the order of their units.
        norm: of the gradients; None where it was left out.
        duplicated: what a batch with each sample twice gives of the gradient of the batch: 1 for a loss that is a mean,
            2 for a sum, anything else for one that depends on the batch otherwise; None where it was left out.

    Example:
        found = check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch)
        print(found)  # a page
        worst = max(found.parameters, key=lambda each: each.residual)
    """

    parameters: tuple[ParameterScale, ...]
    norm: NormScale | None
    duplicated: float | None

    @property
    def is_mean(self) -> bool | None:
        """Whether the loss is a mean over a rank's samples; None where that was not looked at."""
        return None if self.duplicated is None else abs(self.duplicated - 1) <= 1e-2

    def complaints(self) -> list[str]:
        """Return what is wrong: a sentence for each parameter, and one for the norm."""
        found = [complaint for each in self.parameters if (complaint := each.complaint()) is not None]
        if not any(each.is_measured for each in self.parameters) and not found:
            found.append(
                "no parameter has a gradient to measure: the loss reaches none, or the ranks' gradients cancel. Call "
                "it with the loss and the data of training, other data on every rank"
            )
        of_norm = None if self.norm is None else self.norm.complaint()
        if of_norm is not None:
            found.append(of_norm)
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "gradient scale, reduced gradients of the sum over ranks:"
        for (unit, place, expected), same in groupby(
            self.parameters, lambda each: (each.unit, each.place, each.expected)
        ):
            listed = list(same)
            measured = [each for each in listed if each.is_measured]
            count = f"{len(listed)} parameter{'s' * (len(listed) != 1)}"
            yield f"  unit {unit!r}, {count} over {place}: {_range(measured, expected)}"
        if self.norm is not None:
            yield f"  gradient norm {self.norm.found:.7g}, of all gradients {self.norm.expected:.7g}"
        if self.duplicated is not None and not math.isnan(self.duplicated):
            kind = "a mean" if self.is_mean else "a sum" if abs(self.duplicated - 2) <= 1e-2 else "neither mean nor sum"
            yield f"  each sample twice: {self.duplicated:.7g} x the gradient ({kind} over samples)"


def _range(measured: list[ParameterScale], expected: float) -> str:
    if not measured:
        return "no gradient to measure"
    factors = sorted(each.factor for each in measured)
    residual = max(each.residual for each in measured)
    least, most = f"{factors[0]:.7g}", f"{factors[-1]:.7g}"
    found = least if least == most else f"{least} to {most}"
    return f"factor {found}, expected {expected:.7g}; residual {residual:.1e}"
