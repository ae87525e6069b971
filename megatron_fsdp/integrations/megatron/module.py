"""MegatronFSDP: a sharded model with the methods that training loops of Megatron-FSDP and Megatron-LM call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from dbuffer import Replicate
from dbuffer.collectives.broadcast import broadcast
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.manual_finalization import complete_gradients
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Root, WeightState, units_below
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.integrations.megatron.groups import ModelGroups
from megatron_fsdp.integrations.megatron.names import WholeNames
from megatron_fsdp.lifecycle.module import FSDPModule

__all__ = ["MegatronFSDP", "as_megatron"]


def _refused(message: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *unused: Any, **options: Any) -> NoReturn:
        raise ConfigError(message)

    return refuse


class MegatronFSDP(FSDPModule, nn.Module):
    """Mixin for the class of a module that ``fully_shard_model`` has sharded, together with ``FSDPModule``.

    There is no wrapper: parameters keep their names, and there is no attribute ``module``. Methods apply to all units
    below the module. Megatron-LM needs the wrapper ``ShardedDataParallel``, whose methods call these.

    Example:
        model = fully_shard_model(model, fsdp_unit_modules=[Block])
        with model.sync():
            model(batch).square().mean().backward()
    """

    # Set only for models sharded with Megatron's configs: process groups, and names in the whole model.
    model_groups: ModelGroups
    whole_names: WholeNames
    # The error message of save_checkpoint and load_checkpoint for this model, if they do not support it.
    checkpoint_refusal: str

    # ------------------------------------------------------------------ microbatches

    def no_sync(self) -> AbstractContextManager[None]:
        """Run forward and backward of all but the last microbatch of a step inside the block.

        As in Megatron-FSDP, sharded gradients are reduced in every backward. Reductions of replicated gradients (ZeRO-0
        and 1) and over the outer axis wait for the last microbatch. If no reduction waits (ZeRO-2 and 3 on one axis, or
        with one replica), ``.grad`` shows the sum so far.
        """
        return self._auto_sync(False)

    def sync(self) -> AbstractContextManager[None]:
        """Run the last microbatch of a step inside the block: its backward makes gradients final."""
        return self._auto_sync(True)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Make gradients final after each backward (True), or only in ``finish_grad_sync`` (False)."""
        for root in self._roots():
            root.backward.is_last = sync_model

    @contextmanager
    def _auto_sync(self, is_on: bool) -> Iterator[None]:
        before = [(root.backward, root.backward.is_last) for root in self._roots()]
        self.set_model_auto_sync(is_on)
        try:
            yield
        finally:
            for backward, value in before:
                backward.is_last = value

    # ------------------------------------------------------------------ gradients

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: backward starts each unit's reduction after its last gradient."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reductions of all microbatches so far, over all axes; ``.grad`` is final afterwards."""
        with self._auto_sync(True):
            for root in self._roots():
                complete_gradients(root)
        if self._megatrons_groups is not None:
            self._megatrons_groups.show_main_grads(self)

    def synchronize_gradient_reduce(self) -> None:
        """Do nothing: kernels that are issued after backward wait for its reductions."""

    def attach_grad_to_optimizer_state(self) -> None:
        """Do nothing: final gradients are in ``.grad``, where each optimizer reads them."""

    def scale_gradients(self, scaling_factor: torch.Tensor | float) -> None:
        """Multiply all gradients by a factor, such as 1 / (number of tokens) with ``calculate_per_token_loss``.

        Raises:
            StateError: gradients are not final yet.
        """
        for buffer in self._gradients():
            if buffer.binding.sum is not None and buffer.binding.sum.is_in_main_grad:
                raise StateError(f"{buffer.binding.name}: gradients are not final. fix: call finish_grad_sync() first")
            if buffer.binding.final_gradients() is not None:
                buffer.binding.scale(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, those of microbatches that are not final yet among them."""
        if self._megatrons_groups is not None:
            self._megatrons_groups.forget_main_grads(self)
        self.zero_grad(set_to_none=True)
        for buffer in self._gradients():
            buffer.discard_sum()

    # ------------------------------------------------------------------ weights

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start the gather that the next forward needs first; ``force_sync`` makes compute wait for it as well."""
        first = next((unit for unit in units_below(self) if unit.groups), None)
        if first is not None:
            first.unshard(check=True)
        if force_sync:
            self.synchronize_param_gather()

    def synchronize_param_gather(self) -> None:
        """Make compute wait for the gathers that were started."""
        for unit in units_below(self):
            if unit.weight_state is WeightState.GATHERING:
                unit.wait_for_unshard()

    def install_optimized_model_weights(self) -> None:
        """Bring compute weights up to date after main weights changed.

        A ``torch.optim`` step is noticed without it; an optimizer that is none of PyTorch's may not be.
        """
        for group in self._groups():
            group.freshness.has_changed = True

    def broadcast_params(self) -> None:
        """Copy the first replica's weights to all replicas. Rows that only one rank has do not change.

        A rank's rows come from its own copy of the model, so models that differ between ranks have to be made equal
        before they are sharded.
        """
        for group in self._groups():
            weights = group.main_weight
            staged = weights.local_buffer.to(group.spec.device)
            for axis, placement in zip(weights.axes, weights.placements, strict=True):
                if placement == Replicate():
                    broadcast(staged, axis)
            weights.local_buffer.copy_(staged)
            group.freshness.has_changed = True

    # ------------------------------------------------------------------ refused

    mixed_precision_context = _refused(
        "mixed_precision_context: the policy decides the dtypes of the buffers, which exist already. fix: pass it as "
        "fully_shard_model(mixed_precision_policy=...)"
    )
    reset_mixed_precision_policy = mixed_precision_context
    get_distributed_index = _refused(
        "get_distributed_index: there is no such table. fix: the mesh of each group of model.parameter_groups is its "
        "main_weight.mesh"
    )
    all_gather_and_wait_parameters_ready = _refused(
        "all_gather_and_wait_parameters_ready: weights are gathered by unit. fix: call unshard() and reshard() of the "
        "unit that owns them"
    )

    # ------------------------------------------------------------------ parts

    def _groups(self) -> list[ParameterGroup]:
        return [group for unit in units_below(self) for group in unit.groups]

    def _gradients(self) -> list[GradientBuffer]:
        return [group.gradient_buffer for group in self._groups() if group.gradient_buffer is not None]

    @property
    def _megatrons_groups(self) -> ModelGroups | None:
        return vars(self).get("model_groups")

    def _roots(self) -> list[Root]:
        return list({id(unit.root): unit.root for unit in units_below(self)}.values())


def as_megatron(module: nn.Module) -> MegatronFSDP:
    """Give a sharded module the methods of ``MegatronFSDP``, in place."""
    module.__class__ = _megatron_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    assert isinstance(module, MegatronFSDP)
    return module


@functools.cache
def _megatron_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Megatron{cls.__name__}", (MegatronFSDP, cls), {"__module__": cls.__module__})
