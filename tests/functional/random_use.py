"""A way to use a model, described by plain data: a model, how it is sharded, and a list of actions.

An action is a few words: "forward", "backward no_sync", "freeze 2 kept" (the third parameter, as an optimizer holds it;
"shown" is what the model has there now). Each is done to the sharded model on this rank's data and to the plain one on
the data of all ranks (``Trainee``). One that makes no sense where it stands does nothing on either side, so that any
part of a list is a list.
"""

import copy
import shutil
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp import (
    AdamW,
    FsdpModule,
    clip_grad_norm_,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    no_sync,
    save_checkpoint,
)
from tests.functional.random_meddling import Meddling
from tests.functional.random_models import BATCH, WIDTH, Description, Part, Wrap, parts_with_paths
from tests.functional.random_side_parts import ENCLOSING

__all__ = ["Bomb", "Interrupt", "Program", "Trainee", "is_below"]

MAX_NORM = 0.3


@dataclass(frozen=True, repr=False)
class Program(Description):
    """A model, how it is sharded, and what is done with it.

    Attributes:
        actions: separated by commas. wraps: calls of ``fully_shard``, in order.
        ties: pairs of linear leaves that share a weight.
        mesh: outer and inner size, of the strategies on two axes; the others use one axis of all ranks.
        groups: ranks of process groups that somebody made before.
        is_adapted: ``fully_shard_optimizer`` is called. is_guarded: use of released storage is looked for.
        keeps_weights: ``set_reshard_after_backward(False)``.
    """

    part: Part
    actions: str
    wraps: tuple[Wrap, ...] = (Wrap(("",)),)
    ties: tuple[tuple[str, str], ...] = ()
    mesh: tuple[int, int] = (1, 2)
    groups: tuple[tuple[int, ...], ...] = ()
    optimizer: str = "sgd"
    is_adapted: bool = False
    is_guarded: bool = True
    keeps_weights: bool = False

    @property
    def steps(self) -> tuple[str, ...]:
        """The actions one by one."""
        return tuple(filter(None, self.actions.split(", ")))

    def owns(self, path: str) -> bool:
        """Whether a unit owns what is registered in a module, or added to it."""
        whole = [path for path, part in parts_with_paths(self.part, enclosing=ENCLOSING) if part.is_replicated]
        units = [unit for wrap in self.wraps for unit in wrap.paths if not any(is_below(unit, one) for one in whole)]
        return any(is_below(path, unit) for unit in units)

    @property
    def num_ranks(self) -> int:
        """How many ranks it needs."""
        return self.mesh[0] * self.mesh[1]


def is_below(path: str, above: str) -> bool:
    """Whether a module's path is another one's, or below it."""
    return not above or path == above or path.startswith(f"{above}.")


class Bomb(RuntimeError):
    """Raised by the user's code."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C."""


RAISED = {"error": Bomb, "interrupt": Interrupt}
# Ways of ``backward`` that are announced by nothing.
PLAIN = ("", "twice", "first", "latest")


def _optimizer(kind: str, parameters: list[nn.Parameter], is_sharded: bool) -> torch.optim.Optimizer:
    # With the usual epsilon a gradient that is zero but for rounding would move its weight as far as any other.
    adam: dict[str, Any] = {"lr": 0.05, "eps": 0.1}
    if kind == "flat adamw" and is_sharded:
        return AdamW(parameters, weight_decay=0.0, **adam)
    if "sgd" in kind:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach="foreach" in kind)
    if kind == "adam":
        return torch.optim.Adam(parameters, **adam)
    options = {"foreach": True} if kind == "foreach adamw" else {"fused": True} if kind == "fused adamw" else {}
    return torch.optim.AdamW(parameters, weight_decay=0.0, **adam, **options)


@dataclass
class Trainee(Meddling):
    """One of the two models, and what happened to it.

    Attributes:
        ranks: whose data it sees. kept: its parameters by name, as an optimizer holds them from the start. late: those
            that somebody registered later.
        counter: of forwards. pending: losses that await a backward, one list per forward with one loss per rank.
        is_synced: whether gradients are complete. is_doubtful: whether a backward broke off that nobody cleared up.
        is_tampered: whether gathered weights were changed in a way that shows at the next forward.
        seen: what the action just done gave, to be compared. saved: what was saved last.
    """

    program: Program
    model: nn.Module
    ranks: Sequence[int]
    own_rank: int
    is_sharded: bool
    counter: int = 0
    pending: list[list[torch.Tensor]] = field(default_factory=list)
    fuses: list[type[BaseException]] = field(default_factory=list)
    is_synced: bool = True
    is_doubtful: bool = False
    is_tampered: bool = False
    stash: list[torch.Tensor] | None = None
    seen: list[tuple[str, Any]] = field(default_factory=list)
    kept: dict[str, nn.Parameter] = field(default_factory=dict)
    late: dict[str, nn.Parameter] = field(default_factory=dict)
    saved: Any = None

    def begin(self) -> None:
        """Take the parameters and make an optimizer of them."""
        self.kept = dict(self.model.named_parameters())
        for module in self.model.modules():
            if isinstance(module, FsdpModule):
                module.set_reshard_after_backward(not self.program.keeps_weights)
        self._remake()

    def do(self, action: str) -> None:
        """Do one action; ``seen`` is what came of it."""
        name, *words = action.split()
        self.seen = []
        getattr(self, f"_do_{name}")(*words)

    # ------------------------------------------------------------------ what is meant

    def _remake(self) -> None:
        parameters = list(self.kept.values())
        self.optimizer = _optimizer(self.program.optimizer, parameters, self.is_sharded)
        if self.is_sharded and self.program.is_adapted and "flat" not in self.program.optimizer:
            fully_shard_optimizer(self.optimizer)

    def _named(self, which: str, face: str) -> dict[str, nn.Parameter]:
        """Return all parameters or the one that a number means, as kept from the start or as the model shows them."""
        found = self.kept if face == "kept" else dict(self.model.named_parameters())
        names = sorted(self.kept)
        names = names if which == "all" else [names[int(which) % len(names)]]
        return {name: found[name] for name in names if name in found}

    def _module(self, which: str) -> nn.Module:
        modules = [module for module in self.model.modules() if hasattr(module, "part")]
        return modules[int(which) % len(modules)]

    def _units(self, which: str) -> list[nn.Module]:
        paths = self.program.wraps[int(which) % len(self.program.wraps)].paths
        return [self.model.get_submodule(path) for path in paths]

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute

    def _forget_graphs(self) -> None:
        # Weights change now, so a backward of earlier forwards would be an error or nonsense for a plain model too.
        self.pending, self.fuses = [], []

    # ------------------------------------------------------------------ forward and backward

    def data(self, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the input of one forward on one rank."""
        generator = torch.Generator().manual_seed(1 + 100 * number + rank)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x.requires_grad_(number % 2 == 0), torch.randint(0, 100, (BATCH,), generator=generator), number

    def _loss(self, rank: int) -> torch.Tensor:
        if self.stash is not None:
            self.stash.clear()
        output = self.model(*self.data(rank, self.counter))
        loss = (output * output.sin()).mean() + output.mean()
        for tensor in self.stash or ():
            loss = loss + tensor.sin().mean() / 5
        return loss

    def _do_forward(self, *words: str) -> None:
        self.counter += 1
        hooks = []
        if words[:1] in (("bomb",), ("early",), ("fuse",)):
            hooks.append(self._arm(words[0], self._module(words[1]), RAISED[words[2]]))
        losses = []
        try:
            for rank in self.ranks:
                loss = self._loss(rank)
                if words[:1] == ("penalty",):
                    loss = loss + self._penalty(words[1])
                losses.append(loss)
        finally:
            for hook in hooks:
                hook.remove()
        self.pending.append(losses)
        self.seen.append(("loss", losses[self.ranks.index(self.own_rank)].detach()))

    def _penalty(self, face: str) -> torch.Tensor:
        parameters = [p for p in self._named("all", face).values() if p.requires_grad and p.is_floating_point()]
        return sum((parameter.float().square().sum() for parameter in parameters), torch.zeros(())) / 50

    def _arm(self, how: str, module: nn.Module, error: type[BaseException]) -> Any:
        # A new one each time: autograd's graph keeps the hook, and an error the frames that it went through.
        def explode(*_: Any) -> None:
            raise error

        def plant(_: Any, __: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(explode)

        if how == "early":
            return module.register_forward_pre_hook(explode)
        if how == "fuse":
            self.fuses.append(error)
        return module.register_forward_hook(plant if how == "fuse" else explode)

    def _do_drop(self) -> None:
        self.pending, self.fuses = [], []

    def _do_backward(self, how: str = "") -> None:
        """Run backward of all forwards together, of the "first" or "latest" one, or of one after the other, "apart"."""
        if how == "apart":
            while self.pending:
                self._do_backward("latest")
            return
        first = {"first": 1, "latest": len(self.pending) - 1}.get(how, len(self.pending))
        pending, self.pending = self.pending[:first], self.pending[first:]
        if how == "latest":
            pending, self.pending = self.pending, pending
        fuses, self.fuses = self.fuses, []
        if not any(loss.requires_grad for losses in pending for loss in losses):
            return
        self.is_synced = False
        with self._announced(how):
            if fuses and not self.is_sharded:
                self._backward_by_rank(pending)
            else:
                losses = [loss for losses in pending for loss in losses if loss.requires_grad]
                loss = sum(losses, torch.zeros(())) / len(self.ranks)
                if how == "twice":
                    loss.backward(retain_graph=True)
                loss.backward()
        self.is_synced = how in (*PLAIN, "last")
        self.is_doubtful = self.is_doubtful and not self.is_synced

    def _backward_by_rank(self, pending: list[list[torch.Tensor]]) -> None:
        """Let every rank's backward get as far as it gets, and add up what parameters have then."""
        raised = None
        for position in range(len(self.ranks)):
            losses = [losses[position] for losses in pending if losses[position].requires_grad]
            try:
                if losses:
                    (sum(losses, torch.zeros(())) / len(self.ranks)).backward()
            except (Bomb, Interrupt) as error:
                raised = error
        if raised is not None:
            raise raised

    def _announced(self, how: str) -> AbstractContextManager[None]:
        if not self.is_sharded or how in PLAIN:
            return nullcontext()
        if how == "no_sync":
            return no_sync(self.model)
        if how in ("microbatch", "last"):
            return microbatch(self.model, how == "last")
        return _Flag([module for module in self.model.modules() if isinstance(module, FsdpModule)])

    def _do_autograd(self, face: str) -> None:
        self._do_forward()
        named = {name: one for name, one in self._named("all", face).items() if one.requires_grad}
        loss = sum(self.pending.pop(), torch.zeros(())) / len(self.ranks)
        if not loss.requires_grad:
            return
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (name, parameter), gradient in zip(named.items(), found, strict=True):
            self.seen.append((f"gradient of {name}", torch.zeros(parameter.shape) if gradient is None else gradient))

    # ------------------------------------------------------------------ gradients and the optimizer

    def _do_zero_grad(self, how: str) -> None:
        if how == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how == "none")
        self.is_synced, self.is_doubtful = True, False

    def _do_step(self) -> None:
        if self.is_synced:
            self._forget_graphs()
            self.optimizer.step()

    def _do_clip(self, whose: str) -> None:
        if not self.is_synced:
            return
        if whose == "ours" and self.is_sharded:
            norm = clip_grad_norm_(self.model, MAX_NORM)
        else:
            norm = nn.utils.clip_grad_norm_(list(self.kept.values()), MAX_NORM)
        self.seen.append(("norm", norm))

    def _do_swap(self, which: str, other: str) -> None:
        """Exchange the gradients of two parameters, which have to be of one shape."""
        ((_, one),) = self._named(which, "kept").items()
        ((_, two),) = self._named(other, "kept").items()
        one.grad, two.grad = two.grad, one.grad

    def _do_grad(self, how: str, which: str, face: str, when: str = "") -> None:
        if not self.is_synced and when != "amid":
            return
        for parameter in self._named(which, face).values():
            if not parameter.requires_grad:
                continue
            if how == "none":
                parameter.grad = None
            elif how == "set":
                parameter.grad = parameter.detach() * 0.1
            elif how == "ones":
                parameter.grad = torch.ones_like(parameter)
            elif parameter.grad is not None and how == "scale":
                parameter.grad.mul_(0.5)
            elif parameter.grad is not None and how == "add":
                parameter.grad = parameter.grad + parameter.detach() * 0.1
            elif parameter.grad is not None and how == "zero":
                parameter.grad.zero_()

    # ------------------------------------------------------------------ checkpoints

    def _do_save(self) -> None:
        """Save model and optimizer; the plain ones are copied."""
        if _gets_other_parameters(self.program):
            return
        if self.is_sharded:
            names = [mkdtemp() if self.own_rank == 0 else ""]
            weakref.finalize(self, shutil.rmtree, names[0], ignore_errors=True)
            dist.broadcast_object_list(names, src=0)
            self.saved = f"{names[0]}/step"
            save_checkpoint(self.model, self.optimizer, self.saved, extra={"counter": self.counter})
        else:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.counter))

    def _do_restore(self) -> None:
        """Load what was saved last into the same model and optimizer."""
        if self.saved is None:
            return
        self._forget_graphs()
        if self.is_sharded:
            extra = load_checkpoint(self.model, self.optimizer, self.saved)
            self.seen.append(("counter", torch.tensor(extra["counter"])))
        else:
            model, optimizer, counter = copy.deepcopy(self.saved)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            self.seen.append(("counter", torch.tensor(counter)))


def _gets_other_parameters(program: Program) -> bool:
    """Whether parameters are put in or taken out, so that a checkpoint may be of another model."""
    return any(action.startswith(("replace", "tie", "add", "load assign")) for action in program.steps)


class _Flag(AbstractContextManager[None]):
    """``set_requires_gradient_sync(False)`` and, afterwards, True again."""

    def __init__(self, modules: Iterable[FsdpModule]) -> None:
        self._modules = list(modules)

    def __enter__(self) -> None:
        self._set(False)

    def __exit__(self, *_: object) -> None:
        self._set(True)

    def _set(self, value: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(value, recurse=False)
