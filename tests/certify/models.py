"""Small models with sizes that divide nothing, for every way of using weights that the matrix tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.certify.clocks import Queue, VirtualStreams
from megatron_fsdp.engine.fused_linear import expert_matmul
from megatron_fsdp.lifecycle.module import FsdpModule

WIDTH = 7
_VOCABULARY = 11


class Block(nn.Module):
    """A residual block: norm, two projections, and two experts where asked for."""

    def __init__(self, hidden: int, *, has_experts: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 3) if has_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., WIDTH) for (..., WIDTH)."""
        hidden = x + self.down(torch.tanh(self.up(self.norm(x))))
        if self.experts is not None:
            flat = hidden.reshape(-1, WIDTH)
            hidden = hidden + expert_matmul(flat.expand(2, *flat.shape), self.experts).sum(0).view_as(hidden)
        result: torch.Tensor = hidden
        return result


class _Early(nn.Module):
    """Whose ``gain`` is read by others, before it is called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


class ReadsEarly(nn.Module):
    """Backward has closed ``late`` when the gradient of its ``gain`` comes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.late = nn.Linear(WIDTH, WIDTH), _Early()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., WIDTH) for (..., WIDTH)."""
        if isinstance(self.late, FsdpModule):
            self.late.unshard()
        result: torch.Tensor = self.late(torch.tanh(self.first(x * self.late.gain)))
        return result


class Stack(nn.Module):
    """Compute logits from tokens through blocks.

    Args:
        recomputes: None, "reentrant", "selective" (not reentrant), or "nested": each block within all of them.
        hidden: width inside each block. repeats: the first block runs a second time at the end.
        is_tied: the head is the embedding's weight.
    """

    def __init__(
        self,
        make_block: Callable[[int], nn.Module] = Block,
        *,
        recomputes: str | None = None,
        repeats: bool = False,
        is_tied: bool = False,
        hidden: tuple[int, ...] = (13, 1, 17),
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(make_block(size) for size in hidden)
        self.head = nn.Linear(WIDTH, _VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self._recomputes, self._repeats = recomputes, repeats

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each token predicting itself, 0-d; tokens are (rows, length)."""
        x = self.embedding(tokens)
        is_nested = self._recomputes == "nested"
        x = checkpoint(self._layers, x, use_reentrant=False) if is_nested else self._layers(x)
        if self._repeats:
            x = self.layers[0](x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self._recomputes is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self._recomputes == "reentrant")
        return x


class _Here(torch.autograd.Function):
    """Run the backward of the previous operators on a stream, as autograd does for operators that ran there in forward.

    The stream waits for the one that made the gradient, and for nothing else: ``is_own`` says that it made it itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, streams: VirtualStreams, stream: Queue, is_own: bool = False
    ) -> torch.Tensor:
        ctx.streams, ctx.stream, ctx.is_own = streams, stream, is_own
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.stream is not ctx.streams.compute and not ctx.is_own:
            ctx.streams.order(ctx.streams.compute, ctx.stream)
        ctx.streams.switch(ctx.stream)
        return gradients[0], None, None, *([None] if len(ctx.needs_input_grad) == 4 else [])


_run_here: Callable[..., torch.Tensor] = _Here.apply


class Branches(nn.Module):
    """Two branches, the second on another stream in forward and backward; both use a common weight too.

    Args:
        hidden: outputs of a branch. ends_on_side: it is that stream on which backward ends. bias: of the layers.
    """

    def __init__(self, streams: VirtualStreams, hidden: int, *, ends_on_side: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.ends_on_side = ends_on_side
        self.streams, self.side = streams, streams.stream("side")
        self.common = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.here, self.there = (nn.Linear(WIDTH, hidden, bias=bias) for _ in range(2))
        self.here_first, self.there_first = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 2 * hidden) for (..., WIDTH)."""
        streams = self.streams
        # In turns, so that backward goes from one stream to the other and back.
        if self.ends_on_side:
            there, here = self._first_there(x), self._first_here(x)
        else:
            here, there = self._first_here(x), self._first_there(x)
        here = _run_here(self.here(here), streams, streams.compute)
        with streams.use(self.side):
            there = _run_here(self.there(there), streams, self.side)
        streams.order(self.side, streams.compute)
        return torch.cat((here, there), -1)

    def _first_here(self, x: torch.Tensor) -> torch.Tensor:
        return _run_here(torch.tanh(self.here_first(self.common(x))), self.streams, self.streams.compute)

    def _first_there(self, x: torch.Tensor) -> torch.Tensor:
        self.streams.order(self.streams.compute, self.side)
        with self.streams.use(self.side):
            return _run_here(torch.tanh(self.there_first(self.common(x))), self.streams, self.side)


class Towers(nn.Module):
    """Two chains of layers that meet at the end alone, one of them on another stream, forward and backward."""

    def __init__(self, streams: VirtualStreams) -> None:
        super().__init__()
        self.streams, self.side = streams, streams.stream("side")
        self.here, self.there = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., WIDTH) for (..., WIDTH)."""
        streams, here, there = self.streams, x, x
        streams.order(streams.compute, self.side)
        for index, (layer_here, layer_there) in enumerate(zip(self.here, self.there, strict=True)):
            is_own = index < len(self.here) - 1
            here = _run_here(torch.tanh(layer_here(here)), streams, streams.compute, is_own)
            with streams.use(self.side):
                there = _run_here(torch.tanh(layer_there(there)), streams, self.side, is_own)
        streams.order(self.side, streams.compute)
        return here + there


def build(*, has_experts: bool = False, **options: Any) -> Stack:
    """Make a ``Stack`` with its options, alike on every rank."""
    torch.manual_seed(0)
    return Stack(lambda hidden: Block(hidden, has_experts=has_experts), **options)


def batch(rank: int, step: int, microbatch: int = 0) -> torch.Tensor:
    """Draw one rank's tokens of one microbatch, (3, 5)."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + microbatch)
    return torch.randint(0, _VOCABULARY, (3, 5), generator=generator)
