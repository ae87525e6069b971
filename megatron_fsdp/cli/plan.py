"""``megatron-fsdp plan``: predict memory, communication and time of a training step, without the hardware."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

from megatron_fsdp.cli.progress import show_progress
from megatron_fsdp.errors import ConfigError, FsdpError
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.plan_arguments import add_plan_arguments as add_arguments

# Functions import what they use, because torch takes seconds to import and --help does not need it.
if TYPE_CHECKING:
    from megatron_fsdp.formatting import Table
    from megatron_fsdp.planning.estimate import Projection
    from megatron_fsdp.planning.model_source import Subject
    from megatron_fsdp.planning.options import Options

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  megatron-fsdp plan --model llama3-8b --mesh 8                    one node, FP32 main weights, bf16 compute
  megatron-fsdp plan --model llama3-70b --mesh 8x16                two axes: replicas of sharded nodes
  megatron-fsdp plan --model llama3-70b --fit 80GiB --gpus 64      search what fits
  megatron-fsdp plan --model llama3-70b --world 64 --tp 8 --pp 2   with tensor and pipeline parallelism
  megatron-fsdp plan --hf-config config.json --mesh 8 --json
  megatron-fsdp plan --model llama3-8b --mesh 64 --png plan.png    a picture of memory and time"""


def run(args: argparse.Namespace) -> int:
    """Print the plan or the search result for the options.

    Returns:
        0 on success; 1 if ``--fit`` finds no setup that fits; 2 if the options are invalid, with the reason on stderr.
    """
    if args.list_models:
        print("\n".join(catalog.names()))
        return 0
    from dbuffer.errors import DBufferError, PaddingWarning
    from megatron_fsdp.planning.options import Options

    try:
        with warnings.catch_warnings():
            # The page itself lists the padding of every unit and its cause.
            warnings.simplefilter("ignore", PaddingWarning)
            return _run(Options(args))
    except (FsdpError, DBufferError) as error:
        print(f"megatron-fsdp plan: {error}", file=sys.stderr)
        return 2


def _run(options: Options) -> int:
    from megatron_fsdp.planning.plan_page import headline, plan_tables, to_dict
    from megatron_fsdp.planning.search import fit_tables, search

    subject, limit_bytes = options.subject(), options["fit"]
    options.check()
    best: Projection | None
    stages: tuple[Projection, ...] = ()
    tables: list[Table] = []
    title, plain = "", dict[str, Any]()
    if options.given("fit"):
        best, plain["fit"] = search(subject, options, show_progress)
        show_progress("")
        tables += fit_tables(plain["fit"])
    else:
        best, stages = _planned(subject, options)
    if best is not None:
        title, plain = headline(best), {**to_dict(best, stages), **plain}
        tables += plan_tables(best, limit_bytes, stages)
    if best is not None and options["png"]:
        _draw(best, title, options["png"])
    if options["json"]:
        print(json.dumps(plain, indent=2))
    else:
        print("\n\n".join(filter(None, (title, *("\n".join(table.lines()) for table in tables)))))
    return 0 if best is not None else 1


def _draw(best: Projection, title: str, path: str) -> None:
    """Write the picture of a plan to a file."""
    from megatron_fsdp.planning.cost_model import play_in_time
    from megatron_fsdp.planning.picture import draw, save, time_line

    found = play_in_time(best.played, best.setup.workload, best.setup.hardware)
    save(draw(title, best.memory, time_line(found), found.seconds, best.time.optimizer), path)


def _planned(subject: Subject, options: Options) -> tuple[Projection, tuple[Projection, ...]]:
    """Return the plan of the requested stage, by default the one with the most memory; and the plans of all stages."""
    from megatron_fsdp.planning.estimate import project, project_stages

    sizes = options.data_parallel_sizes()
    setup = options.setup(sizes, options.strategy_for(sizes), options.workload())
    if not setup.parallelism.is_any:
        return project(subject, setup), ()
    number = options["stage"]
    stages = project_stages(subject, setup, number)
    if number is None:
        return max(stages, key=lambda each: each.memory_bytes), stages
    if not 0 <= number < len(stages):
        raise ConfigError(f"--stage {number}: there are {len(stages)} stages. fix: --stage 0 to {len(stages) - 1}")
    return stages[number], stages
