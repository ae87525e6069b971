"""Muon over sharded weights: each matrix is made semi-orthogonal by one rank, chosen by a plan, and by no other."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.checks.agreement import mesh_ranks
from megatron_fsdp.checks.rendezvous import meet
from megatron_fsdp.engine.optimizer_steps import skip_announcing
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw.flat_base import Binding, FlatBase, Found
from megatron_fsdp.optim.adamw.flat_state import KEYS, FlatState, Moments, adopt_together
from megatron_fsdp.optim.adamw.param_memory import ABSENT, GroupMemory, find_owned
from megatron_fsdp.optim.muon.exchange import Exchange, OwnerRanks, Source, owner_ranks
from megatron_fsdp.optim.muon.matrix_state import MOMENTUM, MatrixMember, MatrixState, StepRows
from megatron_fsdp.optim.muon.matrix_views import MatrixBlock, MatrixView
from megatron_fsdp.optim.muon.newton_schulz import SIMPLE, Iteration, coefficients, scale_factor
from megatron_fsdp.optim.muon.ownership import MatrixWork, OwnershipReport, plan_ownership

__all__ = ["Domain", "Muon", "explain_ownership"]

# The size of a bucket of matrices; two buckets are in flight.
BUCKET_BYTES = 64 * 2**20
_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False, "capturable": False}
# Options of torch.optim.AdamW that a group with use_muon=False has not.
_ADAMW_REFUSED = ("amsgrad", "differentiable", "capturable")
# Keys of a param group that say what its parameters are; a state dict does not change them.
_STRUCTURE = ("use_muon", "view")
# The other entries of a param group that decide how matrices are stepped.
_BINDING = ("view", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "extra_scale_factor")


class Muon(FlatBase):
    """Muon for matrices and AdamW for the rest, over sharded weights of any strategy, in one optimizer.

    After each step the weights have the bits of ``torch.optim.Muon`` over whole matrices, for any number of ranks.
    16-bit main weights are an exception, because torch rounds them by position. Momentum is sharded like the weights.
    One rank computes each matrix; ``megatron_fsdp.muon.explain_ownership`` shows which. A few all-to-alls bring the
    pieces of the matrices there and back. All of this happens in ``step``, so gradient accumulation costs nothing.

    Muon steps the param groups without ``use_muon=False``, and AdamW, with its own options, those with it.
    ``muon_param_groups`` makes both from a model. A group's ``view``, a ``MatrixView``, says which matrices its
    parameters consist of; by default a 2-D parameter is one matrix. State and state dicts are those of
    ``torch.optim.Muon`` and ``torch.optim.AdamW``. Loading a state dict does not change ``view`` and ``use_muon``.

    Args:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps: as in ``torch.optim.Muon``; all may differ between
            groups and change between steps.
        ns_coefficients: three numbers, or a name of ``COEFFICIENT_SETS``.
        adjust_lr_fn: see ``scale_factor``. extra_scale_factor: multiplies that factor.
        adamw: defaults of groups with ``use_muon=False``: lr (otherwise this one's), betas, eps, weight_decay.
        ns_dtype: the dtype in which matrices are sent and Newton-Schulz is computed. bf16 as in ``torch.optim.Muon``;
            FP32 is slower and more exact.
        moments_dtype: dtype of momentum and moments. None: the dtype of each main weight, or FP32 for split weights.
        max_norm, nonfinite: as in ``AdamW``, for all gradients; decided before any matrix is sent.
    Raises:
        ConfigError: a parameter that is not a matrix in a group for matrices, or options that exclude each other.

    Example:
        optimizer = Muon(muon_param_groups(model), lr=0.02, adamw={"lr": 3e-4})
        model(batch).square().mean().backward()
        optimizer.step()
    """

    _kept = (*FlatBase._kept, "ns_dtype", "_defaults")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | str = SIMPLE,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        extra_scale_factor: float = 1.0,
        adamw: Mapping[str, Any] | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        moments_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        nonfinite: str = "ignore",
    ) -> None:
        for name, dtype in (("ns_dtype", ns_dtype), ("moments_dtype", moments_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"Muon({name}={dtype}) is no floating-point dtype. fix: give one")
        self.ns_dtype = ns_dtype
        self._set_up(max_norm, nonfinite, moments_dtype)
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "extra_scale_factor": extra_scale_factor,
        }
        # By ``use_muon``.
        self._defaults: dict[bool, dict[str, Any]] = {True: muon, False: {**_ADAMW, "lr": lr, **(adamw or {})}}
        super().__init__(params, {"lr": lr})
        self._step_supports_amp_scaling = False
        skip_announcing(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group with its own hyperparameters, as in ``torch.optim``.

        Raises:
            ConfigError: a parameter that is no matrix, hyperparameters out of range, or options that AdamW has not.
        """
        use_muon = bool(param_group.get("use_muon", True))
        group = {**self._defaults[use_muon], **param_group, "use_muon": use_muon}
        if use_muon:
            group["view"] = MatrixView.of(group.get("view")).to_plain()
        _check_group(group)
        super().add_param_group(group)
        for parameter in self.param_groups[-1]["params"] if use_muon else ():
            _blocks_of(parameter, group)

    def _update(self, binding: _Binding, found: Found, factor: torch.Tensor | None) -> None:
        adopt_together([(state, gradient.present) for state, gradient in found], self.state)
        rows = StepRows(self.param_groups, binding.factors)
        gradients = {id(state): gradient for state, gradient in found}
        flats = {
            id(state): torch.zeros(state.memory.numel, dtype=self.ns_dtype, device=state.memory.device)
            for domain in binding.domains
            for state in domain.states
            if any(id(each) in gradients for each in domain.states)
        }
        for state, gradient in found:
            if id(state) in flats:
                state.prepare(gradient, flats[id(state)], rows, factor)
        # Runs while the first matrices are under way.
        others = [functools.partial(_step_others, found, rows, factor)]
        for domain in binding.domains:
            if id(domain.states[0]) not in flats:
                continue
            # Collectives and products run where compute does, which is elsewhere for offloaded weights.
            there = [flats[id(state)].to(state.memory.compute_device) for state in domain.states]
            domain.exchange.run(there, lambda: others.pop()() if others else None)
            for state, whole in zip(domain.states, there, strict=True):
                if id(state) in gradients:
                    state.apply(whole.to(state.memory.device), gradients[id(state)].present, rows)
        for step in others:
            step()

    def _before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # State of torch.optim.Muon has no views. The live param groups decide, not the loaded ones.
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, live in zip(groups, self.param_groups, strict=False):
            structure = {key: live[key] for key in _STRUCTURE if key in live}
            group.update({**self._defaults[live["use_muon"]], **group, **structure})
        return super()._before_loading({**state_dict, "param_groups": groups})

    # ------------------------------------------------------------------ where parameters live

    def domains(self) -> tuple[Domain, ...]:
        """Return the matrices that are shared out, by the ranks that share them; all ranks call it."""
        found: tuple[Domain, ...] = self._bound().domains
        return found

    def fresh_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See ``AdamW``."""
        return (MOMENTUM,) if group["use_muon"] else KEYS

    def _flags_of(self, group: dict[str, Any]) -> tuple[Any, ...]:
        names = _BINDING if group["use_muon"] else _ADAMW_REFUSED
        return (group["use_muon"], *(repr(group.get(name)) for name in names))

    def _bind(self, parameters: tuple[torch.Tensor, ...], flags: tuple[Any, ...]) -> _Binding:
        groups = self.param_groups
        for group in groups:
            # Options may be set in the groups at any time.
            _check_group(group)
        factors: dict[tuple[int, float], int] = {}

        def row_of(group: int, factor: float) -> int:
            # Numbers a row of ``StepRows.apply`` at its first use.
            return factors.setdefault((group, factor), len(factors))

        states: list[FlatState] = []
        for owned in find_owned(groups):
            memory, members = owned.memory, owned.members
            matrices = {
                index: MatrixMember(member, _blocks_of(memory.params[index], groups[member]))
                for index, member in enumerate(members)
                if member != ABSENT and groups[member]["use_muon"]
            }
            if matrices:
                states.append(MatrixState(memory, members, matrices, row_of, self.moments_dtype))
            else:
                states.append(Moments(memory, members, self.moments_dtype))
        matrix_states = [state for state in states if isinstance(state, MatrixState)]
        self._agree(matrix_states)
        domains = tuple(self._domains(matrix_states))
        return _Binding(parameters, flags, tuple(states), domains, tuple(factors))

    def _agree(self, states: Sequence[MatrixState]) -> None:
        """Wait until all ranks are here with the same matrices in the same order: they exchange them in that order.

        Raises:
            MeshError: on every rank, when any two of them differ.
        """
        said: dict[tuple[int, ...], list[str]] = {}
        for state in states:
            memory = state.memory
            if isinstance(memory, GroupMemory):
                lines = said.setdefault(mesh_ranks(memory.group.spec.mesh), [])
                lines += [memory.names[index] for index in state.matrices]
        for ranks in sorted(said):
            meet(
                ranks,
                "steps matrices with Muon",
                said[ranks],
                "the ranks of a mesh give Muon different matrices, or the same ones in another order",
                "fix: give every rank the parameters in the order of model.named_parameters(), not that of a set",
            )

    def _domains(self, states: Sequence[MatrixState]) -> Iterator[Domain]:
        by_ranks: dict[tuple[int, int], tuple[OwnerRanks, list[MatrixState]]] = {}
        for state in states:
            memory = state.memory
            ranks = owner_ranks(memory.group.main_weight) if isinstance(memory, GroupMemory) else OwnerRanks(None, None)
            by_ranks.setdefault((id(ranks.shards), id(ranks.replicas)), (ranks, []))[1].append(state)
        bucket_numel = max(BUCKET_BYTES // self.ns_dtype.itemsize, 1)
        for ranks, members in by_ranks.values():
            pairs = [pair for flat, state in enumerate(members) for pair in self._works(state, flat, ranks.num_shards)]
            ownership = plan_ownership([work for work, _ in pairs], ranks.num_shards, ranks.num_replicas)
            yield Domain(tuple(members), Exchange(ownership, [source for _, source in pairs], ranks, bucket_numel))

    def _works(self, state: MatrixState, flat: int, num_shards: int) -> Iterator[tuple[MatrixWork, Source]]:
        memory = state.memory
        for index, member in state.matrices.items():
            group = self.param_groups[member.group]
            steps = coefficients(group["ns_coefficients"], int(group["ns_steps"]))
            iteration = Iteration(steps, float(group["eps"]))
            source = Source(flat, memory.pieces[index][0], memory.held[index], iteration)
            holders = memory.holders(index, num_shards)
            for block, _ in member.blocks:
                held = tuple(holder for holder in holders if block.overlap(holder[1]))
                yield MatrixWork(memory.names[index], block, held, len(steps)), source


def _step_others(found: Found, rows: StepRows, factor: torch.Tensor | None) -> None:
    """Step all that AdamW steps."""
    for update in [update for state, gradient in found for update in state.updates(gradient, rows)]:
        update.run(rows, factor)


@dataclass(frozen=True, slots=True)
class Domain:
    """Matrices that the same ranks share.

    Attributes:
        states: of the parameters that they are in. exchange: the redistribution of a step.
    """

    states: tuple[MatrixState, ...]
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class _Binding(Binding):
    """The flat memory of an optimizer's parameters, and the owner of each matrix.

    Attributes:
        domains: of the groups with matrices, by their ranks. factors: see ``StepRows``.
    """

    domains: tuple[Domain, ...]
    factors: tuple[tuple[int, float], ...]


def explain_ownership(optimizer: Optimizer) -> tuple[OwnershipReport, ...]:
    """Return a report for each set of ranks that shares matrices; every rank calls it.

    Raises:
        ConfigError: the optimizer is another one.

    Example:
        optimizer = Muon(muon_param_groups(model), lr=0.02)
        for report in explain_ownership(optimizer):
            print(report)
    """
    if not isinstance(optimizer, Muon):
        raise ConfigError(f"explain_ownership: found {type(optimizer).__name__}. fix: give a megatron_fsdp.Muon")
    itemsize = optimizer.ns_dtype.itemsize
    return tuple(OwnershipReport(domain.exchange.ownership, itemsize) for domain in optimizer.domains())


def _check_group(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters out of range."""
    names = ("lr", "weight_decay", "momentum", "eps") if group["use_muon"] else ("lr", "weight_decay", "eps")
    for name in names:
        if float(group[name]) < 0:
            raise ConfigError(f"Muon({name}={group[name]}) is negative. fix: give at least 0")
    if not group["use_muon"]:
        for name in _ADAMW_REFUSED:
            if group.get(name):
                raise ConfigError(
                    f"Muon: {name}=True of a group with use_muon=False is not supported. fix: leave it False"
                )
        return
    coefficients(group["ns_coefficients"], group["ns_steps"])
    scale_factor(1, 1, group["adjust_lr_fn"])


def _blocks_of(parameter: torch.Tensor, group: Mapping[str, Any]) -> tuple[tuple[MatrixBlock, float], ...]:
    """Return a parameter's matrices, each with the factor of its learning rate."""
    owner, name = group_of_parameter(parameter), f"a parameter of shape {tuple(parameter.shape)}"
    if owner is not None:
        key = next(key for key, param in owner.parameters.items() if param is parameter)
        name = f"parameter {key!r} of unit {owner.name!r}"
    if owner is None and isinstance(parameter, DTensor):
        raise ConfigError(
            f"Muon: {name} is a DTensor that fully_shard did not make. fix: shard its module with fully_shard, or use "
            "torch.optim.Muon"
        )
    if parameter.is_complex():
        raise ConfigError(f"Muon: {name} is complex. fix: put it in a param group with use_muon=False")
    if owner is not None:
        main = owner.main_weight
        num_flat = sum(type(placement).__name__ == "Flat" for placement in main.placements)
        if len(owner.spread_over(main.placements)) > num_flat:
            raise ConfigError(
                f"Muon: {name} is sharded by tensor parallelism too, so its matrix is on no data-parallel group. "
                "fix: put it in a param group with use_muon=False"
            )
    blocks = MatrixView.of(group["view"]).blocks(parameter.shape, name)
    mode, extra = group["adjust_lr_fn"], float(group["extra_scale_factor"])
    return tuple((block, scale_factor(block.rows, block.columns, mode) * extra) for block in blocks)
