"""Changes to Megatron's FP32 optimizer for sharded parameters. Imports no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from dbuffer import DBuffer, Flat
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.integrations.megatron.checkpoint import describe_by_name, load_by_name
from megatron_fsdp.integrations.megatron.groups import ModelGroups, reduce_over
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from megatron_fsdp.optim.grad_norm import clip_factor
from megatron_fsdp.optim.muon.megatron_muon import MUON_NAMES, megatron_muon
from megatron_fsdp.optim.stock.sharded_optimizer import fully_shard_optimizer

__all__ = ["OptimizerMethods", "adopt_optimizer", "weight_norm"]

Choice = Callable[[ParameterGroup], DBuffer | None]


def adopt_optimizer(
    made: Any, chunks: Sequence[MegatronFSDP], groups: ModelGroups, asked: Any = None, *, scaler: Any = None
) -> Any:
    """Connect a Megatron optimizer to the sharded chunks that it updates, and return it.

    Args:
        made: Megatron's optimizer.
        chunks, groups: this rank's chunks and process groups.
        asked: the user's ``OptimizerConfig`` if ``made`` has another one: for Muon, Megatron creates Adam.
        scaler: grad scaler for FP16, or None.
    """
    made._chunks, made._groups, made._scaler = tuple(chunks), groups, scaler
    config = made.config if asked is None else asked
    if made.optimizer is not None and config.optimizer in MUON_NAMES:
        made.optimizer = fully_shard_optimizer(megatron_muon(made.optimizer.param_groups, config, chunks[0]))
    elif made.optimizer is not None:
        made.optimizer = fully_shard_optimizer(_torch_optimizer(made.optimizer, config))
    return made


def _torch_optimizer(found: Optimizer, config: Any) -> Optimizer:
    """Replace an optimizer of TransformerEngine or Apex, which do not support DTensors, by PyTorch's."""
    if isinstance(found, (Adam, SGD)):
        return found
    if config.optimizer == "sgd":
        return SGD(found.param_groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum)
    adam = AdamW if config.decoupled_weight_decay else Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return adam(found.param_groups, lr=config.lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay)


class OptimizerMethods:
    """Mixin for the class of Megatron's optimizer that sums over sharded gradients.

    Megatron's own sums over ranks would count replicated gradients (no_shard) once per rank, and do not support experts
    and dense weights in one optimizer.
    """

    _chunks: tuple[MegatronFSDP, ...]
    _groups: ModelGroups
    _scaler: Any
    optimizer: Optimizer | None
    config: Any

    def get_loss_scale(self) -> torch.Tensor:
        """Return the factor for the loss before backward: the grad scaler's scale, or 1."""
        if self._scaler is not None:
            scale: torch.Tensor = self._scaler.scale
            return scale
        return super().get_loss_scale()  # type: ignore[misc,no-any-return]  # the class this is mixed into

    def prepare_grads(self) -> bool:
        """Prepare a step: unscale gradients if there is a grad scaler.

        Returns:
            Whether to skip the step, because with a grad scaler a gradient of some rank is not finite.
        """
        for chunk in self._chunks:
            self._groups.forget_main_grads(chunk)
        super().prepare_grads()  # type: ignore[misc]  # the class this is mixed into
        if self._scaler is None:
            return False
        for chunk in self._chunks:
            chunk.scale_gradients(self._scaler.inv_scale)
        is_overflow = bool(self._sum_of_gradients(lambda rows: (~rows.isfinite()).any()) > 0)
        self._scaler.update(is_overflow)
        return is_overflow

    def get_grad_norm(self) -> float:
        """Return the norm of the whole gradient; each element counts once."""
        return self._sum_of_gradients(_square).sqrt().float().item()

    def get_weight_norm(self) -> float:
        """Return the norm of all main weights, for ``--log-params-norm``; each element counts once."""
        return weight_norm(self._chunks, self._groups).item()

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale gradients so that their norm is at most ``clip_grad``; return the norm before.

        Gradients with a non-finite norm are not scaled.
        """
        norm = self._sum_of_gradients(_square).sqrt().float()
        factor = clip_factor(norm, clip_grad)
        for chunk in self._chunks:
            chunk.scale_gradients(factor)
        return norm.item()

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Return how many elements of the whole gradient are zero."""
        return self._sum_of_gradients(lambda rows: rows.numel() - torch.count_nonzero(rows)).item()

    def _sum_of_gradients(self, measure: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return _sum(self._chunks, self._groups, _final_gradients, measure)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Update compute weights after main weights were loaded."""
        for chunk in self._chunks:
            chunk.install_optimized_model_weights()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return state and hyperparameters under the parameters' names, with DTensors, in Megatron-FSDP's format.

        ``torch.distributed.checkpoint`` saves the result, and loads it in place on any number of ranks; pass it to
        ``load_state_dict`` after loading. State that does not exist yet is shown as zeros, and becomes the optimizer's
        state if a checkpoint was read into it.

        Args:
            model_sharded_state_dict, metadata: no effect.
            is_loading: include entries that only other software saves.
        """
        assert self.optimizer is not None
        return describe_by_name(self._chunks, self.optimizer, is_loading=is_loading) | self._scaler_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards, and of the grad scaler if one is used."""
        return {**super().state_dict(), **self._scaler_state()}  # type: ignore[misc]  # the class this is mixed into

    def _scaler_state(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"grad_scaler": self._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``sharded_state_dict`` or ``state_dict`` returned.

        Raises:
            CheckpointError: a parameter's state was not read from a checkpoint, or hyperparameters do not fit the
                groups.
        """
        if self._scaler is not None and "grad_scaler" in state_dict:
            self._scaler.load_state_dict(state_dict["grad_scaler"])
        state_dict = {key: value for key, value in state_dict.items() if key != "grad_scaler"}
        if "param_to_group_meta" in state_dict or any(
            isinstance(key, str) and key != "common_step" for key in state_dict["state"]
        ):
            assert self.optimizer is not None
            load_by_name(self._chunks, self.optimizer, state_dict)
        else:
            super().load_state_dict(state_dict)  # type: ignore[misc]  # the class this is mixed into


def weight_norm(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> torch.Tensor:
    """Return the norm of the model's main weights, 0-d FP32; every rank passes its own ``chunks``."""
    return _sum(chunks, groups, lambda group: group.main_weight, _square).sqrt().float()


def _final_gradients(group: ParameterGroup) -> DBuffer | None:
    return None if group.gradient_buffer is None else group.gradient_buffer.binding.final_gradients()


def _square(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float32)
    return norm.double().square()


def _sum(
    chunks: Sequence[MegatronFSDP],
    groups: ModelGroups,
    choose: Choice,
    measure: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the sum of ``measure`` over the rows of all ranks, 0-d FP64. Every rank calls this function.

    Each element counts on the first rank that holds it. One sum over all ranks is therefore right for dense weights and
    for experts.
    """
    device = next(group.spec.device for chunk in chunks for unit in units_below(chunk) for group in unit.groups)
    found = [measure(rows).to(device, torch.float64) for rows in _counted(chunks, groups, choose)]
    total = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)
    for scope in groups.scopes():
        reduce_over(total, scope, "sum")
    return total


def _counted(chunks: Sequence[MegatronFSDP], groups: ModelGroups, choose: Choice) -> Iterator[torch.Tensor]:
    for unit in (unit for chunk in chunks for unit in units_below(chunk)):
        unit.check_replaced_params()
        for group in unit.groups:
            buffer = choose(group)
            # Of replicas, the first counts.
            if buffer is None or any(
                axis.rank for axis, placed in zip(buffer.axes, buffer.placements, strict=True) if placed != Flat()
            ):
                continue
            for index, param in enumerate(group.fsdp_params.sharded_params):
                rows = buffer.get_local_tensor(index)
                if rows.numel() and groups.counts(param):
                    yield rows
