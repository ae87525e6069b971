"""What ``megatron-fsdp plan`` does: make the plan or the search, print it, and write its files."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from dbuffer.errors import DBufferError, PaddingWarning
from megatron_fsdp.errors import ConfigError, FsdpError
from megatron_fsdp.planning.estimate import Projection, project, project_stages
from megatron_fsdp.planning.options import Options
from megatron_fsdp.planning.plan_html import draw_png, html_page
from megatron_fsdp.planning.plan_text import page, stage_dict, stage_table, to_dict
from megatron_fsdp.planning.search import Search, fit_dict, fit_page, search

__all__ = ["run_plan"]


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan that the options ask for, and write its files.

    Returns:
        0; 1 when ``--fit`` finds nothing that fits; 2 when the request makes no sense, with the reason on stderr.
    """
    try:
        return _run(args)
    except (FsdpError, DBufferError) as error:
        print(f"megatron-fsdp plan: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    options = Options(args)
    subject = options.subject()
    found: Search | None = None
    stages: tuple[Projection, ...] = ()
    with warnings.catch_warnings():
        # The page lists the padding of every unit with what forces it.
        warnings.simplefilter("ignore", PaddingWarning)
        if args.fit is None:
            _refuse_without_fit(args)
            sizes = options.data_parallel_sizes()
            setup = options.setup(sizes, options.strategy_for(sizes), options.workload())
            best: Projection | None
            if setup.parallelism.is_any:
                stages = project_stages(subject, setup)
                best = _reported(stages, args.stage)
            else:
                best = project(subject, setup)
        else:
            _refuse_parallelism(args)
            found = search(subject, options)
            best = found.best
    decisions = tuple(options.decisions(best.setup)) if best is not None else ()
    _write(args, best, decisions, (found, stages))
    return 0 if best is not None else 1


def _reported(stages: tuple[Projection, ...], number: int | None) -> Projection:
    """Return the stage that was asked for, or the one that takes the most memory."""
    if number is None:
        return max(stages, key=lambda each: each.memory_bytes)
    if not 0 <= number < len(stages):
        raise ConfigError(f"--stage {number}: there are {len(stages)} stages, counted from 0")
    return stages[number]


def _refuse_parallelism(args: argparse.Namespace) -> None:
    for name in ("world", "tp", "ep", "etp", "pp", "cp", "sequence_parallel", "stage"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not searched over: --fit tries data-parallel meshes alone. Leave --fit "
                "out, and compare the totals of the plans"
            )


def _refuse_without_fit(args: argparse.Namespace) -> None:
    for name in ("gpus", "global_batch"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} belongs to --fit SIZE")


def _write(
    args: argparse.Namespace,
    best: Projection | None,
    decisions: tuple[str, ...],
    beside: tuple[Search | None, tuple[Projection, ...]],
) -> None:
    found, stages = beside
    _write_files(args, best, decisions, beside)
    if args.json:
        plain = to_dict(best, decisions) if best is not None else {}
        if stages:
            plain["stages"] = [stage_dict(each) for each in stages]
        print(json.dumps({**plain, "fit": fit_dict(found)} if found is not None else plain, indent=2))
        return
    if found is not None:
        print(fit_page(found), end="\n\n")
    if best is not None:
        print(page(best, decisions, args.fit))
    if len(stages) > 1:
        print("\n" + "\n".join(stage_table(stages).lines()))


def _write_files(
    args: argparse.Namespace,
    best: Projection | None,
    decisions: tuple[str, ...],
    beside: tuple[Search | None, tuple[Projection, ...]],
) -> None:
    if not args.html and not args.png:
        return
    if best is None:
        raise ConfigError(f"nothing fits {args.fit:,} bytes, so there is no chart to draw; the table says why")
    try:
        if args.png:
            draw_png(args.png, best, args.fit)
        if args.html:
            Path(args.html).write_text(html_page(best, decisions, args.fit, beside), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error}; give a file that can be written") from error
