"""A way to use a model, described by plain data: a model, how it is sharded, and a list of actions.

An action is a few words: "forward", "backward no_sync", "freeze 2 kept" (the third parameter, as an optimizer holds it;
"shown" is the module's attribute now). Each action is applied to the sharded model on this rank's data and to the plain
model on the data of all ranks (``Trainee``). An action that is impossible at its position does nothing to either model,
so any part of a list of actions is a valid list.
"""

import copy
import functools
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
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
from tests.functional.random_use.models import (
    BATCH,
    WIDTH,
    Description,
    Node,
    Part,
    Wrap,
    parts_with_paths,
)

__all__ = ["RAISED", "Program", "Trainee", "is_below", "whole"]

MAX_NORM = 0.3


@dataclass(frozen=True, repr=False)
class Program(Description):
    """A model, how it is sharded, and the actions.

    Attributes:
        actions: separated by commas. wraps: calls of ``fully_shard``, in order.
        ties: pairs of linear leaves that share a weight.
        mesh: outer and inner size, of the strategies on two axes; the others use one axis of all ranks.
        groups: ranks of process groups that exist before.
        is_adapted: ``fully_shard_optimizer`` is called. is_guarded: use of released storage is an error.
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
        """The actions as a tuple."""
        return tuple(filter(None, self.actions.split(", ")))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.mesh[0] * self.mesh[1]

    def owns(self, path: str) -> bool:
        """Return whether a unit owns the parameters that are registered in a module, or added to it."""
        left_whole = [path for path, part in parts_with_paths(self.part) if part.is_replicated]
        units = [unit for wrap in self.wraps for unit in wrap.paths]
        return any(is_below(path, unit) and not any(is_below(unit, one) for one in left_whole) for unit in units)

    def changes_parameters(self) -> bool:
        """Return whether actions register or remove parameters, so that a checkpoint may be of another model."""
        return any(action.startswith(("replace", "tie", "add", "load assign")) for action in self.steps)


def is_below(path: str, above: str) -> bool:
    """Return whether a module's path is equal to another one, or below it."""
    return not above or path == above or path.startswith(f"{above}.")


class Bomb(RuntimeError):
    """An error of the user's code."""


class Interrupt(KeyboardInterrupt):
    """A stand-in for Ctrl-C."""


RAISED: dict[str, type[BaseException]] = {"error": Bomb, "interrupt": Interrupt}
# Ways of ``backward`` without a call before it.
PLAIN = ("", "twice", "first", "latest")


def _optimizer(kind: str, parameters: list[nn.Parameter], is_sharded: bool) -> torch.optim.Optimizer:
    # With the usual epsilon, Adam moves a weight by a full step even if its gradient is only a rounding error.
    adam: dict[str, Any] = {"lr": 0.05, "eps": 0.1}
    if kind == "flat adamw" and is_sharded:
        return AdamW(parameters, weight_decay=0.0, **adam)
    if "sgd" in kind:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach="foreach" in kind)
    if kind == "adam":
        return torch.optim.Adam(parameters, **adam)
    options: dict[str, Any] = {kind.partition(" ")[0]: True} if kind in ("foreach adamw", "fused adamw") else {}
    return torch.optim.AdamW(parameters, weight_decay=0.0, **adam, **options)


def whole(value: Any) -> Any:
    """Return a whole copy of a tensor that may be sharded."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


@dataclass
class Trainee:
    """One of the two models, and the state of its training.

    Attributes:
        ranks: whose data it sees. kept: its parameters by name, as an optimizer holds them from the start. late: the
            parameters registered later.
        counter: of forwards. pending: losses that await a backward, one list per forward with one loss per rank.
        is_synced: whether gradients are complete. is_doubtful: whether an interrupted backward has not been cleaned up.
        is_tampered: whether gathered weights were changed in a way that shows at the next forward.
        seen: results of the last action, to be compared. saved: the last saved state.
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
        """Make an optimizer of the current parameters."""
        self.kept = dict(self.model.named_parameters())
        for module in self._sharded_modules():
            module.set_reshard_after_backward(not self.program.keeps_weights)
        self._remake()

    def do(self, action: str) -> None:
        """Perform one action."""
        name, *words = action.split()
        self.seen = []
        getattr(self, f"_do_{name}")(*words)

    # ------------------------------------------------------------------ operands of actions

    def _remake(self) -> None:
        self.optimizer = _optimizer(self.program.optimizer, list(self.kept.values()), self.is_sharded)
        if self.is_sharded and self.program.is_adapted and "flat" not in self.program.optimizer:
            fully_shard_optimizer(self.optimizer)

    def _named(self, which: str, face: str) -> dict[str, nn.Parameter]:
        """Return all parameters or one by its number, as kept from the start or as the model shows them."""
        found = self.kept if face == "kept" else dict(self.model.named_parameters())
        names = sorted(self.kept)
        names = names if which == "all" else [names[int(which) % len(names)]]
        return {name: found[name] for name in names if name in found}

    def _module(self, which: str) -> nn.Module:
        modules = [module for module in self.model.modules() if hasattr(module, "part")]
        return modules[int(which) % len(modules)]

    def _units(self, which: str) -> list[FsdpModule]:
        """Return the sharded modules of a unit; of the plain model none."""
        paths = self.program.wraps[int(which) % len(self.program.wraps)].paths
        modules = (self.model.get_submodule(path) for path in paths)
        return [module for module in modules if isinstance(module, FsdpModule)]

    def _sharded_modules(self) -> list[FsdpModule]:
        return [module for module in self.model.modules() if isinstance(module, FsdpModule)]

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter by another one."""
        path, _, attribute = name.rpartition(".")
        setattr(self.model.get_submodule(path), attribute, parameter)
        self.late[name] = getattr(self.model.get_submodule(path), attribute)

    def _do_drop(self) -> None:
        # Changes of weights also drop losses: a later backward of them would be an error or meaningless in a plain
        # model too.
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
        loss: torch.Tensor = (output * output.sin()).mean() + output.mean()
        for tensor in self.stash or ():
            loss = loss + tensor.sin().mean() / 5
        return loss

    def _do_forward(self, how: str = "", *words: str) -> None:
        self.counter += 1
        hook = self._arm(how, self._module(words[0]), RAISED[words[1]]) if how in ("bomb", "early", "fuse") else None
        losses = []
        try:
            for rank in self.ranks:
                loss = self._loss(rank)
                if how == "penalty":
                    parameters = [p for p in self._named("all", words[0]).values() if p.requires_grad]
                    loss = loss + sum((p.float().square().sum() for p in parameters), torch.zeros(())) / 50
                losses.append(loss)
        finally:
            if hook is not None:
                hook.remove()
        self.pending.append(losses)
        self.seen.append(("loss", losses[self.ranks.index(self.own_rank)].detach()))

    def _arm(self, how: str, module: nn.Module, error: type[BaseException]) -> Any:
        # Make a new exception each time: autograd's graph keeps the hook, and an exception keeps its frames.
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

    def _do_backward(self, how: str = "") -> None:
        """Run backward of all forwards together, of the "first" or "latest" one, or of each separately ("apart")."""
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
        self.is_synced = self.is_tampered = False
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
        """Run each rank's backward as far as it gets, and add up the resulting gradients."""
        raised = None
        for of_rank in zip(*pending, strict=True):
            losses = [loss for loss in of_rank if loss.requires_grad]
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
        return microbatch(self.model, how == "last") if how in ("microbatch", "last") else self._flagged()

    @contextmanager
    def _flagged(self) -> Iterator[None]:
        for module in self._sharded_modules():
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in self._sharded_modules():
                module.set_requires_gradient_sync(True, recurse=False)

    def _do_autograd(self, face: str) -> None:
        self._do_forward()
        named = {name: one for name, one in self._named("all", face).items() if one.requires_grad}
        loss = sum(self.pending.pop(), torch.zeros(())) / len(self.ranks)
        if not loss.requires_grad:
            return
        found: Any = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
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
            self._do_drop()
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
        """Exchange the gradients of two parameters of equal shape."""
        (one,), (two,) = (self._named(number, "kept").values() for number in (which, other))
        one.grad, two.grad = two.grad, one.grad

    def _do_grad(self, how: str, which: str, face: str, when: str = "") -> None:
        if not self.is_synced and when != "amid":
            return
        for parameter in self._named(which, face).values():
            if not parameter.requires_grad:
                continue
            if how == "none":
                parameter.grad = None
            elif how in ("set", "ones"):
                parameter.grad = parameter.detach() * 0.1 if how == "set" else torch.ones_like(parameter)
            elif parameter.grad is not None and how == "add":
                parameter.grad = parameter.grad + parameter.detach() * 0.1
            elif parameter.grad is not None:
                parameter.grad.mul_(0.5) if how == "scale" else parameter.grad.zero_()

    def _do_hook(self, which: str, face: str) -> None:
        # Sharded parameters first: a call that has to be refused is refused before it changes anything.
        for parameter in sorted(self._named(which, face).values(), key=lambda one: not isinstance(one, DTensor)):
            if parameter.requires_grad:
                parameter.register_hook(_halve)

    def _do_posthook(self, which: str, face: str) -> None:
        # Each reentrant checkpoint runs an inner backward. The plain model sees all ranks, so its hooks are called more
        # often than those of one rank.
        parts = parts_with_paths(self.program.part)
        again = [f"{path}." for path, part in parts if part.kind == "checkpoint" and part.size % 2]
        for name, parameter in self._named(which, face).items():
            if parameter.requires_grad and not name.startswith(tuple(again)):
                parameter.register_post_accumulate_grad_hook(_halve_grad)

    # ------------------------------------------------------------------ weights

    def _do_weight(self, how: str, which: str, face: str) -> None:
        self._do_drop()
        parameters: list[torch.Tensor] = [one for one in self._named(which, face).values() if one.is_floating_point()]
        # The next forward has to refuse changes of gathered weights, such as a root's, that no operator shows.
        self.is_tampered |= self.is_sharded and not all(isinstance(one, DTensor) for one in parameters)
        if how == "foreach":
            with torch.no_grad():
                torch._foreach_mul_(parameters, 0.8)
        for parameter in parameters:
            if how == "mul":
                parameter.data.mul_(0.8)
            elif how == "copy":
                parameter.data.copy_(parameter.data * 0.8)
            elif how == "assign":
                parameter.data = parameter.data * 0.8
            elif how == "inplace":
                with torch.no_grad():
                    parameter.mul_(0.8)

    def _do_freeze(self, which: str, face: str) -> None:
        for parameter in self._named(which, face).values():
            parameter.requires_grad_(False)

    def _do_thaw(self, which: str, face: str) -> None:
        for parameter in self._named(which, face).values():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)

    def _do_replace(self, which: str, how: str, then: str) -> None:
        self._do_drop()
        for name, parameter in self._named(which, "kept").items():
            if not parameter.is_floating_point():
                continue
            value = parameter.detach() * 0.8
            if how == "whole":
                generator = torch.Generator().manual_seed(7)
                value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 3
            self._put(name, nn.Parameter(value, requires_grad=parameter.requires_grad))
            if then == "remake":
                self.kept[name] = self.late[name]
                self._remake()

    def _do_tie(self, which: str, then: str) -> None:
        """Replace a parameter by another one of the same shape."""
        self._do_drop()
        by_kind: dict[Any, list[str]] = {}
        for name, parameter in sorted(self.kept.items()):
            if parameter.is_floating_point() and parameter.ndim == 2:
                by_kind.setdefault((parameter.shape, parameter.dtype), []).append(name)
        alike = [names for names in by_kind.values() if len(names) > 1]
        if not alike:
            return
        first, *others = alike[int(which) % len(alike)]
        other = others[int(which) % len(others)]
        path, _, attribute = first.rpartition(".")
        self._put(other, getattr(self.model.get_submodule(path), attribute))
        if then == "remake":
            self.kept.pop(other)
            self._remake()

    def _do_add(self, which: str, then: str) -> None:
        """Add a module that the model calls."""
        self._do_drop()
        lists = [path for path, module in self.model.named_modules() if isinstance(module, nn.ModuleList)]
        # A user who adds a module outside of all units has to reduce its gradients, so add it inside of one.
        places = [path for path in lists if self.program.owns(path)]
        if not places:
            return
        path = places[int(which) % len(places)]
        modules: Any = self.model.get_submodule(path)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            modules.append(Node(Part("linear", size=3), []))
        for attribute in ("up", "bias", "down"):
            self.kept[f"{path}.{len(modules) - 1}.{attribute}"] = getattr(modules[-1], attribute)
        if then == "remake":
            self._remake()

    def _do_poke(self, which: str) -> None:
        """Change weights while they are gathered."""
        self._do_drop()
        self._do_unshard(which)
        inner = {path for wrap in self.program.wraps for path in wrap.paths}
        with torch.no_grad():
            for path in self.program.wraps[int(which) % len(self.program.wraps)].paths:
                for name, parameter in self.model.get_submodule(path).named_parameters(prefix=path):
                    owners = [one for one in inner if not one or name.startswith(f"{one}.")]
                    if parameter.is_floating_point() and max(owners, key=len) == path:
                        parameter.mul_(0.8)
        self._do_reshard(which)

    # ------------------------------------------------------------------ units

    def _do_unshard(self, which: str) -> None:
        for module in self._units(which):
            module.unshard()

    def _do_reshard(self, which: str) -> None:
        for module in self._units(which):
            module.reshard()

    def _do_choose(self, which: str, value: str) -> None:
        """Change whether weights are released after forward."""
        for module in self._units(which):
            choice = {"None": None, "True": True, "False": False}.get(value, 1)
            module.set_reshard_after_forward(choice, recurse=False)

    def _do_slots(self, sizing: str) -> None:
        """Choose slots of a pool for gathered weights and packed gradients, or none."""
        for module in self._sharded_modules():
            module.set_slot_pool(None if sizing == "none" else sizing, recurse=False)

    # ------------------------------------------------------------------ observations

    def _do_look(self) -> None:
        """Read the weights that the model has now, gathered or not."""
        self.seen += [(f"shown {name}", value) for name, value in self.model.named_parameters(remove_duplicate=False)]

    def _do_state(self) -> None:
        self.seen += [(f"state {name}", value) for name, value in self.model.state_dict().items()]

    def _do_copy(self) -> None:
        copied = copy.deepcopy(self.model)
        self.seen += [(f"copied {name}", value) for name, value in copied.state_dict().items()]

    def _do_stash(self, which: str) -> None:
        """Keep a module's output, for the loss."""
        kept = self.stash = [] if self.stash is None else self.stash
        self._module(which).register_forward_hook(functools.partial(_keep, kept))

    def _do_evaluate(self, how: str) -> None:
        self.counter += 1
        guards: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        self.model.train(how != "eval")
        with guards.get(how, nullcontext)():
            output = self.model(*self.data(self.own_rank, self.counter))
        self.model.train()
        self.seen.append(("output", output.detach().clone()))

    def _do_functional(self, how: str) -> None:
        self.counter += 1
        values: dict[str, torch.Tensor] = {}
        for name, parameter in self._named("all", "kept").items():
            value = parameter.detach() if how == "sharded" else whole(parameter)
            values[name] = value * 0.8 if value.is_floating_point() else value
        with torch.no_grad():
            output = torch.func.functional_call(self.model, values, self.data(self.own_rank, self.counter))
        self.seen.append(("output", output.detach().clone()))

    # ------------------------------------------------------------------ state dicts and checkpoints

    def _do_load(self, how: str) -> None:
        self._do_drop()
        state = self.model.state_dict()
        values = {name: whole(value) if how == "whole" else value.detach() for name, value in state.items()}
        values = {name: value * 0.8 if value.is_floating_point() else value for name, value in values.items()}
        self.model.load_state_dict(values, assign=how == "assign")
        if how == "assign":
            shown = dict(self.model.named_parameters())
            self.kept = {name: shown[name] for name in self.kept if name in shown}
            self._remake()

    def _do_save(self) -> None:
        """Save model and optimizer; the plain ones are copied."""
        if self.program.changes_parameters():
            return
        if not self.is_sharded:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.counter))
            return
        names = [mkdtemp() if self.own_rank == 0 else ""]
        weakref.finalize(self, shutil.rmtree, names[0], ignore_errors=True)
        dist.broadcast_object_list(names, src=0)
        self.saved = f"{names[0]}/step"
        save_checkpoint(self.model, self.optimizer, self.saved, extra={"counter": self.counter})

    def _do_restore(self) -> None:
        """Load the last saved state into the same model and optimizer."""
        if self.saved is None:
            return
        self._do_drop()
        if self.is_sharded:
            counter = load_checkpoint(self.model, self.optimizer, self.saved)["counter"]
        else:
            model, optimizer, counter = copy.deepcopy(self.saved)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        self.seen.append(("counter", torch.tensor(counter)))


def _halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _halve_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _keep(kept: list[torch.Tensor], module: nn.Module, arguments: Any, output: Any) -> None:
    kept += [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
