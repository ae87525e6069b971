"""Turn the options of ``megatron-fsdp plan`` into the setup to plan for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dbuffer import Partial, Replicate
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.cost_model import Hardware
from megatron_fsdp.planning.estimate import Setup
from megatron_fsdp.planning.model_source import Subject, factory_subject, file_subject, named_subject
from megatron_fsdp.planning.parallelism import Parallelism
from megatron_fsdp.planning.plan_arguments import DEFAULTS, HYBRID
from megatron_fsdp.planning.stand_in import Axes, Axis, Sharding
from megatron_fsdp.planning.transformer import Workload
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements

__all__ = ["Options", "mesh_axes_of", "placements_of"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_PARALLELISM = ("world", "tp", "ep", "etp", "pp", "cp", "sequence_parallel", "stage")
_OF_SEARCH = ("gpus", "global_batch")
_AXES = {1: ("dp",), 2: ("outer", "inner")}


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed options. An option that the user did not give returns its default, and ``given`` tells so."""

    values: argparse.Namespace

    def given(self, name: str) -> bool:
        """Return whether the user gave an option, by its attribute name."""
        return getattr(self.values, name) is not None

    def __getitem__(self, name: str) -> Any:
        if self.given(name):
            return getattr(self.values, name)
        return "bf16" if name == "main_grads_dtype" and self.values.split_main_params else DEFAULTS.get(name)

    def check(self) -> None:
        """Raise ConfigError if options of ``--fit`` and of a single plan are combined."""
        if self.given("fit"):
            for name in filter(self.given, _OF_PARALLELISM):
                raise ConfigError(
                    f"{_flag(name)} is not searched over: --fit only tries data-parallel meshes. fix: leave --fit out, "
                    "and compare the totals of the plans"
                )
        for name in () if self.given("fit") else filter(self.given, _OF_SEARCH):
            raise ConfigError(f"{_flag(name)} {self[name]} belongs to --fit SIZE. fix: add --fit, or leave it out")

    def subject(self) -> Subject:
        """Return the model that the options name. ConfigError: not exactly one is named, or it cannot be found."""
        named = [name for name in ("model", "hf_config", "factory") if self.given(name)]
        if len(named) != 1:
            found = " and ".join(map(_flag, named)) or "none"
            raise ConfigError(f"found {found}. fix: give exactly one of --model, --hf-config and --factory")
        classes = self["unit_class"] or ()
        if classes and named != ["factory"]:
            raise ConfigError(
                f"--unit-class {classes[0]} belongs to --factory. fix: leave it out; catalog models have units"
            )
        if named == ["factory"]:
            return factory_subject(self["factory"], tuple(classes))
        return named_subject(self["model"]) if named == ["model"] else file_subject(self["hf_config"])

    def policy(self) -> MixedPrecisionPolicy:
        """Return the mixed-precision policy."""
        return MixedPrecisionPolicy(
            _DTYPES[self["dtype"]],
            _DTYPES[self["reduce_dtype"]],
            main_params_dtype=_DTYPES[self["main_dtype"]],
            main_grads_dtype=_DTYPES[self["main_grads_dtype"]],
            split_main_params=bool(self["split_main_params"]),
            moments="int8" if self["moments_dtype"] == "int8" else None,
            gather_dtype=self["gather_dtype"],
            reduction=self["reduction"] or "default",
        )

    def workload(self) -> Workload:
        """Return the work of one rank in a step."""
        return Workload(
            micro_batch=self["micro_batch"],
            sequence_length=self["seq_length"],
            num_microbatches=self["num_microbatches"],
            recompute=self["recompute"],
            context_ranks=self.parallelism().context,
        )

    def parallelism(self) -> Parallelism:
        """Return the tensor, expert, context and pipeline parallelism."""
        tensor, expert, pipeline, context = (self[name] or 1 for name in ("tp", "ep", "pp", "cp"))
        return Parallelism(tensor, expert, pipeline, context, self["etp"] or 0, bool(self["sequence_parallel"]))

    def data_parallel_sizes(self) -> tuple[int, ...]:
        """Return the data-parallel mesh of dense weights: ``--mesh``, or the ranks that ``--world`` leaves.

        ConfigError: neither or both are given, or the parallel sizes do not divide the ranks.
        """
        mesh: tuple[int, ...] | None = self["mesh"]
        if mesh is None and not self.given("world"):
            raise ConfigError(
                "--mesh is missing. fix: give the data-parallel ranks, such as --mesh 64 or --mesh 8x128, or all "
                "ranks, such as --world 2048 --pp 16"
            )
        if mesh is None:
            return (self.parallelism().data_ranks(self["world"]),)
        if self.given("world"):
            raise ConfigError(
                f"--world {self['world']} contradicts --mesh {'x'.join(map(str, mesh))}. fix: give one of them"
            )
        return mesh

    def setup(self, sizes: tuple[int, ...], strategy: str, workload: Workload) -> Setup:
        """Return the setup of a mesh, a strategy and a workload.

        ConfigError: strategy and mesh do not fit together, or an option contradicts the mesh.
        """
        axes, parallelism = mesh_axes_of(sizes), self.parallelism()
        expert_axes = _expert_axes(axes, parallelism) if parallelism.is_any else None
        measured = self["activation_bytes"]
        return Setup(
            strategy,
            Sharding(axes, placements_of(strategy, sizes), self.policy(), expert_axes),
            workload,
            self._hardware(axes, expert_axes, parallelism),
            _DTYPES.get(self["moments_dtype"]),
            measured and measured * workload.micro_batch,
            self["reserve"],
            parallelism,
        )

    def _hardware(self, axes: Axes, expert_axes: Axes | None, parallelism: Parallelism) -> Hardware:
        """Return the links of all axes. Ranks are ordered tp, cp, ep, dp, pp, neighbours first, as in Megatron-LM."""
        rates = tuple(self["bandwidth"] or ())
        if rates and len(rates) not in (1, len(axes)):
            raise ConfigError(
                f"--bandwidth has {len(rates)} values, --mesh {len(axes)} axes. fix: give one per axis, or one for all"
            )
        rates *= 1 if len(rates) == len(axes) else len(axes)
        # Fields of Hardware have the names of their options.
        names = (each.name for each in fields(Hardware) if hasattr(self.values, each.name))
        machine = Hardware(**{name: self[name] for name in names if self.given(name)})
        stride, within = parallelism.tensor, parallelism.ranks_of_expert * parallelism.expert
        links = {}
        for axis, rate in zip(reversed(axes), reversed(rates or [None] * len(axes)), strict=True):
            links[axis.name] = machine.link(axis.size, stride, rate)
            stride *= axis.size
        if expert_axes is not None:
            links[expert_axes[-1].name] = machine.link(expert_axes[-1].size, within, rates[-1] if rates else None)
        for name, size, between in (
            ("tp", parallelism.tensor, 1),
            ("cp", parallelism.context, parallelism.tensor),
            ("ep", parallelism.expert, parallelism.ranks_of_expert),
            ("pp", parallelism.pipeline, stride),
        ):
            if size > 1:
                links[name] = machine.link(size, between)
        return replace(machine, links=links)

    def strategy_for(self, sizes: Sequence[int]) -> str:
        """Return the given strategy, or the default for a mesh."""
        return self["strategy"] or ("hsdp" if len(sizes) == 2 else "optim_grads_params")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def mesh_axes_of(sizes: Sequence[int]) -> Axes:
    """Return the axes of a mesh (``dp``, or ``outer`` and ``inner``) as its first rank sees them."""
    return tuple(Axis(name, size, 0) for name, size in zip(_AXES[len(sizes)], sizes, strict=True))


def _expert_axes(axes: Axes, parallelism: Parallelism) -> Axes | None:
    """Return the axes over which an expert's weights are sharded; None if they are the same as for dense weights."""
    *outer, inner = axes
    size = parallelism.expert_data_ranks(inner.size)
    return None if size == inner.size else (*outer, Axis(f"expert {inner.name}", size, 0))


def placements_of(strategy: str, sizes: Sequence[int]) -> Placements:
    """Return the placements of a strategy. A non-hybrid strategy on two axes replicates over the outer one.

    ConfigError: a hybrid strategy on one axis.
    """
    if strategy in HYBRID:
        if len(sizes) != 2:
            width = next((size for size in (8, 4, 2) if sizes[0] > size and sizes[0] % size == 0), sizes[0])
            raise ConfigError(
                f"--strategy {strategy} shards over two axes, --mesh {sizes[0]} has one. fix: --mesh OUTERxINNER, "
                f"such as --mesh {sizes[0] // width}x{width}"
            )
        return Placements.hsdp(0, 1) if strategy == "hsdp" else Placements.hfsdp(0, 1)
    inner: Placements = getattr(Placements, strategy)(len(sizes) - 1)
    if len(sizes) == 1:
        return inner
    parts = ((Replicate(), *inner.parameter), (Partial("sum"), *inner.gradient), (Replicate(), *inner.optimizer))
    return Placements((0, 1), *parts)
