"""Cases: the configurations that the certificate is for, each a short training run on a few ranks."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp.api import fully_shard, microbatch, no_sync
from megatron_fsdp.certify.certificate import Certificate, Certification, watching
from megatron_fsdp.certify.clocks import Queue
from megatron_fsdp.certify.models import WIDTH, Branches, Stack, batch, build
from megatron_fsdp.checkpoint.api import save_checkpoint
from megatron_fsdp.optim.adamw import AdamW
from megatron_fsdp.optim.grad_norm import clip_grad_norm_
from megatron_fsdp.optim.muon import Muon
from megatron_fsdp.optim.param_groups import muon_param_groups
from megatron_fsdp.optim.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.policy.mesh import DataParallelMeshDims
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.runtime.module import FsdpModule

__all__ = ["CASES", "SHORT", "Case", "run_case"]

_BF16, _FP32 = torch.bfloat16, torch.float32
_NUM_STEPS = 2

_STRATEGIES: dict[str, Callable[[], Placements]] = {
    "no_shard": lambda: Placements.no_shard(0),
    "optim": lambda: Placements.optim(0),
    "optim_grads": lambda: Placements.optim_grads(0),
    "optim_grads_params": lambda: Placements.optim_grads_params(0),
    "hsdp": lambda: Placements.hsdp(0, 1),
    "hfsdp": lambda: Placements.hfsdp(0, 1),
}
_POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(_BF16, _FP32, main_params_dtype=_FP32),
    "unfused": MixedPrecisionPolicy(fuse_weight_gradients=False),
    "wide": MixedPrecisionPolicy(_BF16, _FP32, main_params_dtype=_FP32, fuse_weight_gradients="wide"),
    "split": MixedPrecisionPolicy(_BF16, _FP32, main_params_dtype=_FP32, split_main_params=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration.

    Attributes:
        strategy: a key of the six. policy: of the precisions. model: options of ``models.build``.
        reshard: ``reshard_after_forward``. prefetches: lists of units two ahead. slots: sizing of memory slots.
        accumulation: "none", "microbatch" or "no_sync"; of two microbatches.
        optimizer: "sgd", "torch", "adamw", "clipped" (AdamW with a maximal norm), "muon", or "clip_grad_norm".
        trouble: "forward" or "backward" raises in the second step, and training goes on; "frozen": the first block is
            frozen then; "evaluation": one comes between the steps; "saving": a checkpoint is saved beside the second step.
        is_tensor_parallel: blocks are cut over a second mesh axis.
        host_may_wait: why the host is meant to wait for the GPU here; empty where it is not.
    """

    name: str
    strategy: str = "optim_grads_params"
    policy: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict)
    reshard: bool | int | None = None
    prefetches: bool = False
    slots: str | None = None
    accumulation: str = "none"
    optimizer: str = "sgd"
    trouble: str = ""
    is_offloaded: bool = False
    is_tensor_parallel: bool = False
    host_may_wait: str = ""

    @property
    def num_ranks(self) -> int:
        """2, or 4 where the mesh has two axes or is cut in groups."""
        has_two_axes = self.strategy in ("hsdp", "hfsdp") or self.is_tensor_parallel
        return 4 if has_two_axes or type(self.reshard) is int else 2


def run_case(case: Case) -> Certificate:
    """Run one case on this rank; every rank of the process group calls it."""
    with watching(case.name) as check:
        script = _SCRIPTS.get(case.trouble)
        losses = _check_steps(case, check) if script is None else script(check)
        certificate = check.certificate()
    # Read when all is over: on a GPU to look is to wait.
    return replace(certificate, losses=tuple(loss.item() for loss in losses))


def _check_steps(case: Case, check: Certification) -> list[torch.Tensor]:
    model = _make(case)
    optimizer = _optimizer(case, model)
    check.know(model)
    losses = []
    for step in range(_NUM_STEPS + 1):
        if step == 1:
            # The first step makes what is made once, such as optimizer state and tables.
            check.begin()
        _trouble(case, model, optimizer, step)
        losses += _train(case, model, optimizer, step)
    return losses


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []

    def backward(microbatch: int) -> None:
        loss = model(batch(rank, step, microbatch))
        losses.append(loss.detach())
        loss.backward()

    rank = dist.get_rank()
    if case.accumulation == "no_sync":
        with no_sync(model):
            backward(0)
        backward(1)
    else:
        num_microbatches = 2 if case.accumulation == "microbatch" else 1
        for index in range(num_microbatches):
            with microbatch(model, index == num_microbatches - 1):
                backward(index)
    if case.optimizer == "clip_grad_norm":
        clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _two_streams(check: Certification, hidden: int, *, fuses: bool) -> list[torch.Tensor]:
    """Train a model of which a branch runs on a stream of its own."""
    streams = check.streams
    model = fully_shard(Branches(streams, hidden), mp_policy=MixedPrecisionPolicy(fuse_weight_gradients=fuses))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    check.know(model)
    losses: list[torch.Tensor] = []
    for step in range(_NUM_STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        losses.append(model(torch.randn(3, WIDTH, generator=generator)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            check.begin()
    return losses


def _captured(check: Certification) -> list[torch.Tensor]:
    """Capture forward and backward alone, after a step on another stream, with hooks on a stream that nobody joins."""
    streams = check.streams
    model = build()
    for part in (*model.layers, model):
        fully_shard(part)
    check.know(model)
    optimizer = AdamW(model.parameters(), lr=1e-2, capturable=True)
    with streams.use(aside := streams.stream("aside")):
        streams.order(streams.compute, aside)
        model(batch(dist.get_rank(), 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    streams.order(aside, streams.compute)
    check.begin()
    graph, hooks = streams.stream("graph"), streams.stream("hooks")

    def go_on_with(before: Queue, stream: Queue) -> None:
        # As autograd does between nodes of two streams.
        streams.order(before, stream)
        streams.switch(stream)

    streams.order(streams.compute, graph)
    with streams.capture(graph):
        streams.order(graph, hooks)
        loss = model(batch(dist.get_rank(), 1))
        with streams.use(hooks):
            streams.order(graph, hooks)
            loss.register_hook(lambda _: go_on_with(graph, hooks))
            model.layers[0].register_full_backward_pre_hook(lambda *_: go_on_with(hooks, graph))
        loss.backward()
        if not all(graph.follows(lane) for lane in streams.lanes):
            check.note("a graph that ends with the backward has not joined every lane")
    streams.order(graph, streams.compute)
    optimizer.step()
    return [loss]


def _deleted(check: Certification) -> list[torch.Tensor]:
    """Delete a model while a gather of it is in flight."""
    model = build()
    for part in (*model.layers, model):
        fully_shard(part)
    check.know(model)
    model(batch(dist.get_rank(), 0)).backward()
    check.begin()
    first = model.layers[0]
    assert isinstance(first, FsdpModule)
    first.unshard(async_op=True)
    del model, first, part
    gc.collect()
    # Whatever is allocated next may have its memory.
    torch.zeros(1)
    return []


_SCRIPTS: dict[str, Callable[[Certification], list[torch.Tensor]]] = {
    "two streams, small, copied": lambda check: _two_streams(check, 5, fuses=False),
    "two streams, small, multiplied": lambda check: _two_streams(check, 5, fuses=True),
    "two streams, large, copied": lambda check: _two_streams(check, 4000, fuses=False),
    "two streams, large, multiplied": lambda check: _two_streams(check, 4000, fuses=True),
    "captured": _captured,
    "deleted in flight": _deleted,
}


class _Interruption(Exception):
    """Comes from the middle of a forward or backward."""


def _trouble(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step != 1 or not case.trouble:
        return
    assert isinstance(model, Stack)
    if case.trouble in ("forward", "backward"):
        _interrupt(model, case.trouble)
        optimizer.zero_grad()
    elif case.trouble == "frozen":
        model.layers[0].requires_grad_(False)
    elif case.trouble == "evaluation":
        with torch.no_grad():
            model(batch(dist.get_rank(), 99))
    elif case.trouble == "saving":
        _save(model, optimizer)


def _interrupt(model: Stack, where: str) -> None:
    """Raise in the second block, in forward or in backward."""

    def stop(*_: Any) -> None:
        raise _Interruption

    def stop_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(stop)

    hook: Any = stop if where == "forward" else stop_backward
    handle = model.layers[1].register_forward_hook(hook)
    try:
        model(batch(dist.get_rank(), 98)).backward()
    except _Interruption:
        pass
    finally:
        handle.remove()


def _save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(name[0] or own) / "checkpoint"
        save_checkpoint(model, optimizer, folder, asynchronous=True)


def _make(case: Case) -> nn.Module:
    model = build(**case.model)
    options = _options(case, model)
    for part in (*model.layers, model):
        reshard = None if part is model and type(case.reshard) is int else case.reshard
        fully_shard(part, reshard_after_forward=reshard, **options)
    assert isinstance(model, FsdpModule)
    if case.slots is not None:
        model.set_slot_pool(case.slots)
    if case.prefetches:
        _prefetch_two_ahead([layer for layer in model.layers if isinstance(layer, FsdpModule)])
    return model


def _options(case: Case, model: Stack) -> dict[str, Any]:
    options: dict[str, Any] = {"mp_policy": _POLICIES[case.policy]}
    if case.is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy()
    size = dist.get_world_size()
    if case.is_tensor_parallel:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
        return options | {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    has_two = case.strategy in ("hsdp", "hfsdp")
    names = ("outer", "inner") if has_two else ("data",)
    shape = (2, size // 2) if has_two else (size,)
    return options | {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "placements": _STRATEGIES[case.strategy](),
    }


def _prefetch_two_ahead(layers: list[FsdpModule]) -> None:
    for position, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[position + 1 : position + 3])
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(position - 2, 0) : position])))


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer in ("adamw", "clipped"):
        return AdamW(model.parameters(), lr=1e-2, max_norm=0.1 if case.optimizer == "clipped" else None)
    if case.optimizer == "muon":
        return Muon(muon_param_groups(model), lr=1e-2)
    if case.optimizer == "torch":
        return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))


def _cases() -> Iterator[Case]:
    base = Case("")
    for strategy in _STRATEGIES:
        for policy in ("fp32", "bf16"):
            for accumulation in ("none", "microbatch", "no_sync"):
                yield Case(
                    f"{strategy}, {policy}, {accumulation}",
                    strategy, policy, accumulation=accumulation, optimizer="clipped",
                )  # fmt: skip
    for reshard in (True, False, 2):
        yield replace(base, name=f"reshard {reshard}", reshard=reshard)
        yield replace(base, name=f"reshard {reshard}, microbatches", reshard=reshard, accumulation="microbatch")
    for slots in ("by_size", "largest"):
        for strategy in ("optim_grads", "optim_grads_params", "hfsdp"):
            yield replace(base, name=f"slots {slots}, {strategy}", slots=slots, strategy=strategy, policy="bf16")
        yield replace(base, name=f"slots {slots}, prefetch lists", slots=slots, prefetches=True)
        yield replace(base, name=f"slots {slots}, reshard 2", slots=slots, reshard=2)
    yield replace(base, name="prefetch lists", prefetches=True)
    yield replace(base, name="prefetch lists, bf16", prefetches=True, policy="bf16", accumulation="microbatch")
    reason = "offloaded weights and gradients are the host's: it waits for their copies by design"
    for policy in ("fp32", "bf16"):
        for strategy in ("optim_grads_params", "hfsdp"):
            for accumulation in ("none", "no_sync"):
                yield Case(
                    f"offload, {strategy}, {policy}, {accumulation}",
                    strategy, policy, accumulation=accumulation, is_offloaded=True, host_may_wait=reason,
                )  # fmt: skip
    for recomputes in ("reentrant", "selective", "nested"):
        for options in ({}, {"slots": "largest"}, {"reshard": 2}, {"policy": "bf16", "accumulation": "microbatch"}):
            name = f"recompute {recomputes}" + "".join(f", {key} {value}" for key, value in options.items())
            yield replace(base, name=name, model={"recomputes": recomputes}, **options)
    for policy in ("unfused", "wide", "split"):
        for accumulation in ("none", "microbatch"):
            optimizer = "clipped" if policy == "split" else "sgd"
            yield replace(
                base, name=f"{policy}, {accumulation}", policy=policy, accumulation=accumulation, optimizer=optimizer
            )
    for key in ("is_tied", "repeats", "has_experts"):
        yield replace(base, name=key, model={key: True})
        yield replace(base, name=f"{key}, recomputed", model={key: True, "recomputes": "selective"}, policy="bf16")
    for trouble in ("forward", "backward", "frozen", "evaluation", "saving"):
        reason = "a save waits until this rank's part is in host memory" if trouble == "saving" else ""
        for options in ({"optimizer": "adamw"}, {"slots": "largest", "policy": "bf16"}):
            name = f"trouble: {trouble}, " + ", ".join(options)
            yield replace(base, name=name, trouble=trouble, host_may_wait=reason, **options)
    for script in _SCRIPTS:
        yield replace(base, name=script, trouble=script)
    yield replace(base, name="tensor parallel", is_tensor_parallel=True, model={"hidden": (12, 2, 16)})
    for optimizer in ("torch", "adamw", "clip_grad_norm", "muon"):
        for strategy in ("optim_grads_params", "hfsdp"):
            yield replace(base, name=f"{optimizer}, {strategy}", optimizer=optimizer, strategy=strategy, policy="bf16")


CASES = tuple(_cases())
# One of each mechanism, for every change.
SHORT = tuple(
    case
    for case in CASES
    if case.name
    in (
        "optim_grads_params, bf16, microbatch",
        "hfsdp, bf16, none",
        "optim_grads, fp32, no_sync",
        "reshard 2",
        "slots largest, prefetch lists",
        "offload, optim_grads_params, bf16, none",
        "recompute reentrant",
        "split, none",
        "repeats",
        "trouble: backward, optimizer",
        "trouble: frozen, optimizer",
        "two streams, small, multiplied",
        "captured",
        "deleted in flight",
    )
)
