"""Programs written for ``torch.distributed.fsdp``, run with PyTorch's engine and with this one.

A program is text that uses one engine's names and the methods of a ``Run``, which records the results. Only whole
tensors are compared, because PyTorch cuts the rows of a parameter evenly and this engine does not.
"""

import ast
import importlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import _fully_shard
from torch.distributed.tensor import DTensor

from tests.harness.models import inputs, three_blocks
from tests.harness.oracle import whole

__all__ = [
    "PROGRAMS", "SINCE_2_15", "Program", "Run", "blocks", "complaints", "enter", "has_name", "loss_of", "mesh", "shows",
]  # fmt: skip

# Each engine's module: the only line in which the programs differ.
ENGINES = {"torch": "torch.distributed.fsdp", "ours": "megatron_fsdp"}
SINCE_2_15 = "GradientReductionHandle"
"""A name that PyTorch has from 2.15 on, for programs of what it does since."""


class Run:
    """The names of one engine, and a record of a program's results with them.

    Attributes:
        losses: of this rank's data. tensors: whole ones, by name. facts: anything else that has to be equal.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.losses: list[float] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: list[object] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(ENGINES[self.engine]), name)

    def see(self, *facts: object) -> None:
        """Record a value that has to be equal for both engines."""
        self.facts += facts

    def refuses(self, action: Callable[[], object], *errors: type[Exception]) -> None:
        """Record whether ``action`` raises one of ``errors``, by default those that FSDP2's users may catch."""
        errors = errors or (ValueError, RuntimeError, AssertionError)
        try:
            action()
        except errors:
            self.see("refused")
        else:
            self.see("accepted")

    def shard(self, model: Any = None, **options: Any) -> Any:
        """Shard each layer of ``blocks()`` and the model, as FSDP2's tutorial does."""
        model = model or blocks()
        for part in (*model.layers, model):
            self.fully_shard(part, **options)
        return model

    def train(
        self,
        model: Any,
        steps: int = 3,
        microbatches: int = 1,
        *,
        before: Callable[[Any, bool], object] | None = None,
        after: Callable[[], object] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[[Any, int], torch.Tensor] | None = None,
        keeps: bool = True,
    ) -> Any:
        """Train on this rank's data, record the whole weights if ``keeps``, and return the model.

        Args:
            before: called with the model, and whether it is the last, before each microbatch. after: before each step.
            loss: of the model at a step; its mean square by default.
        """
        optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for index in range(steps * microbatches):
            is_last = index % microbatches == microbatches - 1
            if before is not None:
                before(model, is_last)
            found = (loss or loss_of)(model, index)
            found.backward()
            self.losses.append(found.item())
            if is_last:
                if after is not None:
                    after()
                optimizer.step()
                optimizer.zero_grad()
        if keeps:
            self.keep(model)
        return model

    def keep_gradients(self, model: nn.Module) -> None:
        """Record the whole gradients of a model, and their dtypes."""
        for name, parameter in model.named_parameters():
            self.tensors[f"{len(self.tensors)}, gradient of {name}"] = whole(parameter.grad, parameter)
            self.see(parameter.grad is None or parameter.grad.dtype)

    def keep(self, model: nn.Module) -> None:
        """Record the whole weights of a model, and the class of its parameters."""
        self.tensors |= {name: whole(value, value) for name, value in model.state_dict().items()}
        parameters = dict(model.named_parameters())
        self.see({name: (p.shape, p.dtype, p.device.type, p.requires_grad) for name, p in parameters.items()})
        self.see(shows(model))


@dataclass(frozen=True, slots=True)
class Program:
    """Code for both engines.

    Attributes:
        body: the code, as text or a function of a ``Run``; the engines differ in its last value.
        num_ranks: number of ranks. needs: dotted name in ``torch.distributed.fsdp`` that older versions lack.
        tolerance: largest difference of a loss or a tensor: fp32 rounding, or rounding of the compute dtype.
        differs: the results of PyTorch's engine and of this one; of an exception, the class and the start of its text.
    """

    body: str | Callable[[Run], object]
    num_ranks: int = 2
    needs: str = "fully_shard"
    tolerance: float = 2e-6
    differs: tuple[object, object] | None = None

    def disagreements(self, theirs: Run, ours: Run) -> list[str]:
        """Return one line for each difference."""
        keys = theirs.tensors.keys() & ours.tensors.keys()
        pairs = [(name, theirs.tensors[name], ours.tensors[name]) for name in sorted(keys)]
        pairs.append(("losses", torch.tensor(theirs.losses), torch.tensor(ours.losses)))
        found = [f"only one has {name}" for name in theirs.tensors.keys() ^ ours.tensors.keys()]
        for name, wanted, mine in pairs:
            if wanted.shape != mine.shape or wanted.dtype != mine.dtype:
                found.append(f"{name}: {wanted.shape}, {wanted.dtype} and {mine.shape}, {mine.dtype}")
            elif (
                wanted.numel() and not (worst := float((wanted.double() - mine.double()).abs().max())) <= self.tolerance
            ):
                found.append(f"{name} is off by {worst:.3g}")
        return found + ([] if theirs.facts == ours.facts else [f"facts: {theirs.facts} and {ours.facts}"])


PROGRAMS: dict[str, Program] = {}
_names: dict[str, Any] = {}


def enter(programs: dict[str, Program], names: dict[str, Any]) -> None:
    """Add programs and the names that their texts use to the table."""
    assert not PROGRAMS.keys() & programs.keys()
    PROGRAMS.update(programs)
    _names.update(names)


def has_name(path: str) -> bool:
    """Look up a name in the installed ``torch.distributed.fsdp``, dotted for an attribute of a class."""
    found: Any = importlib.import_module(ENGINES["torch"])
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None


def complaints(name: str) -> list[str]:
    """Run a program with both engines, on every rank, and return the differences."""
    (theirs, their_end), (ours, our_end) = (_run(PROGRAMS[name], engine) for engine in ENGINES)
    differs = PROGRAMS[name].differs
    if differs is not None:
        ends = zip(differs, (their_end, our_end), strict=True)
        return [f"wanted {wanted}, found {found}" for wanted, found in ends if not _is_as_written(found, wanted)]
    found = [end for end in (their_end, our_end) if isinstance(end, str)]
    if not (theirs.facts or theirs.tensors):
        found.append("nothing was seen that could differ")
    return found or PROGRAMS[name].disagreements(theirs, ours)


def _run(program: Program, engine: str) -> tuple[Run, object]:
    """Return a program's record with one engine, and its last value or its error."""
    torch.manual_seed(0)
    seen = Run(engine)
    try:
        return seen, _value_of(program.body, seen) if isinstance(program.body, str) else program.body(seen)
    except Exception as error:
        return seen, f"{type(error).__name__}: {error}"


def _value_of(text: str, run: Run) -> object:
    methods = ("keep_gradients", "refuses", "see", "shard", "train")
    names = {name: getattr(run, name) for name in (*_fully_shard.__all__, *methods) if hasattr(run, name)}
    names = {**_names, **names, "run": run}
    *most, last = ast.parse(textwrap.dedent(text)).body
    exec(compile(ast.Module(most, []), "<program>", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
    exec(compile(ast.Module([last], []), "<program>", "exec"), names)
    return None


def _is_as_written(found: object, wanted: object) -> bool:
    return found == wanted or (isinstance(found, str) and isinstance(wanted, str) and found.startswith(wanted))


# ---------------------------------------------------------------- what programs are made of


def blocks() -> Any:
    """Build three blocks of different sizes, the same ones each time."""
    torch.manual_seed(0)
    return three_blocks()


def mesh(*sizes: int) -> DeviceMesh:
    """Make a mesh of one axis, or of replicas and shards."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Return the mean square of a model's output for this rank's data."""
    output: torch.Tensor = model(inputs(dist.get_rank(), step))
    return output.float().square().mean()


def shows(model: nn.Module) -> list[bool]:
    """Return for each parameter whether it is a sharded DTensor now (True) or a plain whole tensor (False)."""
    return [isinstance(parameter, DTensor) for parameter in model.parameters()]
