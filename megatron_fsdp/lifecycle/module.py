"""FSDPModule, the class of a sharded module, and the forward hooks of its unit."""

from __future__ import annotations

import functools
import inspect
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from megatron_fsdp.engine.forward import post_forward, pre_forward
from megatron_fsdp.engine.fused_linear import fuse_linear_layers
from megatron_fsdp.engine.manual_finalization import complete_gradients, refuse_in_backward, start_pending_reductions
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.recovery import reset, settle
from megatron_fsdp.engine.streams import wait_for_host_reads
from megatron_fsdp.engine.unit import Root, Unit, WeightState, alive, is_in_backward, units_below
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.lifecycle.make_param_group import set_divisor, set_reduction
from megatron_fsdp.lifecycle.param_changes import (
    InnerApply,
    KeptParametrizations,
    apply_in_forward,
    apply_to_group,
    before_load_state_dict,
    before_state_dict,
    refuse_sharded_save,
)
from megatron_fsdp.lifecycle.unit_changes import update_gradient_buffers
from megatron_fsdp.lifecycle.unwritten_buffers import is_to_empty, meta_buffers, move_buffers, note_unwritten
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.variants.forward_order import order_of
from megatron_fsdp.variants.memory_slots import (
    communicator_has_memory,
    keep_gathered,
    place_unit,
    reshard_to,
    use_slots,
)

__all__ = [
    "FSDPModule", "FsdpModule", "GradientReductionHandle", "UnshardHandle", "convert", "gather_afresh",
    "register_fsdp_forward_method", "unit_of", "watch_inner_modules",
]  # fmt: skip


class GradientReductionHandle:
    """Returned by ``FSDPModule.finalize_backward(async_op=True)``.

    Example:
        model.set_manual_backward_finalization(True)
        model(batch).sum().backward()
        handle = model.finalize_backward(async_op=True)
        metrics = batch.mean()  # while gradients are reduced
        handle.wait()
        optimizer.step()
    """

    def __init__(self, root: Root | None) -> None:
        self._root = root
        if root is not None:
            start_pending_reductions(root)
            root.backward.open_handle = id(self)

    def wait(self) -> None:
        """Make compute wait for the reductions; ``.grad`` of the parameters is final afterwards.

        Raises:
            StateError: ``reset_iter_state`` dropped the gradients.
        """
        root = self._root
        if root is not None:
            if root.backward.open_handle != id(self):
                raise StateError(
                    "wait() after reset_iter_state(), which dropped the gradients. fix: run the backward again"
                )
            refuse_in_backward(root)
            self._root, root.backward.open_handle = None, 0
            complete_gradients(root)


class UnshardHandle:
    """Returned by ``FSDPModule.unshard(async_op=True)``.

    Example:
        handle = model.unshard(async_op=True)
        inputs = batch * 2  # while the weights are gathered
        handle.wait()
    """

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make compute wait for the gather; the module's parameters are plain tensors afterwards."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.wait_for_unshard()


class FSDPModule:
    """Mixed into the class of every module given to ``fully_shard``: ``FSDP<Class>`` is a subclass of both.

    Example:
        fully_shard(model)
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)  # as in FSDP2
    """

    _fsdp_unit: Unit

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Raise: DDP and torch.jit read this attribute. DDP would overwrite all ranks' shards with the first rank's."""
        if _is_called_by_jit():
            raise ConfigError(
                f"{type(self).__name__} is sharded, and torch.jit.trace and torch.jit.script cannot compile the hooks "
                "that gather its weights. fix: compile a plain model with these weights: "
                "plain.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()}), "
                "then torch.jit.trace(plain, inputs); for training use torch.compile"
            )
        raise ConfigError(
            f"{type(self).__name__} is sharded and reduces its gradients itself, so DistributedDataParallel cannot be "
            "around it. fix: train the module without it; with accelerate, pass optimizer and data loader to "
            "Accelerator.prepare without the model, or give it the whole model inside of accelerate_fsdp2()"
        )

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make a plain module of the original class: what ``sequential[:2]`` calls its own class for is no unit."""
        original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **options)

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The parameter groups of this unit; those of nested units are not among them."""
        return unit_of(self).groups

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's current weights (not those of nested units), and make them the module's parameters.

        Args:
            async_op: return a handle at once; the weights may be used after its ``wait()``.
        Raises:
            StateError: another tensor replaced a parameter of the module.
        """
        unit = unit_of(self)
        unit.check_replaced_params()
        gather_afresh(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release this unit's gathered weights; its parameters are sharded DTensors again."""
        unit = unit_of(self)
        _refuse_held(unit, "reshard()")
        unit.reshard()
        wait_for_host_reads()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of gathered weights allocated, so that their addresses stay the same (True).

        CUDA graphs of a step need this. Reading the memory after ``reshard`` raises an error.
        """
        for unit in self._units(recurse):
            for group in unit.groups:
                keep_gathered(group, keeps=keep, is_sharded=unit.weight_state is WeightState.SHARDED)
            if unit.slots.sizing is not None:
                place_unit(unit)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: the next backwards keep gradients on this rank, unreduced. The first one with True reduces the sum."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = unit.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: the next backwards leave axes on which gradients rest partial (the outer one of HSDP) unreduced."""
        for unit in self._units(recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last microbatch of an optimizer step."""
        unit_of(self).root.backward.is_last = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True: reductions start in backward, and gradients become final in ``finalize_backward``, on the root alone.

        Raises:
            StateError: this is no root; or a backward is under way, or not finalized.
        """
        unit, backward = unit_of(self), unit_of(self).root.backward
        self._check_root("set_manual_backward_finalization")
        if enabled != backward.is_manual and (is_in_backward() or backward.is_unfinished):
            raise StateError(
                f"unit {unit.name!r}: set_manual_backward_finalization({enabled}) in or after a backward that is not "
                "finalized. fix: call finalize_backward() or reset_iter_state() first"
            )
        backward.is_manual = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Make the gradients of all backwards so far final, after ``set_manual_backward_finalization(True)``.

        Does nothing before the first backward. Earlier backwards may run with ``set_requires_gradient_sync(False)``.

        Args:
            async_op: issue the reductions and return a handle; ``.grad`` may be read after its ``wait()``.
        Raises:
            StateError: called in a backward, on another module than the root, without manual finalization, or before
                ``wait()`` of the last handle.
        """
        root, backward = unit_of(self).root, unit_of(self).root.backward
        if not backward.number:
            return GradientReductionHandle(None) if async_op else None
        self._check_root("finalize_backward")
        obstacles = {
            "was called before wait() of the last handle. fix: call handle.wait() first": bool(backward.open_handle),
            "was called without set_manual_backward_finalization(True), so gradients are final. fix: leave the call "
            "out": not backward.is_manual,
            "was called in a backward. fix: call it after backward() has returned": is_in_backward(),
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                raise StateError(f"unit {unit_of(self).name!r}: finalize_backward() {obstacle}")
        if async_op:
            return GradientReductionHandle(root)
        complete_gradients(root)
        return None

    def _check_root(self, method: str) -> None:
        unit, root = unit_of(self), unit_of(self).root.outermost()
        if root is not unit:
            found = "another module" if root is None else repr(root.name)
            raise StateError(
                f"unit {unit.name!r}: {method}() was called on a unit below the root. fix: call it on the root "
                f"module, which is {found}"
            )

    def set_reshard_after_forward(self, reshard_after_forward: bool | int | None, recurse: bool = True) -> None:
        """Choose whether weights are released after forward and gathered again; as in ``fully_shard``."""
        for unit in self._units(recurse):
            reshard_to(unit, reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps weights gathered after backward, so the next microbatch's forward needs no gather."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """All-gather these units when this unit's forward starts, not those that followed in the last forward."""
        unit_of(self).forward_prefetch = [unit_of(module).reference for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these units when this one's backward starts, instead of the one that came before in forward."""
        unit_of(self).backward_prefetch = [unit_of(module).reference for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of data-parallel ranks."""
        for group in unit_of(self).groups:
            set_divisor(group, float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what ``set_gradient_divide_factor`` does; FSDP2's older name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with each reduced gradient of this unit, to reduce it further over ranks outside of the mesh.

        Args:
            hook: changes a 1-D tensor, this rank's part of the averaged gradients of one parameter group, in place;
                on every microbatch where gradients rest sharded, on the last one where they rest partial.
            stream: FSDP2's argument. The hook runs on the lane of the reductions, so it must be None.
        Raises:
            ConfigError: a stream is given.
        """
        if stream is not None:
            raise ConfigError(
                "set_all_reduce_hook(stream=...): the hook runs on the stream of the reductions. fix: leave stream None"
            )
        for group in unit_of(self).groups:
            set_reduction(group, hook=hook)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit's weights by ``comm(output_tensor, input_tensor, group, async_op=...)``.

        FSDP2's ``AllGather``; memory is the unit's own, so ``comm.allocate`` is not called.
        """
        for group in unit_of(self).groups:
            group.weights.gather_function = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients by ``comm(output_tensor, input_tensor, group, op, async_op=...)``, FSDP2's."""
        for group in unit_of(self).groups:
            set_reduction(group, function=comm)

    def set_forward_order(self, units: Sequence[nn.Module] | None = None) -> None:
        """Let all ranks gather and reduce units in one order, whether or not a rank runs them.

        For models that run other units on other ranks: an image tower without images, an expert without tokens, a
        dropped layer. A rank that skips a unit takes part in its gather, gives the weights back at once, and takes part
        in its reduction with zeros. Call it on the root, on every rank, before the first forward or between steps.

        Units are entered at most once in a forward of the root, in this order. A unit that is called several times
        needs ``set_reshard_after_forward(False)``. Choices of ``set_modules_to_forward_prefetch`` and its like do not
        count: the next unit of the order is gathered ahead.

        Args:
            units: the modules given to ``fully_shard``, all but the root, in the order of their calls. None: the order
                in which modules are registered.
        Raises:
            StateError: this is not the root, or a backward is under way.
            ConfigError: a unit is missing, or comes twice, or belongs to another root.

        Example:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model).set_forward_order()
        """
        unit = unit_of(self)
        self._check_root("set_forward_order")
        if is_in_backward() or unit.open_call is not None:
            raise StateError(
                f"unit {unit.name!r}: set_forward_order() inside a forward or backward. fix: call it between steps"
            )
        unit.root.order = order_of(unit.root, None if units is None else [unit_of(each) for each in units])

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this unit's weights, for a module whose backward does not read them.

        Use it for an embedding, for example. If backward does read the weights, autograd raises (docs/design/order.md).
        """
        unit_of(self).unshards_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward of the root wait for an event recorded after an optimizer step on another stream."""
        unit_of(self).root.step_event = event

    def reset_iter_state(self) -> None:
        """Reset after a forward or backward that raised: release weights and drop incomplete gradients.

        This also drops gradients accumulated before, and those that wait for ``finalize_backward``.
        """
        reset(unit_of(self).root)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept FSDP2's switch: reductions are always sums here, and the division is part of the fold."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept FSDP2's switch: parameters without a gradient here always take part, with zeros."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limit the number of packed gradient buffers. More buffers let backward run further ahead of reductions.

        Forward prefetches as many trained units, which needs no additional memory.

        Raises:
            TypeError: not an int. ConfigError: below one.
        """
        _check_count("set_reduce_scatter_max_input_buffers", max_input_buffers)
        for unit in self._units(recurse):
            unit.root.backward.max_packed_buffers = max_input_buffers

    def set_prefetch_bytes(self, num_bytes: int | None) -> None:
        """Gather as many units ahead of their use as take ``num_bytes`` of gathered weights, at least one.

        Call it on the root, with the same number on every rank. For models whose units differ in size: between two
        units of experts lies one of attention, which is too short to hide their gather. More bytes let gathers run
        further ahead, forward and backward, and that memory is held beside the weights of the unit that computes.
        ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch`` win, for their unit, and
        ``set_forward_order`` for all.

        Args:
            num_bytes: None, the default, counts units: one in backward, as FSDP2 does, and in forward as many as
                ``set_reduce_scatter_max_input_buffers`` allows.
        Raises:
            TypeError: not an int. ConfigError: below one, or called on a unit that is not the root.
        """
        if num_bytes is not None:
            _check_count("set_prefetch_bytes", num_bytes)
        root = unit_of(self).root
        if root.outermost() is not unit_of(self):
            raise ConfigError(
                f"set_prefetch_bytes on unit {unit_of(self).name!r}: the memory is that of all units together. fix: "
                "call it on the root module, after its fully_shard"
            )
        root.prefetch_bytes = num_bytes

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Use a separate communicator for reductions (the default); False shares the one of all-gathers."""
        for unit in self._units(recurse):
            for axis in (axis for group in unit.groups for axis in group.main_weight.axes):
                axis.separate_reductions(enable)

    def set_slot_pool(self, sizing: str | None = "largest", *, recurse: bool = True) -> None:
        """Let gathered weights and packed gradients take turns in memory that stays, instead of allocating each time.

        Two slots for weights and one for gradients serve a chain of units, whatever their number; more are made where
        more is needed at once. Call it on the root.

        Args:
            sizing: "largest": every slot is as large as the largest unit that is released after forward. "by_size":
                units of equal size share slots. None: the allocator.
        Raises:
            StorageError: another ``sizing``, or a PyTorch that cannot do it (before 2.13).
        """
        use_slots({unit: SlotChoice(sizing, unit.slots.source) for unit in self._units(recurse)})

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take this unit's slots from the communicator's own allocator (NCCL: registered memory), if it has one."""
        unit = unit_of(self)
        if not enable:
            use_slots({unit: SlotChoice(unit.slots.sizing if unit.slots.source == "device" else None)})
        elif communicator_has_memory(unit):
            use_slots({unit: SlotChoice(unit.slots.sizing or "by_size", "communicator")})

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take this unit's slots from symmetric memory, which every rank maps at once; on GPUs only.

        Raises:
            StorageError: the unit is not on a GPU.
        """
        unit = unit_of(self)
        use_slots({unit: SlotChoice(unit.slots.sizing or "by_size", backend)})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, including gathered ones."""
        unit = unit_of(self)
        for each in (unit, *alive(unit.inner)):
            # A unit of several modules may have some outside of this one, whose gradients stay.
            is_whole = len(each.modules) == 1
            for group in each.groups:
                if set_to_none and group.gradient_buffer is not None and is_whole:
                    # In one pass, before nn.Module asks each of them.
                    group.gradient_buffer.binding.zero_grad()
                elif each.weight_state is WeightState.UNSHARDED:
                    _zero_hidden(self, group, set_to_none=set_to_none)  # type: ignore[arg-type]  # every class of ours is a module
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of nn.Module, which comes next in every class of ours

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept FSDP2's switch: all-gathers are always asynchronous."""

    def _get_fsdp_state(self) -> Unit:
        """Return the unit: what ``fully_shard.state(module)`` returns."""
        return unit_of(self)

    def _units(self, recurse: bool) -> Iterator[Unit]:
        return units_below(self) if recurse else iter((unit_of(self),))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # The module's own parameters stay in their buffers; everything else is handled as in any module.
        unit = unit_of(self)
        if unit.is_in_forward:
            places = [place[:2] for group in unit.groups for place in group.fsdp_params.module_infos.places]
            return apply_in_forward(unit, places, fn, lambda: super(FSDPModule, self)._apply(fn, recurse))  # type: ignore[misc]
        _refuse_held(unit, "a conversion (to(), half(), to_empty() and the like)")
        settle(unit.root)
        unit.check_replaced_params()
        unit.reshard()
        wait_for_host_reads()
        allocated = meta_buffers(self) if is_to_empty(fn) else []  # type: ignore[arg-type]  # every class of ours is a module
        try:
            for group in unit.groups:
                for registry, attribute, *_ in group.fsdp_params.module_infos.places:
                    registry[attribute] = None
            result = super()._apply(fn, recurse)  # type: ignore[misc]
            for group in unit.groups:
                apply_to_group(group, fn, is_awaited=any(call() is not None for call in unit.pending_calls))
        finally:
            for group in unit.groups:
                group.fsdp_params.module_infos.register()
            # A group that was on the meta device, or of another dtype, has other gradient buffers now.
            update_gradient_buffers(unit)
        if unit.root.device is not None:
            # Of an offloaded model to_empty(device="cpu") allocates them in CPU memory, and compute uses them.
            move_buffers(allocated, unit.root.device)
        note_unwritten(self, allocated)  # type: ignore[arg-type]  # as above
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            f"{type(self).__name__} cannot be deep-copied: its parameters are views of buffers shared by the unit. "
            "fix: build a second model, fully_shard it, and load_state_dict(model.state_dict()) into it; an average "
            "of the "
            "weights needs no second model: {name: parameter.detach().clone()}, updated in place"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"{type(self).__name__} cannot be pickled: it holds process groups. fix: save its state instead: "
            "save_checkpoint, torch.distributed.checkpoint or state_dict()"
        )


def _zero_hidden(module: nn.Module, group: ParameterGroup, *, set_to_none: bool) -> None:
    """Reset the gradients of sharded parameters below a module, which shows the gathered ones."""
    below = {id(child._parameters) for child in module.modules()}
    for registry, _, parameter, _ in group.fsdp_params.module_infos.places:
        if id(registry) in below and parameter.grad is not None:
            parameter.grad = None if set_to_none else parameter.grad.zero_()


def _check_count(method: str, count: object) -> None:
    """Raise FSDP2's errors unless ``count`` is an int of at least one."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{method}({count!r}): found a {type(count).__name__}. fix: give an int of at least one")
    if count < 1:
        raise ConfigError(f"{method}({count}). fix: give a number of at least one")


def _is_called_by_jit() -> bool:
    return any("/torch/jit/" in each.filename for each in traceback.extract_stack(limit=12))


def _refuse_held(unit: Unit, action: str) -> None:
    if unit.num_holds:
        raise StateError(
            f"unit {unit.name!r}: {action} inside unsharded(), which keeps its weights gathered. fix: call it after "
            "the block"
        )


def gather_afresh(unit: Unit) -> None:
    """All-gather the current main weights, unless the module already shows up-to-date gathered weights."""
    if unit.num_holds:
        return
    if unit.weight_state is not WeightState.SHARDED and (
        unit.has_old_weights() or not all(group.fsdp_params.module_infos.shows_gathered for group in unit.groups)
    ):
        unit.reshard()
    for group in unit.groups:
        group.freshness.may_have_changed = True
    unit.unshard(check=True)


# The class under this project's name.
FsdpModule = FSDPModule


def unit_of(module: object) -> Unit:
    """Return the unit of an ``FSDPModule``.

    Raises:
        StateError: ``fully_shard`` was not called on it.
    """
    unit = getattr(module, "_fsdp_unit", None)
    if not isinstance(unit, Unit):
        raise StateError(f"{type(module).__name__} is not sharded. fix: call fully_shard on it first")
    return unit


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class ``FSDP<Class>`` of a module class, the same one each time."""
    members: dict[str, Any] = {"__module__": cls.__module__}
    if callable(save := getattr(cls, "save_pretrained", None)):
        members["save_pretrained"] = _save_of_whole_weights(save)
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)


def _save_of_whole_weights(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hugging Face's ``save_pretrained`` for a sharded model: it saves the whole weights that it is given."""

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **options: Any) -> Any:
        given = inspect.signature(save).bind_partial(self, *args, **options).arguments
        state = given.get("state_dict", options.get("state_dict"))
        if state is None or any(isinstance(value, DTensor) for value in state.values()):
            refuse_sharded_save(self, "no state_dict" if state is None else "a state_dict of sharded tensors")
        return save(self, *args, **options)

    return save_pretrained


def convert(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Register the unit's parameters, and make the modules ``FSDPModule``s with hooks."""
    for group in unit.groups:
        if group.spec.fuses_weight_gradients:
            fuse_linear_layers(group.owned)
        group.fsdp_params.module_infos.register()
    watch_inner_modules(modules, unit)
    for module in modules:
        for below in module.modules():
            if parametrize.is_parametrized(below):
                below.parametrizations.__class__ = KeptParametrizations
        module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
        module._fsdp_unit = unit  # type: ignore[assignment]  # not a submodule or tensor: lands in the instance dictionary
        # PyTorch's composable replicate() leaves out modules that this registry names, as it does those of FSDP2.
        module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
        module.register_forward_pre_hook(functools.partial(pre_forward, unit), prepend=True, with_kwargs=True)
        # Also called, with None for the output, when forward raised: parameters must not stay gathered then.
        module.register_forward_hook(functools.partial(post_forward, unit), always_call=True)
        module.register_state_dict_pre_hook(functools.partial(before_state_dict, unit))
        module.register_load_state_dict_pre_hook(functools.partial(before_load_state_dict, unit))


def watch_inner_modules(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Watch ``.to()`` and similar calls of the unit's inner modules, which hold its parameters."""
    owned: dict[nn.Module, dict[str, ParameterGroup]] = {}
    for group in unit.groups:
        for info in (info for parameter in group.owned for info in parameter.param_module_infos):
            owned.setdefault(info.module, {})[info.attribute] = group
    for module, names in owned.items():
        if module not in modules:
            vars(module)["_apply"] = InnerApply(unit, module, names)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a call of another method (``generate``, ``encode``) like one of ``forward``: weights are gathered for it.

    Nothing happens to a module that is not sharded, so model code may call it in either case.

    Raises:
        ConfigError: the module has no such method.

    Example:
        fully_shard(model)
        register_fsdp_forward_method(model, "encode")
        encoded = model.encode(batch)
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(
            f"{type(module).__name__} has no method {method_name!r} to register as a forward method. fix: name a "
            "method of the module"
        )
    unit = unit_of(module)

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = pre_forward(unit, self, args, kwargs) or (args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = post_forward(unit, self, args, output)
        return output

    setattr(module, method_name, types.MethodType(call, module))
