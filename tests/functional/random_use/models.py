"""Small random models built from a description, and ways to shard them, for the random tests.

A description is plain data: it is sent to the ranks and built there, and its ``repr`` can be pasted into a test.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dbuffer import Granularity, Whole
from megatron_fsdp import MixedPrecisionPolicy

BATCH = 3
WIDTH = 5

POLICIES: Mapping[str, MixedPrecisionPolicy | None] = {
    "none": None,
    "fp32 reduction": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "fp64 reduction": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "fp64 compute": MixedPrecisionPolicy(param_dtype=torch.float64),
    "fp64 compute, fp32 reduction, fp32 outputs": MixedPrecisionPolicy(
        torch.float64, torch.float32, torch.float32, cast_forward_inputs=False
    ),
    "fp64 gradients": MixedPrecisionPolicy(main_grads_dtype=torch.float64),
    "fp64 main weights": MixedPrecisionPolicy(main_params_dtype=torch.float64),
    "unfused": MixedPrecisionPolicy(fuse_weight_gradients=False),
}
GRANULARITIES: Mapping[str, Granularity | Callable[[nn.Parameter], Granularity | None] | None] = {
    "slices": None,
    "whole": Whole(),
    "whole matrices": lambda parameter: Whole() if parameter.ndim > 1 else None,
}


class Description:
    """A dataclass whose repr shows only fields that differ from the defaults."""

    def __repr__(self: Any) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value, is_wanted = getattr(self, field.name), field.default is dataclasses.MISSING
            if is_wanted or value != field.default:
                shown.append(repr(value) if is_wanted else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Part(Description):
    """One module.

    Attributes:
        kind: a key of ``FORWARDS``, or "again": an earlier module a second time.
        parts: the modules below it.
        size: rows of its weights; of "repeat", the number of calls; of "again", which earlier module; else a choice.
        dtype: of floating-point parameters. frozen: "", "first" parameter or "all".
        is_replicated: ``fsdp_no_shard`` is called on it.
    """

    kind: str
    parts: "tuple[Part, ...]" = ()
    size: int = 1
    dtype: str = "float32"
    frozen: str = ""
    is_replicated: bool = False


@dataclass(frozen=True, repr=False)
class Wrap(Description):
    """A call of ``fully_shard`` on the module or the list of modules with these paths."""

    paths: tuple[str, ...]
    strategy: str = "optim_grads_params"
    reshard: bool | int | None = None
    policy: str = "none"
    granularity: str = "slices"
    is_offloaded: bool = False


# Modules without modules below them.
LEAVES = ("linear", "gain", "experts", "lookup", "norm", "masked", "spare", "empty", "scalar")
# Modules with two results; a module above uses one or both.
SIDE_KINDS = ("list", "dictionary", "dataclass", "nested")
# These hold the modules below them in an inner module called ``both``.
ENCLOSING = ("pick", *SIDE_KINDS)
# Shapes of parameters, with -1 for ``size``; "spare" ones are never used, and "factor" has no rows to shard.
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "linear": {"up": (-1, WIDTH), "bias": (-1,), "down": (WIDTH, -1)},
    "gain": {"gain": (1,), "shift": (WIDTH,)},
    "experts": {"experts": (-1, WIDTH, WIDTH)},
    "lookup": {"table": (-1, WIDTH)},
    "norm": {"weight": (WIDTH,), "bias": (WIDTH,)},
    "masked": {"offset": (WIDTH,)},
    "spare": {"spare": (WIDTH, -1)},
    "empty": {"rows": (0, WIDTH)},
    "scalar": {"factor": ()},
    "gated": {"before": (-1, WIDTH), "after": (1,)},
    "clamped": {"clamped": (-1, WIDTH)},
}


class Node(nn.Module):
    """A part of a model: (BATCH, WIDTH) -> (BATCH, WIDTH), in its input's dtype."""

    codes: torch.Tensor
    mask: torch.Tensor
    shift: torch.Tensor

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__()
        self.part = part
        if part.kind in ENCLOSING:
            self.both = Both(part, parts)
        elif part.kind not in LEAVES:
            self.parts = nn.ModuleList(parts)
        for number, (name, shape) in enumerate(SHAPES.get(part.kind, {}).items()):
            values = torch.randn([part.size if size < 0 else size for size in shape]) / math.sqrt(WIDTH)
            values += 1.0 if name in ("gain", "factor", "after") else 0.0
            is_frozen = part.frozen == "all" or (part.frozen == "first" and number == 0)
            own = values.to(getattr(torch, part.dtype))
            setattr(self, name, nn.Parameter(own, requires_grad=not is_frozen))
        if part.kind == "masked":
            codes = torch.randint(0, 5, (part.size, WIDTH), dtype=torch.int64 if part.size % 2 else torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
            self.register_buffer("shift", torch.arange(WIDTH))
        elif part.kind == "mlp":
            self.up, self.down = Linear(WIDTH, part.size), Linear(part.size, WIDTH, bias=part.size % 2 == 0)
        elif part.kind == "renormed":
            self.table = nn.Embedding(part.size, WIDTH, max_norm=0.8)

    def own(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a parameter in the dtype of the input."""
        parameter: torch.Tensor = getattr(self, name)
        return parameter.to(like.dtype)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        found = FORWARDS[self.part.kind](self, x, tokens, turn)
        return x + torch.tanh(found) / 2 if self.part.kind in LEAVES and self.part.kind != "spare" else found


class Linear(nn.Linear):
    """Computes in its weight's dtype, which a policy may have chosen, and returns its input's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


@dataclass
class Pair:
    """A module with two results."""

    first: torch.Tensor
    second: torch.Tensor


class Both(nn.Module):
    """Return several results: for "pick" those of all modules below; else the last, and the first one scaled."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__()
        self.part = part
        self.parts = nn.ModuleList(parts)
        if part.kind != "pick":
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> object:
        kind, outputs = self.part.kind, [x]
        for part in self.parts:
            outputs.append(part(x if kind == "pick" else outputs[-1], tokens, turn))
        if kind == "pick":
            return {"first": outputs[1], "others": outputs[2:], "turn": turn}
        first, second = outputs[-1], outputs[min(1, len(self.parts))] * self.scale.to(x.dtype)
        results = {
            "list": [first, second], "dictionary": {"first": first, "second": second}, "dataclass": Pair(first, second),
            "nested": [Pair(first, second)],
        }  # fmt: skip
        return results[kind]


# ---------------------------------------------------------------- what each kind computes


def _chain(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    for part in m.parts:
        x = part(x, tokens, turn)
    return x


def _linear(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    inner = torch.tanh(functional.linear(x, m.own("up", x), m.own("bias", x)))
    return functional.linear(inner, m.own("down", x))


def _lookup(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    table = m.own("table", x)
    return functional.embedding(tokens % len(table), table)


def _masked(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    scale = m.own("codes", x).sum(0) + m.shift
    return torch.where(m.mask, x * scale / 8, m.own("offset", x))


def _repeat(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    for call in range(m.part.size):
        x = _chain(m, x, tokens, turn + call)
    return x


def _checkpoint(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    if m.part.size % 2 and not x.requires_grad:
        return _chain(m, x, tokens, turn)  # with reentrant checkpointing there would be no gradients
    result: torch.Tensor = checkpoint(_chain, m, x, tokens, turn, use_reentrant=bool(m.part.size % 2))
    return result


def _detached(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    with torch.no_grad():
        addend = _chain(m, x, tokens, turn)
    return x + addend / 2


def _pick(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    """Use one of several outputs: the first, the last, or one chosen by the data."""
    found = m.both(x, tokens, turn)
    outputs: list[torch.Tensor] = [found["first"], *found["others"]]
    return outputs[(0, -1, int(tokens.sum()) % len(outputs))[m.part.size % 3]]


def _side(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    """Use one or both of two results; ``size`` says which."""
    found: Any = m.both(x, tokens, turn)
    found = found[0] if m.part.kind == "nested" else found
    if isinstance(found, Pair):
        first, second = found.first, found.second
    else:
        first, second = found.values() if isinstance(found, dict) else found
    return (first + torch.tanh(second) / 2, x + torch.tanh(second), first)[m.part.size % 3]


def _clamped(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    with torch.no_grad():
        m.clamped.clamp_(-0.2, 0.2)
    return _chain(m, x * (1 + m.own("clamped", x).sum(0) / 4), tokens, turn)


def _borrowing(m: Any, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
    """Use a weight of a module below, after that module has run."""
    x = _chain(m, x, tokens, turn)
    for part in m.parts:
        if part.part.kind == "linear":
            x = x + torch.tanh(functional.linear(x, part.own("up", x))) @ part.own("up", x) / 4
    return x


# Some kinds use the modules below them only on some ranks, in some microbatches. Without these modules they return a
# view: a unit that returns its very input on some ranks has no node in their backward.
FORWARDS: Mapping[str, Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "linear": _linear,
    "gain": lambda m, x, tokens, turn: x * m.own("gain", x) + m.own("shift", x),
    "experts": lambda m, x, tokens, turn: torch.tanh(x @ m.own("experts", x)).mean(0),
    "lookup": _lookup,
    "norm": lambda m, x, tokens, turn: functional.layer_norm(x, (WIDTH,), m.own("weight", x), m.own("bias", x)),
    "masked": _masked,
    "spare": lambda m, x, tokens, turn: x,
    "empty": lambda m, x, tokens, turn: x + m.own("rows", x).sum(0),
    "scalar": lambda m, x, tokens, turn: x * m.own("factor", x),
    "chain": _chain,
    "again": _chain,
    "gated": lambda m, x, *rest: _chain(m, x + m.own("before", x).sum(0), *rest) * m.own("after", x),
    "sum": lambda m, x, *rest: torch.stack([part(x, *rest).to(x.dtype) for part in m.parts]).mean(0),
    "repeat": _repeat,
    "by turn": lambda m, x, *rest: _chain(m, x, *rest) if rest[1] % 2 == m.part.size % 2 else x.view_as(x),
    "sometimes": lambda m, x, *rest: _chain(m, x, *rest) if int(rest[0].sum() + m.part.size) % 2 else x.view_as(x),
    "checkpoint": _checkpoint,
    "detached": _detached,
    "pick": _pick,
    "mlp": lambda m, x, *rest: _chain(m, x + torch.tanh(m.down(torch.tanh(m.up(x)))) / 2, *rest),
    "clamped": _clamped,
    "renormed": lambda m, x, *rest: _chain(m, x + m.table(rest[0] % m.part.size).to(x.dtype), *rest),
    "borrowing": _borrowing,
    **dict.fromkeys(SIDE_KINDS, _side),
}


def build(part: Part, ties: tuple[tuple[str, str], ...] = ()) -> nn.Module:
    """Build the module with everything below it; of two paths in ``ties`` the second takes the first's "up"."""
    made: list[nn.Module] = []
    model = _build(part, made)
    for first, second in ties:
        model.get_submodule(second).up = model.get_submodule(first).up
    return model


def _build(part: Part, made: list[nn.Module]) -> nn.Module:
    if part.kind == "again" and made:
        return made[part.size % len(made)]
    made.append(Node(part, [_build(below, made) for below in part.parts]))
    return made[-1]


def parts_with_paths(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """Yield a part and all below it with their modules' paths, parents first."""
    yield path, part
    for number, below in enumerate(part.parts):
        inner = ["both"] if part.kind in ENCLOSING else []
        yield from parts_with_paths(below, ".".join([*filter(None, [path]), *inner, "parts", str(number)]))
