"""Units that are compiled before or after they are sharded, and compiled optimizer steps, train like the whole model.

In one file, because the compiler takes seconds to start in each process of ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch.distributed.tensor import DTensor

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.functional.megatron_fsdp.engine.linear_uses import counted_products
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, CheckpointedStack, Stack, inputs, make_model, squared, three_blocks
from tests.harness.oracle import Case, compare, differing, sharded_model, token_loss, train, whole_state
from tests.harness.twins import Twins, sharded

BACKEND = "aot_eager"
# Warnings of the compiler itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


def equal_blocks(kind: type[Stack] = Stack) -> Any:
    return kind(Block(), Block(), Block())


def compiled_layers(model: Any, *, then: bool, **options: Any) -> None:
    """Compile every layer before it is sharded, or after."""
    for layer in model.layers:
        if not then:
            layer.compile(backend=BACKEND)
        fully_shard(layer, **options)
        if then:
            layer.compile(backend=BACKEND)
    fully_shard(model)


def wrapped(model: Any, *, then: bool) -> None:
    """Replace every layer by the result of torch.compile, before it is sharded, or after."""
    for index, layer in enumerate(model.layers):
        if then:
            model.layers[index] = torch.compile(fully_shard(layer), backend=BACKEND)
        else:
            compiled: Any = torch.compile(layer, backend=BACKEND)
            model.layers[index] = fully_shard(compiled)
    fully_shard(model)


def parts_compiled(model: Any) -> None:
    """Compile the blocks inside of a single unit, as models do with their feed-forward layers."""
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    fully_shard(model)


ORDERS: dict[str, Callable[[Any], object]] = {
    "compiled then sharded": lambda model: compiled_layers(model, then=False),
    "sharded then compiled": lambda model: compiled_layers(model, then=True),
    "torch.compile(module), sharded": lambda model: wrapped(model, then=False),
    "torch.compile(sharded module)": lambda model: wrapped(model, then=True),
    "parts of a unit compiled": parts_compiled,
    "the whole sharded model compiled": lambda model: sharded(model).compile(backend=BACKEND),
    # Wider layers keep results comparable with the whole model's.
    "another compute dtype": lambda model: compiled_layers(
        model, then=False, mp_policy=MixedPrecisionPolicy(torch.float64)
    ),
    "compiled then sharded, recomputed": lambda model: compiled_layers(model, then=False),
}


# Other tests cover units that are compiled before or after they are sharded.
@pytest.mark.parametrize(
    "name", nightly_but(("the whole sharded model compiled", "compiled then sharded, recomputed"), ORDERS)
)
@on_ranks(2, timeout=200)
def test_gradients_equal_those_of_a_whole_model(name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kind = CheckpointedStack if name.endswith("recomputed") else Stack
    result = compare(Case(lambda: equal_blocks(kind), squared, shard=ORDERS[name], is_guarded=False))
    assert result.is_exact, result
    assert sum(torch._dynamo.utils.counters["stats"].values()) > 0


@on_ranks(2, timeout=200)
def test_steps_after_the_first_compile_nothing() -> None:
    torch._dynamo.reset()
    compiled, counts = [], []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model = equal_blocks()
    for layer in model.layers:
        layer.compile(backend=backend)
    sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        train(model, optimizer, [step], loss=squared)
        counts.append(len(compiled))
    assert counts == [max(counts[0], 1)] * 4


@on_ranks(2, timeout=200)
def test_a_unit_may_be_recompiled_while_gradients_exist() -> None:
    torch._dynamo.reset()
    twins = Twins(lambda: equal_blocks(), "optim_grads_params", lambda model, _: compiled_layers(model, then=False))
    for step, rows in enumerate((2, 5, 3)):
        # Another number of rows makes the second microbatch compile with dynamic shapes.
        loss = partial(lambda model, rank, step, rows: model(inputs(rank, step, rows, 7)).square().mean(), rows=rows)
        twins.backward(step, loss)
    assert twins.gradients_apart() < 1e-5


@on_ranks(2, timeout=200)
def test_compiled_units_serve_evaluation_and_inference() -> None:
    torch._dynamo.reset()
    model = equal_blocks()
    compiled_layers(model, then=False)
    trained = squared(model, 0, 0).item()
    model.eval()
    calls: list[str] = []
    with torch.no_grad(), observe_collectives(lambda call: calls.append(call.kind)):
        without_grad = squared(model, 0, 0)
    with torch.inference_mode():
        inference: torch.Tensor = model(inputs(0, 0))
    assert calls == ["all_gather"] * 3
    assert max(abs(float(one) - trained) for one in (without_grad, inference.square().mean())) < 1e-6


@on_ranks(2, timeout=200)
def test_compiled_units_fuse_no_products_and_add_no_graph_breaks() -> None:
    breaks = []
    for fuses in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        policy = MixedPrecisionPolicy(fuse_weight_gradients=fuses)
        with counted_products() as products:
            result = compare(
                Case(
                    three_blocks, squared, is_guarded=False,
                    shard=lambda model: compiled_layers(model, then=True, mp_policy=policy),  # noqa: B023
                )
            )  # fmt: skip
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
        assert result.is_exact, result
        assert products == []
    assert breaks[0] == breaks[1]

    def shard(model: Any) -> None:
        for layer in model.layers:
            layer.up.compile(backend=BACKEND)
        sharded(model)

    torch._dynamo.reset()
    with counted_products() as products:
        result = compare(Case(three_blocks, squared, shard=shard, is_guarded=False))
    assert result.is_exact, result
    assert len(products) == 3 * 3


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


class ByHand(torch.optim.SGD):
    """An optimizer that steps decayed gradients, each in one graph, like low-bit optimizers."""

    @staticmethod
    def update(parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor) -> None:
        mean.lerp_(gradient, 0.5)
        parameter.add_(mean / (mean.square().sqrt() + 0.1) + 0.01 * parameter, alpha=-0.1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # nothing here gives it a closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            with torch._dynamo.utils.disable_cache_limit():
                self.update(parameter.detach(), parameter.grad, state["mean"])


def compiled_steps(model: nn.Module, name: str, *, is_compiled: bool) -> dict[str, torch.Tensor]:
    """Train, and return the whole weights."""
    torch._dynamo.reset()
    kind, options = OPTIMIZERS.get(name, (ByHand, {}))
    optimizer: Any = kind([p for p in model.parameters() if p.requires_grad], **options)
    if isinstance(optimizer, ByHand) and is_compiled:
        update = torch.compile(ByHand.update, backend=BACKEND, fullgraph=True, dynamic=False)
        optimizer.update = update  # type: ignore[method-assign]  # for this object alone
    elif is_compiled:
        optimizer.step = torch.compile(optimizer.step, backend=BACKEND)
    train(model, optimizer, loss=token_loss)
    return whole_state(model)


NAMES = ("AdamW", "SGD", "a function in one graph")


@pytest.mark.parametrize("name", nightly_but(NAMES[1:], NAMES))
@on_ranks(2, timeout=240)
def test_weights_equal_the_whole_models_after_compiled_steps_of(name: str) -> None:
    wanted = compiled_steps(make_model(), name, is_compiled=False)
    found = compiled_steps(sharded_model(), name, is_compiled=True)
    assert differing(found, wanted, 1e-5) == []


@on_ranks(2, timeout=240)
def test_results_of_a_compiled_function_keep_their_kind() -> None:
    function = torch.compile(lambda p: (p * 2, p.sum()), backend=BACKEND, fullgraph=True)
    weight: Any = sharded_model().head.weight.detach()
    twice, total = function(weight)
    assert type(twice).__name__ == "FlatDTensor"
    assert torch.equal(twice.full_tensor(), weight.full_tensor() * 2)
    torch.testing.assert_close(total.full_tensor() if isinstance(total, DTensor) else total, weight.full_tensor().sum())


def is_cached_on_disk() -> bool:
    try:
        weight: Any = sharded_model().head.weight
        weight._stable_hash_for_caching()
    except BypassAOTAutogradCache:
        return False
    return True


def test_compiled_steps_of_dtensors_are_not_cached_on_disk() -> None:
    # PyTorch's cache key of a DTensor ignores its local tensor: 4-bit state would get the code of FP32 state.
    assert run_ranks(1, is_cached_on_disk) == [False]
