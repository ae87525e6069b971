"""Megatron host: processor time per unit that the Megatron adapter adds to megatron-core's layers, compared with FSDP2.

The model is a GPTModel of tiny layers, one unit each, in a world whose collectives do nothing
(benchmarks/null_group.py). A step is forward and backward, plus ``finish_grad_sync`` and ``zero_grad_buffer`` for the
adapter, or ``zero_grad`` for FSDP2. The time of the unsharded model in the same round is subtracted. The bench needs
megatron-core, which runs on a CPU with a stand-in for torch.cuda.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.bench_host import added_microseconds
from benchmarks.engines import Precision, fsdp2, world_mesh
from benchmarks.harness import Row, Samples, interleaved, ratio
from benchmarks.null_group import null_world

LENGTH, BATCH, VOCABULARY, WIDTH = 4, 1, 16, 16
Step = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for model, worlds and rounds."""
    parser.add_argument("--layers", type=int, default=12, help="of the model, a unit each")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=41, help="measured steps of each engine")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every world."""
    if importlib.util.find_spec("megatron") is None:
        raise SystemExit("megatron_host needs megatron-core: pip install megatron-core==0.16.1")
    from tests.integration.megatron_training import megatron_processes

    rows = []
    # Gathered memory is uninitialized, and arithmetic on denormal numbers would take longer than the engines.
    torch.set_flush_denormal(True)
    try:
        for num_ranks in args.worlds:
            with null_world(num_ranks), megatron_processes():
                rows += measure({"layers": args.layers, "ranks": num_ranks}, args.rounds)
    finally:
        torch.set_flush_denormal(False)
    return rows


def measure(case: dict[str, int], rounds: int) -> list[Row]:
    """Return the rows of one model in the current world."""
    steps = {name: make(case["layers"]) for name, make in _ENGINES.items()}
    # Processor time of this process; other processes do not count.
    seconds = interleaved(steps, rounds=rounds, warmup=5, clock=time.process_time)
    num_units = case["layers"] + 2
    added = {
        name: Samples(tuple(value / num_units for value in added_microseconds(seconds[name], seconds["plain"]).values))
        for name in steps
        if name != "plain"
    }
    rows = [
        Row("megatron_host", {**case, "engine": name}, "host time added to a unit", "us", samples)
        for name, samples in added.items()
    ]
    whole = ratio(added["adapter"], added["FSDP2"])
    return [*rows, Row("megatron_host", case, "host time over FSDP2's", "", whole)]


def _plain(num_layers: int) -> Step:
    _, model = _model(num_layers)
    return functools.partial(_step, model, model.zero_grad)


def _fsdp2(num_layers: int) -> Step:
    _, model = _model(num_layers)
    sharded = fsdp2(model, _units(model), world_mesh(), Precision())
    return functools.partial(_step, sharded, sharded.zero_grad)


def _adapter(num_layers: int) -> Step:
    from megatron.core.distributed import DistributedDataParallelConfig

    from megatron_fsdp.megatron import ShardedDataParallel

    config, model = _model(num_layers)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        check_for_nan_in_grad=False,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    sharded = ShardedDataParallel(config, ddp_config, model)

    def finish() -> None:
        sharded.finish_grad_sync()
        sharded.zero_grad_buffer()

    return functools.partial(_step, sharded, finish)


_ENGINES: dict[str, Callable[[int], Step]] = {"plain": _plain, "adapter": _adapter, "FSDP2": _fsdp2}


def _model(num_layers: int) -> tuple[Any, Any]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=WIDTH,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, share_embeddings_and_output_weights=False)
    return config, model


def _units(model: Any) -> list[nn.Module]:
    """Return the modules that the adapter makes units, without the root."""
    return [model.embedding, *model.decoder.layers]


def _step(model: nn.Module, finish: Step) -> None:
    tokens = torch.arange(LENGTH)[None] % VOCABULARY
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    model(tokens, torch.arange(LENGTH)[None], mask, labels=tokens).sum().backward()
    finish()
