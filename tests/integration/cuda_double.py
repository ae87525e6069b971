"""A stand-in for torch.cuda: megatron.core, which is written for GPUs alone, runs on CPU tensors inside it."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

CPU = torch.device("cpu")
# Functions that megatron.core calls with device="cuda", or with the device that torch.cuda.current_device() returns.
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


class Stream:
    """One of torch.cuda's streams: on a CPU everything is in order already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has passed: something else to wait for."""
        return event or Stream()


@contextmanager
def cuda_double() -> Iterator[None]:
    """Let megatron.core take the CPU for a GPU while the block runs.

    ``torch.cuda.is_available()`` stays False: megatron.core trains without asking, and the library under test must
    not be led to streams and pinned memory that are not there.
    """
    # The first block of this kind settles which functions such blocks look for: not the stand-ins.
    with CPU:
        torch.empty(0)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    with ExitStack() as stack:
        for patch in (*_patches_of_torch(), *_patches_of_gloo(), *_patches_of_random_numbers(random)):
            stack.enter_context(patch)
        # The router asks whether this is None, and defines it only next to TransformerEngine.
        router = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        stack.enter_context(mock.patch.object(router, "te_general_gemm", None, create=True))
        # The dispatcher hands sizes to all_to_all as numpy's, which it makes only from tensors on a GPU.
        dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        stack.enter_context(mock.patch.object(dispatcher, "maybe_move_tensor_to_cpu", _as_numpy, create=True))
        yield


def _patches_of_torch() -> Iterator[AbstractContextManager[Any]]:
    for name in FACTORIES:
        yield mock.patch.object(torch, name, _on_cpu(getattr(torch, name)))
    yield mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    yield mock.patch.object(nn.Module, "cuda", lambda module, *_, **__: module)
    yield mock.patch.object(torch.Tensor, "type", _cuda_type(torch.Tensor.type))
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, replacement in replacements.items():
        yield mock.patch.object(torch.cuda, name, replacement)


def _patches_of_gloo() -> Iterator[AbstractContextManager[Any]]:
    """Let tensors of unequal sizes be gathered and scattered, which NCCL does and gloo does not."""
    yield mock.patch.object(dist, "all_gather", _any_all_gather(dist.all_gather))
    yield mock.patch.object(dist, "reduce_scatter", _any_reduce_scatter)


def _any_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **options: Any) -> Any:
        sizes = [output.shape[0] if output.ndim else 1 for output in outputs]
        if len(set(sizes)) == 1:
            return original(outputs, tensor, group=group, **options)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        found = [torch.empty_like(padded) for _ in outputs]
        original(found, padded, group=group)
        for output, size, part in zip(outputs, sizes, found, strict=True):
            output.copy_(part[:size])
        return None

    return all_gather


def _any_reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None, **_: Any) -> None:
    total = torch.cat(inputs)
    dist.all_reduce(total, group=group)
    output.copy_(total.split([part.shape[0] for part in inputs])[dist.get_rank(group)])


def _patches_of_random_numbers(random: Any) -> Iterator[AbstractContextManager[Any]]:
    for owner in (torch.cuda, torch.cuda.random):
        yield mock.patch.object(owner, "get_rng_state", _get_state)
        yield mock.patch.object(owner, "set_rng_state", _set_state)
        yield mock.patch.object(owner, "manual_seed", torch.manual_seed)
    yield mock.patch.object(random, "_get_cuda_rng_state", _get_state)
    yield mock.patch.object(random, "_set_cuda_rng_state", _set_state)


def _as_numpy(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*values: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = CPU
        return factory(*values, **options)

    return make


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_of(tensor: torch.Tensor, *wanted: Any, **options: Any) -> Any:
        found = original(tensor, *wanted, **options)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of
