"""The search for a setup that fits: the setups it tries, their ranking, and its report."""

import contextlib
import functools
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.__main__ import main
from megatron_fsdp.planning import catalog
from tests.harness.grids import nightly_but

GIB = 2**30


@functools.cache
def config() -> str:
    """Write the config file of a GPT-2 with two layers, and return its path."""
    path = Path(tempfile.mkdtemp()) / "gpt2-small.json"
    path.write_text(json.dumps({**catalog.load("gpt2"), "n_layer": 2}))
    return str(path)


@functools.cache
def plan(options: str) -> dict[str, Any]:
    model = "" if "--factory" in options or "--model" in options else f"--hf-config {config()} "
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", *f"{model}{options} --json".split()]) == 0
    plain = json.loads(printed.getvalue())
    assert isinstance(plain, dict)
    return plain


EIGHT = "--fit 4GiB --gpus 8"


def test_fitting_setups_are_below_the_limit_with_the_fastest_first() -> None:
    plain = plan(EIGHT)
    fitting = plain["fit"]["fitting"]
    assert len(fitting) > 10
    assert all(each["memory_bytes"] <= 4 * GIB for each in fitting)
    times = [each["step_seconds"] for each in fitting]
    assert times == sorted(times)
    assert plain["strategy"] == fitting[0]["strategy"]
    assert plain["memory"]["total_bytes"] == fitting[0]["memory_bytes"]
    assert plain["time"]["total_seconds"] == fitting[0]["step_seconds"]


FEW = [
    ("--model gpt2 --num-microbatches 4 --strategy hfsdp", 1),
    ("--model gpt2 --num-microbatches 2 --dtype fp32 --strategy optim_grads", 1),
    ("--model gpt2 --num-microbatches 1 --gather-dtype int8_block --strategy hsdp", 1),
]
EVERY = [
    ("--model gpt2 --num-microbatches 4", 6),
    *(
        (f"--model {name} --num-microbatches 2 --strategy {strategy} --mesh 2x2", 1)
        for name in catalog.names()
        for strategy in ("optim_grads", "hsdp", "hfsdp")
    ),
]


@pytest.mark.parametrize(("given", "num_rows"), nightly_but(FEW, [*FEW, *EVERY]))
def test_estimates_from_a_few_layers_equal_the_plan_of_all_layers(given: str, num_rows: int) -> None:
    given = f"{given} --micro-batch 1 --recompute none"
    rows = plan(f"{given} --fit 80TiB --gpus 4")["fit"]["fitting"]
    assert len(rows) == num_rows
    for row in rows:
        one = plan(f"{given} --mesh {'x'.join(map(str, row['mesh']))} --strategy {row['strategy']}")
        assert one["memory"]["total_bytes"] == row["memory_bytes"]
        assert one["time"]["total_seconds"] == pytest.approx(row["step_seconds"], rel=0.01)


@pytest.mark.parametrize(
    ("options", "keys", "wanted"),
    [
        # All setups train on the same number of sequences: micro-batch times microbatches per rank.
        (
            "--gpus 4 --global-batch 48 --strategy optim",
            ("micro_batch", "num_microbatches"),
            {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)},
        ),
        # Hybrids have every split of the ranks.
        (
            "--gpus 12 --micro-batch 1 --recompute none",
            ("strategy", "mesh"),
            {
                *((strategy, mesh) for strategy in ("hsdp", "hfsdp") for mesh in ((6, 2), (4, 3), (3, 4), (2, 6))),
                *((strategy, (12,)) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
            },
        ),
        # Given options stay fixed.
        (
            "--strategy hsdp --mesh 2x8 --micro-batch 2 --recompute full",
            ("strategy", "mesh", "micro_batch", "num_microbatches", "recompute"),
            {("hsdp", (2, 8), 2, 4, "full")},
        ),
        (
            "--gpus 4 --num-microbatches 3 --global-batch 24 --recompute none --strategy optim",
            ("num_microbatches", "micro_batch"),
            {(3, 2)},
        ),
    ],
)
def test_a_search_tries_what_is_not_given(options: str, keys: tuple[str, ...], wanted: set[Any]) -> None:
    fitting = plan(f"--fit 200GiB {options}")["fit"]["fitting"]
    found = [tuple(tuple(each[key]) if key == "mesh" else each[key] for key in keys) for each in fitting]
    assert set(found) == wanted


def test_if_nothing_fits_the_table_gives_the_smallest_setups_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --model llama3-8b --fit 10GiB --gpus 4 --strategy no_shard".split()) == 1
    page = capsys.readouterr().out
    assert page.startswith("0 of 8 setups fit 10.00 GiB on 4 ranks, 32 sequences per step")
    words = "at least 141.21 GiB, 131.21 GiB too much, with micro-batch 1 and recompute full"
    assert re.search(rf"no_shard +4 .* {words}: .*AdamW moments 59.83 GiB", page)


def test_setups_without_a_layout_are_rejected_with_that_reason() -> None:
    found = plan("--factory tests.unit.megatron_fsdp.cli.test_plan:few_long_rows --fit 10TiB --gpus 64 --micro-batch 1")
    reasons = {(each["strategy"], tuple(each["mesh"])): each["reason"] for each in found["fit"]["rejected"]}
    assert reasons["optim", (64,)].startswith("no layout: unit 'blocks.1': padding makes")
    assert {each["strategy"] for each in found["fit"]["fitting"]} >= {"no_shard", "hsdp"}


def test_reserved_memory_is_not_given_away() -> None:
    found = plan("--fit 8GiB --gpus 4 --recompute none --reserve 3GiB")
    assert max(each["memory_bytes"] for each in found["fit"]["fitting"]) <= 8 * GIB
    assert found["memory"]["parts"]["reserve"] == 3 * GIB


def test_a_slower_network_makes_replicas_over_nodes_the_faster_choice() -> None:
    def seconds(options: str) -> dict[str, float]:
        found = plan(f"--fit 80GiB --gpus 16 --micro-batch 1 {options}")["fit"]["fitting"]
        # Fastest first.
        return {each["strategy"]: each["step_seconds"] for each in reversed(found)}

    slow, fast = seconds("--network-bandwidth 1GB/s"), seconds("--network-bandwidth 50GB/s")
    assert max(slow["hsdp"], slow["hfsdp"]) < slow["optim_grads_params"]
    assert all(slow[strategy] > fast[strategy] for strategy in fast)


def test_a_search_says_what_it_tries_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", "gpt2", "--fit", "80GiB", "--gpus", "1", "--micro-batch", "1", "--recompute", "none"]
    assert main([*words, "--strategy", "optim"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("gpt2: 124.4 M parameters, on 1 rank, optim")
    assert "1 of 1 setup fits 80.00 GiB on 1 rank, 8 sequences per step" in printed.out
    assert "tokens/s and rank" in printed.out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*words, "--strategy", "optim"]) == 0
    assert capsys.readouterr().err == "\r\x1b[Ktrying 1 of 1: optim on 1\r\x1b[K"
