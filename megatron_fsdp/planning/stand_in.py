"""StandIn: a module with a unit's parameters, which notes what using them would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = ["StandIn"]

# How often each kind of operation of forward comes again: a product has two in backward, one of them for the weight.
_TIMES = {"forward": {"matrix": 1, "attention": 1}, "backward": {"matrix": 1, "attention": 2}, "weight": {"matrix": 1}}


class _Use(torch.autograd.Function):
    """A use of a weight: its products, and gradients without values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, note: Callable[[str], None]) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.note = note
        note("forward")
        return torch.empty(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        ctx.note("backward")
        if not ctx.needs_input_grad[1]:
            return torch.empty(1), None, None
        ctx.note("weight")
        return torch.empty(1), torch.empty_like(weight), None


class StandIn(nn.Module):
    """A unit: its parameters in the order in which they are used, with the units inside of it between them.

    Args:
        work: operations of one token, which are shared out among the weights by their size.
    """

    def __init__(self, recording: Recording, work: UnitWork) -> None:
        super().__init__()
        self._order: list[str] = []
        self._recording, self._work = recording, work
        self._numel = 0

    def use(self, weight: nn.Parameter) -> None:
        """Use a parameter next."""
        self._order.append(f"weight{len(self._order)}")
        self.register_parameter(self._order[-1], weight)
        self._numel += weight.numel()

    def call(self, unit: StandIn) -> None:
        """Call a unit next."""
        self._order.append(f"unit{len(self._order)}")
        self.register_module(self._order[-1], unit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass a token through everything; values mean nothing."""
        for name in self._order:
            each = getattr(self, name)
            x = each(x) if isinstance(each, nn.Module) else _Use.apply(x, each, self._noting(each))  # type: ignore[no-untyped-call]
        return x

    def _noting(self, weight: torch.Tensor) -> Callable[[str], None]:
        """Return what notes the operations of a use: its share of the unit's own."""
        work, recording, share = self._work, self._recording, weight.numel() / self._numel

        def note(what: str) -> None:
            for kind, times in _TIMES[what].items():
                recording.work(Work(what, kind, int(share * times * getattr(work, kind))))
            if what == "backward" and work.is_layer:
                for kind in ("matrix", "attention"):
                    recording.work(Work("again", f"{kind} again", int(share * getattr(work, kind))), calls=0)

        return note
