"""What ``megatron-fsdp plan`` does: make the plan or the search, print it, and write its files."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from dbuffer.errors import DBufferError, PaddingWarning
from megatron_fsdp.errors import ConfigError, FsdpError
from megatron_fsdp.planning.charts import Chart, draw_png, memory_chart
from megatron_fsdp.planning.estimate import Projection, project, project_stages
from megatron_fsdp.planning.options import Options
from megatron_fsdp.planning.plan_html import html_page
from megatron_fsdp.planning.plan_page import Part, headline, page_parts, to_dict
from megatron_fsdp.planning.search import Search, fit_dict, search

__all__ = ["run_plan"]


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan that the options ask for, and write its files.

    Returns:
        0; 1 when ``--fit`` finds nothing that fits; 2 when the request makes no sense, with the reason on stderr.
    """
    try:
        return _run(Options(args))
    except (FsdpError, DBufferError) as error:
        print(f"megatron-fsdp plan: {error}", file=sys.stderr)
        return 2


def _run(options: Options) -> int:
    subject = options.subject()
    found: Search | None = None
    best: Projection | None
    stages: tuple[Projection, ...] = ()
    options.check()
    with warnings.catch_warnings():
        # The page lists the padding of every unit with what forces it.
        warnings.simplefilter("ignore", PaddingWarning)
        if options.given("fit"):
            found = search(subject, options)
            best = found.best
        else:
            sizes = options.data_parallel_sizes()
            setup = options.setup(sizes, options.strategy_for(sizes), options.workload())
            stages = project_stages(subject, setup) if setup.parallelism.is_any else ()
            best = _reported(stages, options["stage"]) if stages else project(subject, setup)
        decisions = tuple(options.decisions(best.setup)) if best is not None else ()
        parts = tuple(page_parts(best, decisions, found, stages))
        _write_files(options, best, parts)
    if options["json"]:
        plain = to_dict(best, decisions, stages) if best is not None else {}
        print(json.dumps({**plain, "fit": fit_dict(found)} if found is not None else plain, indent=2))
    else:
        print("\n\n".join("\n".join(part.lines()) for part in parts if not isinstance(part, Chart)))
    return 0 if best is not None else 1


def _reported(stages: tuple[Projection, ...], number: int | None) -> Projection:
    """Return the stage that was asked for, or the one that takes the most memory."""
    if number is None:
        return max(stages, key=lambda each: each.memory_bytes)
    if not 0 <= number < len(stages):
        raise ConfigError(f"--stage {number}: there are {len(stages)} stages, counted from 0")
    return stages[number]


def _write_files(options: Options, best: Projection | None, parts: tuple[Part, ...]) -> None:
    page, picture = options["html"], options["png"]
    if not page and not picture:
        return
    if best is None:
        raise ConfigError(f"nothing fits {options['fit']:,} bytes, so there is no chart to draw; the table says why")
    try:
        if picture:
            draw_png(picture, memory_chart(best.memory, options["fit"]), headline(best))
        if page:
            Path(page).write_text(html_page(headline(best), parts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error}; give a file that can be written") from error
