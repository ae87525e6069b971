"""Search for ``--fit``: find the setups that fit the accelerators' memory, and the fastest of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dbuffer.errors import LayoutError
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import Table, counted, format_bytes
from megatron_fsdp.planning.cost_model import StepTime, predict_step
from megatron_fsdp.planning.estimate import Projection, Setup, memory_of, play_setup, project
from megatron_fsdp.planning.model_source import Subject
from megatron_fsdp.planning.options import Options
from megatron_fsdp.planning.plan_arguments import HYBRID, STRATEGIES
from megatron_fsdp.planning.played_step import PlayedStep
from megatron_fsdp.planning.transformer import Workload

__all__ = ["fit_tables", "search"]

# Default number of sequences per rank and step; rows of the table of fitting setups.
_PER_RANK, _ROWS = 8, 12
# The strategies with sharded resting weights, which a low-precision gather requires.
_PACKED = ("optim_grads_params", "hsdp")
# With this many layers, the middle layers of both halves behave as in a deep model: gathers run two layers ahead,
# reductions two behind.
_FEW = 8


def search(
    subject: Subject, options: Options, progress: Callable[[str], None] = lambda _: None
) -> tuple[Projection | None, dict[str, Any]]:
    """Try strategies, meshes, micro-batch sizes and recomputation; options that the user gave are kept.

    All setups train on the same number of sequences per step, so that their step times compare. ``progress`` is called
    with a line of text before each sharding is tried.

    Returns:
        The plan of the fastest setup that fits, or None, and the results as plain data (docs/planning.md).

    Raises:
        ConfigError: the number of ranks is missing, or does not divide the batch.
    """
    limit_bytes, num_ranks = options["fit"], _num_ranks(options)
    per_rank = _sequences_per_rank(options, num_ranks)
    workloads = list(_workloads(subject, options, per_rank))
    shardings = list(_shardings(options, num_ranks))
    counts = sorted({each.num_microbatches for each in workloads})
    models, times = _models(subject, options)
    found: list[tuple[Setup, dict[str, Any]]] = []
    rejected: list[dict[str, Any]] = []
    for number, (strategy, mesh) in enumerate(shardings, start=1):
        sizes = "x".join(map(str, mesh))
        progress(f"trying {number} of {len(shardings)}: {strategy} on {sizes}")
        place = {"strategy": strategy, "mesh": list(mesh)}
        setups = [options.setup(mesh, strategy, workload) for workload in workloads]
        try:
            steps = [play_setup(each, setups[0], counts) for each in models]
        except LayoutError as error:
            rejected.append({**place, "memory_bytes": 0, "reason": f"no layout: {str(error).partition('. ')[0]}"})
            continue
        tried = [(setup, memory_of(subject, setup, steps, times)) for setup in setups]
        # Only setups that fit are timed, because timing takes longer than counting memory.
        fits = [(setup, memory) for setup, memory in tried if sum(memory.values()) <= limit_bytes]
        found += [(setup, {**place, **_plain(setup, memory, _time(setup, steps, times))}) for setup, memory in fits]
        if not fits:
            setup, memory = min(tried, key=lambda each: sum(each[1].values()))
            reason = _reason(setup.workload, memory, limit_bytes)
            rejected.append({**place, "memory_bytes": sum(memory.values()), "reason": reason})
    found.sort(key=lambda each: (each[1]["step_seconds"], each[1]["memory_bytes"]))
    plain = {
        "limit_bytes": limit_bytes,
        "num_ranks": num_ranks,
        "sequences_per_step": per_rank * num_ranks,
        "num_tried": len(shardings) * len(workloads),
        "counts_activations": subject.transformer is not None or options.given("activation_bytes"),
        "fitting": [each for _, each in found],
        "rejected": rejected,
    }
    best = project(subject, found[0][0]) if found else None
    assert best is None or best.memory_bytes == found[0][1]["memory_bytes"], "all layers take other memory than told"
    return best, plain


def fit_tables(found: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of the fastest setups that fit, and a table of why the others do not."""
    fitting, limit = found["fitting"], format_bytes(found["limit_bytes"])
    unknown = "" if found["counts_activations"] else "; activations are not known and not counted"
    verb = "fits" if found["num_tried"] == 1 else "fit"
    title = (
        f"{len(fitting):,} of {counted(found['num_tried'], 'setup')} {verb} {limit} on "
        f"{counted(found['num_ranks'], 'rank')}, {counted(found['sequences_per_step'], 'sequence')} per step{unknown}"
    )
    # The rate of one rank, as in the plan below the table; the ranks train on different sequences.
    renamed = {"tokens_per_second": "tokens/s and rank"}
    yield Table.of([{renamed.get(key, key): each[key] for key in each} for each in fitting[:_ROWS]], title)
    yield Table.of(found["rejected"], "what does not fit")


def _models(subject: Subject, options: Options) -> tuple[tuple[Subject, ...], int]:
    """Return the models to run, and how many layers to extrapolate.

    If layers are alike, these are the model with a few layers and with one layer more; otherwise the whole model and 0.
    ``--reduction`` needs the whole model, because its sums are held in an order that differs for each layer.
    """
    few, more = (subject.shortened(number) for number in (_FEW, _FEW + 1))
    if few is None or more is None or options.given("reduction"):
        return (subject,), 0
    return (few, more), (len(subject.blocks) - len(few.blocks)) // (len(more.blocks) - len(few.blocks))


def _time(setup: Setup, steps: Sequence[PlayedStep], times: int) -> StepTime:
    found = [predict_step(each, setup.workload, setup.hardware) for each in steps]
    return found[0].extended(found[-1], times)


def _plain(setup: Setup, memory: Mapping[str, int], time: StepTime) -> dict[str, Any]:
    workload = setup.workload
    return {
        "micro_batch": workload.micro_batch,
        "num_microbatches": workload.num_microbatches,
        "recompute": workload.recompute,
        "memory_bytes": sum(memory.values()),
        "step_seconds": time.total,
        "exposed_seconds": time.exposed,
        "tokens_per_second": workload.num_microbatches * workload.tokens / time.total,
    }


def _num_ranks(options: Options) -> int:
    gpus, mesh = options["gpus"], options["mesh"]
    if gpus is None and mesh is None:
        raise ConfigError("--fit needs --gpus N, the number of ranks. fix: add --gpus N, or --mesh to keep one mesh")
    if mesh is not None and gpus not in (None, math.prod(mesh)):
        raise ConfigError(
            f"--gpus {gpus} contradicts --mesh {'x'.join(map(str, mesh))}, which has {math.prod(mesh)} ranks. fix: "
            "leave out one of them"
        )
    return int(gpus) if mesh is None else math.prod(mesh)


def _sequences_per_rank(options: Options, num_ranks: int) -> int:
    batch = options["global_batch"]
    if batch is None:
        given = options.given("micro_batch") and options.given("num_microbatches")
        product: int = options["micro_batch"] * options["num_microbatches"]
        return product if given else math.lcm(_PER_RANK, product)
    if batch % num_ranks:
        raise ConfigError(
            f"--global-batch {batch} is no multiple of the {num_ranks} ranks. fix: --global-batch "
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
            f"{per_rank} sequences per rank and step cannot be split with --micro-batch {base.micro_batch} and "
            f"--num-microbatches {base.num_microbatches}. fix: change --global-batch, or leave one of them out"
        )
    kinds = [base.recompute]
    if not options.given("recompute") and subject.transformer is not None and not options.given("activation_bytes"):
        kinds = ["none", "full"]
    for size, recompute in itertools.product(sizes, kinds):
        yield replace(base, micro_batch=size, num_microbatches=per_rank // size, recompute=recompute)


def _shardings(options: Options, num_ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    given, mesh = options["strategy"], options["mesh"]
    splits = [(num_ranks // inner, inner) for inner in range(2, num_ranks) if num_ranks % inner == 0]
    for strategy in (given,) if given else _PACKED if options.given("gather_dtype") else STRATEGIES:
        if mesh is not None:
            # On two axes, ZeRO-3 with replicas is the same as hsdp, and hybrid strategies need two axes.
            is_twin = not given and strategy == "optim_grads_params" and len(mesh) == 2
            if not is_twin and (given or len(mesh) == 2 or strategy not in HYBRID):
                yield strategy, mesh
        else:
            yield from ((strategy, sizes) for sizes in (splits if strategy in HYBRID else [(num_ranks,)]))


def _reason(work: Workload, memory: Mapping[str, int], limit_bytes: int) -> str:
    total, parts = sum(memory.values()), sorted(memory.items(), key=lambda part: -part[1])[:2]
    largest = " and ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    return (
        f"at least {format_bytes(total)}, {format_bytes(total - limit_bytes)} too much, with micro-batch "
        f"{work.micro_batch} and recompute {work.recompute}: {largest}"
    )
