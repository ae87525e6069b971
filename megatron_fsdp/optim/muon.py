"""Muon over sharded weights: each matrix is made semi-orthogonal by one rank, chosen by a plan, and by no other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw_state import ABSENT, KEYS, GroupGradients, GroupMoments, adopt_together
from megatron_fsdp.optim.adamw_update import PlainParameter, Rows, Update, group_update, plain_update
from megatron_fsdp.optim.exchange import Exchange, OwnerRanks, Solver, Source
from megatron_fsdp.optim.flat_base import FlatBase, Gradients, Home, loss_of
from megatron_fsdp.optim.matrix_group import MOMENTUM, MatrixGroup, MatrixMember, StepRows
from megatron_fsdp.optim.matrix_views import MatrixBlock, MatrixView
from megatron_fsdp.optim.newton_schulz import Iteration, coefficients, scale_factor
from megatron_fsdp.optim.owner_ranks import owner_ranks
from megatron_fsdp.optim.ownership import MatrixWork, holders_of, plan_ownership
from megatron_fsdp.runtime.freshness import refreshes_itself
from megatron_fsdp.runtime.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.resting_copy import announce_step

__all__ = ["Domain", "Muon"]

_SIMPLE = (3.4445, -4.7750, 2.0315)
_ADAMW = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "maximize": False,
    "capturable": False,
}
# Keys of a param group that say what its parameters are; a state dict does not change them.
_STRUCTURE = ("use_muon", "view")


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

    _kept = (*FlatBase._kept, "options", "num_orthogonalized", "_muon_defaults", "_adamw_defaults")
    _wide_keys = (MOMENTUM, *KEYS[1:])
    _binding: _Binding | None = None

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | str = _SIMPLE,
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
        self._muon_defaults = {
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
        self._adamw_defaults = {**_ADAMW, "lr": lr, **(adamw or {})}
        super().__init__(params, {"lr": lr})
        self._step_supports_amp_scaling = False
        refreshes_itself(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own; as in ``torch.optim``.

        Raises:
            ConfigError: a parameter that is no matrix, hyperparameters out of range, or options that AdamW has not.
        """
        group = dict(param_group)
        group["use_muon"] = bool(group.get("use_muon", True))
        if group["use_muon"]:
            group["view"] = MatrixView.of(group.get("view")).to_plain()
        defaults = self._muon_defaults if group["use_muon"] else self._adamw_defaults
        for name, value in defaults.items():
            group.setdefault(name, value)
        _check_group(group)
        super().add_param_group(group)
        added = self.param_groups[-1]
        if added["use_muon"]:
            for parameter in added["params"]:
                _blocks_of(parameter, added)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None) -> Any:
        """Take one step; parameters whose ``.grad`` is None are left alone. All ranks call it.

        Args:
            closure: computes and returns the loss, with gradients enabled.
            max_norm: as in ``AdamW.step``. None: the constructor's.
        Returns:
            What the closure returned, else None.
        """
        loss = loss_of(closure)
        binding = self._bound()
        gradients = _Gradients(binding)
        factor = self._clip_factor(gradients, max_norm)
        if not self._may_step(gradients):
            return loss
        stepped = [each.group for each in (*binding.matrices, *binding.moments) if each.group is not None]
        announce_step(stepped)
        rows = Rows(self.param_groups)
        others = functools.partial(self._step_others, gradients, rows, factor)
        self._step_matrices(binding, gradients, rows.clip_on, factor, others)
        for group, _ in gradients.matrices:
            group.settle()
        for moments, _ in gradients.moments:
            moments.settle()
        return loss

    def _step_matrices(
        self,
        binding: _Binding,
        gradients: _Gradients,
        clip_on: Callable[[torch.Tensor | None, torch.device], torch.Tensor | None],
        factor: torch.Tensor | None,
        meanwhile: Callable[[], None],
    ) -> None:
        """Step all that Muon steps; ``meanwhile`` runs while the first matrices are under way."""
        rows = StepRows(self.param_groups, binding.factors)
        found = {id(group): gradient for group, gradient in gradients.matrices}
        waiting = [meanwhile]
        for domain in binding.domains:
            present = [found.get(id(group)) for group in domain.groups]
            if all(gradient is None for gradient in present):
                continue
            flats = []
            for group, gradient in zip(domain.groups, present, strict=True):
                flat = group.first.local_buffer.new_empty(0, dtype=self.options.message_dtype)
                flat = flat.new_zeros(group.first.local_buffer.numel())
                if gradient is not None:
                    group.adopt(self.state, gradient.present)
                    group.prepare(gradient, flat, rows, clip_on(factor, flat.device))
                flats.append(flat)
            # Collectives and products run where compute does, which is elsewhere for offloaded weights.
            there = [flat.to(group.device) for group, flat in zip(domain.groups, flats, strict=True)]
            domain.exchange.run(there, lambda: waiting.pop()() if waiting else None)
            self.num_orthogonalized += domain.exchange.num_owned
            flats = [whole.to(flat.device) for whole, flat in zip(there, flats, strict=True)]
            for group, gradient, flat in zip(domain.groups, present, flats, strict=True):
                if gradient is not None:
                    group.apply(flat, gradient.present, rows)
        if waiting:
            meanwhile()
        for plain in binding.plain_matrices:
            if plain.parameter.grad is not None:
                self._step_plain(plain, factor)

    def _step_others(self, gradients: _Gradients, rows: Rows, factor: torch.Tensor | None) -> None:
        """Step all that AdamW steps."""
        updates: list[Update] = []
        for group, gradient in gradients.matrices:
            updates += group.adamw_updates(gradient, rows.number)
        adopt_together([(moments, gradient.present) for moments, gradient in gradients.moments], self.state)
        updates += [group_update(moments, gradient, rows) for moments, gradient in gradients.moments]
        for plain, values in gradients.others:
            updates.append(plain_update(plain, values, self.state, rows, self.moments_dtype))
        for update in updates:
            update.run(rows, factor)

    def _step_plain(self, plain: _PlainMatrices, factor: torch.Tensor | None) -> None:
        """Step a parameter that is whole on this rank and belongs to no sharded module."""
        parameter, group = plain.parameter, self.param_groups[plain.group]
        gradient = parameter.grad
        assert gradient is not None
        values = self.state.setdefault(parameter, {})
        if MOMENTUM not in values:
            values[MOMENTUM] = torch.zeros_like(parameter, dtype=self.moments_dtype).detach()
        kept = values[MOMENTUM]
        gradient = gradient.to(kept.dtype)
        if factor is not None:
            gradient = gradient * factor.to(gradient)
        mu = float(group["momentum"])
        kept.lerp_(gradient, 1 - mu)
        seen = gradient.lerp(kept, mu) if group["nesterov"] else kept
        lr = float(group["lr"])
        parameter.mul_(1 - lr * group["weight_decay"])
        width = parameter.shape[-1]
        seen, target = seen.to(self.options.message_dtype).reshape(-1, width), parameter.view(-1, width)
        for block, ratio in plain.blocks:
            columns = slice(block.first_column, block.last_column)
            matrix = torch.cat([seen[start:stop, columns] for start, stop in block.row_ranges])
            work = MatrixWork(f"plain parameter {plain.number}", block, ())
            update = plain.solver(matrix[None].to(plain.solver.dtype, copy=True), [work])[0].to(seen.dtype)
            self.num_orthogonalized += 1
            sizes = [stop - start for start, stop in block.row_ranges]
            for (start, stop), piece in zip(block.row_ranges, update.split(sizes), strict=True):
                target[start:stop, columns].add_(piece, alpha=-(lr * ratio))

    # ------------------------------------------------------------------ state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of ``torch.optim.Muon`` over the same parameters, sharded or whole.

        Every rank calls it: state that PyTorch cut in other places is brought into the parameters' rows.

        Raises:
            ConfigError: a parameter's state is another optimizer's.
        """
        structure = [{key: group[key] for key in _STRUCTURE if key in group} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, kept in zip(self.param_groups, structure, strict=True):
            group.update(kept)
            defaults = self._muon_defaults if group["use_muon"] else self._adamw_defaults
            for name, value in defaults.items():
                group.setdefault(name, value)
        binding = self._bound()
        for matrices in binding.matrices:
            matrices.adopt_all(self.state)
        adopt_together([(moments, moments.held(self.state)) for moments in binding.moments], self.state)

    # ------------------------------------------------------------------ where parameters live

    def domains(self) -> tuple[Domain, ...]:
        """Return the matrices that are shared out, by the ranks that share them; all ranks call it."""
        return self._bound().domains

    def _bound(self) -> _Binding:
        """Return where the parameters live and who owns them, found anew when param groups have changed."""
        parameters = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        flags = tuple(_flags(group) for group in self.param_groups)
        if self._binding is None or not self._binding.fits(parameters, flags):
            self._binding = _bind(self.param_groups, self.options, self.solver_of, flags, parameters)
        return self._binding

    def solver_of(self, group: Mapping[str, Any]) -> Solver:
        """Return what owners do with the matrices of a param group."""
        steps = coefficients(group["ns_coefficients"], int(group["ns_steps"]))
        return Iteration(steps, float(group["eps"]), self.options.ns_dtype)


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
        ranks: who. groups: the parameter groups that they are in. exchange: the redistribution of a step.
    """

    ranks: OwnerRanks
    groups: tuple[MatrixGroup, ...]
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class _PlainMatrices:
    """A parameter of Muon's that no sharded module owns, the how manieth, with its matrices and their factors."""

    parameter: torch.Tensor
    group: int
    number: int
    blocks: tuple[tuple[MatrixBlock, float], ...]
    solver: Solver


@dataclass(frozen=True, slots=True)
class _Binding(Home):
    """Where the parameters of an optimizer live, and the hyperparameters that decided how.

    Attributes:
        matrices: groups with matrices. moments: sharded groups without. domains: the former, by their ranks.
        plain_matrices, plain: parameters that are not sharded. factors: see ``StepRows``.
    """

    matrices: tuple[MatrixGroup, ...]
    moments: tuple[GroupMoments, ...]
    domains: tuple[Domain, ...]
    plain_matrices: tuple[_PlainMatrices, ...]
    plain: tuple[PlainParameter, ...]
    factors: tuple[tuple[int, float], ...]


class _Gradients(Gradients[GroupGradients]):
    """What one step reads: all gradients, and those of groups with matrices, of groups without, and of AdamW's rest."""

    def __init__(self, binding: _Binding) -> None:
        matrices = [PlainParameter(each.parameter, each.group, False) for each in binding.plain_matrices]
        super().__init__((*binding.matrices, *binding.moments), (*binding.plain, *matrices))
        self.matrices = [(group, found) for group, found in self.groups if isinstance(group, MatrixGroup)]
        self.moments = [(group, found) for group, found in self.groups if isinstance(group, GroupMoments)]
        self.others = [pair for pair in self.plain if any(pair[0] is each for each in binding.plain)]


def _flags(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what of a param group decides the binding."""
    if not group["use_muon"]:
        return (len(group["params"]),)
    names = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "extra_scale_factor")
    return (len(group["params"]), repr(group["view"]), *(repr(group[name]) for name in names))


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
    """Return a parameter's matrices, each with the factor of its learning rate.

    Raises:
        ConfigError: it is no matrix, or is sharded in a way that leaves no rank a whole one.
    """
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


class _Factors:
    """Numbers the rows of ``StepRows.apply`` as they are asked for."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, float], int] = {}

    def row(self, group: int, factor: float) -> int:
        return self.numbers.setdefault((group, factor), len(self.numbers))


def _bind(
    param_groups: Sequence[dict[str, Any]],
    options: MuonOptions,
    solver_of: Callable[[Mapping[str, Any]], Solver],
    flags: tuple[Any, ...],
    parameters: Sequence[torch.Tensor],
) -> _Binding:
    number_of = {id(parameter): number for number, group in enumerate(param_groups) for parameter in group["params"]}
    owners: dict[int, ParameterGroup] = {}
    plain: list[PlainParameter] = []
    plain_matrices: list[_PlainMatrices] = []
    for parameter in parameters:
        number = number_of[id(parameter)]
        group, owner = param_groups[number], group_of_parameter(parameter)
        if owner is not None:
            owners[id(owner)] = owner
        elif group["use_muon"]:
            blocks = _blocks_of(parameter, group)
            plain_matrices.append(_PlainMatrices(parameter, number, len(plain_matrices), blocks, solver_of(group)))
        else:
            plain.append(PlainParameter(parameter, number, False))
    factors = _Factors()
    matrices: list[MatrixGroup] = []
    moments: list[GroupMoments] = []
    for owner in owners.values():
        params = tuple(owner.parameters.values())
        members = tuple(number_of.get(id(param), ABSENT) for param in params)
        found = {
            index: MatrixMember(member, _blocks_of(params[index], param_groups[member]))
            for index, member in enumerate(members)
            if member != ABSENT and param_groups[member]["use_muon"]
        }
        if found:
            matrices.append(MatrixGroup(owner, members, found, factors.row, options.moments_dtype))
        else:
            moments.append(GroupMoments(owner, members, options.moments_dtype, is_capturable=False))
    domains = tuple(_domains(matrices, [solver_of(g) if g["use_muon"] else None for g in param_groups], options))
    order = tuple(factors.numbers)
    kept = (tuple(matrices), tuple(moments), domains, tuple(plain_matrices), tuple(plain))
    return _Binding(tuple(parameters), flags, *kept, order)


def _domains(
    matrices: Sequence[MatrixGroup], solvers: Sequence[Solver | None], options: MuonOptions
) -> Iterator[Domain]:
    by_ranks: dict[tuple[int, int], tuple[OwnerRanks, list[MatrixGroup]]] = {}
    for each in matrices:
        owner = each.group
        assert owner is not None
        ranks = owner_ranks(owner.main_weight, shares_replicas=options.share_replicas)
        by_ranks.setdefault((id(ranks.shards), id(ranks.replicas)), (ranks, []))[1].append(each)
    for ranks, members in by_ranks.values():
        works: list[MatrixWork] = []
        sources: list[Source] = []
        for flat, each in enumerate(members):
            for work, source in _works(each, flat, ranks, solvers):
                works.append(work)
                sources.append(source)
        ownership = plan_ownership(works, ranks.num_shards, ranks.num_replicas)
        bucket_numel = max(options.bucket_bytes // options.message_dtype.itemsize, 1)
        yield Domain(ranks, tuple(members), Exchange(ownership, sources, ranks, bucket_numel))


def _works(
    each: MatrixGroup, flat: int, ranks: OwnerRanks, solvers: Sequence[Solver | None]
) -> Iterator[tuple[MatrixWork, Source]]:
    owner = each.group
    assert owner is not None
    plan, names = owner.plan, tuple(owner.parameters)
    for index, member in each.matrices.items():
        solver = solvers[member.group]
        assert solver is not None
        num_steps = len(solver.coefficients) if isinstance(solver, Iteration) else 5
        holders = holders_of(plan.offsets[index], plan.tensor_numel(index), plan.numel // ranks.num_shards)
        name = f"{owner.name}.{names[index]}"
        for block, _ in member.blocks:
            held = tuple(holder for holder in holders if block.overlap(holder[1]))
            work = MatrixWork(name, block, held, num_steps)
            yield work, Source(flat, each.base(index), each.held(index), solver)
