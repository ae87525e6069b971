"""Units that are compiled before or after they are sharded, and compiled optimizer steps, train like the whole model.

In one file, because the compiler takes seconds to start in each process of ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch.distributed.tensor import DTensor

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.functional.linear_uses import counted_products, shard_as
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import (
    Block,
    CheckpointedStack,
    Stack,
    draw_tokens,
    inputs,
    loss_of,
    make_mesh,
    make_model,
    squared,
    three_blocks,
    world_mesh,
)
from tests.harness.oracle import Case, Comparison, compare, differing, shard_model, whole_state
from tests.harness.twins import sharded

BACKEND = "aot_eager"
# What the compiler itself does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]
State = dict[str, torch.Tensor]


def three_equal_blocks() -> nn.Module:
    return Stack(Block(), Block(), Block())


def sharded_in_order(model: nn.Module, *, then: bool, policy: MixedPrecisionPolicy | None = None) -> None:
    """Compile every layer before it is sharded, or then."""
    for layer in model.layers:
        for step in (lambda one: fully_shard(one, mp_policy=policy), lambda one: one.compile(backend=BACKEND))[
            :: 1 if then else -1
        ]:
            step(layer)
    fully_shard(model)


def compiled_then_sharded(model: nn.Module) -> None:
    sharded_in_order(model, then=False)


def wrapped(model: nn.Module, *wraps: Callable[[nn.Module], nn.Module]) -> None:
    """Replace every layer by what functions make of it, one after the other."""
    for index, layer in enumerate(model.layers):
        for wrap in wraps:
            layer = wrap(layer)
        model.layers[index] = layer
    fully_shard(model)


def torch_compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, backend=BACKEND)


def parts_compiled(model: nn.Module) -> None:
    """Compile the blocks within a unit of all of them, as models do with their feed-forward."""
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    fully_shard(model)


def whole_model_compiled(model: nn.Module) -> None:
    sharded(model).compile(backend=BACKEND)


ORDERS: dict[str, Callable[[nn.Module], None]] = {
    "compiled then sharded": compiled_then_sharded,
    "sharded then compiled": lambda model: sharded_in_order(model, then=True),
    "torch.compile(module), sharded": lambda model: wrapped(model, torch_compiled, fully_shard),
    "torch.compile(sharded module)": lambda model: wrapped(model, fully_shard, torch_compiled),
    "parts of a unit compiled": parts_compiled,
    "the whole sharded model compiled": whole_model_compiled,
    # Wider, so that results stay comparable with the whole model's.
    "another compute dtype": lambda model: sharded_in_order(
        model, then=False, policy=MixedPrecisionPolicy(torch.float64)
    ),
}


# Units that are compiled before or after they are sharded take part in other tests.
QUICK = ("the whole sharded model compiled",)


@pytest.mark.parametrize("name", nightly_but(QUICK, ORDERS))
@on_ranks(2, timeout=200)
def test_gradients_equal_those_of_a_whole_model(name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = compare(Case(three_equal_blocks, squared, shard=ORDERS[name], is_guarded=False))
    assert result.is_exact, result
    assert sum(torch._dynamo.utils.counters["stats"].values()) > 0


@on_ranks(2, timeout=200)
def test_compiled_units_may_be_recomputed() -> None:
    torch._dynamo.reset()
    result = compare(
        Case(lambda: CheckpointedStack(Block(), Block()), squared, shard=compiled_then_sharded, is_guarded=False)
    )
    assert result.is_exact


@on_ranks(2, timeout=200)
def test_steps_after_the_first_compile_nothing_anew() -> None:
    torch._dynamo.reset()
    counts = []
    compiled = 0

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model = three_equal_blocks()
    for layer in model.layers:
        layer.compile(backend=backend)
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        squared(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(compiled)
    assert counts[0] > 0
    assert counts == [counts[0]] * 4


@on_ranks(2, timeout=200)
def test_compiled_units_serve_evaluation_and_inference() -> None:
    torch._dynamo.reset()
    model = three_equal_blocks()
    compiled_then_sharded(model)
    trained = squared(model, 0, 0).item()
    model.eval()
    calls: list[str] = []
    with torch.no_grad(), observe_collectives(lambda call: calls.append(call.kind)):
        without_grad: torch.Tensor = model(inputs(0, 0))
    with torch.inference_mode():
        inference: torch.Tensor = model(inputs(0, 0))
    worst = max(abs(float(out.square().mean()) - trained) for out in (without_grad, inference))
    assert calls == ["all_gather"] * 3
    assert worst < 1e-6


def counting_products(policy: MixedPrecisionPolicy) -> tuple[Comparison, int, int]:
    """Train compiled units; return the comparison, and the numbers of products and of graph breaks."""

    def shard(model: nn.Module) -> None:
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
            layer.compile(backend=BACKEND)
        fully_shard(model)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with counted_products() as products:
        result = compare(Case(three_blocks, squared, shard=shard, is_guarded=False))
    return result, len(products), sum(torch._dynamo.utils.counters["graph_break"].values())


def test_compiled_units_use_no_products_and_their_graphs_break_no_more_often() -> None:
    fused = run_ranks(2, counting_products, MixedPrecisionPolicy(), timeout=200)
    unfused = run_ranks(2, counting_products, MixedPrecisionPolicy(fuse_weight_gradients=False), timeout=200)
    assert all(result.is_exact for result, _, _ in fused), fused
    assert [products for _, products, _ in fused] == [0, 0]
    assert [breaks for _, _, breaks in fused] == [breaks for _, _, breaks in unfused]


@on_ranks(2, timeout=200)
def test_layers_beside_compiled_ones_use_products() -> None:

    def shard(model: nn.Module) -> None:
        for layer in model.layers:
            layer.up.compile(backend=BACKEND)
        shard_as("optim_grads_params", MixedPrecisionPolicy())(model)

    torch._dynamo.reset()
    with counted_products() as products:
        result = compare(Case(three_blocks, squared, shard=shard, is_guarded=False))
    products = len(products)
    assert result.is_exact, result
    assert products == 3 * 3


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def compiled_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return torch.compile(optimizer.step, backend=BACKEND)


def by_hand(optimizer: torch.optim.Optimizer, *, is_compiled: bool) -> Callable[[], object]:
    """Return a step of decayed gradients, each in one graph, as low-bit optimizers make theirs."""

    def update(parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor) -> None:
        mean.lerp_(gradient, 0.5)
        parameter.add_(mean / (mean.square().sqrt() + 0.1) + 0.01 * parameter, alpha=-0.1)

    compiled = torch.compile(update, backend=BACKEND, fullgraph=True, dynamic=False) if is_compiled else update

    @torch.no_grad()
    def step() -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            with torch._dynamo.utils.disable_cache_limit():
                compiled(parameter.detach(), parameter.grad, state["mean"])

    return step


def train_with_compiled_steps(model: nn.Module, name: str, ranks: list[int], *, is_compiled: bool) -> State:
    torch._dynamo.reset()
    kind, options = OPTIMIZERS.get(name, OPTIMIZERS["SGD"])
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
    step: Callable[[], object] = optimizer.step
    if name == "a function in one graph":
        step = by_hand(optimizer, is_compiled=is_compiled)
    elif is_compiled:
        step = compiled_step(optimizer)
    for index in range(3):
        for rank in ranks:
            tokens = draw_tokens(rank, index)
            (loss_of(model(tokens), tokens) / len(ranks)).backward()
        step()
        optimizer.zero_grad()
    return whole_state(model)


@pytest.mark.parametrize(
    "name", nightly_but(["SGD", "a function in one graph"], ["AdamW", "SGD", "a function in one graph"])
)
@on_ranks(2, timeout=240)
def test_weights_equal_the_whole_models_after_compiled_steps_of(name: str) -> None:
    wanted = train_with_compiled_steps(make_model(), name, [0, 1], is_compiled=False)
    strategy = "optim_grads_params"
    mesh = make_mesh((2,))
    found = train_with_compiled_steps(
        shard_model(make_model(), mesh, strategy), name, [dist.get_rank()], is_compiled=True
    )
    assert differing(found, wanted, 1e-5) == []


@on_ranks(2, timeout=240)
def test_results_of_a_compiled_function_keep_their_kind() -> None:
    model = shard_model(make_model(), world_mesh())
    function = torch.compile(lambda p: (p * 2, p.sum()), backend=BACKEND, fullgraph=True)
    weight = model.head.weight.detach()
    twice, total = function(weight)
    assert isinstance(twice, DTensor)
    assert isinstance(weight, DTensor)
    assert torch.equal(twice.full_tensor(), weight.full_tensor() * 2)
    torch.testing.assert_close(total.full_tensor() if isinstance(total, DTensor) else total, weight.full_tensor().sum())
    assert [type(twice).__name__] == ["FlatDTensor"]


def is_cached_on_disk() -> bool:
    weight = shard_model(make_model(), world_mesh()).head.weight
    try:
        weight._stable_hash_for_caching()
    except BypassAOTAutogradCache:
        return False
    return True


def test_compiled_steps_are_not_taken_from_disk_where_other_inputs_may_be_of_another_kind() -> None:
    # PyTorch's key of a DTensor forgets what is inside: 4-bit state would get the code of FP32 state.
    assert run_ranks(1, is_cached_on_disk) == [False]
