"""Peer worker: one rank of an engine that lives in another interpreter; a script that peer_python.py starts there.

``PYTHON -I peer_worker.py REQUEST`` reads a request, JSON in a file, and writes its answer beside it. NVIDIA's
megatron-fsdp has the import name of this project's package, so this repository must not be on the import path here:
only the files of this folder that need torch alone are made importable, as the package ``benchmarks``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_package = types.ModuleType("benchmarks")
_package.__path__ = [str(Path(__file__).parent)]
sys.modules.setdefault("benchmarks", _package)

from benchmarks.allocations import cuda_phases_of, phases_of  # noqa: E402  (importable only from here on)
from benchmarks.models import Shape  # noqa: E402
from benchmarks.null_group import null_world  # noqa: E402
from benchmarks.torch_engines import (  # noqa: E402
    LEARNING_RATE,
    Precision,
    Step,
    make_model,
    step_of,
    train_fsdp2,
    train_in_turn,
)

__all__ = ["PEERS", "SETTINGS", "main"]

NUM_STEPS = 3


def train_megatron_fsdp(shape: Shape, precision: Precision, device: str) -> Step:
    """Train by NVIDIA's megatron-fsdp and torch's fused AdamW.

    Raises:
        ImportError: the package of that import name is another one.
    """
    wanted = Path(str(metadata.distribution("megatron-fsdp").locate_file("megatron_fsdp")))
    megatron_fsdp = import_module("megatron_fsdp")
    found = Path(str(megatron_fsdp.__file__)).parent
    if found.resolve() != wanted.resolve():
        raise ImportError(f"import megatron_fsdp finds {found}, wanted {wanted}")
    model = make_model(shape, device)
    if precision.compute is not None:
        model.to(precision.compute)
    reduce = precision.reduce or precision.compute or torch.float32
    policy = megatron_fsdp.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=reduce
    )
    unit = type(model.layers[0])
    place = {"device": torch.device(device, 0)} if device == "cuda" else {"device": torch.device(device)}
    sharded = megatron_fsdp.fully_shard_model(model, fsdp_unit_modules=[unit], mixed_precision_policy=policy, **place)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE, fused=True)
    return step_of(sharded, megatron_fsdp.fully_shard_optimizer(optimizer))


def train_deepspeed(shape: Shape, precision: Precision, device: str) -> Step:
    """Train by DeepSpeed's ZeRO-3 and torch's fused AdamW."""
    deepspeed: Any = import_module("deepspeed")
    # Its collectives through shared memory would have to be compiled first, and other engines have none.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    model = make_model(shape, device)
    # Its own sizes are meant for other models; the other engines gather and reduce a layer at a time.
    layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
        },
        "communication_data_type": names[precision.reduce or precision.compute or torch.float32],
    }
    if precision.compute is not None:
        config[names[precision.compute]] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


# By the name of the package that pip installs.
PEERS: dict[str, Callable[[Shape, Precision, str], Step]] = {
    "megatron-fsdp": train_megatron_fsdp,
    "deepspeed": train_deepspeed,
}
SETTINGS = {
    "megatron-fsdp": "fully_shard_model of every layer, ZeRO-3, FP32 main weights and gradients, overlap as by default",
    "deepspeed": "ZeRO-3, overlap_comm, contiguous_gradients, buckets of a layer, no persistent parameters",
}


def main(path: Path) -> int:
    """Answer the request in a file, in ``FILE.answer``; the answer holds "error" where it cannot be done."""
    request = json.loads(path.read_text(encoding="utf-8"))
    # A peer warns of what PyTorch deprecates, in every step.
    warnings.simplefilter("ignore")
    try:
        answer = _answer(request)
    # What a peer raises is what is asked for.
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    path.with_suffix(".answer").write_text(json.dumps(answer), encoding="utf-8")
    return 1 if "error" in answer else 0


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["what"] == "list":
        return {"versions": {name: metadata.version(name) for name in PEERS if _is_installed(name)}}
    dtypes = request["precision"]
    compute, reduce = (None if dtypes[name] is None else getattr(torch, dtypes[name]) for name in ("compute", "reduce"))
    precision = Precision(compute, reduce)
    sizes = dict(request["shape"])
    sizes["compute"] = None if sizes["compute"] is None else getattr(torch, sizes["compute"])
    shape, peer = Shape(**sizes), PEERS[request["peer"]]
    if request["backend"] == "null":
        with null_world(request["ranks"]):
            return _measure(request, peer, shape, precision)
    store = f"file://{request['store']}"
    dist.init_process_group("gloo", init_method=store, rank=request["rank"], world_size=request["ranks"])
    return _measure(request, peer, shape, precision)


def _measure(
    request: dict[str, Any], peer: Callable[[Shape, Precision, str], Step], shape: Shape, precision: Precision
) -> dict[str, Any]:
    device = request["device"]
    if request["what"] == "step":
        steps = {request["peer"]: peer(shape, precision, device), "FSDP2": train_fsdp2(shape, precision, device)}
        return {"times": train_in_turn(steps, shape, request["rounds"], device)}
    tokens = torch.zeros(shape.batch, shape.length + 1, dtype=torch.long, device=device)

    def run(begin: Callable[[str], None]) -> Step:
        step = peer(shape, precision, device)
        for _ in range(NUM_STEPS):
            begin("whole step")
            step(tokens)
        begin("rest")
        return step

    phases = dict(cuda_phases_of(run) if device == "cuda" else phases_of(run))
    return {"phases": {name: [phase.start, phase.peak, phase.end] for name, phase in phases.items()}}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    # Peers leave threads and groups behind whose end may hang.
    os._exit(status)
