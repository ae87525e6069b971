"""What programs do to weights, hooks and modules of a model: the actions of a ``Trainee`` beside those that train."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from megatron_fsdp import FsdpModule
from tests.functional.random_models import Leaf, Part, parts_with_paths
from tests.functional.random_side_parts import ENCLOSING

__all__ = ["Meddling", "whole"]


def whole(value: Any) -> Any:
    """Return a whole copy of a tensor that may be sharded."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


class Meddling:
    """Mixed into ``Trainee``, whose attributes it uses."""

    model: nn.Module
    program: Any
    is_sharded: bool
    is_tampered: bool
    kept: dict[str, nn.Parameter]
    late: dict[str, nn.Parameter]

    def _do_hook(self, which: str, face: str) -> None:
        # Sharded ones first: what is refused is refused before anything is done.
        for parameter in sorted(self._named(which, face).values(), key=lambda one: not isinstance(one, DTensor)):
            if parameter.requires_grad:
                parameter.register_hook(_halve)

    def _do_posthook(self, which: str, face: str) -> None:
        # Each of them runs a backward of its own in that of the plain model, which sees all ranks: its hooks are called
        # more often than those of one rank.
        again = [
            path
            for path, part in parts_with_paths(self.program.part, enclosing=ENCLOSING)
            if part.kind == "checkpoint" and part.size % 2
        ]
        for name, parameter in self._named(which, face).items():
            if parameter.requires_grad and not any(name.startswith(f"{path}.") for path in again):
                parameter.register_post_accumulate_grad_hook(_halve_grad)

    # ------------------------------------------------------------------ weights

    def _do_weight(self, how: str, which: str, face: str) -> None:
        self._forget_graphs()
        parameters = [one for one in self._named(which, face).values() if one.is_floating_point()]
        # Of weights that are gathered, such as a root's, the next forward has to refuse what no operator of them shows.
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
        self._forget_graphs()
        for name, parameter in self._named(which, "kept").items():
            module, attribute = self._holder(name)
            if not parameter.is_floating_point():
                continue
            if how == "like":
                value = parameter.detach() * 0.8
            else:
                generator = torch.Generator().manual_seed(7)
                value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 3
            setattr(module, attribute, nn.Parameter(value, requires_grad=parameter.requires_grad))
            self._register_late(name, module, attribute, then)

    def _register_late(self, name: str, module: nn.Module, attribute: str, then: str) -> None:
        self.late[name] = getattr(module, attribute)
        if then == "remake":
            self.kept[name] = self.late[name]
            self._remake()

    def _do_tie(self, which: str, then: str) -> None:
        """Register one parameter in the place of another one of its shape."""
        self._forget_graphs()
        by_kind: dict[Any, list[str]] = {}
        for name, parameter in sorted(self.kept.items()):
            if parameter.is_floating_point() and parameter.ndim == 2:
                by_kind.setdefault((parameter.shape, parameter.dtype), []).append(name)
        alike = [names for names in by_kind.values() if len(names) > 1]
        if not alike:
            return
        first, *others = alike[int(which) % len(alike)]
        other = others[int(which) % len(others)]
        (source, attribute), (target, replaced) = self._holder(first), self._holder(other)
        self.late[other] = getattr(source, attribute)
        setattr(target, replaced, self.late[other])
        if then == "remake":
            self.kept.pop(other)
            self._remake()

    def _do_add(self, which: str, then: str) -> None:
        """Add a module that the model calls."""
        self._forget_graphs()
        lists = [path for path, module in self.model.named_modules() if isinstance(module, nn.ModuleList)]
        # Who puts it where no unit is has to reduce its gradients too.
        places = [path for path in lists if self.program.owns(path)]
        if not places:
            return
        path = places[int(which) % len(places)]
        modules = self.model.get_submodule(path)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            modules.append(Leaf(Part("linear", size=3)))
        name = f"{path}.{len(modules) - 1}"
        for attribute in ("up", "bias", "down"):
            self.kept[f"{name}.{attribute}"] = getattr(modules[-1], attribute)
        if then == "remake":
            self._remake()

    def _do_unshard(self, which: str) -> None:
        for module in self._units(which):
            if isinstance(module, FsdpModule):
                module.unshard()

    def _do_reshard(self, which: str) -> None:
        for module in self._units(which):
            if isinstance(module, FsdpModule):
                module.reshard()

    def _do_choose(self, which: str, value: str) -> None:
        """Choose anew whether weights are released after forward."""
        for module in self._units(which):
            if isinstance(module, FsdpModule):
                choice = {"None": None, "True": True, "False": False}.get(value, 1)
                module.set_reshard_after_forward(choice, recurse=False)

    def _do_slots(self, sizing: str) -> None:
        """Give gathered weights and packed gradients slots of a pool, or none."""
        for module in self.model.modules():
            if isinstance(module, FsdpModule):
                module.set_slot_pool(None if sizing == "none" else sizing, recurse=False)

    def _do_poke(self, which: str) -> None:
        """Change weights while they are gathered."""
        self._forget_graphs()
        self._do_unshard(which)
        inner = {path for wrap in self.program.wraps for path in wrap.paths}
        with torch.no_grad():
            for path in self.program.wraps[int(which) % len(self.program.wraps)].paths:
                for name, parameter in self.model.get_submodule(path).named_parameters(prefix=path):
                    owners = [one for one in inner if not one or name.startswith(f"{one}.")]
                    if parameter.is_floating_point() and max(owners, key=len) == path:
                        parameter.mul_(0.8)
        self._do_reshard(which)

    # ------------------------------------------------------------------ the rest

    def _do_look(self) -> None:
        """Read the weights that the model shows, gathered or not."""
        self.seen += [(f"shown {name}", value) for name, value in self.model.named_parameters(remove_duplicate=False)]

    def _do_stash(self, which: str) -> None:
        """Keep what a module gives, for the loss."""
        kept = self.stash = [] if self.stash is None else self.stash
        self._module(which).register_forward_hook(functools.partial(_keep, kept))

    def _do_evaluate(self, how: str) -> None:
        self.counter += 1
        guard: Callable[[], Any] = {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "eval": nullcontext,
            "train": nullcontext,
        }[how]
        self.model.train(how != "eval")
        with guard():
            output = self.model(*self.data(self.own_rank, self.counter))
        self.model.train()
        self.seen.append(("output", output.detach().clone()))

    def _do_state(self) -> None:
        self.seen += [(f"state {name}", value) for name, value in self.model.state_dict().items()]

    def _do_load(self, how: str) -> None:
        self._forget_graphs()
        state = self.model.state_dict()
        values = {name: whole(value) if how == "whole" else value.detach() for name, value in state.items()}
        values = {name: value * 0.8 if value.is_floating_point() else value for name, value in values.items()}
        self.model.load_state_dict(values, assign=how == "assign")
        if how == "assign":
            shown = dict(self.model.named_parameters())
            self.kept = {name: shown[name] for name in self.kept if name in shown}
            self._remake()

    def _do_functional(self, how: str) -> None:
        self.counter += 1
        values: dict[str, torch.Tensor] = {}
        for name, parameter in self._named("all", "kept").items():
            value = parameter.detach() if how == "sharded" else whole(parameter)
            values[name] = value * 0.8 if value.is_floating_point() else value
        with torch.no_grad():
            arguments = self.data(self.own_rank, self.counter)
            output = torch.func.functional_call(self.model, values, arguments)
        self.seen.append(("output", output.detach().clone()))

    def _do_copy(self) -> None:
        copied = copy.deepcopy(self.model)
        self.seen += [(f"copied {name}", value) for name, value in copied.state_dict().items()]


def _halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _halve_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _keep(kept: list[torch.Tensor], module: nn.Module, arguments: Any, output: Any) -> None:
    kept += [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
