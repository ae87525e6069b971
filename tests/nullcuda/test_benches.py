"""The benches that have a GPU path run there to the end, and name their results after the GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.bench_gpu import SECTIONS, TARGETS
from benchmarks.bench_host import measure
from benchmarks.harness import Row, read_rows
from benchmarks.null_group import null_world
from tests.harness import run_ranks
from tests.nullcuda import machine

ROOT = Path(__file__).parents[2]


def results_of(bench: str, flags: str, folder: Path, num_ranks: int = 1) -> tuple[list[Row], str]:
    """Run a bench; return its rows, from the file that has the GPU's name, and its error output."""
    launch = ["examples/start_ranks.py", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    command = [sys.executable, *launch, "-m", "benchmarks", bench, *flags.split(), "--results", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    (path,) = folder.iterdir()
    assert path.name == f"{bench}-null-h200{f'-{num_ranks}-ranks' if num_ranks > 1 else ''}.json"
    return read_rows(path)[1], done.stderr


def test_the_gpu_bench_runs_all_sections_and_measures_every_target_of_one_gpu(tmp_path: Path) -> None:
    rows, errors = results_of("gpu", "--small --rounds 1 --worlds 8 --batches 1", tmp_path)
    assert [(row.case["section"], row.metric, row.notes) for row in rows if row.bench == "gpu"] == [], errors
    assert {row.bench for row in rows} == set(SECTIONS)
    unmeasured = [target for target in TARGETS if not any(target.is_about(row) for row in rows)]
    assert {target.bench for target in unmeasured} == {"ranked step"}


def test_the_gpu_bench_of_two_ranks_names_its_results_after_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")
    rows, _ = results_of("gpu", "--small --rounds 1 --batches 1", tmp_path, num_ranks=2)
    assert {row.bench for row in rows} == {"ranked step"}


def test_the_kernel_bench_names_its_results_after_the_gpu(tmp_path: Path) -> None:
    rows, _ = results_of("kernels", "--numel 4099 --rounds 1", tmp_path)
    assert {row.case["backend"] for row in rows} == {"triton"}


def test_the_host_bench_leaves_out_a_model_whose_package_is_missing(tmp_path: Path) -> None:
    flags = "--device cuda --models hf-llama llama-like --layers 2 --precisions bf16 --rounds 1"
    rows, errors = results_of("host", flags, tmp_path)
    assert {row.case["model"] for row in rows} == {"llama-like"}
    assert "hf-llama is left out" in errors


def waits_before_measured_steps(rounds: int) -> int:
    """Return how often a measurement of host time waits for the whole GPU."""
    dist.destroy_process_group()
    torch.backends.cuda.enable_cudnn_sdp(False)
    with null_world(8), machine.logged():
        measure({"model": "llama-like", "layers": 1, "ranks": 8}, rounds, "cuda")
    return sum(call.kind == "device_sync" for call in machine.calls())


def test_steps_whose_host_time_is_measured_start_on_an_idle_gpu() -> None:
    (waits,) = run_ranks(1, waits_before_measured_steps, 2, fresh=True, timeout=120)
    # Three engines: unsharded, ours and FSDP2.
    assert waits >= 3 * 2
