"""Import: what ``import megatron_fsdp`` costs a process that shards nothing, and what ``fully_shard`` loads.

Each statement runs in a new process that has imported torch already, and the next one follows it in the same process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import Row, Samples

STATEMENTS = (
    "import megatron_fsdp",
    "from megatron_fsdp import fully_shard",
    "from megatron_fsdp import *",
)
_PACKAGES = ("megatron_fsdp", "dbuffer", "dbuffer_kernels")
_CODE = f"""
import json, sys, time
import torch, torch.distributed.tensor
from torch.optim import optimizer
found, seconds = [], 0.0
for statement in {STATEMENTS!r}:
    start = time.perf_counter()
    exec(statement)
    seconds += time.perf_counter() - start
    modules = sum(name.partition(".")[0] in {_PACKAGES!r} for name in sys.modules)
    hooks = len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)
    found.append((seconds, modules, hooks))
print(json.dumps(found))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how often to measure."""
    parser.add_argument("--rounds", type=int, default=5, help="processes to measure")


def run(args: argparse.Namespace) -> list[Row]:
    """Import in ``rounds`` processes; return what each statement took, loaded and registered."""
    measured = [imported() for _ in range(args.rounds)]
    rows = []
    for position, statement in enumerate(STATEMENTS):
        case = {"after": statement}
        seconds, modules, hooks = zip(*(one[position] for one in measured), strict=True)
        rows.append(Row("import", case, "time", "s", Samples(tuple(seconds))))
        rows.append(Row("import", case, "modules of ours", "", Samples((float(modules[0]),)), is_exact=True))
        rows.append(Row("import", case, "hooks on optimizers", "", Samples((float(hooks[0]),)), is_exact=True))
    return rows


def imported() -> list[tuple[float, int, int]]:
    """Return what one process found after each statement."""
    done = subprocess.run([sys.executable, "-c", _CODE], check=True, capture_output=True, text=True)
    found: list[Any] = json.loads(done.stdout)
    return [(seconds, modules, hooks) for seconds, modules, hooks in found]
