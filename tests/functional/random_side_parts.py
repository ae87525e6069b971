"""Modules that return more than a tensor, and modules that change their own weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tests.functional.random_models import COMPOSITES, WIDTH, Composite, Leaf, Maker, Part

__all__ = ["ENCLOSING", "KINDS", "SIDE_KINDS", "Side"]


@dataclass
class Pair:
    """Two results."""

    first: torch.Tensor
    second: torch.Tensor


class Side(nn.Module):
    """Runs the modules below it and gives two results: the last one's output, and the first one's, scaled."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__()
        self.part = part
        self.parts = nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> object:
        outputs = [x]
        for part in self.parts:
            outputs.append(part(outputs[-1], tokens, turn))
        first, second = outputs[-1], outputs[min(1, len(self.parts))] * self.scale.to(x.dtype)
        results = {
            "list": [first, second], "dictionary": {"first": first, "second": second}, "dataclass": Pair(first, second),
            "nested": [Pair(first, second)],
        }  # fmt: skip
        return results[self.part.kind]


class SideUser(Composite):
    """Uses one or both of the results of a ``Side``, whose ``size`` says which."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__(part, [])
        self.both = Side(part, parts)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        found = self.both(x, tokens, turn)
        found = found[0] if self.part.kind == "nested" else found
        if isinstance(found, Pair):
            first, second = found.first, found.second
        else:
            first, second = found.values() if isinstance(found, dict) else found
        return (first + torch.tanh(second) / 2, x + torch.tanh(second), first)[self.part.size % 3]


class Linear(nn.Linear):
    """Computes in its weight's dtype, which a policy may have chosen, and returns its input's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Mlp(Composite):
    """Two layers of PyTorch's own, the second one now and then without a bias."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__(part, parts)
        self.up = Linear(WIDTH, part.size)
        self.down = Linear(part.size, WIDTH, bias=part.size % 2 == 0)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        return super().forward(x + torch.tanh(self.down(torch.tanh(self.up(x)))) / 2, tokens, turn)


class Clamped(Composite):
    """Clamps a weight of its own in forward."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__(part, parts)
        self.clamped = nn.Parameter(torch.randn(part.size, WIDTH))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        with torch.no_grad():
            self.clamped.clamp_(-0.4, 0.4)
        return super().forward(x * (1 + self.clamped.to(x.dtype).sum(0) / 4), tokens, turn)


class Renormed(Composite):
    """Looks tokens up in a table whose rows are scaled down in forward."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__(part, parts)
        self.table = nn.Embedding(part.size, WIDTH, max_norm=0.8)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        return super().forward(x + self.table(tokens % self.part.size).to(x.dtype), tokens, turn)


class Sometimes(Composite):
    """Uses what is below it or not, as the data says: not on all ranks, in not all microbatches."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        if int(tokens.sum() + self.part.size) % 2:
            return super().forward(x, tokens, turn)
        return x.view_as(x)


class Borrowing(Composite):
    """Uses a weight of a module below it itself, after that module has run."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        x = super().forward(x, tokens, turn)
        for part in self.parts:
            if isinstance(part, Leaf) and part.part.kind == "linear":
                x = x + torch.tanh(functional.linear(x, part.up.to(x.dtype))) @ part.up.to(x.dtype) / 4
        return x


SIDE_KINDS = ("list", "dictionary", "dataclass", "nested")
ENCLOSING = ("pick", *SIDE_KINDS)
KINDS: Mapping[str, Maker] = {
    **COMPOSITES,
    **dict.fromkeys(SIDE_KINDS, SideUser),
    "mlp": Mlp,
    "clamped": Clamped,
    "renormed": Renormed,
    "borrowing": Borrowing,
    "sometimes": Sometimes,
}
