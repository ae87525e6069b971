"""Kernels: bytes per second of each kernel, compared with a device copy in the same run.

On CUDA every kernel is memory bound, so the ratio to a copy shows how far it is from the limit. Without CUDA the
plain-torch references run; the rows then only show that the bench works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import Row, Samples, device_seconds, interleaved, named_by_device
from dbuffer_kernels import (
    AdamWBuffers,
    Segment,
    Segments,
    accumulate,
    adamw,
    adamw_row,
    backend,
    cast_copy,
    checksum,
    join_weight,
    split_weight,
)

FP32, BF16, INT16 = torch.float32, torch.bfloat16, torch.int16
ROW = adamw_row(10, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
# Gradient, weight and moments of an AdamW step, and whether it writes a model weight or updates a remainder.
ADAMW_CASES = {
    "all fp32, bf16 model weight": (FP32, FP32, FP32, "model weight"),
    "bf16 gradient, bf16 model weight": (BF16, FP32, FP32, "model weight"),
    "fp32 weight as bf16 and remainder": (BF16, BF16, FP32, "remainder"),
    "all bf16": (BF16, BF16, BF16, "nothing"),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One call to measure, and the number of bytes that it must move."""

    call: Callable[[], object]
    num_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size, the device and the number of rounds."""
    parser.add_argument("--numel", type=int, default=0, help="elements; 0: 2^28 on CUDA, 2^20 on the CPU")
    parser.add_argument("--rounds", type=int, default=11, help="measured calls of each kernel")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every kernel, interleaved with the copy."""
    device = torch.device(_device_of(args))
    return kernel_rows(args.numel or (1 << 28 if device.type == "cuda" else 1 << 20), device, args.rounds)


def result_name(args: argparse.Namespace) -> str:
    """Return the name of the file of results."""
    return named_by_device("kernels", _device_of(args))


def _device_of(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def kernel_rows(numel: int, device: torch.device, rounds: int) -> list[Row]:
    """Return the rates of all kernels on ``numel`` elements, and their ratios to a copy measured in turn."""
    # Some kernels run on the device for less time than the host needs to call them.
    stopwatch = device_seconds if device.type == "cuda" else None
    rows = []
    copy = copy_work(numel, device)
    for name, make in makers(numel, device).items():
        # Allocate the buffers of one kernel at a time: together they would not fit.
        work = make()
        seconds = interleaved({"copy": copy.call, name: work.call}, rounds=rounds, stopwatch=stopwatch)
        rates = [work.num_bytes / value for value in seconds[name].values]
        copy_rates = [copy.num_bytes / value for value in seconds["copy"].values]
        ratio = Samples(tuple(rate / other for rate, other in zip(rates, copy_rates, strict=True)))
        case: dict[str, str | int | float] = {"kernel": name, "numel": numel, "backend": backend(device)}
        rows.append(Row("kernels", case, "rate", "B/s", Samples(tuple(rates))))
        rows.append(Row("kernels", case, "rate over that of a copy", "", ratio))
    return rows


def copy_work(numel: int, device: torch.device) -> Work:
    """Return torch's own copy of as many bytes as an fp32 buffer has: the attainable bandwidth."""
    source, out = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return Work(lambda: out.copy_(source), 2 * source.nbytes)


def makers(numel: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    """Return, by kernel, a function that allocates its buffers and returns the calls to measure."""
    steps = {f"adamw ({name})": name for name in ADAMW_CASES}
    return {
        "cast_copy fp32 to bf16": lambda: cast_work(numel, device),
        "accumulate bf16 into fp32": lambda: accumulate_work(numel, device),
        "checksum fp32": lambda: checksum_work(numel, device),
        "split_weight": lambda: halves_work(numel, device, joins=False),
        "join_weight": lambda: halves_work(numel, device, joins=True),
        **{name: lambda case=case: adamw_work(numel, device, case) for name, case in steps.items()},  # type: ignore[misc]
    }


def cast_work(numel: int, device: torch.device) -> Work:
    """Round to bf16."""
    source, out = torch.randn(numel, device=device), torch.empty(numel, dtype=BF16, device=device)
    return Work(lambda: cast_copy(source, out), source.nbytes + out.nbytes)


def accumulate_work(numel: int, device: torch.device) -> Work:
    """Add a bf16 gradient to an fp32 one."""
    source, out = torch.ones(numel, dtype=BF16, device=device), torch.zeros(numel, device=device)
    return Work(lambda: accumulate(source, out, scale=0.5), source.nbytes + 2 * out.nbytes)


def checksum_work(numel: int, device: torch.device) -> Work:
    """Compute the 64-bit checksum of fp32 weights."""
    source = torch.ones(numel, device=device)
    return Work(lambda: checksum(source, key=1), source.nbytes)


def halves_work(numel: int, device: torch.device, *, joins: bool) -> Work:
    """Split fp32 weights into bf16 and 16 bits, or join them."""
    main, model = torch.randn(numel, device=device), torch.ones(numel, dtype=BF16, device=device)
    rest = torch.zeros(numel, dtype=INT16, device=device)
    num_bytes = main.nbytes + model.nbytes + rest.nbytes
    if joins:
        return Work(lambda: join_weight(model, rest, main), num_bytes)
    return Work(lambda: split_weight(main, model, rest), num_bytes)


def adamw_work(numel: int, device: torch.device, case: str) -> Work:
    """Run an AdamW step on one segment."""
    gradient, weight, moments, beside = ADAMW_CASES[case]
    gradients, weights, exp_avg, exp_avg_sq = (
        torch.ones(numel, dtype=dtype, device=device) for dtype in (gradient, weight, moments, moments)
    )
    model = torch.empty(numel, dtype=BF16, device=device) if beside == "model weight" else None
    rest = torch.zeros(numel, dtype=INT16, device=device) if beside == "remainder" else None
    buffers = AdamWBuffers(gradients, weights, exp_avg, exp_avg_sq, model, rest)
    segments, rows = Segments([Segment(0, numel)], numel), torch.tensor([ROW], dtype=torch.float64, device=device)
    return Work(lambda: adamw(buffers, segments, rows), numel * _bytes_per_element(buffers))


def _bytes_per_element(buffers: AdamWBuffers) -> int:
    """Return how many bytes ``adamw`` moves for each element."""
    twice = [buffers.weight, buffers.exp_avg, buffers.exp_avg_sq]
    twice += [] if buffers.remainder is None else [buffers.remainder]
    once = [buffers.gradient] + ([] if buffers.model_weight is None else [buffers.model_weight])
    return 2 * sum(tensor.itemsize for tensor in twice) + sum(tensor.itemsize for tensor in once)
