"""Write the tables and pictures of the pages of results, and the error bar of ``plan``, from benchmarks/results.

``python -m benchmarks.performance_page`` replaces the text between ``<!-- table: NAME -->`` and ``<!-- end -->`` in
docs/performance.md and benchmarks/RESULTS.md, and draws the charts of docs/performance.md. It takes a second.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, read_rows
from benchmarks.performance_charts import CHARTS, svg

__all__ = ["PAGES", "SUMMARY", "TABLES", "TABLES_PAGE", "Claim", "error_bar", "page", "picture_of", "table_of"]

_STEP = "host time over peer's"
_STEP_AND_ZERO_GRAD = "host time with zero_grad over peer's"
_REPLICAS = "wall time, one comparison of replicas over a step"
_RISE = "most resident memory over the first"
RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
TABLES_PAGE = Path(__file__).parent / "RESULTS.md"
PAGES = (DOCS / "performance.md", TABLES_PAGE)
# Part of the package, because an installed package has no results of benches.
ERROR_BAR = Path(__file__).parents[1] / "megatron_fsdp" / "planning" / "error_bar.json"


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of a table: a measured row and its target.

    Attributes:
        words: text of the line.
        file: name of a file in the folder of results, without suffix.
        metric, case: the row's metric, and the part of its case that identifies it in the file.
        most: the target: a maximum of the value. None: no target.
    """

    words: str
    file: str
    metric: str
    case: Mapping[str, str | int | float]
    most: float | None = None


def _calls(model: str, words: str, most: float | None) -> Claim:
    return Claim(f"calls, {words}", "host", "calls over FSDP2's", {"model": model}, most)


def _step(
    words: str, file: str, precision: str, peer: str, wall: float | None = None, processor: float | None = None
) -> list[Claim]:
    case = {"precision": precision, "peer": peer}
    return [
        Claim(f"{words}, {what}", f"step-{file}", f"{what} over peer's", case, most)
        for what, most in (("wall time", wall), ("processor time", processor))
    ]


def _link(engine: str, most: float | None = None) -> list[Claim]:
    claims = []
    for compute in (2.0, 1.0, 0.5):
        case: dict[str, str | int | float] = {"engine": engine, "forward over gather": compute}
        words = f"{engine}, forward {compute:g} x its gather"
        claims.append(Claim(words, "link", "exposed communication over the least", case, most))
    for gradients in ("FP32", "of two dtypes"):
        case = {"engine": engine, "gradients": gradients}
        words = f"{engine}, 1,024 ranks, 20 us a hop, three groups a unit, gradients {gradients}"
        claims.append(Claim(words, "link", "exposed communication over the least", case, most))
    return claims


def _memory(
    metric: str, words: str, most: float | None = None, precisions: Sequence[str] = ("fp32", "bf16")
) -> list[Claim]:
    return [
        Claim(f"{words}, {precision}, {ranks} ranks", "memory", metric, {"precision": precision, "ranks": ranks}, most)
        for precision in precisions
        for ranks in (8, 64)
    ]


def _bytes(metric: str, words: str, precision: str, most: float | None = None) -> list[Claim]:
    case: dict[str, str | int | float] = {"precision": precision, "ranks": 64, "engine": "ours"}
    return [Claim(f"{words}, {precision.removesuffix(', not fused')}, 64 ranks", "memory", metric, case, most)]


_PRECISIONS = ("fp32", "bf16", "bf16, reduced in fp32")

TABLES: Mapping[str, Sequence[Claim]] = {
    "host": [
        _calls("hf-llama", "Hugging Face's Llama", 0.25),
        _calls("hf-qwen3", "Hugging Face's Qwen3", 0.25),
        _calls("hf-gpt2", "Hugging Face's GPT-2", 0.25),
        _calls("megatron-like", "layers shaped like Megatron's", 0.25),
        _calls("llama-like", "layers shaped like Llama's", 0.25),
        _calls("vectors-9", "9 vectors a layer", None),
        _calls("vectors-36", "36 vectors a layer", None),
    ],
    "host-null-h200": [
        Claim(
            f"{what}, Llama 3.2 1B, {words}", "host-null-h200", f"{what} over FSDP2's", {"precision": precision}, most
        )
        for precision, words, time in (
            ("bf16, reduced in fp32", "bf16 reduced in FP32", 0.35),
            ("bf16", "bf16", None),
            ("fp32", "FP32", 0.3),
        )
        for what, most in (("host time", time), ("calls", None))
    ],
    "step": [
        *_step("2 x 64 tokens, fp32, over FSDP2", "2x64-long", "fp32", "FSDP2", 0.65, 0.78),
        *_step("2 x 64 tokens, bf16, over FSDP2", "2x64-long", "bf16", "FSDP2", 0.7, None),
        *_step("4 x 256 tokens, fp32, over FSDP2", "4x256", "fp32", "FSDP2", 1.0, None),
        *_step("4 x 256 tokens, fp32, over bare", "4x256", "fp32", "bare", None, 1.05),
        *_step("mixture of experts, fp32, over FSDP2", "moe", "fp32", "FSDP2"),
        *_step("mixture of experts, bf16, over FSDP2", "moe", "bf16", "FSDP2"),
        *_step("2 x 64 tokens, fp32, over DDP", "2x64", "fp32", "DDP"),
        *_step("2 x 64 tokens, fp32, over bare", "2x64-long", "fp32", "bare"),
        *_step("2 x 64 tokens, bf16, over bare", "2x64-long", "bf16", "bare"),
        *_step("2 x 64 tokens, fp32, over the flat AdamW", "2x64", "fp32", "ours, flat AdamW"),
    ],
    "memory": [
        *_memory("peak in forward over the forecast", "forward peak over explain(model)"),
        *_memory("peak in backward over the forecast", "backward peak over explain(model)"),
        *_memory("peak in forward over FSDP2's", "forward peak over FSDP2", 1.01, _PRECISIONS),
        *_memory("peak in backward over FSDP2's", "backward peak over FSDP2", 1.01, _PRECISIONS),
        *_memory("peak in step over FSDP2's", "peak of the optimizer's step over FSDP2", 1.01, _PRECISIONS),
        *_memory("bytes at rest over FSDP2's", "at rest over FSDP2", 1.01, _PRECISIONS),
        *_memory("peak of the whole step with what rests over FSDP2's", "whole step over FSDP2", 1.01, _PRECISIONS),
        *_memory("bytes moved over FSDP2's", "bytes moved over FSDP2", None, _PRECISIONS),
        *_bytes("bytes moved per parameter beyond plain", "bytes moved per parameter, fused", "bf16", 0.5),
        *_bytes(
            "bytes moved per parameter beyond plain", "bytes moved per parameter, not fused", "bf16, not fused", 4.0
        ),
        *_bytes("bytes at rest per parameter, all ranks", "bytes at rest per parameter", "bf16, bf16 gradients"),
        *_bytes("bytes at rest per parameter, all ranks", "bytes at rest per parameter", "bf16, split main weights"),
    ],
    "invariance": [
        Claim(
            f"{what} over the default's, {mesh} ranks, {wire} on the wire",
            "invariance",
            f"{what} over default's",
            case,
            most,
        )
        for mesh, most in (("2", 1.15), ("4", 1.15), ("2x2", None))
        for wire in ("fp32", "bf16")
        for case in ({"mesh": mesh, "wire": wire},)
        for what in ("wall time", "processor time")
    ],
    "watch": [
        *(
            Claim(
                f"{what}, watched over plain, width {width}", "watch", f"{what}, watched over plain", {"width": width}
            )
            for width in (64, 256)
            for what in ("wall time", "processor time")
        ),
        *(
            Claim(f"one comparison of replicas over a step, width {width}", "watch", _REPLICAS, {"width": width}, 1.0)
            for width in (64, 256)
        ),
    ],
    "optimizer": [
        *(
            Claim(f"AdamW({way}=True), step and zero_grad, over FSDP2's", "optimizer", _STEP_AND_ZERO_GRAD, case, 0.3)
            for way in ("foreach", "fused")
            for case in ({"step": f"stock, {way}"},)
        ),
        Claim("step of the flat AdamW over foreach on DTensors", "optimizer", _STEP, {"step": "flat"}, 0.15),
        Claim("the same, launches left out", "optimizer", _STEP, {"step": "flat, launches left out"}),
    ],
    "resident": [
        Claim(f"most after iteration 50 over what iteration 50 held, {engine}", "resident", _RISE, case, most)
        for engine, most in (("ours", 1.03), ("FSDP2", None))
        for case in ({"engine": engine},)
    ]
    + [Claim("resident memory over FSDP2's", "resident", "resident memory over peer's", {"peer": "FSDP2"}, 1.05)],
    "link": [*_link("ours", 1.2), *_link("FSDP2")],
    "checkpoint": [
        Claim(f"{kind} speed over {peer} (more is better)", "checkpoint", f"{kind} speed over peer's", {"peer": peer})
        for kind in ("save", "load")
        for peer in ("torch DCP", "torch.save")
    ],
}

SUMMARY: Sequence[Claim] = [
    *_step("training step, 2 x 64 tokens, fp32, over FSDP2", "2x64-long", "fp32", "FSDP2", 0.65, 0.78),
    *_step("training step, 2 x 64 tokens, bf16, over FSDP2", "2x64-long", "bf16", "FSDP2", 0.7, None)[:1],
    *_step("training step, mixture of experts, fp32, over FSDP2", "moe", "fp32", "FSDP2")[:1],
    *_step("training step, 2 x 64 tokens, fp32, over DDP", "2x64", "fp32", "DDP")[:1],
    *TABLES["optimizer"][:1],
    replace(TABLES["link"][1], words="waiting for collectives over the least possible, forward as long as a gather"),
    *TABLES["resident"][-1:],
    replace(TABLES["watch"][0], words="training step with Watch over the same without, width 64, wall time"),
    *(
        replace(claim, words='step with reduction="invariant" over the default, 4 ranks, processor time')
        for claim in TABLES["invariance"]
        if claim.words == "processor time over the default's, 4 ranks, fp32 on the wire"
    ),
    *(claim for claim in TABLES["checkpoint"] if claim.case["peer"] == "torch DCP"),
]
"""The lines of docs/performance.md that no picture shows. RESULTS.md has all lines."""

# Benches that write their own tables.
PREDICTED = ("virtual", "error_bar")


def page(text: str, folder: Path = RESULTS) -> str:
    """Return the text of a page with new tables."""

    def table(name: str) -> str:
        if name == "summary":
            return table_of(SUMMARY, folder, is_summary=True)
        return _whole_table(name, folder) if name in PREDICTED else table_of(TABLES[name], folder)

    pattern = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: found[1] + table(found[2]) + found[3], text)


def picture_of(name: str) -> Path:
    """Return the file of a picture that ``CHARTS`` names."""
    return DOCS / f"{name}.svg"


def _whole_table(name: str, folder: Path) -> str:
    """Return all rows of a file in the bench's own format."""
    environment, rows = read_rows(folder / f"{name}.json")
    shown = importlib.import_module(f"benchmarks.bench_{name}").rows_text(rows)
    return f"{shown}\n\nRows: {_source(name, environment)}.\n"


def _source(name: str, environment: Mapping[str, Any]) -> str:
    """Return the file of rows, and the machine, the version of PyTorch and the commit that they are of."""
    machine = environment["machine"]
    where = [machine["processor"], f"{machine['num_cores']} cores", *machine["devices"]]
    return f"`{name}.json` ({', '.join(where)}; PyTorch {environment['versions']['torch']}; {environment['commit']})"


def error_bar(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the summary of ``plan``'s errors, which ``plan`` and the page print; from the rows of the page's table."""
    _, rows = read_rows(folder / "error_bar.json")
    found = {row.metric: row for row in rows if "settings" in row.case}
    arguments = json.loads((folder / "error_bar.json").read_text(encoding="utf-8"))["arguments"]
    median, worst = (found[f"{name} error"] for name in ("median", "worst"))
    values = {name: round(row.samples.median, 1) for name, row in (("median", median), ("worst", worst))}
    return {"settings": median.case["settings"], "clock": arguments["clock"], **values}


def table_of(claims: Sequence[Claim], folder: Path, *, is_summary: bool = False) -> str:
    """Return a Markdown table of targets and measurements.

    Below the table come the machine and the commit of each file of results. A summary has a column with the bench of
    each row instead.

    Raises:
        LookupError: a claim matches no row, or several.
    """
    files = {claim.file: read_rows(folder / f"{claim.file}.json") for claim in claims}
    lines = ["| ratio | wanted | measured | spread | rounds |", "|---|---:|---:|---:|---:|"]
    if is_summary:
        lines = [lines[0] + " bench |", lines[1] + "---|"]
    for claim in claims:
        row = _row_of(claim, files[claim.file][1])
        exact = row.samples.rounds == 1
        wanted = "" if claim.most is None else f"<= {claim.most:g}"
        mark = "" if claim.most is None or row.samples.median <= claim.most else " (missed)"
        spread, rounds = ("exact", "") if exact else (f"{row.samples.spread:.0%}", str(row.samples.rounds))
        bench = f" {claim.file.partition('-')[0]} |" if is_summary else ""
        lines.append(f"| {claim.words} | {wanted} | {row.samples.median:.2f}{mark} | {spread} | {rounds} |{bench}")
    if is_summary:
        return "\n".join([*lines, ""])
    joined = ",\n".join(_source(name, environment) for name, (environment, _) in files.items())
    return "\n".join([*lines, "", f"Rows: {joined}.", ""])


def _row_of(claim: Claim, rows: Sequence[Row]) -> Row:
    found = [row for row in rows if row.metric == claim.metric and claim.case.items() <= dict(row.case).items()]
    if len(found) != 1:
        about = f"{claim.metric!r} of {json.dumps(dict(claim.case))}"
        raise LookupError(f"{claim.file}.json has {len(found)} rows for {about}; wanted one")
    return found[0]


def main() -> int:
    """Write the pages, the pictures and the error bar of ``plan``, and return the exit status."""
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, charts in CHARTS.items():
        picture_of(name).write_text(svg(charts()), encoding="utf-8")
    ERROR_BAR.write_text(json.dumps(error_bar()) + "\n", encoding="utf-8")
    written = ", ".join(str(path) for path in (*PAGES, *map(picture_of, CHARTS), ERROR_BAR))
    print(f"written: {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
