"""Placements: the sharding strategy, as placements of weights, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dbuffer import BufferPlacement, Flat, Partial, Replicate
from dbuffer.errors import PlacementError

__all__ = ["Placements"]

Axis = int | str


@dataclass(frozen=True, slots=True, init=False)
class Placements:
    """The placements of the three kinds of buffer, per data-parallel axis.

    Args:
        dp_axes: the axes of the mesh, by name or number, outermost first; each argument is a tuple or a list with one
            entry for each axis, or the only entry itself.
        parameter: placements of the compute weights between uses: ``Replicate`` or ``Flat``.
        gradient: placements of the gradients between microbatches: ``Partial`` or ``Flat``. ``Partial("avg")`` is
            treated as ``Partial()``: gradients are summed, and divided by the number of ranks, or by
            ``set_gradient_divide_factor``.
        optimizer: placements of main weights, final gradients and optimizer state: ``Replicate`` or ``Flat``.
    Raises:
        PlacementError: the three placements of an axis do not fit; names the axis and the legal choices.

    Example:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model, mesh, Placements.optim_grads(0))  # ZeRO-2 over axis 0
        print(Placements.hsdp(0, 1))  # replicas over axis 0, ZeRO-3 over axis 1
    """

    dp_axes: tuple[Axis, ...]
    parameter: tuple[BufferPlacement, ...]
    gradient: tuple[BufferPlacement, ...]
    optimizer: tuple[BufferPlacement, ...]

    def __init__(
        self,
        dp_axes: Axis | Sequence[Axis],
        parameter: BufferPlacement | Sequence[BufferPlacement],
        gradient: BufferPlacement | Sequence[BufferPlacement],
        optimizer: BufferPlacement | Sequence[BufferPlacement],
    ) -> None:
        given = {"dp_axes": dp_axes, "parameter": parameter, "gradient": gradient, "optimizer": optimizer}
        for name, value in given.items():
            found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
            if name == "gradient":
                # Megatron-FSDP v2 writes the mean. Gradients are averaged here in any case.
                found = tuple(Partial() if placement == Partial("avg") else placement for placement in found)
            object.__setattr__(self, name, found)
        lengths = {len(self.dp_axes), len(self.parameter), len(self.gradient), len(self.optimizer)}
        if len(lengths) != 1 or not self.dp_axes:
            raise PlacementError(
                f"{self}. fix: give one parameter, gradient and optimizer placement for each of dp_axes"
            )
        for position, axis in enumerate(self.dp_axes):
            self._check_axis(position, axis)

    def _check_axis(self, position: int, axis: Axis) -> None:
        parameter, gradient, optimizer = self.parameter[position], self.gradient[position], self.optimizer[position]
        for kind, found, legal in (
            ("parameter", parameter, (Replicate, Flat)),
            ("gradient", gradient, (Partial, Flat)),
            ("optimizer", optimizer, (Replicate, Flat)),
        ):
            if not isinstance(found, legal):
                names = " or ".join(choice.__name__ for choice in legal)
                raise PlacementError(f"axis {axis!r}: the {kind} placement is {found!r}. fix: give {names}")
        if isinstance(gradient, Partial) and gradient.reduce_op != "sum":
            raise PlacementError(
                f"axis {axis!r}: the gradient placement is {gradient!r}; gradients are summed and divided. fix: give "
                "Partial() or Partial('avg')"
            )
        if optimizer == Replicate() and Flat() in (parameter, gradient):
            raise PlacementError(
                f"axis {axis!r}: parameter {parameter} and gradient {gradient} with optimizer Replicate(): what the "
                "optimizer replicates must not be sharded elsewhere. fix: use optimizer=Flat() or "
                "parameter=Replicate(), gradient=Partial()"
            )

    @classmethod
    def no_shard(cls, *axes: Axis) -> Placements:
        """DDP: everything is replicated, over axis 0 by default; gradients are all-reduced on the last microbatch."""
        whole = (Replicate(),) * len(axes or (0,))
        return cls(axes or (0,), whole, (Partial(),) * len(whole), whole)

    @classmethod
    def optim(cls, axis: Axis = 0) -> Placements:
        """ZeRO-1: optimizer state and main weights sharded."""
        return cls((axis,), (Replicate(),), (Partial(),), (Flat(),))

    @classmethod
    def optim_grads(cls, axis: Axis = 0) -> Placements:
        """ZeRO-2: gradients sharded as well."""
        return cls((axis,), (Replicate(),), (Flat(),), (Flat(),))

    @classmethod
    def optim_grads_params(cls, axis: Axis = 0) -> Placements:
        """ZeRO-3: weights sharded as well."""
        return cls((axis,), (Flat(),), (Flat(),), (Flat(),))

    @classmethod
    def hsdp(cls, outer: Axis = 0, inner: Axis = 1) -> Placements:
        """ZeRO-3 on the inner axis, replicas on the outer one."""
        return cls((outer, inner), (Replicate(), Flat()), (Partial(), Flat()), (Replicate(), Flat()))

    @classmethod
    def hfsdp(cls, outer: Axis = 0, inner: Axis = 1) -> Placements:
        """ZeRO-3 on the inner axis, optimizer state and main weights sharded over both."""
        return cls((outer, inner), (Replicate(), Flat()), (Partial(), Flat()), (Flat(), Flat()))

    def num_shards(self, sizes: Sequence[int]) -> int:
        """Return the number of shards of the most finely sharded buffer, for axes of these sizes."""
        return math.prod(size for size, placement in zip(sizes, self.optimizer, strict=True) if placement == Flat())
