"""Hooks on saved tensors that pickle them, and units whose backward finds no weights by choice."""

import io
import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.engine.unit import units_below
from tests.harness import on_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import WIDTH, Block, CheckpointedStack, Made, Product, inputs, three_blocks
from tests.harness.twins import Twins, sharded


def groups_of(model: nn.Module) -> list[Any]:
    """Return the parameter groups of all units of a model."""
    return [group for unit in units_below(model) for group in unit.groups]


def packed(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def unpacked(content: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(content))


def build() -> nn.Module:
    """Return a model whose first part returns its input and a result computed from it."""
    first = Made(lambda m, x: (m.linear(x.sin()), x), linear=nn.Linear(WIDTH, WIDTH))

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        y, same = model.first(x)
        return model.blocks(y * same.cos())

    return Made(forward, first=first, blocks=three_blocks())


@on_ranks(2)
def test_gradients_equal_the_whole_models_when_saved_tensors_are_pickled() -> None:
    twins, worst = Twins(build, units=lambda model: (model.first, *model.blocks.layers)), []
    xs = [inputs(rank, 0).requires_grad_() for rank in range(dist.get_world_size() + 1)]
    xs[-1] = inputs(dist.get_rank(), 0).requires_grad_()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            twins.model(xs[-1]).square().mean().backward()
        twins.plain_backward(0, lambda model, rank, _: model(xs[rank]).square().mean())
        own = xs[dist.get_rank()].grad * dist.get_world_size()
        worst += [float((xs[-1].grad - own).abs().max()), twins.gradients_apart()]
        twins.zero_grad()
        for x in xs:
            x.grad = None
    assert max(worst) < 1e-6


class LaterCopies:
    """Hooks that copy after forward, as hooks that copy on another stream may do on a GPU."""

    def __init__(self) -> None:
        self.packed: list[list[torch.Tensor]] = []

    def __enter__(self) -> None:
        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed[0])
        self.hooks.__enter__()

    def pack(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Keep a tensor that is copied only later."""
        self.packed.append([tensor.detach()])
        return self.packed[-1]

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)
        for packed in self.packed:
            packed[0] = packed[0].clone()


def shared_once() -> Any:
    """Return hooks that keep one copy of each tensor, found by its address, like verl's hooks.

    Like verl's hooks these skip weights: a gathered weight releases its memory, and another weight may get its address.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return tensor, tensor
        # Keeping the tensor prevents other activations from getting its address.
        return tensor, copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.detach().clone())

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1])


def as_array(tensor: torch.Tensor) -> Any:
    """Return an array on the tensor's own memory; NumPy has no bf16."""
    return tensor.detach().view(torch.int16 if tensor.dtype is torch.bfloat16 else tensor.dtype).numpy(), tensor.dtype


def from_array(packed: Any) -> torch.Tensor:
    array, dtype = packed
    return torch.from_numpy(array).view(dtype)


OFFLOADS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: torch.autograd.graph.saved_tensors_hooks(as_array, from_array),
    "copied arrays": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (as_array(tensor)[0].copy(), tensor.dtype), from_array
    ),
    "one copy per address": shared_once,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "copies": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda it: it),
    "views": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.view_as(tensor), lambda it: it),
    "detached": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda it: it),
    "copied after forward": LaterCopies,
}


@on_ranks(2)
def test_an_array_of_a_gathered_weight_keeps_its_memory_and_the_log_says_so() -> None:
    arrays = []

    def forward(part: Any, x: torch.Tensor) -> torch.Tensor:
        arrays.append(part.linear.weight.detach().numpy())
        output: torch.Tensor = part.linear(x)
        return output

    model: Any = nn.Sequential(Made(forward, linear=nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    sharded(model, reshard_after_forward=True)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dbuffer.storage").addHandler(handler)
    try:
        for step in range(3):
            model(inputs(dist.get_rank(), step)).square().mean().backward()
            wanted = model[0].linear.weight.full_tensor().detach()
            assert all(torch.equal(torch.from_numpy(array), wanted) for array in arrays), (
                "as an array of a plain weight"
            )
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    finally:
        logging.getLogger("dbuffer.storage").removeHandler(handler)
    assert len(lines) == 1
    assert "'0'" in lines[0]
    assert "fix: tensor.clone().numpy()" in lines[0]


@on_ranks(2)
def test_gradients_that_were_converted_to_arrays_can_be_dropped() -> None:
    twins = Twins(three_blocks)
    for step in range(3):
        twins.backward(step)
        assert twins.gradients_apart() < 1e-6
        kept = [param.grad.to_local().numpy() for param in twins.model.parameters()]
        before = [array.copy() for array in kept]
        if step == 1:
            del kept
        twins.zero_grad()
        twins.backward(step + 10)
        assert twins.gradients_apart() < 1e-6
        if step != 1:
            assert all((array == old).all() for array, old in zip(kept, before, strict=True)), "a later gradient"
        twins.zero_grad()


# Strategies, and reshard_after_forward.
LAYOUTS: tuple[tuple[str, bool | None], ...] = (
    ("optim", None), ("optim_grads", None), ("hsdp", None),
    *(("optim_grads_params", reshard) for reshard in (True, None, False)),
)  # fmt: skip
RUNS = [
    (kind, layout, is_checkpointed, dtype)
    for kind, layout, is_checkpointed, dtype in product(
        OFFLOADS, LAYOUTS, (False, True), (torch.float32, torch.bfloat16)
    )
    # Hooks that copy after forward need weights that stay until backward.
    if kind != "copied after forward" or (layout == ("optim_grads_params", False) and not is_checkpointed)
]


def num_ranks(layout: tuple[str, bool | None]) -> int:
    """Return two ranks for a mesh of two axes, and three for one axis."""
    return 2 if layout[0] == "hsdp" else 3


def three_checkpointed_blocks() -> nn.Module:
    return CheckpointedStack(Block(), Block(hidden=1), Block(hidden=17))


@pytest.mark.parametrize(("kind", "layout", "is_checkpointed", "dtype"), nightly_but(covering(RUNS), RUNS))
@on_ranks(num_ranks)
def test_offloaded_tensors_change_no_gradient(
    kind: str, layout: tuple[str, bool | None], is_checkpointed: bool, dtype: torch.dtype
) -> None:
    build = three_checkpointed_blocks if is_checkpointed else three_blocks
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    twins = Twins(build, layout[0], mp_policy=policy, reshard_after_forward=layout[1])
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
    for step in range(3):
        with OFFLOADS[kind]():
            loss = twins.model(inputs(dist.get_rank(), step).to(dtype)).float().square().mean()
        loss.backward()
        twins.plain_backward(step)
        assert twins.gradients_apart() < (1e-6 if dtype is torch.float32 else 3e-2)
        twins.step(optimizers)


@on_ranks(2)
def test_frozen_units_are_resharded_after_a_checkpointed_backward() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    blocks[1].requires_grad_(False)
    blocks[3].requires_grad_(False)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model = sharded(Made(forward, blocks=blocks))
    for step in range(2):
        model(inputs(dist.get_rank(), step)).square().mean().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert all(not group.gathered.is_allocated for group in groups_of(model))


@on_ranks(2)
def test_a_backward_that_reads_weights_set_not_to_be_gathered_is_refused() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5000), nn.Linear(5000, 3), nn.Tanh())
    sharded(model, units=lambda model: model[:3], reshard_after_forward=True)
    # The input of the first layer needs no gradient, so its backward reads no weight.
    model[0].set_unshard_in_backward(False)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    model.zero_grad()
    model[1].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match="is at version 1000000000"):
        model(inputs(dist.get_rank(), 0)).square().mean().backward()


class Skips:
    """Hooks that keep marked tensors and copy all others, like Megatron's fine_grained_activation_offloading.

    Attributes:
        num_kept: tensors that were kept.
    """

    def __init__(self) -> None:
        self.num_kept = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if it is marked, else a copy."""
        if getattr(tensor, "offloading_activation", True):
            return tensor.detach().clone()
        self.num_kept += 1
        return tensor


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_marks_of_parameters_after_sharding_tell_hooks_what_not_to_offload(strategy: str) -> None:
    def block() -> nn.Module:
        return Made(
            lambda part, x: Product.apply(x, part.linear.weight).tanh(), linear=nn.Linear(WIDTH, WIDTH, bias=False)
        )

    twins = Twins(lambda: nn.Sequential(block(), block()), strategy)
    for param in twins.model.parameters():
        param.offloading_activation = False
    for step in range(2):
        hooks = Skips()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, lambda tensor: tensor):
            loss = twins.model(inputs(dist.get_rank(), step)).square().mean()
        loss.backward()
        twins.plain_backward(step)
        assert hooks.num_kept == 2
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()
