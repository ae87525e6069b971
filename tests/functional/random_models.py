"""Small models put together from a description, and the ways to shard them: what the random tests draw.

A description is plain data: it travels to the ranks, is built there, and its ``repr`` can be pasted into a test.
"""

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping
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


def _whole_matrices(parameter: nn.Parameter) -> Granularity | None:
    return Whole() if parameter.ndim > 1 else None


GRANULARITIES: Mapping[str, Granularity | Callable[[nn.Parameter], Granularity | None] | None] = {
    "slices": None,
    "whole": Whole(),
    "whole matrices": _whole_matrices,
}


class Description:
    """Shows only what differs from the defaults."""

    def __repr__(self) -> str:
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
        kind: a key of ``SHAPES`` (modules with parameters of their own) or of ``COMPOSITES``.
        parts: the modules below a composite.
        size: rows of a leaf's weights; calls of "repeat"; of "again", which earlier module; else a choice.
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
    """One call of ``fully_shard``, on the module or the list of modules with these paths."""

    paths: tuple[str, ...]
    strategy: str = "optim_grads_params"
    reshard: bool | int | None = None
    policy: str = "none"
    granularity: str = "slices"
    is_offloaded: bool = False


# ---------------------------------------------------------------- leaves


def _linear(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    inner = torch.tanh(functional.linear(x, part.get("up", x), part.get("bias", x)))
    return functional.linear(inner, part.get("down", x))


def _gain(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x * part.get("gain", x) + part.get("shift", x)


def _experts(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ part.get("experts", x)).mean(0)


def _lookup(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    table = part.get("table", x)
    return functional.embedding(tokens % len(table), table)


def _norm(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (WIDTH,), part.get("weight", x), part.get("bias", x))


def _masked(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    assert isinstance(part.mask, torch.Tensor)
    assert isinstance(part.shift, torch.Tensor)
    scale = part.get("codes", x).sum(0) + part.shift
    return torch.where(part.mask, x * scale / 8, part.get("offset", x))


def _spare(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x


def _scalar(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x * part.get("factor", x)


def _empty(part: "Leaf", x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x + part.get("rows", x).sum(0)


# Shapes of the parameters, with -1 for ``size``; "spare" ones are never used, and "factor" has no rows to shard.
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
}
_COMPUTE = {
    "linear": _linear, "gain": _gain, "experts": _experts, "lookup": _lookup, "norm": _norm, "masked": _masked,
    "spare": _spare, "empty": _empty, "scalar": _scalar,
}  # fmt: skip


class Leaf(nn.Module):
    """A module with parameters and without modules below it; (BATCH, WIDTH) -> (BATCH, WIDTH), in its input's dtype."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        dtype = getattr(torch, part.dtype)
        for number, (name, shape) in enumerate(SHAPES[part.kind].items()):
            sizes = tuple(part.size if size < 0 else size for size in shape)
            values = torch.randn(sizes) / math.sqrt(WIDTH) + (1.0 if name in ("gain", "factor") else 0.0)
            is_frozen = part.frozen == "all" or (part.frozen == "first" and number == 0)
            setattr(self, name, nn.Parameter(values.to(dtype), requires_grad=not is_frozen))
        if part.kind == "masked":
            codes = torch.randint(0, 5, (part.size, WIDTH), dtype=torch.int64 if part.size % 2 else torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
            self.register_buffer("shift", torch.arange(WIDTH))

    def get(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a parameter in the dtype of the input."""
        parameter = getattr(self, name)
        assert isinstance(parameter, torch.Tensor)
        return parameter.to(like.dtype)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        if self.part.kind == "spare":
            return x
        return x + torch.tanh(_COMPUTE[self.part.kind](self, x, tokens)) / 2


# ---------------------------------------------------------------- composites


class Composite(nn.Module):
    """Calls the modules below it, one after the other unless a subclass knows better."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__()
        self.part = part
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        for part in self.parts:
            x = part(x, tokens, turn)
        return x


class Gated(Composite):
    """Has parameters of its own, used before and after the modules below it."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__(part, parts)
        self.before = nn.Parameter(torch.randn(part.size, WIDTH) / 3)
        self.after = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        x = super().forward(x + self.before.to(x.dtype).sum(0), tokens, turn)
        return x * self.after.to(x.dtype)


class Sum(Composite):
    """Adds up what the modules below it make of one input."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        outputs = [part(x, tokens, turn) for part in self.parts]
        return torch.stack([output.to(x.dtype) for output in outputs]).mean(0)


class Repeat(Composite):
    """Calls what is below it several times."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        for call in range(self.part.size):
            x = super().forward(x, tokens, turn + call)
        return x


class ByTurn(Composite):
    """Uses what is below it on every other rank only, and on the others in the next microbatch."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        # A view: a unit whose output is its very input on some ranks has no place of its own in their backward.
        return super().forward(x, tokens, turn) if turn % 2 == self.part.size % 2 else x.view_as(x)


class Checkpointed(Composite):
    """Runs what is below it again in backward."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        if self.part.size % 2 and not x.requires_grad:
            return super().forward(x, tokens, turn)  # there would be no gradients from reentrant checkpointing
        result = checkpoint(super().forward, x, tokens, turn, use_reentrant=bool(self.part.size % 2))
        assert isinstance(result, torch.Tensor)
        return result


class Detached(Composite):
    """Adds what is below it without gradients."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        with torch.no_grad():
            addend = super().forward(x, tokens, turn)
        return x + addend / 2


class Both(nn.Module):
    """Returns the outputs of the modules below it in a structure."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> dict[str, Any]:
        outputs = [part(x, tokens, turn) for part in self.parts]
        return {"first": outputs[0], "others": outputs[1:], "turn": turn}


class Pick(Composite):
    """Uses one of several outputs: the first, the last, or one that the data choose."""

    def __init__(self, part: Part, parts: list[nn.Module]) -> None:
        super().__init__(part, [])
        self.both = Both(parts)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turn: int) -> torch.Tensor:
        found = self.both(x, tokens, turn)
        outputs = [found["first"], *found["others"]]
        result = outputs[(0, -1, int(tokens.sum()) % len(outputs))[self.part.size % 3]]
        assert isinstance(result, torch.Tensor)
        return result


COMPOSITES: Mapping[str, type[Composite]] = {
    "chain": Composite, "gated": Gated, "sum": Sum, "repeat": Repeat, "by turn": ByTurn, "checkpoint": Checkpointed,
    "detached": Detached, "pick": Pick,
}  # fmt: skip


Maker = Callable[[Part, list[nn.Module]], nn.Module]


def build(
    part: Part, ties: tuple[tuple[str, str], ...] = (), composites: Mapping[str, Maker] = COMPOSITES
) -> nn.Module:
    """Build the module with everything below it; of two paths in ``ties`` the second takes the first's "up"."""
    made: list[nn.Module] = []
    model = _build(part, made, composites)
    for first, second in ties:
        model.get_submodule(second).up = model.get_submodule(first).up
    return model


def _build(part: Part, made: list[nn.Module], composites: Mapping[str, Maker]) -> nn.Module:
    if part.kind == "again":
        return made[part.size % len(made)] if made else Composite(part, [])
    if part.kind in SHAPES:
        module: nn.Module = Leaf(part)
    else:
        module = composites[part.kind](part, [_build(below, made, composites) for below in part.parts])
    made.append(module)
    return module


def parts_with_paths(part: Part, path: str = "", enclosing: Container[str] = ("pick",)) -> Iterator[tuple[str, Part]]:
    """Yield a part and all below it with their modules' paths, parents first; ``enclosing`` kinds have a ``both``."""
    yield path, part
    inner = ["both"] if part.kind in enclosing else []
    for number, below in enumerate(part.parts):
        below_path = ".".join([*filter(None, [path]), *inner, "parts", str(number)])
        yield from parts_with_paths(below, below_path, enclosing)
