"""Virtual: predicted time of forward and backward on GPUs, for this engine and for FSDP2, without a GPU.

The real code of both engines runs in this process, as rank 0 of the mesh, on virtual devices
(``megatron_fsdp.virtual``). No operator is computed and no time is measured. Each row is a prediction for H200s with
the numbers in ``benchmarks/h200.py``. The bound in each row is a minimum for any engine: the longer of compute and
communication, plus the first gather and the last reduction. ``python -m benchmarks virtual --models llama3-8b --tokens
2048 --causes 8`` also prints which units wait for which collectives.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import megatron_fsdp
from benchmarks.h200 import H200
from benchmarks.harness import Row, Samples
from benchmarks.virtual_models import MODELS, VirtualModel, make_model
from megatron_fsdp.virtual.device import virtual_device
from megatron_fsdp.virtual.playback import Playback, play
from megatron_fsdp.virtual.recording import Event, Recording, Stream

MESHES = {"8": (8,), "8x8": (64,), "hsdp 2x8": (2, 8)}
REDUCE = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The host's time of Python around a collective, in calls of operators: a third of 350 us for a unit and step of ours
# (benchmarks/RESULTS.md, "Host time"), and twice as much of FSDP2's, as benchmarks/results/host.json has it.
CALLS = {
    "ours": 24,
    "ours, 1 buffer": 24,
    "ours, 2 buffers": 24,
    "ours, prefetch of 3 GiB, 3 buffers": 24,
    "FSDP2": 50,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, meshes, tokens, dtypes and engines."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="1b: Llama 3.2's shape")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES), help="8x8: 64 in one axis")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="on each rank")
    parser.add_argument("--reduce", nargs="+", default=list(REDUCE), choices=list(REDUCE), help="dtype of the sums")
    parser.add_argument("--engines", nargs="+", default=["ours", "FSDP2"], choices=list(CALLS), help="whose code")
    parser.add_argument("--layers", type=int, help="of the model, in place of its own number")
    parser.add_argument("--causes", type=int, default=0, metavar="N", help="print the N longest waits of each row")


def run(args: argparse.Namespace) -> list[Row]:
    """Predict the time of every combination."""
    rows = []
    for model in args.models:
        for mesh in args.meshes:
            for tokens in args.tokens:
                for reduce in args.reduce:
                    setting = {"model": model, "mesh": mesh, "tokens": tokens, "sums": reduce}
                    played = {}
                    for engine in args.engines:
                        played[engine] = predict(model, mesh, tokens, reduce, engine, args.layers)
                        rows += _rows({**setting, "engine": engine}, played[engine])
                        _show({**setting, "engine": engine}, played[engine], args)
                    rows += _ratios(setting, played)
    return rows


def _ratios(setting: dict[str, str | int], played: dict[str, Playback]) -> list[Row]:
    peer = played.pop("FSDP2", None)
    metric = "predicted step over FSDP2's"
    return [
        Row(
            "virtual",
            {**setting, "engine": engine},
            metric,
            "",
            Samples((found.seconds / peer.seconds,)),
        )
        for engine, found in played.items()
        if peer is not None
    ]


def predict(model: str, mesh: str, tokens: int, reduce: str, engine: str, num_layers: int | None = None) -> Playback:
    """Return forward and backward of ``tokens`` tokens, in one sequence, on rank 0."""
    sizes = MESHES[mesh]
    parts = _fsdp2_parts() if engine == "FSDP2" else None
    with virtual_device(torch.Size(sizes).numel(), collective_calls=CALLS[engine], parts=parts) as device:
        names = ("outer", "inner")[-len(sizes) :]
        made = make_model(model, num_layers)
        with _torch_cpu_by(device.recording) if engine == "FSDP2" else contextlib.nullcontext():
            _shard(made, init_device_mesh("cpu", sizes, mesh_dim_names=names), REDUCE[reduce], engine)
            given = torch.zeros(1, tokens, dtype=torch.int64)

            def step() -> None:
                made(given).backward()
                made.zero_grad()

            recording = device.record(step)
    return play(recording.items, H200)


def _shard(model: VirtualModel, mesh: DeviceMesh, reduce: torch.dtype, engine: str) -> None:
    units = [*model.units(), model]
    if engine == "FSDP2":
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce, cast_forward_inputs=False)
        for unit in units:
            fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, shard_placement_fn=_placement(mesh))
        return
    ours = megatron_fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce, cast_forward_inputs=False)
    for unit in units:
        megatron_fsdp.fully_shard(unit, mesh, mp_policy=ours)
    root: Any = model
    for option in engine.split(", ")[1:]:
        words = option.split()
        if words[0] == "prefetch":
            root.set_prefetch_bytes(int(words[2]) << 30)
        else:
            root.set_reduce_scatter_max_input_buffers(int(words[0]))


def _placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Cut experts along their inner dimension if there are more ranks than experts, like torchtitan."""
    num_ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 3 and num_ranks > len(parameter) else None

    return placement


@contextlib.contextmanager
def _torch_cpu_by(recording: Recording) -> Iterator[None]:
    """Give FSDP2 virtual streams where it asks torch.cpu for streams, as it does for tensors in CPU memory."""
    names = iter(("copy-in", "gather", "reduce", "all-reduce"))
    doubles = {
        "Stream": lambda *_, **options: _stream(recording, next(names, ""), **options),
        "Event": lambda *_, **__: Event(recording),
        "stream": recording.use,
        "current_stream": recording.current,
    }
    saved = {name: getattr(torch.cpu, name) for name in doubles if hasattr(torch.cpu, name)}
    for name, double in doubles.items():
        setattr(torch.cpu, name, double)
    try:
        yield
    finally:
        for name in doubles:
            if name in saved:
                setattr(torch.cpu, name, saved[name])
            else:
                delattr(torch.cpu, name)


def _stream(recording: Recording, name: str, device: object = None, priority: int = 0) -> Stream:
    made = recording.new(None, name)
    made.priority = priority
    return made


def _fsdp2_parts() -> dict[Any, Callable[..., Any]]:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    return {torch.ops.fsdp.all_gather_copy_in.default: _fsdp_collectives.all_gather_copy_in_cuda}


def bound(found: Playback) -> float:
    """Return the step's minimum time: the longer of compute and communication, plus first gather and last reduction.

    Compute cannot begin before the first gather, and the last reduction cannot begin before compute has ended.
    """
    sent = [run.work for run in found.runs if run.work.ranks]
    links: dict[str, float] = {}
    for work in sent:
        links[found.machine.link(work)] = links.get(found.machine.link(work), 0.0) + found.machine.seconds(work)
    ends = found.machine.seconds(sent[0]) + found.machine.seconds(sent[-1]) if sent else 0.0
    return max(found.busy() + ends, *links.values())


def _rows(case: dict[str, str | int], found: Playback) -> list[Row]:
    quantities = {
        "predicted step": (found.seconds * 1e3, "ms"),
        "bound": (bound(found) * 1e3, "ms"),
        "compute waits": (found.waiting() / found.seconds * 100, "%"),
    }
    return [Row("virtual", case, metric, unit, Samples((value,))) for metric, (value, unit) in quantities.items()]


def _show(case: dict[str, str | int], found: Playback, args: argparse.Namespace) -> None:
    name = ", ".join(map(str, case.values()))
    print(f"{name}: {found.seconds * 1e3:.0f} ms, compute waits {found.waiting() / found.seconds:.0%}", flush=True)
    for (unit, cause), seconds in list(found.exposed().items())[: args.causes]:
        print(f"    {unit} waits {seconds * 1e3:.2f} ms for {cause}")


def rows_text(rows: Sequence[Row]) -> str:
    """Return one line for each setting with the values of both engines: ms, and the share in which compute waits."""
    engines = list(dict.fromkeys(str(row.case["engine"]) for row in rows))
    table: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for row in rows:
        key = tuple(value for name, value in row.case.items() if name != "engine")
        table.setdefault(key, {}).setdefault(str(row.case["engine"]), {})[row.metric] = row.samples.median
    lines = [
        "| model | ranks | tokens | sums | " + " | ".join(engines) + " | bound |",
        "|---|---|---|---|" + "---|" * (len(engines) + 1),
    ]
    for key, found in table.items():
        cells = [f"{each['predicted step']:.0f} ({each['compute waits']:.0f} %)" for each in found.values()]
        bound = min(each["bound"] for each in found.values())
        lines.append("| " + " | ".join([*map(str, key), *cells, f"{bound:.0f}"]) + " |")
    return "\n".join(lines)
