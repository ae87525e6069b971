"""Muon over sharded weights: each matrix is made semi-orthogonal by one rank, chosen by a plan, and by no other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dbuffer_kernels import MuonWeights, Segment, Segments, muon_apply, muon_momentum
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw_state import ABSENT, KEYS, GroupMoments, adopt_together
from megatron_fsdp.optim.adamw_update import PlainParameter, Rows, Update, group_update, plain_update, stored
from megatron_fsdp.optim.exchange import Exchange, OwnerRanks, Solver, Source, owner_ranks
from megatron_fsdp.optim.flat_base import Binding, FlatBase, Gradients, owned_groups
from megatron_fsdp.optim.matrix_group import MOMENTUM, MatrixGroup, MatrixMember, StepRows, matrix_segments
from megatron_fsdp.optim.matrix_views import MatrixBlock, MatrixView
from megatron_fsdp.optim.newton_schulz import SIMPLE, Iteration, coefficients, scale_factor
from megatron_fsdp.optim.ownership import MatrixWork, OwnershipReport, holders_of, ownership_report, plan_ownership
from megatron_fsdp.runtime.step.freshness import refreshes_itself
from megatron_fsdp.runtime.step.parameter_group import group_of_parameter

__all__ = ["Domain", "Muon", "MuonOptions", "explain_ownership"]

_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False, "capturable": False}
# Keys of a param group that say what its parameters are; a state dict does not change them.
_STRUCTURE = ("use_muon", "view")
# What else of it decides how matrices are stepped.
_BINDING = ("view", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "extra_scale_factor")


class Muon(FlatBase):
    """Muon for matrices and AdamW for the rest, over sharded weights of any strategy, in one optimizer.

    Weights after each step are those of ``torch.optim.Muon`` over whole matrices to the bit, for any number of ranks
    (not for 16-bit main weights, which torch itself rounds by position). Momentum stays sharded
    as the weights are. Every matrix is one rank's work, by a plan that ``megatron_fsdp.optim.explain_ownership`` shows;
    its pieces go there and back in a few all-to-alls. Nothing happens before ``step``: accumulation costs nothing.

    Param groups say what Muon steps: those with ``use_muon=False`` go to AdamW (with its options), the others to Muon;
    ``muon_param_groups`` makes both from a model. ``view`` says what the matrices of a group's parameters are, a
    ``MatrixView``; the default is a 2-D parameter as one matrix. State and state dicts are those of
    ``torch.optim.Muon`` and ``torch.optim.AdamW``; ``view`` and ``use_muon`` are the live ones whatever is loaded.

    Args:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps: as in ``torch.optim.Muon``; all may differ between
            groups and change between steps.
        ns_coefficients: three numbers, or a name of ``COEFFICIENT_SETS``.
        adjust_lr_fn: see ``scale_factor``. extra_scale_factor: multiplies that factor.
        adamw: defaults of groups with ``use_muon=False``: lr (otherwise this one's), betas, eps, weight_decay.
        options: how the step is carried out.
        max_norm, nonfinite: as in ``AdamW``; both look at all gradients, and decide before any matrix is touched.
    Raises:
        ConfigError: a parameter that is no matrix in a group for matrices, by name; options that do not go together.

    Example:
        optimizer = Muon(muon_param_groups(model), lr=0.02, adamw={"lr": 3e-4})
        model(batch).square().mean().backward()
        optimizer.step()
    """

    _kept = (*FlatBase._kept, "options", "num_orthogonalized", "_defaults")
    _wide_keys = (MOMENTUM, *KEYS[1:])

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
        options: MuonOptions | None = None,
        max_norm: float | None = None,
        nonfinite: str = "ignore",
    ) -> None:
        self.options = options or MuonOptions()
        self._set_up(max_norm, nonfinite, self.options.moments_dtype)
        self.num_orthogonalized = 0
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
        refreshes_itself(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own; as in ``torch.optim``.

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

    def _update(self, binding: _Binding, gradients: Gradients, factor: torch.Tensor | None) -> None:
        adopt_together([(state, found.present) for state, found in gradients.groups], self.state)
        rows = StepRows(self.param_groups, binding.factors)
        # Runs while the first matrices are under way.
        waiting = [functools.partial(self._step_others, gradients, rows, factor)]
        found = {id(state): gradient for state, gradient in gradients.groups}
        for domain in binding.domains:
            present = [found.get(id(group)) for group in domain.groups]
            if all(gradient is None for gradient in present):
                continue
            flats = []
            for group, gradient in zip(domain.groups, present, strict=True):
                flat = torch.zeros_like(group.first.local_buffer, dtype=self.options.message_dtype)
                if gradient is not None:
                    group.prepare(gradient, flat, rows, rows.clip_on(factor, flat.device))
                flats.append(flat)
            # Collectives and products run where compute does, which is elsewhere for offloaded weights.
            there = [flat.to(group.device) for group, flat in zip(domain.groups, flats, strict=True)]
            domain.exchange.run(there, lambda: waiting.pop()() if waiting else None)
            self.num_orthogonalized += domain.exchange.num_owned
            for group, gradient, flat, whole in zip(domain.groups, present, flats, there, strict=True):
                if gradient is not None:
                    group.apply(whole.to(flat.device), gradient.present, rows)
        for others in waiting:
            others()
        for plain, values in gradients.plain:
            if isinstance(plain, PlainMatrices):
                self._step_plain(plain, values, rows, factor)

    def _step_others(self, gradients: Gradients, rows: Rows, factor: torch.Tensor | None) -> None:
        """Step all that AdamW steps."""
        updates: list[Update] = []
        for state, gradient in gradients.groups:
            is_mixed = isinstance(state, MatrixGroup)
            updates += state.adamw_updates(gradient, rows.number) if is_mixed else [group_update(state, gradient, rows)]
        for plain, values in gradients.plain:
            if not isinstance(plain, PlainMatrices):
                updates.append(plain_update(plain, values, self.state, rows, self.moments_dtype))
        for update in updates:
            update.run(rows, factor)

    def _step_plain(
        self, plain: PlainMatrices, gradient: torch.Tensor, rows: StepRows, factor: torch.Tensor | None
    ) -> None:
        """Step a parameter that is whole on this rank and belongs to no sharded module."""
        parameter, numel = plain.parameter, plain.parameter.numel()
        values = self.state.setdefault(parameter, {})
        if MOMENTUM not in values:
            values[MOMENTUM] = torch.zeros_like(parameter, dtype=self.moments_dtype).detach()
        tensors = [parameter.detach(), values[MOMENTUM]]
        weight, kept = flat = [each.reshape(-1) for each in tensors]
        seen = kept.new_empty(numel, dtype=self.options.message_dtype)
        whole, clip = Segments([Segment(0, numel, plain.group)], numel), rows.clip_on(factor, kept.device)
        muon_momentum(gradient, kept, seen, whole, rows.momentum(kept.device), clip=clip)
        plain.exchange.run([seen], lambda: None)
        self.num_orthogonalized += plain.exchange.num_owned
        muon_apply(seen, MuonWeights(weight), plain.segments, rows.apply(kept.device))
        for tensor, copy in stored(tensors, flat):
            tensor.copy_(copy.view(tensor.shape))

    def _before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # State of torch.optim.Muon has no views; what is live says what parameters are, whatever is loaded.
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

    def solver_of(self, group: Mapping[str, Any]) -> Solver:
        """Return what owners do with the matrices of a param group."""
        steps = coefficients(group["ns_coefficients"], int(group["ns_steps"]))
        return Iteration(steps, float(group["eps"]), self.options.ns_dtype)

    def _flags_of(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(repr(group[name]) for name in _BINDING) if group["use_muon"] else ()

    def _bind(self, parameters: tuple[torch.Tensor, ...], flags: tuple[Any, ...]) -> _Binding:
        groups, dtype = self.param_groups, self.options.moments_dtype
        factors: dict[tuple[int, float], int] = {}

        def row_of(group: int, factor: float) -> int:
            # Rows of ``StepRows.apply`` are numbered as they are asked for.
            return factors.setdefault((group, factor), len(factors))

        matrices: list[MatrixGroup] = []
        moments: list[GroupMoments] = []
        for owned in owned_groups(groups):
            params = tuple(owned.group.parameters.values())
            found = {
                index: MatrixMember(member, _blocks_of(params[index], groups[member]))
                for index, member in enumerate(owned.members)
                if member != ABSENT and groups[member]["use_muon"]
            }
            if found:
                matrices.append(MatrixGroup(owned.group, owned.members, found, row_of, dtype))
            else:
                moments.append(GroupMoments(owned.group, owned.members, dtype, is_capturable=False))
        plain: list[PlainParameter] = []
        for number, group in enumerate(groups):
            for parameter in (p for p in group["params"] if group_of_parameter(p) is None):
                if group["use_muon"]:
                    plain.append(self._plain_matrices(parameter, number, f"plain parameter {len(plain)}", row_of))
                else:
                    plain.append(PlainParameter(parameter, number, False))
        domains = tuple(self._domains(matrices))
        return _Binding(parameters, flags, (*matrices, *moments), tuple(plain), domains, tuple(factors))

    def _plain_matrices(
        self, parameter: torch.Tensor, number: int, name: str, row_of: Callable[[int, float], int]
    ) -> PlainMatrices:
        group, held = self.param_groups[number], range(parameter.numel())
        member = MatrixMember(number, _blocks_of(parameter, group))
        works = [MatrixWork(name, block, ()) for block, _ in member.blocks]
        sources = [Source(0, 0, held, self.solver_of(group))] * len(works)
        exchange = Exchange(plan_ownership(works, 1), sources, OwnerRanks(None, None), 1)
        segments = Segments(list(matrix_segments(member, 0, held, row_of)), len(held))
        return PlainMatrices(parameter, number, False, segments, exchange)

    def _domains(self, matrices: Sequence[MatrixGroup]) -> Iterator[Domain]:
        by_ranks: dict[tuple[int, int], tuple[OwnerRanks, list[MatrixGroup]]] = {}
        for each in matrices:
            assert each.group is not None
            ranks = owner_ranks(each.group.main_weight, shares_replicas=self.options.share_replicas)
            by_ranks.setdefault((id(ranks.shards), id(ranks.replicas)), (ranks, []))[1].append(each)
        for ranks, members in by_ranks.values():
            pairs = [pair for flat, each in enumerate(members) for pair in self._works(each, flat, ranks.num_shards)]
            ownership = plan_ownership([work for work, _ in pairs], ranks.num_shards, ranks.num_replicas)
            bucket_numel = max(self.options.bucket_bytes // self.options.message_dtype.itemsize, 1)
            yield Domain(tuple(members), Exchange(ownership, [source for _, source in pairs], ranks, bucket_numel))

    def _works(self, each: MatrixGroup, flat: int, num_shards: int) -> Iterator[tuple[MatrixWork, Source]]:
        owner = each.group
        assert owner is not None
        plan, names = owner.plan, tuple(owner.parameters)
        for index, member in each.matrices.items():
            source = Source(
                flat, each.base(index), each.held_elements(index), self.solver_of(self.param_groups[member.group])
            )
            holders = holders_of(plan.offsets[index], plan.tensor_numel(index), plan.numel // num_shards)
            for block, _ in member.blocks:
                held = tuple(holder for holder in holders if block.overlap(holder[1]))
                steps = len(source.solver.coefficients) if isinstance(source.solver, Iteration) else 5
                yield MatrixWork(f"{owner.name}.{names[index]}", block, held, steps), source


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """How ``Muon`` carries a step out; none changes the result but where it says so.

    Attributes:
        ns_dtype: in which Newton-Schulz is computed. bf16 as ``torch.optim.Muon``; FP32 is slower and closer.
        comm_dtype: of matrices and updates on the wire, and of their rounding on one rank as on many; None: that of
            Newton-Schulz, to which they are rounded anyway.
        share_replicas: replicas (HSDP, weights that rest whole) divide the work and gather updates; else each does all.
        bucket_bytes: of the matrices that an owner takes at once; two such buckets are in flight.
        moments_dtype: of momentum and moments; None: that of each main weight, FP32 where those are split.

    Example:
        options = MuonOptions(ns_dtype=torch.float32)
        optimizer = Muon(muon_param_groups(model), lr=0.02, options=options)
    """

    ns_dtype: torch.dtype = torch.bfloat16
    comm_dtype: torch.dtype | None = None
    share_replicas: bool = True
    bucket_bytes: int = 64 * 2**20
    moments_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("ns_dtype", "comm_dtype", "moments_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"MuonOptions({name}={dtype}): give a floating-point dtype")
        if self.bucket_bytes < 1:
            raise ConfigError(f"MuonOptions(bucket_bytes={self.bucket_bytes}): wanted at least 1")

    @property
    def message_dtype(self) -> torch.dtype:
        """The dtype of matrices and updates on the wire."""
        return self.comm_dtype or self.ns_dtype


@dataclass(frozen=True, slots=True)
class Domain:
    """Matrices that the same ranks share.

    Attributes:
        groups: the parameter groups that they are in. exchange: the redistribution of a step.
    """

    groups: tuple[MatrixGroup, ...]
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class PlainMatrices(PlainParameter):
    """A parameter of Muon's that no sharded module owns, where its matrices lie, and what is done with them."""

    segments: Segments
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class _Binding(Binding):
    """Where the parameters of an optimizer live, and who steps matrices.

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
        raise ConfigError(f"explain_ownership: found {type(optimizer).__name__}; wanted a megatron_fsdp.optim.Muon")
    itemsize = optimizer.options.message_dtype.itemsize
    return tuple(ownership_report(domain.exchange.ownership, itemsize) for domain in optimizer.domains())


def _check_group(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters out of range."""
    names = ("lr", "weight_decay", "momentum", "eps") if group["use_muon"] else ("lr", "weight_decay", "eps")
    for name in names:
        if float(group[name]) < 0:
            raise ConfigError(f"Muon({name}={group[name]}): wanted at least 0")
    if not group["use_muon"]:
        for name in ("amsgrad", "differentiable", "capturable"):
            if group.get(name):
                raise ConfigError(f"Muon: {name}=True of a group with use_muon=False is not supported; leave it False")
        return
    coefficients(group["ns_coefficients"], group["ns_steps"])
    scale_factor(1, 1, group["adjust_lr_fn"])


def _name_of(parameter: torch.Tensor) -> str:
    group = group_of_parameter(parameter)
    if group is None:
        return f"a parameter of shape {tuple(parameter.shape)}"
    name = next(name for name, param in group.parameters.items() if param is parameter)
    return f"parameter {name!r} of unit {group.name!r}"


def _blocks_of(parameter: torch.Tensor, group: Mapping[str, Any]) -> tuple[tuple[MatrixBlock, float], ...]:
    """Return a parameter's matrices, each with the factor of its learning rate."""
    name = _name_of(parameter)
    owner = group_of_parameter(parameter)
    if owner is None and isinstance(parameter, DTensor):
        raise ConfigError(
            f"Muon: {name} is a DTensor that fully_shard did not make; shard its module with fully_shard, or use "
            "torch.optim.Muon"
        )
    if parameter.is_complex():
        raise ConfigError(f"Muon: {name} is complex; put it in a param group with use_muon=False")
    if owner is not None:
        main = owner.main_weight
        num_flat = sum(type(placement).__name__ == "Flat" for placement in main.placements)
        if len(owner.spread_over(main.placements)) > num_flat:
            raise ConfigError(
                f"Muon: {name} is sharded by tensor parallelism too, so its matrix is on no data-parallel group; put "
                "it in a param group with use_muon=False"
            )
    blocks = MatrixView.of(group["view"]).blocks(parameter.shape, name)
    mode, extra = group["adjust_lr_fn"], float(group["extra_scale_factor"])
    return tuple((block, scale_factor(block.rows, block.columns, mode) * extra) for block in blocks)
