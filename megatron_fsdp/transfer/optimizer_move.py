"""OptimizerMove: the state of a model's optimizers as tensors of a transfer, and what takes their place."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from dbuffer.layout import Layout
from dbuffer_kernels import QUANT_BLOCK, num_blocks
from megatron_fsdp.checks.rendezvous import job_store
from megatron_fsdp.engine.params import is_laid_out_like
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw.int8_moments import CODED_KEYS
from megatron_fsdp.optim.loaded_state import lay_out_loaded_state
from megatron_fsdp.optim.stock.flat_step import forget_memory

__all__ = ["OptimizerMove", "StateItem"]

_SCALES = tuple(key for key in CODED_KEYS if key.endswith("_scales"))


@dataclass(frozen=True, slots=True)
class StateItem:
    """One tensor of optimizer state that travels.

    Attributes:
        optimizer: number of the optimizer. place: number of the parameter. key: in the parameter's state.
        is_scales: one number for each block of 8-bit codes. In the new layout each rank gets all of them, and the
            optimizer keeps its own in the next step. was_whole: each rank had all of them before.
    """

    optimizer: int
    place: int
    key: str
    dtype: torch.dtype
    is_scales: bool
    was_whole: bool
    numel: int

    def elements(self, held: range, *, is_new: bool) -> range:
        """Return which elements of the tensor go with elements of the parameter."""
        if not self.is_scales:
            return held
        if is_new or self.was_whole:
            return range(self.numel)
        return range(held.start // QUANT_BLOCK, num_blocks(held.stop)) if held else range(0)


@dataclass(slots=True, eq=False)
class OptimizerMove:
    """State of optimizers over parameters that get other rows.

    Attributes:
        items: the tensors that travel. values: what does not, such as counts of steps: by optimizer, parameter and key.
    """

    optimizers: Sequence[Optimizer]
    params: Sequence[nn.Parameter]
    items: list[StateItem] = field(default_factory=list)
    values: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    _hyperparameters: list[list[dict[str, Any]]] | None = None
    _targets: list[torch.Tensor] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _layouts: Sequence[tuple[Layout, int]] = ()

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer], params: Sequence[tuple[str, nn.Parameter]]) -> OptimizerMove:
        """Look at the state of optimizers.

        Args:
            params: name and sharded parameter of each place.
        Raises:
            ConfigError: state that has neither the parameter's shape nor none.
        """
        move = cls(optimizers, [param for _, param in params])
        for number, optimizer in enumerate(optimizers):
            lay_out_loaded_state(optimizer)
            values: dict[int, dict[str, Any]] = {}
            for place, (name, param) in enumerate(params):
                state = optimizer.state.get(param)
                if not state:
                    continue
                values[place] = {}
                for key, value in state.items():
                    item = _item(number, place, name, param, key, value, optimizer)
                    if item is None:
                        values[place][key] = value
                    else:
                        move.items.append(item)
            move.values.append(values)
        return move

    def tensors(self, places: Sequence[Any]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield the name, dtype and shape of each tensor that travels.

        Args:
            places: of the parameters, with ``name``, ``old`` and ``old_index``.
        """
        for item in self.items:
            place = places[item.place]
            shape = (item.numel,) if item.is_scales else place.old.plan.shapes[place.old_index]
            yield f"{place.name}.{item.key} of optimizer {item.optimizer}", item.dtype, shape

    def sources(self) -> list[torch.Tensor]:
        """Return this rank's part of each."""
        states = [self.optimizers[item.optimizer].state[self.params[item.place]] for item in self.items]
        values = [state[item.key] for state, item in zip(states, self.items, strict=True)]
        return [value._local_tensor if isinstance(value, DTensor) else value for value in values]

    def make_targets(self, layouts: Sequence[tuple[Layout, int]]) -> list[torch.Tensor]:
        """Allocate this rank's part of the new layout.

        Args:
            layouts: the layout of each place's main weights, and its position there.
        """
        self._layouts = layouts
        flat: dict[tuple[int, int, str], torch.Tensor] = {}
        for item in self.items:
            layout, index = layouts[item.place]
            device = self.params[item.place].device
            if item.is_scales:
                self._targets.append(torch.zeros(item.numel, dtype=item.dtype, device=device))
                continue
            key = (item.optimizer, id(layout), item.key)
            if key not in flat or flat[key].dtype is not item.dtype:
                flat[key] = torch.zeros(layout.numel, dtype=item.dtype, device=device)
            self._targets.append(layout.tensor(index, flat[key]))
        return self._targets

    # ------------------------------------------------------------------ ranks that were started anew

    def exchange(self, name: str, ranks: Sequence[int], lost: Collection[int]) -> None:
        """Tell ranks that were started anew which state the others have, by the job's store.

        Args:
            name: of this meeting in the store. ranks: that call. lost: those started anew.
        """
        store: Any = job_store()
        teller = next(rank for rank in ranks if rank not in lost)
        if dist.get_rank() == teller:
            values = [
                {place: {key: _portable(value) for key, value in found.items()} for place, found in each.items()}
                for each in self.values
            ]
            groups = [
                [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in each.param_groups]
                for each in self.optimizers
            ]
            store.set(f"{name} state", pickle.dumps((self.items, values, groups)))
        elif dist.get_rank() in lost:
            self.items, self.values, self._hyperparameters = pickle.loads(store.get(f"{name} state"))

    # ------------------------------------------------------------------ afterwards

    def commit(self) -> None:
        """Put what arrived into the optimizers' state."""
        moved: dict[tuple[int, int], dict[str, Any]] = {}
        for item, target in zip(self.items, self._targets, strict=True):
            param = self.params[item.place]
            assert isinstance(param, FlatDTensor)
            # Give the local part the parameter's own shape: whole rows, without elements of other parameters.
            value = target if item.is_scales else param.with_local(target.view(param._local_tensor.shape))
            moved.setdefault((item.optimizer, item.place), {})[item.key] = value
        for number, (optimizer, values) in enumerate(zip(self.optimizers, self.values, strict=True)):
            for place, kept in values.items():
                param = self.params[place]
                self._undo.append(_put_back(optimizer, param))
                optimizer.state[param] = {**kept, **moved.get((number, place), {})}
            if self._hyperparameters is not None:
                for group, new in zip(optimizer.param_groups, self._hyperparameters[number], strict=True):
                    group.update(new)
            forget_memory(optimizer)

    def undo(self) -> None:
        """Put back the state that was."""
        while self._undo:
            self._undo.pop()()
        for optimizer in self.optimizers:
            forget_memory(optimizer)


def _item(
    number: int, place: int, name: str, param: nn.Parameter, key: str, value: Any, optimizer: Optimizer
) -> StateItem | None:
    """Return a value of state as a tensor that travels; None for one that is the same on all ranks."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return None
    if key in _SCALES:
        is_whole = not isinstance(value, DTensor)
        return StateItem(number, place, key, value.dtype, True, is_whole, num_blocks(param.numel()))
    if isinstance(value, FlatDTensor) and value.shape == param.shape and is_laid_out_like(value, param):
        return StateItem(number, place, key, value.dtype, False, False, param.numel())
    raise ConfigError(
        f"reshard_: {type(optimizer).__name__} has state {key!r} of shape {tuple(value.shape)} for parameter {name!r} "
        f"of shape {tuple(param.shape)}. Which rows of it belong to a rank is not known. fix: save_checkpoint, and "
        "load_checkpoint into a model of the new layout"
    )


def _portable(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _put_back(optimizer: Optimizer, param: nn.Parameter) -> Callable[[], None]:
    before = optimizer.state.get(param)

    def undo() -> None:
        if before is None:
            optimizer.state.pop(param, None)
        else:
            optimizer.state[param] = before

    return undo
