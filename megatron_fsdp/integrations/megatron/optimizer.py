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
from megatron_fsdp.optim.megatron_muon import MUON_NAMES, megatron_muon
from megatron_fsdp.optim.sharded_optimizer import fully_shard_optimizer

__all__ = ["OptimizerMethods", "adopt_optimizer", "weight_norm"]

Choice = Callable[[ParameterGroup], DBuffer | None]


def adopt_optimizer(
    made: Any, chunks: Sequence[MegatronFSDP], groups: ModelGroups, asked: Any = None, *, scaler: Any = None
) -> Any:
    """Tie a Megatron optimizer to the sharded chunks of a model whose parameters it updates, and return it.

    ``asked`` is the ``OptimizerConfig`` that was asked for, where ``made`` has another: Megatron makes Adam for Muon.
    """
    made._chunks, made._groups, made._scaler = tuple(chunks), groups, scaler
    config = made.config if asked is None else asked
    if made.optimizer is not None and config.optimizer in MUON_NAMES:
        made.optimizer = fully_shard_optimizer(megatron_muon(made.optimizer.param_groups, config, chunks[0]))
    elif made.optimizer is not None:
        made.optimizer = fully_shard_optimizer(_torch_optimizer(made.optimizer, config))
    return made


def _torch_optimizer(found: Optimizer, config: Any) -> Optimizer:
    """Return PyTorch's optimizer in place of TransformerEngine's and Apex's, whose kernels know no DTensors."""
    if isinstance(found, (Adam, SGD)):
        return found
    if config.optimizer == "sgd":
        return SGD(found.param_groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum)
    adam = AdamW if config.decoupled_weight_decay else Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return adam(found.param_groups, lr=config.lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay)


class OptimizerMethods:
    """Mixed into the class of the optimizer that ``get_megatron_optimizer`` returned.

    Megatron's own sums over ranks would count gradients that rest whole (no_shard) once for each of them, and know no
    experts beside dense weights in one optimizer.
    """

    _chunks: tuple[MegatronFSDP, ...]
    _groups: ModelGroups
    _scaler: Any
    optimizer: Optimizer | None
    config: Any

    def get_loss_scale(self) -> torch.Tensor:
        """Return what losses are multiplied by before backward: the grad scaler's scale, or 1."""
        if self._scaler is not None:
            scale: torch.Tensor = self._scaler.scale
            return scale
        return super().get_loss_scale()  # type: ignore[misc,no-any-return]  # the class this is mixed into

    def prepare_grads(self) -> bool:
        """Make ready for a step; gradients are the parameters' ``.grad`` already.

        Returns:
            Whether the step is to be left out: under a grad scaler, a gradient of some rank is not finite.
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
        """Return the norm of the whole gradient, each element once."""
        return self._sum_of_gradients(_square).sqrt().float().item()

    def get_weight_norm(self) -> float:
        """Return the norm of all main weights, each element once: what ``--log-params-norm`` logs."""
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
        """Bring compute weights up to date after main weights were loaded."""
        for chunk in self._chunks:
            chunk.install_optimized_model_weights()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state and hyperparameters under the names of the parameters, with DTensors, as Megatron-FSDP does.

        It is what ``torch.distributed.checkpoint`` saves and, for any number of ranks and whatever groups these have,
        loads in place; give the result to ``load_state_dict`` then. State that is not there yet is shown as zeros,
        which the optimizer gets when something was read into them. ``is_loading`` asks for what other software may
        have saved, too; Megatron's other arguments say nothing that the model does not.
        """
        assert self.optimizer is not None
        return describe_by_name(self._chunks, self.optimizer, is_loading=is_loading) | self._scaler_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's parts, and of the grad scaler where there is one."""
        return {**super().state_dict(), **self._scaler_state()}  # type: ignore[misc]  # the class this is mixed into

    def _scaler_state(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"grad_scaler": self._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``sharded_state_dict`` or ``state_dict`` returned.

        Raises:
            CheckpointError: nothing was read into a parameter's state, or hyperparameters do not fit the groups.
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
    """Return the norm of all main weights of the model, 0-d FP32. ``chunks`` are those of this rank."""
    return _sum(chunks, groups, lambda group: group.main_weight, _square).sqrt().float()


def _final_gradients(group: ParameterGroup) -> DBuffer | None:
    return None if group.gradients is None else group.gradients.binding.settled()


def _square(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float32)
    return norm.double().square()


def _sum(
    chunks: Sequence[MegatronFSDP],
    groups: ModelGroups,
    choose: Choice,
    measure: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the sum of a measure of all rows over all ranks, which call it together: 0-d FP64.

    Every element is counted on one rank, the first of those that hold it, so one sum over all of them serves dense
    weights and experts alike, whatever their groups.
    """
    device = next(group.spec.device for chunk in chunks for unit in units_below(chunk) for group in unit.groups)
    found = [measure(rows).to(device, torch.float64) for rows in _counted(chunks, groups, choose)]
    total = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)
    for scope in groups.scopes():
        reduce_over(total, scope, "sum")
    return total


def _counted(chunks: Sequence[MegatronFSDP], groups: ModelGroups, choose: Choice) -> Iterator[torch.Tensor]:
    for unit in (unit for chunk in chunks for unit in units_below(chunk)):
        unit.refuse_replaced_params()
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
