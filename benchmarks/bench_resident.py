"""Resident: growth of the training script's memory over many iterations on gloo ranks, compared with FSDP2.

Each engine trains ``examples/pretrain_gpt.py`` under torchrun with the model of ``make train`` and fewer samples per
step, so that thousands of steps take minutes. The script's log has rank 0's resident memory every ``--every``
iterations. The first reading counts as the start, because it includes late imports and caches that are filled once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Row, Samples, beside_peers

_SCRIPT = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
ENGINES = {
    "ours": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "FSDP2": "--use-torch-fsdp2",
    "DDP": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes, those of ``make train`` unless told otherwise but for the batch, and how long to train."""
    parser.add_argument("--engines", nargs="+", default=["ours", "FSDP2"], choices=list(ENGINES))
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--batch", type=int, default=2, help="samples per rank; make train has 8")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--steps", type=int, default=3000, help="of each engine")
    parser.add_argument("--every", type=int, default=50, help="steps between readings")
    parser.add_argument("--flags", default="", help="more flags of the script, of all engines, as one word")


def run(args: argparse.Namespace) -> list[Row]:
    """Train with each engine; return its readings, their growth, and the ratios of ours to the peers'."""
    case = {"steps": args.steps, "ranks": args.ranks, "batch": args.batch}
    return resident_rows(case, {engine: train(engine, args) for engine in args.engines})


def train(engine: str, args: argparse.Namespace) -> Samples:
    """Return the bytes resident on rank 0 at each reading.

    Raises:
        RuntimeError: the script failed; the message has the end of its output.
    """
    flags = (
        f"{ENGINES[engine]} --num-layers {args.layers} --hidden-size {args.width} --num-attention-heads 4 "
        f"--seq-length {args.length} --micro-batch-size {args.batch} --train-iters {args.steps} --lr 1e-3 "
        f"--log-interval {args.every} --eval-iters 0 --num-tokens-to-generate 0 --distributed-backend gloo {args.flags}"
    )
    ranks = f"-m torch.distributed.run --standalone --nproc-per-node {args.ranks}".split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *ranks, str(_SCRIPT), *flags.split()]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_environment())
        if ended.returncode:
            raise RuntimeError(f"{engine}: {' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
        return readings(Path(folder) / "runs" / "gpt" / "log.jsonl", args.every)


def readings(log: Path, first: int) -> Samples:
    """Return the bytes that a log of the script has from iteration ``first`` on."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    held = [row["resident_memory_mib"] for row in rows if "resident_memory_mib" in row and row["iteration"] >= first]
    return Samples(tuple(2**20 * mib for mib in held))


def resident_rows(case: Mapping[str, str | int | float], found: Mapping[str, Samples]) -> list[Row]:
    """Return the readings of each engine, their growth above the first, and the ratios of ours to each peer's."""
    rows = beside_peers(Row("resident", case, "resident memory", "B"), found)
    for engine, samples in found.items():
        rise = Samples((max(samples.values) / samples.values[0],))
        rows.append(Row("resident", {**case, "engine": engine}, "most resident memory over the first", "", rise))
    return rows


def _environment() -> Mapping[str, str]:
    """Return the variables of this process with one thread per rank, and its modules for the ranks."""
    paths: Sequence[str] = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
