"""Units that are compiled before or after they are sharded train like the whole model."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Stack, inputs, squared
from tests.harness.oracle import Case, Comparison, compare

BACKEND = "aot_eager"
# The compiler itself looks at .grad of what a module is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def three_equal_blocks() -> nn.Module:
    return Stack(Block(), Block(), Block())


def layers_of(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Stack)
    return list(model.layers)


def compiled_then_sharded(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.compile(backend=BACKEND)
        fully_shard(layer)
    fully_shard(model)


def sharded_then_compiled(model: nn.Module) -> None:
    for layer in layers_of(model):
        fully_shard(layer)
        layer.compile(backend=BACKEND)
    fully_shard(model)


def wrapped_by_torch_compile(model: nn.Module) -> None:
    assert isinstance(model, Stack)
    for index, layer in enumerate(layers_of(model)):
        model.layers[index] = fully_shard(torch.compile(layer, backend=BACKEND))
    fully_shard(model)


def wrapped_after_sharding(model: nn.Module) -> None:
    assert isinstance(model, Stack)
    for index, layer in enumerate(layers_of(model)):
        model.layers[index] = torch.compile(fully_shard(layer), backend=BACKEND)
    fully_shard(model)


def inner_parts_compiled(model: nn.Module) -> None:
    """Compile the blocks within a unit of all of them, as models do with their feed-forward."""
    for layer in layers_of(model):
        layer.compile(backend=BACKEND)
    fully_shard(model)


def whole_model_compiled(model: nn.Module) -> None:
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    model.compile(backend=BACKEND)


def compiled_in_bf16(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(torch.float64)  # wider, so that results stay comparable with the whole model's
    for layer in layers_of(model):
        layer.compile(backend=BACKEND)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model)


ORDERS: dict[str, Callable[[nn.Module], None]] = {
    "compiled then sharded": compiled_then_sharded,
    "sharded then compiled": sharded_then_compiled,
    "torch.compile(module), sharded": wrapped_by_torch_compile,
    "torch.compile(sharded module)": wrapped_after_sharding,
    "parts of a unit compiled": inner_parts_compiled,
    "the whole sharded model compiled": whole_model_compiled,
    "another compute dtype": compiled_in_bf16,
}


def train(name: str) -> tuple[Comparison, int]:
    """Return the comparison, and how much the compiler counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = compare(Case(three_equal_blocks, squared, shard=ORDERS[name], is_guarded=False))
    return result, sum(torch._dynamo.utils.counters["stats"].values())


QUICK = ("compiled then sharded", "the whole sharded model compiled", "another compute dtype")


@pytest.mark.parametrize("name", nightly_but(QUICK, ORDERS))
def test_gradients_equal_those_of_a_whole_model(name: str) -> None:
    for result, num_compiled in run_ranks(2, train, name, timeout=200):
        assert result.is_exact, result
        assert num_compiled > 0


class Recomputed(Stack):
    """Runs its layers in checkpointed regions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def recomputed_blocks() -> nn.Module:
    return Recomputed(Block(), Block())


def train_recomputed() -> Comparison:
    torch._dynamo.reset()
    return compare(Case(recomputed_blocks, squared, shard=compiled_then_sharded, is_guarded=False))


def test_compiled_units_may_be_recomputed() -> None:
    assert all(result.is_exact for result in run_ranks(2, train_recomputed, timeout=200))


def recompilations() -> list[int]:
    """Return how many graphs were compiled after each of four steps."""
    torch._dynamo.reset()
    counts = []
    compiled = 0

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model = three_equal_blocks()
    for layer in layers_of(model):
        layer.compile(backend=backend)
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        squared(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(compiled)
    return counts


def test_steps_after_the_first_compile_nothing_anew() -> None:
    for counts in run_ranks(2, recompilations, timeout=200):
        assert counts[0] > 0
        assert counts == [counts[0]] * 4


def evaluated() -> tuple[list[str], float]:
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
    return calls, worst


def test_compiled_units_serve_evaluation_and_inference() -> None:
    for calls, worst in run_ranks(2, evaluated, timeout=200):
        assert calls == ["all_gather"] * 3
        assert worst < 1e-6
