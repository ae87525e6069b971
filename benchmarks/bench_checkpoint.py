"""Checkpoint: bytes per second of saves and loads, compared with torch.distributed.checkpoint and torch.save.

Gloo ranks save and load a GPT with AdamW's state in turn, with this project's save_checkpoint, with DCP over FSDP2, and
with torch.save of the whole state by rank 0. The first two flush their files to the disk. This project's files have
checksums. Loads come from the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import megatron_fsdp
from benchmarks.engines import Precision, fsdp2, ours, world_mesh
from benchmarks.harness import Row, Samples, Times, beside_peers, in_turn
from benchmarks.models import Model, Shape
from tests.harness import run_ranks

# The save, and the load.
Calls = tuple[Callable[[], object], Callable[[], object]]
WAYS = ("ours", "torch DCP", "torch.save")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model's size and the folder."""
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the model")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure saves and loads in a folder that is removed afterwards."""
    shape = Shape(args.layers, args.width, args.vocabulary, batch=1, length=2, head_width=min(64, args.width))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ranks = run_ranks(args.ranks, save_and_load, shape, folder, args.rounds, timeout=1800.0)
    with torch.device("meta"):
        num_bytes = 12 * sum(parameter.numel() for parameter in Model(shape).parameters())
    return checkpoint_rows({"bytes": num_bytes, "ranks": args.ranks}, num_bytes, ranks)


def save_and_load(shape: Shape, folder: str, rounds: int) -> Times:
    """Return the seconds of every save and load; the state is weights and two moments, all in FP32."""
    mine, peer = _trained(shape, "ours"), _trained(shape, "FSDP2")
    ways = {"ours": _our_calls(Path(folder) / "ours", *mine), **_peer_calls(Path(folder), *peer)}

    def spend(calls: Calls) -> tuple[float, float]:
        if dist.get_rank() == 0:
            for way in WAYS:
                shutil.rmtree(Path(folder) / way, ignore_errors=True)
        seconds = []
        for call in calls:
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        return seconds[0], seconds[1]

    return in_turn(ways, spend, rounds, warmup=1)


def _trained(shape: Shape, engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(shape)
    shard = ours if engine == "ours" else fsdp2
    shard(model, list(model.layers), world_mesh(), Precision())
    kind = megatron_fsdp.AdamW if engine == "ours" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.zeros(shape.batch, shape.length + 1, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _our_calls(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Calls:
    return (
        lambda: megatron_fsdp.save_checkpoint(model, optimizer, folder),
        lambda: megatron_fsdp.load_checkpoint(model, optimizer, folder),
    )


def _peer_calls(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Calls]:
    whole, path = StateDictOptions(full_state_dict=True, cpu_offload=True), folder / "torch.save" / "state.pt"

    def state_of(options: StateDictOptions | None) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": moments}

    def apply(state: dict[str, Any], options: StateDictOptions | None) -> None:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
        )

    def load_dcp() -> None:
        state = state_of(None)
        load(state, checkpoint_id=folder / "torch DCP")
        apply(state, None)

    def save_whole() -> None:
        state = state_of(whole)
        if dist.get_rank() == 0:
            path.parent.mkdir(exist_ok=True)
            torch.save(state, path)

    return {
        "torch DCP": (lambda: save(state_of(None), checkpoint_id=folder / "torch DCP"), load_dcp),
        "torch.save": (save_whole, lambda: apply(torch.load(path), StateDictOptions(full_state_dict=True))),
    }


def checkpoint_rows(case: Mapping[str, str | int | float], num_bytes: int, ranks: Sequence[Times]) -> list[Row]:
    """Return the slowest rank's bytes per second of each way, and the ratios of ours to the other ways."""
    rows = []
    for position, kind in enumerate(("save", "load")):
        speeds = {}
        for way in ranks[0]:
            rounds = zip(*(one[way] for one in ranks), strict=True)
            speeds[way] = Samples(tuple(num_bytes / max(spent[position] for spent in one) for one in rounds))
        rows += beside_peers(Row("checkpoint", case, f"{kind} speed", "B/s"), speeds, key="way")
    return rows
