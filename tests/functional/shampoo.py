"""Shampoo over sharded weights: the owner of a matrix keeps its preconditioners, and nobody else does.

For each matrix G of m rows and n columns, ``L = mean of G G^T``, ``R = mean of G^T G`` and the update is
``L^(-1/4) G R^(-1/4)``, brought to the norm of G. Source: Gupta, Koren, Singer, "Shampoo: preconditioned stochastic
tensor optimization" (2018); exponential means and grafting to SGD as in Anil et al. (2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer.collectives_rare import broadcast
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw_state import adopt_together
from megatron_fsdp.optim.exchange import OwnerRanks
from megatron_fsdp.optim.matrix_group import MatrixGroup
from megatron_fsdp.optim.matrix_views import MatrixBlock
from megatron_fsdp.optim.muon import Domain, Muon, MuonOptions, PlainMatrices
from megatron_fsdp.optim.ownership import MatrixWork

__all__ = ["Shampoo"]

_FACTORS = ("left", "right", "left_root", "right_root")
Key = tuple[str, MatrixBlock]


class Shampoo(Muon):
    """Shampoo for matrices and AdamW for the rest, on the ownership plan of ``Muon``.

    Param groups, views, exchange, momentum (before preconditioning; none by default), clipping and ``nonfinite`` are
    those of ``Muon``. Each matrix has FP32 factors of 2 (m m + n n) elements with their roots, on its owner alone.
    ``state_dict`` gathers them to all ranks, under ``left.0``, ``right.0``, ... of their parameter by the number of the
    matrix in it, so every rank calls it; loading gives them to whoever owns the matrix then.

    Args:
        params, lr, weight_decay, momentum, nesterov, adamw, max_norm, nonfinite: as in ``Muon``.
        beta2: of the means L and R. eps: added to their eigenvalues, relative to the largest.
        frequency: steps between new roots; each takes two eigenvalue decompositions of every matrix.
        options: as in ``Muon``; everything is computed in FP32.
    Raises:
        ConfigError: numbers out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        beta2: float = 0.99,
        eps: float = 1e-6,
        frequency: int = 1,
        **others: Any,
    ) -> None:
        options = others.pop("options", None) or MuonOptions(ns_dtype=torch.float32)
        if not 0 <= beta2 < 1 or frequency < 1:
            raise ConfigError(
                f"Shampoo(beta2={beta2}, frequency={frequency}): wanted 0 <= beta2 < 1 and frequency >= 1"
            )
        self._solver = _Preconditioning(beta2, eps, frequency)
        nesterov = others.pop("nesterov", False)
        super().__init__(params, lr, weight_decay, momentum, nesterov, adjust_lr_fn="none", options=options, **others)

    def solver_of(self, group: Mapping[str, Any]) -> _Preconditioning:
        """Return what owners do with the matrices of a param group."""
        return self._solver

    def state_dict(self) -> dict[str, Any]:
        """Return the state with all preconditioners, gathered from their owners; every rank calls it."""
        groups = [group for group in self._bound().states if isinstance(group, MatrixGroup)]
        adopt_together(((each, [i in each.matrices for i in range(len(each.members))]) for each in groups), self.state)
        document: dict[str, Any] = super().state_dict()
        indices = [index for group in document["param_groups"] for index in group["params"]]
        by_parameter = dict(zip(map(id, self._parameters()), indices, strict=True))
        state = {index: dict(values) for index, values in document["state"].items()}
        for owned in self._matrices():
            factors = self._solver.factors(owned.key, owned.shape, owned.device)
            owned.share(factors)
            state.setdefault(by_parameter[id(owned.parameter)], {}).update(
                {f"{name}.{owned.number}": value for name, value in factors.items()}
            )
        return {**document, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on any number of ranks; every rank calls it."""
        super().load_state_dict(state_dict)
        for owned in self._matrices():
            values = self.state.get(owned.parameter, {})
            found = {name: values.pop(f"{name}.{owned.number}", None) for name in (*_FACTORS, "count")}
            if owned.is_mine and all(value is not None for value in found.values()):
                factors = {name: found[name].float().clone() for name in _FACTORS}
                self._solver.known[owned.key] = _Factors(**factors, count=int(found["count"]))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _matrices(self) -> Iterator[_Owned]:
        """Yield all matrices in one order on all ranks."""
        binding = self._bound()
        for domain in binding.domains:
            yield from _owned_by_ranks(domain)
        for plain in (each for each in binding.plain if isinstance(each, PlainMatrices)):
            for number, work in enumerate(plain.exchange.ownership.works):
                yield _Owned(work, number, plain.parameter, plain.parameter.device, None, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_solver": self._solver}


@dataclass(frozen=True, slots=True)
class _Owned:
    """One matrix, the how manieth of its parameter, and who has its factors; no ranks: each has its own."""

    work: MatrixWork
    number: int
    parameter: torch.Tensor
    device: torch.device
    ranks: OwnerRanks | None
    owner: int

    @property
    def key(self) -> Key:
        return self.work.name, self.work.block

    @property
    def shape(self) -> tuple[int, int]:
        return self.work.block.rows, self.work.block.columns

    @property
    def is_mine(self) -> bool:
        ranks = self.ranks
        return ranks is None or self.owner == ranks.replica * ranks.num_shards + ranks.shard

    def share(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Send the owner's factors to all ranks: within its replica, then to the others."""
        if self.ranks is None:
            return
        replica, shard = divmod(self.owner, self.ranks.num_shards)
        for value in factors.values():
            if self.ranks.shards is not None:
                broadcast(value, self.ranks.shards, shard)
            if self.ranks.replicas is not None:
                broadcast(value, self.ranks.replicas, replica)


def _owned_by_ranks(domain: Domain) -> Iterator[_Owned]:
    ownership = domain.exchange.ownership
    owned = zip(ownership.works, ownership.owners, strict=True)
    for group in domain.groups:
        owner = group.group
        faces = tuple(owner.parameters.values())
        for index, member in group.matrices.items():
            for number in range(len(member.blocks)):
                work, rank = next(owned)
                yield _Owned(work, number, faces[index], group.device, domain.exchange.ranks, rank)


@dataclass(slots=True)
class _Factors:
    """What an owner keeps of a matrix: means and their roots, FP32, and how many steps they have seen."""

    left: torch.Tensor
    right: torch.Tensor
    left_root: torch.Tensor
    right_root: torch.Tensor
    count: int


@dataclass(eq=False)
class _Preconditioning:
    """What owners do with matrices: update their factors, and apply the roots."""

    beta2: float
    eps: float
    frequency: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.known: dict[Key, _Factors] = {}

    def __call__(self, matrices: torch.Tensor, works: Sequence[MatrixWork]) -> torch.Tensor:
        results = [self._one(matrix.clone(), work) for matrix, work in zip(matrices, works, strict=True)]
        return torch.stack(results)

    def factors(self, key: Key, shape: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
        """Return copies of a matrix's factors, zeros where this rank has none."""
        found = self.known.get(key)
        sizes = (shape[0], shape[1], shape[0], shape[1])
        values = {
            name: torch.zeros(size, size, device=device) if found is None else getattr(found, name).clone()
            for name, size in zip(_FACTORS, sizes, strict=True)
        }
        return {**values, "count": torch.tensor(0.0 if found is None else float(found.count), device=device)}

    def _one(self, matrix: torch.Tensor, work: MatrixWork) -> torch.Tensor:
        key = work.name, work.block
        if key not in self.known:
            rows, columns = matrix.shape
            sizes = (rows, columns, rows, columns)
            new = (torch.zeros(size, size, device=matrix.device) for size in sizes)
            self.known[key] = _Factors(**dict(zip(_FACTORS, new, strict=True)), count=0)
        kept = self.known[key]
        kept.left.lerp_(matrix @ matrix.T, 1 - self.beta2)
        kept.right.lerp_(matrix.T @ matrix, 1 - self.beta2)
        if kept.count % self.frequency == 0:
            # Means of so few steps are too small by this factor, as in Adam.
            correction = 1 - self.beta2 ** (kept.count + 1)
            kept.left_root = self._root(kept.left / correction)
            kept.right_root = self._root(kept.right / correction)
        kept.count += 1
        update = kept.left_root @ matrix @ kept.right_root
        return update * (matrix.norm() / update.norm().clamp(min=1e-30))

    def _root(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the inverse fourth root of a symmetric matrix."""
        values, vectors = torch.linalg.eigh(mean)
        values = values.clamp(min=0) + self.eps * values[-1].clamp(min=1e-30)
        return (vectors * values.pow(-0.25)) @ vectors.T
