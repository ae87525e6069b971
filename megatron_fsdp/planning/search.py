"""Fit: which ways to train a model fit a number of accelerators, and which of them is fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dbuffer.errors import LayoutError
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import Listing, Table, format_bytes, format_seconds
from megatron_fsdp.planning.estimate import Projection, memory_of, play_setup, project
from megatron_fsdp.planning.model_source import Subject
from megatron_fsdp.planning.options import Options
from megatron_fsdp.planning.plan_arguments import HYBRID
from megatron_fsdp.planning.transformer import Recompute, Workload

__all__ = ["Rejection", "Search", "fit_dict", "fit_parts", "search"]

# Sequences of a rank and step when no batch is given; rows of the table.
_PER_RANK, _ROWS = 8, 12


@dataclass(frozen=True, slots=True)
class Rejection:
    """A strategy on a mesh with which nothing fits: what its smallest setup takes (0: none could be laid out)."""

    strategy: str
    mesh: tuple[int, ...]
    memory_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Search:
    """What was found.

    Attributes:
        fitting: the setups that fit, fastest step first. rejected: meshes and strategies of which none fits.
        num_tried: setups looked at. per_rank: sequences of a rank and step, the same for all.
        is_complete: False where activations are not known and so not counted.
    """

    limit_bytes: int
    num_ranks: int
    per_rank: int
    num_tried: int
    fitting: tuple[Projection, ...]
    rejected: tuple[Rejection, ...]
    is_complete: bool

    @property
    def best(self) -> Projection | None:
        """The fastest that fits, None when nothing does."""
        return self.fitting[0] if self.fitting else None


def search(subject: Subject, options: Options) -> Search:
    """Try strategies, splits of the ranks into a mesh, micro-batches and recomputation; options that are given stay.

    All setups train on the same number of sequences per step, so their step times compare.

    Raises:
        ConfigError: no number of ranks is given, or a batch that they do not divide.
    """
    limit_bytes, num_ranks = options["fit"], _num_ranks(options)
    per_rank = _sequences_per_rank(options, num_ranks)
    is_complete = subject.activations is not None or options.given("activation_bytes")
    workloads = list(_workloads(subject, options, per_rank))
    counts = sorted({workload.num_microbatches for workload in workloads})
    fitting: list[Projection] = []
    rejected: list[Rejection] = []
    shardings = list(_shardings(options, num_ranks))
    for strategy, sizes in shardings:
        setups = [options.setup(sizes, strategy, workload) for workload in workloads]
        try:
            played = play_setup(subject, setups[0], counts)
        except LayoutError as error:
            rejected.append(Rejection(strategy, sizes, 0, f"no layout: {str(error).partition('. ')[0]}"))
            continue
        takes = [sum(part.num_bytes for part in memory_of(subject, setup, played)) for setup in setups]
        # How long the rest would take is of no account.
        fits = [setup for setup, num_bytes in zip(setups, takes, strict=True) if num_bytes <= limit_bytes]
        fitting += [project(subject, setup, played) for setup in fits]
        if not fits:
            smallest = project(subject, setups[takes.index(min(takes))], played)
            rejected.append(Rejection(strategy, sizes, smallest.memory_bytes, _reason(smallest, limit_bytes)))
    fitting.sort(key=lambda projection: (projection.time.total, projection.memory_bytes))
    num_tried = len(shardings) * len(workloads)
    return Search(limit_bytes, num_ranks, per_rank, num_tried, tuple(fitting), tuple(rejected), is_complete)


def _num_ranks(options: Options) -> int:
    gpus, mesh = options["gpus"], options["mesh"]
    if gpus is None and mesh is None:
        raise ConfigError("--fit needs --gpus N, or a --mesh to keep")
    if mesh is not None and gpus not in (None, math.prod(mesh)):
        raise ConfigError(f"--gpus {gpus} contradicts --mesh {'x'.join(map(str, mesh))}, which has {math.prod(mesh)}")
    return int(gpus) if mesh is None else math.prod(mesh)


def _sequences_per_rank(options: Options, num_ranks: int) -> int:
    batch = options["global_batch"]
    if batch is None:
        given = options.given("micro_batch") and options.given("num_microbatches")
        product: int = options["micro_batch"] * options["num_microbatches"]
        return product if given else math.lcm(_PER_RANK, product)
    if batch % num_ranks:
        raise ConfigError(
            f"--global-batch {batch} is no multiple of the {num_ranks} ranks; the nearest is "
            f"{max(round(batch / num_ranks), 1) * num_ranks}"
        )
    return int(batch) // num_ranks


def _workloads(subject: Subject, options: Options, per_rank: int) -> Iterator[Workload]:
    base = options.workload()
    sizes = [
        size
        for size in range(1, per_rank + 1)
        if per_rank % size == 0
        and (size == base.micro_batch or not options.given("micro_batch"))
        and (per_rank // size == base.num_microbatches or not options.given("num_microbatches"))
    ]
    if not sizes:
        raise ConfigError(
            f"{per_rank} sequences per rank and step cannot be split with {options.cause('micro_batch')} and "
            f"{options.cause('num_microbatches')}; change --global-batch or leave one of them out"
        )
    kinds = [base.recompute]
    if not options.given("recompute") and subject.activations is not None and not options.given("activation_bytes"):
        kinds = [Recompute.NONE, *([] if base.fused_attention else [Recompute.SELECTIVE]), Recompute.FULL]
    for size, recompute in itertools.product(sizes, kinds):
        yield replace(base, micro_batch=size, num_microbatches=per_rank // size, recompute=recompute)


def _shardings(options: Options, num_ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    given, mesh = options["strategy"], options["mesh"]
    splits = [(num_ranks // inner, inner) for inner in range(2, num_ranks) if num_ranks % inner == 0]
    for strategy in (given,) if given else options.strategies():
        if mesh is not None:
            # On two axes ZeRO-3 with replicas is hsdp, and hybrids need two.
            is_twin = not given and strategy == "optim_grads_params" and len(mesh) == 2
            if not is_twin and (given or len(mesh) == 2 or strategy not in HYBRID):
                yield strategy, mesh
        elif strategy in HYBRID:
            yield from ((strategy, sizes) for sizes in splits)
        else:
            yield strategy, (num_ranks,)


def _reason(smallest: Projection, limit_bytes: int) -> str:
    parts = sorted(smallest.memory, key=lambda part: -part.num_bytes)[:2]
    largest = " and ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts)
    work = smallest.setup.workload
    return (
        f"at least {format_bytes(smallest.memory_bytes)}, {format_bytes(smallest.memory_bytes - limit_bytes)} too "
        f"much, with micro-batch {work.micro_batch} and recompute {work.recompute.value}: {largest}"
    )


def fit_parts(found: Search) -> Iterator[Listing | Table]:
    """Yield how many setups fit, the table of the fastest, and why the rest does not."""
    unknown = "" if found.is_complete else "; activations are not known and not counted"
    yield Listing(
        f"{len(found.fitting):,} of {found.num_tried:,} setups fit {format_bytes(found.limit_bytes)} on "
        f"{found.num_ranks:,} ranks, {found.per_rank * found.num_ranks:,} sequences per step{unknown}",
        (),
    )
    if found.fitting:
        rows: list[tuple[str, ...]] = [
            ("", "strategy", "mesh", "micro-batch", "recompute", "memory", "step", "tokens/s and rank", "not hidden")
        ]
        for number, each in enumerate(map(_fitting_dict, found.fitting[:_ROWS]), start=1):
            batches = f"{each['num_microbatches']:,} x {each['micro_batch']:,}"
            memory, step, hidden = format_bytes(each["memory_bytes"]), each["step_seconds"], each["exposed_seconds"]
            amounts = (memory, format_seconds(step), f"{each['tokens_per_second']:,.0f}", format_seconds(hidden))
            rows.append((str(number), each["strategy"], _mesh(each["mesh"]), batches, each["recompute"], *amounts))
        yield Table(rows, 3)
        if (more := len(found.fitting) - _ROWS) > 0:
            yield Listing(f"and {more:,} slower ones", ())
    if found.rejected:
        entries = [f"{each.strategy} on {_mesh(each.mesh)}: {each.reason}" for each in found.rejected]
        yield Listing("what does not fit", entries)


def _mesh(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def fit_dict(found: Search) -> dict[str, Any]:
    """Return the search as plain data; docs/planning.md describes the keys."""
    return {
        "limit_bytes": found.limit_bytes,
        "num_ranks": found.num_ranks,
        "sequences_per_step": found.per_rank * found.num_ranks,
        "num_tried": found.num_tried,
        "counts_activations": found.is_complete,
        "fitting": [_fitting_dict(each) for each in found.fitting],
        "rejected": [{**asdict(each), "mesh": list(each.mesh)} for each in found.rejected],
    }


def _fitting_dict(each: Projection) -> dict[str, Any]:
    return {
        "strategy": each.setup.strategy,
        "mesh": [axis.size for axis in each.setup.sharding.axes],
        "micro_batch": each.setup.workload.micro_batch,
        "num_microbatches": each.setup.workload.num_microbatches,
        "recompute": each.setup.workload.recompute.value,
        "memory_bytes": each.memory_bytes,
        "step_seconds": each.time.total,
        "exposed_seconds": each.time.exposed,
        "tokens_per_second": each.tokens_per_second,
    }
