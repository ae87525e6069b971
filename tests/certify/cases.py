"""Cases: the configurations that the certificate is for, each a short training run on a few ranks."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from megatron_fsdp.checkpoint.api import save_checkpoint
from megatron_fsdp.checkpoint.async_save import finish_pending_save
from megatron_fsdp.lifecycle.module import FsdpModule
from megatron_fsdp.optim.adamw.adamw import AdamW
from megatron_fsdp.optim.grad_norm import clip_grad_norm_
from megatron_fsdp.optim.muon.muon import Muon
from megatron_fsdp.optim.muon.param_groups import muon_param_groups
from megatron_fsdp.optim.stock.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.policy.mesh import DataParallelMeshDims
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements
from tests.certify.models import WIDTH, Block, Branches, ReadsEarly, Stack, Towers, batch, build

_BF16, _FP32 = torch.bfloat16, torch.float32
_NUM_STEPS = 2
_EVENT = "a wait for an event"

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
    "wire": MixedPrecisionPolicy(_BF16, _BF16, main_params_dtype=_FP32, main_grads_dtype=_FP32),
    "summed": MixedPrecisionPolicy(_BF16, _BF16, accumulate_dtype=_FP32, main_params_dtype=_FP32),
    "split": MixedPrecisionPolicy(_BF16, _FP32, main_params_dtype=_FP32, split_main_params=True),
    "int8 moments": MixedPrecisionPolicy(_BF16, _FP32, main_params_dtype=_FP32, moments="int8"),
    **{
        f"{gather} gathers": MixedPrecisionPolicy(_BF16, _FP32, main_params_dtype=_FP32, gather_dtype=gather)
        for gather in ("int8_block",)
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration to certify.

    Attributes:
        strategy: key of a strategy. policy: key of a precision policy. model: options of ``models.build``.
        reshard: ``reshard_after_forward``. prefetches: lists of units two ahead. slots: how memory slots are sized.
        accumulation: "none", or two microbatches by "microbatch" or "no_sync".
        optimizer: "sgd", "torch", "adamw", "clipped" (AdamW with a maximal norm), "coded" (with 8-bit moments), "muon",
            or "clip_grad_norm".
        trouble: an event in the second step. "forward" or "backward" raises there, and training continues; "frozen"
            freezes the first block; "evaluation" evaluates between the steps; "saving" saves during the second step.
            Or a key of ``_SCRIPTS``, which ignores the other options.
        is_tensor_parallel: blocks are cut over a second mesh axis.
        host_may: the expected waits of the host for the GPU, see ``Certificate.is_clean``; host_may_wait: why.
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
    host_may: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """2, or 4 where the mesh has two axes or is cut in groups."""
        has_two_axes = self.strategy in ("hsdp", "hfsdp") or self.is_tensor_parallel
        return 4 if has_two_axes or type(self.reshard) is int else 2


def run_case(case: Case) -> Certificate:
    """Run one case on this rank; every rank of the process group calls it."""
    with watching(case.name) as check:
        _SCRIPTS.get(case.trouble, functools.partial(_check_steps, case))(check)
        return check.certificate()


def _check_steps(case: Case, check: Certification) -> None:
    model = _make(case)
    optimizer = _optimizer(case, model)
    check.know(model)
    # The first step creates optimizer state and tables.
    for step in range(1 + _NUM_STEPS):
        if step == 1:
            check.begin()
        _trouble(case, model, optimizer, step)
        _train(case, model, optimizer, step)
    if case.trouble == "saving":
        finish_pending_save()
        dist.barrier()
        shutil.rmtree(_folder(), ignore_errors=True)


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    def backward(microbatch: int) -> None:
        model(batch(rank, step, microbatch)).backward()

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


def _two_streams(
    check: Certification, hidden: int, *, fuses: bool, is_open: bool = False, is_late: bool = False
) -> None:
    """Train a model that runs one branch on a second stream.

    Args:
        is_open: some of it is used nowhere. is_late: sums are wider than gradients, so that a lane packs these.
    """
    # Without a bias, weight gradients are multiplied straight into the buffer and no other gradient takes a turn there.
    branches = Branches(check.streams, hidden, ends_on_side=is_open, bias=not fuses or hidden < WIDTH)
    if is_open:
        branches.unused = nn.Parameter(torch.ones(3, WIDTH))
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (_BF16, _FP32) if is_late else (None, None)
    policy = MixedPrecisionPolicy(*dtypes, fuse_weight_gradients=fuses)
    _train_on_two(check, fully_shard(branches, mp_policy=policy))


def _two_towers(check: Certification) -> None:
    """Train two towers whose units alternate, each tower on its own stream."""
    towers = Towers(check.streams)
    for layer in (*towers.here, *towers.there):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(fuse_weight_gradients=False))
    _train_on_two(check, fully_shard(towers))


def _train_on_two(check: Certification, model: nn.Module) -> None:
    streams = check.streams
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    check.know(model)
    for step in range(_NUM_STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        scaled = model(torch.randn(3, WIDTH, generator=generator)).square().mean() * 1.0
        # Callbacks of a backward, including the engine's, run on the stream that called backward.
        scaled.register_hook(lambda _: _at_the_end(lambda: streams.switch(streams.compute)))
        scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            check.begin()


def _at_the_end(callback: Callable[[], None]) -> None:
    """Call back when the backward under way ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _sharded(check: Certification, model: Any) -> Any:
    """Shard a model, each of its layers as a unit, and let the check know it."""
    for part in (*model.layers, model):
        fully_shard(part)
    check.know(model)
    return model


def _captured(check: Certification) -> None:
    """Capture forward and backward alone, after a step on another stream, with hooks on a stream never joined."""
    streams = check.streams
    model = _sharded(check, build())
    optimizer = AdamW(model.parameters(), lr=1e-2, capturable=True)
    with streams.use(aside := streams.stream("aside")):
        streams.order(streams.compute, aside)
        model(batch(dist.get_rank(), 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    streams.order(aside, streams.compute)
    check.begin()

    def go_on_with(before: Queue, stream: Queue) -> None:
        # Autograd does this between nodes of two streams.
        streams.order(before, stream)
        streams.switch(stream)

    hooks = streams.stream("hooks")
    for step in (1, 2):
        # Each step has a new stream, which the engine sees only after the hooks' stream.
        graph = streams.stream(f"graph {step}")
        streams.order(streams.compute, graph)
        with streams.capture(graph):
            streams.order(graph, hooks)
            loss = model(batch(dist.get_rank(), step))
            turn, turn_back = functools.partial(go_on_with, graph, hooks), functools.partial(go_on_with, hooks, graph)
            loss.register_hook(lambda _, turn=turn: turn())
            handle = model.layers[0].register_full_backward_pre_hook(lambda *_, turn=turn_back: turn())
            loss.backward()
            handle.remove()
            if not all(graph.follows(lane) for lane in streams.lanes):
                check.note("a graph that ends with the backward has not joined every lane")
        streams.order(graph, streams.compute)
        optimizer.step()
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _captured_backward(check: Certification) -> None:
    """Capture a backward alone that reduces nothing, on a stream that the engine has not seen, with hooks elsewhere.

    Every unit has closed when the backward ends; packing gradients there would order the streams as well.
    """
    streams = check.streams
    torch.manual_seed(0)
    model = nn.Sequential(Block(13), Block(17))
    for part in (*model, model):
        fully_shard(part)
    check.know(model)

    def loss_of(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3, WIDTH, generator=generator).requires_grad_()
        loss: torch.Tensor = model(x * 1.0).square().mean()
        return loss

    loss_of(0).backward()
    model.zero_grad()
    check.begin()
    graph, hooks = streams.stream("graph"), streams.stream("hooks")
    with no_sync(model):
        loss = loss_of(1)
        streams.order(streams.compute, graph)
        with streams.capture(graph):

            def switch(_: torch.Tensor) -> None:
                streams.order(graph, hooks)
                streams.switch(hooks)
                # The callbacks of a backward run on the stream of who called it.
                _at_the_end(lambda: streams.switch(graph))

            # This hook runs before any hook of the engine on the model's output.
            scaled = loss * 1.0
            scaled.register_hook(switch)
            scaled.backward()


def _step_elsewhere(check: Certification) -> None:
    """Step on a side stream; the next forward waits for the end of the step."""
    streams, model = check.streams, _sharded(check, build())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    side = streams.stream("side")
    for step in range(_NUM_STEPS + 1):
        model(batch(dist.get_rank(), step)).backward()
        streams.order(streams.compute, side)
        with streams.use(side):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        event = streams.event()
        event.record(side)
        model.set_post_optim_event(event)
        if step == 0:
            check.begin()


def _evaluation_elsewhere(check: Certification) -> None:
    """Evaluate with weights that stay gathered, on a stream that is forgotten before a lane has work."""
    streams = check.streams
    model = fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=False)
    check.know(model)
    x = torch.ones(3, WIDTH)
    for step in range(_NUM_STEPS + 1):
        side = streams.stream(f"side {step}")
        with torch.no_grad():
            model(x)
            streams.order(streams.compute, side)
            with streams.use(side):
                model(x)
            for _ in range(2):
                model(x)
            model.reshard()
        model(x).square().mean().backward()
        model.zero_grad()
        if step == 0:
            check.begin()


def _unshard_by_hand(check: Certification) -> None:
    """Use a unit's weights outside of its forward, between ``unshard`` and ``reshard``."""
    model = _sharded(check, build())
    model(batch(dist.get_rank(), 0)).backward()
    model.zero_grad()
    check.begin()
    for layer in model.layers:
        layer.unshard()
        layer.up.weight.detach().square().sum()
        layer.reshard()
        layer.unshard(async_op=True).wait()
        for group in layer.parameter_groups:
            group.gathered.local_buffer.sum()
        layer.reshard()


def _closed_twice(check: Certification) -> None:
    """Train models whose backward brings a gradient of a unit that it has closed, and whose sums it has reduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    models = []
    for placements in (Placements.optim(0), Placements.optim_grads_params(0)):
        model = ReadsEarly()
        for part in (model.first, model.late, model):
            fully_shard(part, mesh, placements, mp_policy=MixedPrecisionPolicy(reduce_dtype=_BF16))
        check.know(model)
        models.append(model)
    for step in range(_NUM_STEPS):
        for model in models:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            model.zero_grad()
        if step == 0:
            check.begin()


def _missing_gradients(check: Certification) -> None:
    """Train a model with a weight that no rank uses: the host asks the others when reductions are over."""
    model = build()
    model.unused = nn.Parameter(torch.ones(3, WIDTH))
    _sharded(check, model)
    model(batch(dist.get_rank(), 0)).backward()
    waits = [wait for wait in check.streams.waits if wait.is_host and wait.via.path.endswith("missing_gradients.py")]
    if dist.get_world_size() > 1 and all(wait.is_redundant for wait in waits):
        check.note("the host asks who misses gradients before the reductions are over")
    check.begin()


def _deleted(check: Certification) -> None:
    """Delete a model while a gather of it is in flight."""
    model = _sharded(check, build())
    model(batch(dist.get_rank(), 0)).backward()
    check.begin()
    model.layers[0].unshard(async_op=True)
    del model
    gc.collect()
    # The next allocation may reuse the memory of the deleted model.
    torch.zeros(1)


_SCRIPTS: dict[str, Callable[[Certification], None]] = {
    "two streams, small, copied": lambda check: _two_streams(check, 5, fuses=False),
    "two streams, small, multiplied": lambda check: _two_streams(check, 5, fuses=True),
    "two streams, large, copied": lambda check: _two_streams(check, 4000, fuses=False),
    "two streams, large, multiplied": lambda check: _two_streams(check, 4000, fuses=True),
    "two streams, small, late": lambda check: _two_streams(check, 5, fuses=False, is_open=True, is_late=True),
    "two streams, towers": _two_towers,
    "two streams, open": lambda check: _two_streams(check, 5, fuses=False, is_open=True),
    "captured": _captured,
    "captured backward": _captured_backward,
    "step elsewhere": _step_elsewhere,
    "evaluation elsewhere": _evaluation_elsewhere,
    "unshard by hand": _unshard_by_hand,
    "closed twice": _closed_twice,
    "missing gradients": _missing_gradients,
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
            # A weight average writes to weights that the last gathers may still read.
            for parameter in model.parameters():
                parameter.mul_(0.99)
    elif case.trouble == "saving":
        save_checkpoint(model, optimizer, _folder(), asynchronous=True)


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


def _folder() -> Path:
    """Return where the ranks of this run save to: all of them have one parent."""
    return Path(tempfile.gettempdir(), f"megatron_fsdp certify {os.getppid()}")


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
    if case.optimizer == "coded":
        return AdamW(model.parameters(), lr=1e-2, moments="int8")
    if case.optimizer == "muon":
        return Muon(muon_param_groups(model), lr=1e-2)
    if case.optimizer == "torch":
        return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))


def _strategy_cases() -> Iterator[Case]:
    for strategy, policy in itertools.product(_STRATEGIES, ("fp32", "bf16")):
        for accumulation in ("none", "microbatch", "no_sync"):
            yield Case(
                f"{strategy}, {policy}, {accumulation}",
                strategy, policy, accumulation=accumulation, optimizer="clipped",
            )  # fmt: skip
    for policy, accumulation in itertools.product(("unfused", "wide", "summed", "split"), ("none", "microbatch")):
        optimizer = "clipped" if policy == "split" else "sgd"
        yield Case(f"{policy}, {accumulation}", policy=policy, accumulation=accumulation, optimizer=optimizer)
    for strategy in ("optim", "hsdp"):
        yield Case(f"wire, {strategy}", strategy, "wire", accumulation="microbatch", optimizer="clipped")
    for policy, strategy in itertools.product(("int8_block gathers", "int8 moments"), ("optim_grads_params", "hsdp")):
        optimizer = "coded" if policy == "int8 moments" else "clipped"
        yield Case(f"{policy}, {strategy}", strategy, policy, accumulation="no_sync", optimizer=optimizer)
    for optimizer, strategy in itertools.product(
        ("torch", "adamw", "clip_grad_norm", "muon"), ("optim_grads_params", "hfsdp")
    ):
        yield Case(f"{optimizer}, {strategy}", strategy, "bf16", optimizer=optimizer)


def _memory_cases() -> Iterator[Case]:
    for reshard in (True, False, 2):
        yield Case(f"reshard {reshard}", reshard=reshard)
        yield Case(f"reshard {reshard}, microbatches", reshard=reshard, accumulation="microbatch")
    for slots in ("by_size", "largest"):
        for strategy in ("optim_grads", "optim_grads_params", "hfsdp"):
            yield Case(f"slots {slots}, {strategy}", strategy, "bf16", slots=slots)
        yield Case(f"slots {slots}, prefetch lists", slots=slots, prefetches=True)
        yield Case(f"slots {slots}, reshard 2", slots=slots, reshard=2)
    yield Case("prefetch lists", prefetches=True)
    yield Case("prefetch lists, bf16", prefetches=True, policy="bf16", accumulation="microbatch")
    reason = "offloaded gradients are the host's: it waits for their copies, and for those of weights at the end"
    for strategy, policy, accumulation in (
        *itertools.product(("optim_grads_params", "hfsdp"), ("fp32", "bf16"), ("none", "no_sync")),
        ("optim_grads_params", "fp32", "microbatch"),
        ("optim_grads_params", "summed", "none"),
    ):
        yield Case(
            f"offload, {strategy}, {policy}, {accumulation}",
            strategy, policy, accumulation=accumulation, is_offloaded=True, host_may_wait=reason,
            host_may=(_EVENT,),
        )  # fmt: skip


def _model_cases() -> Iterator[Case]:
    more: tuple[dict[str, Any], ...] = (
        {}, {"slots": "largest"}, {"reshard": 2}, {"policy": "bf16", "accumulation": "microbatch"}
    )  # fmt: skip
    for recomputes, options in itertools.product(("reentrant", "selective", "nested"), more):
        name = f"recompute {recomputes}" + "".join(f", {key} {value}" for key, value in options.items())
        yield Case(name, model={"recomputes": recomputes}, **options)
    for key in ("is_tied", "repeats", "has_experts"):
        yield Case(key, model={key: True})
        yield Case(f"{key}, recomputed", model={key: True, "recomputes": "selective"}, policy="bf16")
    yield Case("repeats, reentrant", model={"repeats": True, "recomputes": "reentrant"})
    yield Case("tensor parallel", is_tensor_parallel=True, model={"hidden": (12, 2, 16)})


def _trouble_cases() -> Iterator[Case]:
    more: tuple[dict[str, Any], ...] = ({"optimizer": "adamw"}, {"slots": "largest", "policy": "bf16"})
    for trouble, options in itertools.product(("forward", "backward", "frozen", "evaluation", "saving"), more):
        reason = "a save waits until this rank's part is in host memory" if trouble == "saving" else ""
        may = ("",) if trouble == "saving" else ()
        yield Case(
            f"trouble: {trouble}, {', '.join(options)}",
            trouble=trouble,
            host_may_wait=reason,
            host_may=may,
            **options,
        )
    yield Case(
        "trouble: evaluation, offloaded", trouble="evaluation", is_offloaded=True,
        host_may_wait="offloaded weights are the host's: it waits at the end of a pass", host_may=(_EVENT,),
    )  # fmt: skip
    for script in _SCRIPTS:
        may = {"closed twice": (_EVENT,)}.get(script, ())
        reason = "the host has to know which gradients are None, or missing on all ranks" if may else ""
        yield Case(script, trouble=script, host_may_wait=reason, host_may=may)


CASES = (*_strategy_cases(), *_memory_cases(), *_model_cases(), *_trouble_cases())
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
        "slots by_size, optim_grads_params",
        "offload, optim_grads_params, bf16, none",
        "offload, optim_grads_params, fp32, no_sync",
        "two streams, large, copied",
        "captured backward",
        "recompute reentrant",
        "split, none",
        "wire, optim",
        "closed twice",
        "repeats",
        "trouble: backward, optimizer",
        "trouble: frozen, optimizer",
        "two streams, small, multiplied",
        "captured",
        "deleted in flight",
    )
)
