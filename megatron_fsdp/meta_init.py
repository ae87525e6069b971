"""materialize: initialise a model that was sharded on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from dbuffer.collectives.broadcast import broadcast
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.lifecycle.make_param_group import shown_over
from megatron_fsdp.lifecycle.unit_changes import materialize_unit
from megatron_fsdp.lifecycle.unwritten_buffers import meta_buffers, note_unwritten

__all__ = ["in_full_precision", "materialize"]

Initializer = Callable[[nn.Module], object]


def materialize(model: nn.Module, init_fn: Initializer | None = None) -> None:
    """Allocate and initialise everything in ``model`` that is on the meta device.

    Each rank allocates only its shards, and initialisers draw one tensor at a time, so no unit is ever gathered. The
    values equal those of the unsharded model, initialised in one process with the random state of the mesh's first
    rank. They do not depend on the number of ranks or on the strategy.

    Modules are initialised in the order of their constructors: children first, in order of registration. Parameters
    become new objects, so create the optimizer afterwards.

    Args:
        model: a sharded model. Every rank calls this function.
        init_fn: called with each module that directly holds meta parameters or buffers. None: call the module's
            ``reset_parameters`` (or ``_reset_parameters``), which must fill its buffers too.
    Raises:
        StateError: no module of ``model`` is sharded.
        ConfigError: ``init_fn`` is None and a module that holds meta tensors has no ``reset_parameters``. Nothing was
            allocated.

    Example:
        with torch.device("meta"):
            model = Model()
        materialize(fully_shard(model))
    """
    units = list(units_below(model))
    if not units:
        raise StateError(f"{type(model).__name__} holds no sharded module. fix: call fully_shard on it first")
    names = {id(module): name for name, module in model.named_modules()}
    children_first: dict[int, nn.Module] = {}

    def note(module: nn.Module) -> None:
        children_first.setdefault(id(module), module)

    model.apply(note)
    todo = [
        (module, _initializer(names[key], module, init_fn))
        for key, module in children_first.items()
        if any(tensor is not None and tensor.is_meta for tensor in _held(module).values())
    ]
    device = next((group.spec.device for unit in units for group in unit.groups), torch.device("cpu"))
    fresh = [group for unit in units for group in unit.groups if group.spec.is_meta]
    for unit in units:
        materialize_unit(unit)
    unwritten = meta_buffers(model)
    for module, _ in todo:
        _allocate_rest(module, device)
    note_unwritten(model, unwritten)
    # Initialisers copy tensors of their own into parameters. All ranks draw the same, so that these are replicated.
    with _random_state_of_first_rank(units, device), in_full_precision(fresh), implicit_replication(), torch.no_grad():
        for _, initialise in todo:
            initialise()


@contextmanager
def in_full_precision(groups: Iterable[ParameterGroup]) -> Iterator[None]:
    """Replace split parameters by FP32 ones inside the block; store their values when the block ends.

    The FP32 parameters need 4 more bytes per element inside the block.
    """
    copies = [(group, group.weights.values()) for group in groups if group.weights.remainder is not None]
    with ExitStack() as stack:
        for group, values in copies:
            stack.enter_context(shown_over(group.fsdp_params, values))
        yield
    for group, values in copies:
        group.weights.store(values)


def _held(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


def _initializer(name: str, module: nn.Module, init_fn: Initializer | None) -> Callable[[], object]:
    if init_fn is not None:
        return functools.partial(init_fn, module)
    own: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    own = own or getattr(module, "_reset_parameters", None)
    if own is None:
        held = [key for key, value in _held(module).items() if value is not None]
        raise ConfigError(
            f"module {name!r} ({type(module).__name__}) holds {held} on the meta device and has no reset_parameters(). "
            "fix: define one, or materialize(model, init_fn=...), a function of such a module"
        )
    return own


def _allocate_rest(module: nn.Module, device: torch.device) -> None:
    """Allocate meta buffers, and parameters that no unit owns."""
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and group_of_parameter(parameter) is None:
            new = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            module._parameters[key] = new


@contextmanager
def _random_state_of_first_rank(units: list[Unit], device: torch.device) -> Iterator[None]:
    """Use the first rank's random state on every rank inside the block; then restore that of each other rank."""
    axes = {id(axis.gather_group): axis for unit in units for group in unit.groups for axis in group.main_weight.axes}
    states: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = [(torch.get_rng_state(), torch.set_rng_state)]
    if device.type == "cuda":
        states.append((torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device)))
    for own, set_state in states:
        shared = own.to(device)
        for axis in axes.values():
            broadcast(shared, axis)
        set_state(shared.cpu())
    try:
        yield
    finally:
        for own, set_state in states if any(axis.rank for axis in axes.values()) else ():
            set_state(own)
