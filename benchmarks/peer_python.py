"""Peers with an interpreter of their own: which engines one has, and what they take there.

NVIDIA's megatron-fsdp cannot be imported where this project is, for it has the same import name; DeepSpeed wants other
versions of packages. ``--peer-python PATH`` names an interpreter that has such an engine beside torch. Its ranks are
processes of their own (peer_worker.py), which also train by FSDP2, in turn with the peer: two engines that never share
a process are compared by what each takes over FSDP2 beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Times
from benchmarks.models import Shape
from benchmarks.peer_worker import PEERS, SETTINGS
from benchmarks.torch_engines import Precision

__all__ = ["Peer", "PeerError", "Task", "add_peer_argument", "ask", "peers_of", "times_of"]

WORKER = Path(__file__).with_name("peer_worker.py")
TIMEOUT_S = 900.0
# How long the other ranks may go on when one has failed.
GRACE_S = 10.0


class PeerError(RuntimeError):
    """A peer did not do what was asked of it; the message is its own error, on one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine of one interpreter.

    Attributes:
        name: of its package. version: of its package. python: the interpreter.
    """

    name: str
    version: str
    python: Path

    @property
    def label(self) -> str:
        """What rows call it."""
        return f"{self.name} {self.version}"

    @property
    def notes(self) -> dict[str, str]:
        """What rows say of its settings."""
        return {"settings": SETTINGS[self.name], "interpreter": "its own"}


@dataclass(frozen=True, slots=True)
class Task:
    """What a peer is asked for.

    Attributes:
        what: "step" or "memory". ranks: of the world; all are real ones on the CPU's gloo, rank 0 alone is on "null".
        backend: "gloo" or "null". device: "cpu" or "cuda". rounds: measured steps.
    """

    what: str
    shape: Shape
    precision: Precision
    ranks: int
    backend: str = "gloo"
    device: str = "cpu"
    rounds: int = 1


def add_peer_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--peer-python``."""
    parser.add_argument(
        "--peer-python",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help=f"interpreters that have torch and one of: {', '.join(PEERS)}; each is measured in its own",
    )


def peers_of(pythons: Sequence[Path]) -> list[Peer]:
    """Return the peers that the interpreters have, and print which interpreter has none, and why.

    Raises:
        SystemExit: there is no such interpreter.
    """
    found = []
    for python in pythons:
        if not python.exists():
            raise SystemExit(f"--peer-python {python}: no such file; give the path of an interpreter")
        try:
            versions = _run(python, [{"what": "list"}])[0]["versions"]
        except PeerError as error:
            print(f"--peer-python {python}: left out: {error}")
            continue
        if not versions:
            print(f"--peer-python {python}: left out: it has none of {', '.join(PEERS)} (pip install)")
        found += [Peer(name, version, python) for name, version in versions.items()]
    return found


def ask(peers: Sequence[Peer], task: Task) -> Iterator[tuple[Peer, list[dict[str, Any]]]]:
    """Yield every peer that can do a task with its answers, rank by rank; print why another cannot.

    An answer to "step" holds "times", those of ``train_in_turn``; one to "memory" holds "phases": start, peak and end.
    """
    for peer in peers:
        try:
            yield peer, _run(peer.python, list(_requests(peer, task)))
        except PeerError as error:
            print(f"{peer.label}: left out: {error}")


def times_of(answers: Sequence[Mapping[str, Any]]) -> list[Times]:
    """Return the answers to "step" as ``train_in_turn`` returned them."""
    return [
        {name: [(wall, processor) for wall, processor in rounds] for name, rounds in answer["times"].items()}
        for answer in answers
    ]


def _requests(peer: Peer, task: Task) -> Iterator[dict[str, Any]]:
    for rank in range(task.ranks if task.backend == "gloo" else 1):
        yield {
            "what": task.what,
            "peer": peer.name,
            "shape": {**asdict(task.shape), "compute": _name(task.shape.compute)},
            "precision": {"compute": _name(task.precision.compute), "reduce": _name(task.precision.reduce)},
            "rank": rank,
            "ranks": task.ranks,
            "backend": task.backend,
            "device": task.device,
            "rounds": task.rounds,
        }


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _run(python: Path, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Start one process per request, and return their answers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_start(python, folder, rank, request) for rank, request in enumerate(requests)]
        try:
            _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        answers = [_read(folder, rank, process) for rank, process in enumerate(processes)]
    # A rank that lost its peer says less than the peer; that one answered first, and did not time out.
    for answer in sorted(answers, key=lambda answer: answer["order"]):
        if "error" in answer:
            raise PeerError(answer["error"])
    return answers


def _start(python: Path, folder: Path, rank: int, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    path = folder / f"{rank}.json"
    path.write_text(json.dumps({**request, "store": str(folder / "store")}), encoding="utf-8")
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(request.get("ranks", 1))}
    # Some engines read them though the process group is there.
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (folder / f"{rank}.output").open("wb") as output:
        return subprocess.Popen(
            [str(python), "-I", str(WORKER), str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _read(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    answer = folder / f"{rank}.answer"
    if answer.exists():
        return {**json.loads(answer.read_text(encoding="utf-8")), "order": answer.stat().st_mtime_ns}
    lines = (folder / f"{rank}.output").read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return {"error": f"rank {rank} ended with exit status {process.returncode}: {last}", "order": time.time_ns()}
