"""What the options of ``megatron-fsdp plan`` mean: the setup to plan for, and who chose it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dbuffer import Partial, Replicate
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.cost_model import Hardware, Machine
from megatron_fsdp.planning.estimate import Setup
from megatron_fsdp.planning.from_shapes import Sharding
from megatron_fsdp.planning.model_source import Subject, factory_subject, file_subject, named_subject
from megatron_fsdp.planning.model_spec import AxisFacts
from megatron_fsdp.planning.parallelism import Parallelism
from megatron_fsdp.planning.plan_arguments import DEFAULTS, HYBRID, STRATEGIES
from megatron_fsdp.planning.transformer import Recompute, Workload
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements

__all__ = ["Options", "placements_of"]

_PACKED = ("optim_grads_params", "hsdp")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MACHINE = Machine()
_RECOMPUTED = {
    Recompute.NONE: "activations are kept for backward",
    Recompute.SELECTIVE: "backward computes attention scores again",
    Recompute.FULL: "backward computes each layer again from its input",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed options; what was not given has its default, and is known as such."""

    values: argparse.Namespace

    def given(self, name: str) -> bool:
        """Whether an option was given, by its attribute's name."""
        return getattr(self.values, name) is not None

    def cause(self, name: str) -> str:
        """Return an option as it would be written, and whether it is a default."""
        flag = "--" + name.replace("_", "-")
        value = getattr(self.values, name)
        text = flag if isinstance(value, bool) else f"{flag} {self[name]}"
        return text if self.given(name) else f"{text} (default)"

    def choice(self, name: str, value: object) -> str:
        """Return an option that a search may have chosen, and who chose it."""
        source = "" if self.given(name) else " (found by --fit)" if self.values.fit is not None else " (default)"
        return f"--{name.replace('_', '-')} {value}{source}"

    def __getitem__(self, name: str) -> object:
        value = getattr(self.values, name)
        if value is None and name == "main_grads_dtype" and self.values.split_main_params:
            return "bf16"
        return DEFAULTS.get(name) if value is None else value

    def subject(self) -> Subject:
        """Return the model that the options name.

        Raises:
            ConfigError: none or several are named, or it cannot be found.
        """
        args = self.values
        named = [flag for flag in ("model", "hf_config", "factory") if self.given(flag)]
        if len(named) != 1:
            found = " and ".join("--" + flag.replace("_", "-") for flag in named) or "none"
            raise ConfigError(f"found {found}; give exactly one of --model, --hf-config and --factory")
        if args.unit_class and not args.factory:
            raise ConfigError(
                f"--unit-class {args.unit_class[0]} belongs to --factory; catalog models have their units"
            )
        if args.model:
            return named_subject(args.model)
        if args.hf_config:
            return file_subject(args.hf_config)
        return factory_subject(args.factory, tuple(args.unit_class))

    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes."""
        compute, main, reduce, grads = (
            _DTYPES[str(self[name])] for name in ("dtype", "main_dtype", "reduce_dtype", "main_grads_dtype")
        )
        is_split = bool(self["split_main_params"])
        moments = "int8" if self.values.moments_dtype == "int8" else None
        if moments and self["optimizer"] != "adamw":
            raise ConfigError(f"--moments-dtype int8 needs --optimizer adamw (found {self['optimizer']})")
        return MixedPrecisionPolicy(
            compute,
            reduce,
            main_params_dtype=main,
            main_grads_dtype=grads,
            split_main_params=is_split,
            moments=moments,
            gather_dtype=self.values.gather_dtype,
            reduction=self.values.reduction,
        )

    def moments_dtype(self) -> torch.dtype | None:
        """Return the dtype of AdamW's moments, None for that of the main weights."""
        return _DTYPES.get(self.values.moments_dtype)

    def workload(self) -> Workload:
        """Return what a rank computes."""
        return Workload(
            micro_batch=int(str(self["micro_batch"])),
            sequence_length=int(str(self["seq_length"])),
            num_microbatches=int(str(self["num_microbatches"])),
            recompute=Recompute(self["recompute"]),
            fused_attention=self["attention"] == "fused",
            dropout=bool(self["dropout"]),
            context_ranks=self.parallelism().context,
        )

    def parallelism(self) -> Parallelism:
        """Return how the model is divided besides the data-parallel ranks."""
        args = self.values
        return Parallelism(
            args.tp or 1, args.ep or 1, args.pp or 1, args.cp or 1, args.etp or 0, bool(args.sequence_parallel)
        )

    def data_parallel_sizes(self) -> tuple[int, ...]:
        """Return the mesh of dense weights: ``--mesh``, or what ``--world`` leaves of the ranks.

        Raises:
            ConfigError: none or both are given, or sizes that do not divide the ranks.
        """
        mesh, world = self.values.mesh, self.values.world
        if (mesh is None) == (world is None):
            if mesh is not None:
                raise ConfigError(f"--world {world} contradicts --mesh {'x'.join(map(str, mesh))}; give one of them")
            raise ConfigError(
                "--mesh is missing: give the data-parallel ranks, such as --mesh 64 or --mesh 8x128, or all ranks, "
                "such as --world 2048 --pp 16"
            )
        if world is None:
            sizes: tuple[int, ...] = mesh
            return sizes
        return (self.parallelism().data_ranks(world),)

    def machine(self) -> Machine:
        """Return the machine, with what was given of it."""
        args = self.values
        given = {
            "flops": args.flops,
            "memory_bytes_per_second": args.memory_bandwidth,
            "node_size": args.gpus_per_node,
            "node_bandwidth": args.node_bandwidth,
            "network_bandwidth": args.network_bandwidth,
            "network_latency": args.network_latency,
        }
        return replace(_MACHINE, **{name: value for name, value in given.items() if value is not None})

    def setup(self, sizes: tuple[int, ...], strategy: str, workload: Workload) -> Setup:
        """Return the setup of a mesh and a strategy.

        Raises:
            ConfigError: they do not go together, or the options contradict the mesh.
        """
        args = self.values
        axes = mesh_axes_of(sizes, int(str(self["rank"])))
        if args.gather_dtype and strategy not in _PACKED:
            raise ConfigError(
                f"--gather-dtype {args.gather_dtype} needs --strategy optim_grads_params or hsdp (found {strategy}): "
                "weights that rest sharded as main weights do"
            )
        bandwidths = tuple(args.bandwidth or ())
        if bandwidths and len(bandwidths) not in (1, len(axes)):
            raise ConfigError(
                f"--bandwidth has {len(bandwidths)} values, --mesh {len(axes)} axes; give one for each, or one for all"
            )
        if len(bandwidths) < len(axes):
            bandwidths *= len(axes)
        parallelism = self.parallelism()
        expert_axes = _expert_axes(axes, parallelism) if parallelism.is_any else None
        return Setup(
            strategy,
            Sharding(axes, placements_of(strategy, sizes), self.policy(), expert_axes),
            workload,
            _hardware(self.machine(), axes, expert_axes, bandwidths, parallelism),
            self.moments_dtype(),
            args.activation_bytes and args.activation_bytes * workload.micro_batch,
            int(str(self["reserve"])),
            str(self["optimizer"]),
            parallelism,
        )

    def strategies(self) -> tuple[str, ...]:
        """Return those that a search may choose from: packed gathers need weights that rest sharded."""
        return _PACKED if self.values.gather_dtype else STRATEGIES

    def strategy_for(self, sizes: Sequence[int]) -> str:
        """Return the strategy given, or the default of a mesh."""
        return self.values.strategy or ("hsdp" if len(sizes) == 2 else "optim_grads_params")

    def decisions(self, setup: Setup) -> Iterator[str]:
        """Yield one line per choice, with the option that caused it."""
        mesh = "x".join(str(axis.size) for axis in setup.sharding.axes)
        ranks = f"--world {self.values.world}" if self.given("world") else self.choice("mesh", mesh)
        yield f"{_sharded(setup)}: {self.choice('strategy', setup.strategy)}, {ranks}"
        packed = self.values.gather_dtype
        travel = f"compute in {self['dtype']}, matrices travel in {packed}" if packed else ""
        cause = f", --gather-dtype {packed}" if packed else ""
        travel = travel or f"compute and travel in {self['dtype']}"
        yield from _inside(setup)
        yield f"weights {travel}: {self.cause('dtype')}{cause}"
        split = " in two halves" if self["split_main_params"] else ""
        cause = self.cause("main_dtype") + (", --split-main-params" if split else "")
        yield f"the optimizer steps {self['main_dtype']} weights{split}: {cause}"
        yield f"gradients travel in {self['reduce_dtype']}: {self.cause('reduce_dtype')}"
        if self.values.reduction:
            yield "and are exchanged and added up one microbatch at a time, in a fixed order: --reduction invariant"
        yield f"gradients rest in {self['main_grads_dtype']}: {self.cause('main_grads_dtype')}"
        moments = self.values.moments_dtype
        yield f"moments are {moments or self['main_dtype']}: " + (
            self.cause("moments_dtype") if moments else "as main weights"
        )
        if setup.optimizer == "muon":
            yield f"Muon steps matrices, each is one rank's work: {self.cause('optimizer')}"
        work = setup.workload
        yield (
            f"{work.num_microbatches:,} x {work.micro_batch:,} sequences of {work.sequence_length:,} tokens per rank: "
            f"{self.choice('num_microbatches', work.num_microbatches)}, "
            f"{self.choice('micro_batch', work.micro_batch)}, {self.cause('seq_length')}"
        )
        yield f"{_RECOMPUTED[work.recompute]}: {self.choice('recompute', work.recompute.value)}"
        yield f"{setup.hardware.flops / 1e12:,.4g} Tflop/s: --flops" + ("" if self.given("flops") else " (default)")
        for axis, link in setup.hardware.links.items():
            cause = "--bandwidth" if self.given("bandwidth") else "from the nodes"
            yield f"axis {axis}: {link.bytes_per_second / 1e9:,.4g} GB/s, {link.latency * 1e6:,.3g} us per hop: {cause}"


def mesh_axes_of(sizes: Sequence[int], rank: int = 0) -> tuple[AxisFacts, ...]:
    """Return the axes of a mesh (``dp``, or ``outer`` and ``inner``) as one of its ranks sees them.

    Raises:
        ConfigError: the mesh has no such rank.
    """
    names = ("dp",) if len(sizes) == 1 else ("outer", "inner")
    axes, place = [], rank
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        axes.append(AxisFacts(name, size, place % size))
        place //= size
    if place or rank < 0:
        raise ConfigError(f"--rank {rank}: the mesh has {'x'.join(map(str, sizes))} ranks, counted from 0")
    return tuple(reversed(axes))


def _expert_axes(axes: tuple[AxisFacts, ...], parallelism: Parallelism) -> tuple[AxisFacts, ...] | None:
    """Return the axes over which the weights of one expert are sharded; None where they are those of all others."""
    inner = axes[-1]
    size = parallelism.expert_data_ranks(inner.size)
    if size == inner.size:
        return None
    return (*axes[:-1], AxisFacts(f"expert {inner.name}", size, inner.rank * size // inner.size))


def _hardware(
    machine: Machine,
    axes: tuple[AxisFacts, ...],
    expert_axes: tuple[AxisFacts, ...] | None,
    bandwidths: tuple[float, ...],
    parallelism: Parallelism,
) -> Hardware:
    """Return the links of all axes; ranks are ordered tp, cp, ep, dp, pp, neighbours first, as Megatron's are."""
    tensor, within = parallelism.tensor, parallelism.ranks_of_expert * parallelism.expert
    hardware = machine.hardware(axes, bandwidths, stride=tensor)
    links = dict(hardware.links)
    if expert_axes is not None:
        links |= {
            expert_axes[-1].name: machine.hardware(expert_axes, bandwidths, stride=within).links[expert_axes[-1].name]
        }
    stage_ranks = tensor * math.prod(axis.size for axis in axes)
    for name, size, stride in (
        ("tp", tensor, 1),
        ("cp", parallelism.context, tensor),
        ("ep", parallelism.expert, parallelism.ranks_of_expert),
        ("pp", parallelism.pipeline, stage_ranks),
    ):
        if size > 1:
            links |= machine.hardware((AxisFacts(name, size, 0),), stride=stride).links
    return replace(hardware, links=links)


def placements_of(strategy: str, sizes: Sequence[int]) -> Placements:
    """Return the placements of a strategy; one for a single axis keeps replicas on the outer of two.

    Raises:
        ConfigError: hybrid sharding on one axis.
    """
    if strategy in HYBRID:
        if len(sizes) != 2:
            width = next((size for size in (8, 4, 2) if sizes[0] > size and sizes[0] % size == 0), sizes[0])
            raise ConfigError(
                f"--strategy {strategy} shards over two axes, --mesh {sizes[0]} has one; write --mesh OUTERxINNER, "
                f"such as --mesh {sizes[0] // width}x{width}"
            )
        hybrid: Placements = getattr(Placements, strategy)(0, 1)
        return hybrid
    inner: Placements = getattr(Placements, strategy)(len(sizes) - 1)
    if len(sizes) == 1:
        return inner
    return Placements(
        (0, 1),
        (Replicate(), *inner.parameter),
        (Partial("sum"), *inner.gradient),
        (Replicate(), *inner.optimizer),
    )


def _inside(setup: Setup) -> Iterator[str]:
    """Yield how the model is divided besides."""
    parallelism, axes = setup.parallelism, setup.sharding.axes
    if parallelism.tensor > 1:
        shared = ", the residual stream too: --sequence-parallel" if parallelism.is_sequence_parallel else ""
        yield f"each layer is shared by {parallelism.tensor} ranks: --tp {parallelism.tensor}{shared}"
    if setup.sharding.expert_axes is not None:
        size = setup.sharding.expert_axes[-1].size
        yield (
            f"experts are shared by {parallelism.expert} ranks (--ep), each by {parallelism.ranks_of_expert} (--etp), "
            f"and sharded over {axes[-1].size} x {parallelism.tensor} / ({parallelism.expert} x "
            f"{parallelism.ranks_of_expert}) = {size:,}"
        )
    if parallelism.pipeline > 1:
        yield f"layers are divided over {parallelism.pipeline} stages: --pp {parallelism.pipeline}"
    if parallelism.context > 1:
        yield f"each sequence is shared by {parallelism.context} of the data-parallel ranks: --cp {parallelism.context}"


def _sharded(setup: Setup) -> str:
    axes, placements = setup.sharding.axes, setup.sharding.placements
    parts = []
    kinds = (("weights", placements.parameter), ("gradients", placements.gradient))
    for what, places in (*kinds, ("optimizer state", placements.optimizer)):
        over = [
            f"{axis.name} ({axis.size:,})" for axis, place in zip(axes, places, strict=True) if "Flat" in repr(place)
        ]
        parts.append(f"{what} over {' and '.join(over)}" if over else f"{what} nowhere")
    return f"sharded: {', '.join(parts)}"
