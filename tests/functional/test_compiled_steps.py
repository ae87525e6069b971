"""Compiled optimizer steps over sharded parameters: the weights of a whole model, in one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import draw_tokens, loss_of, make_mesh, make_model, world_mesh
from tests.harness.oracle import differing, shard_model, whole_state

State = dict[str, torch.Tensor]
BACKEND = "aot_eager"
# What the compiler itself does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def compiled(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return torch.compile(optimizer.step, backend=BACKEND)


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return a step of decayed gradients, each in one graph, as low-bit optimizers make theirs."""

    @torch.compile(backend=BACKEND, fullgraph=True, dynamic=False)
    def update(parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor) -> None:
        mean.lerp_(gradient, 0.5)
        parameter.add_(mean / (mean.square().sqrt() + 0.1) + 0.01 * parameter, alpha=-0.1)

    @torch.no_grad()
    def step() -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            with torch._dynamo.utils.disable_cache_limit():
                update(parameter.detach(), parameter.grad, state["mean"])

    return step


def train(model: nn.Module, name: str, ranks: list[int], *, is_compiled: bool) -> State:
    torch._dynamo.reset()
    kind, options = OPTIMIZERS.get(name, OPTIMIZERS["SGD"])
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
    step: Callable[[], object] = optimizer.step
    if name == "a function in one graph":
        step = by_hand(optimizer)
    elif is_compiled:
        step = compiled(optimizer)
    for index in range(3):
        for rank in ranks:
            tokens = draw_tokens(rank, index)
            (loss_of(model(tokens), tokens) / len(ranks)).backward()
        step()
        optimizer.zero_grad()
    return whole_state(model)


def train_sharded(name: str, strategy: str) -> State:
    mesh = make_mesh((2,))
    return train(shard_model(make_model(), mesh, strategy), name, [dist.get_rank()], is_compiled=True)


@pytest.mark.parametrize("name", nightly_but(["a function in one graph"], ["AdamW", "SGD", "a function in one graph"]))
def test_weights_equal_the_whole_models_after_compiled_steps_of(name: str) -> None:
    wanted = train(make_model(), name, [0, 1], is_compiled=False)
    for found in run_ranks(2, train_sharded, name, "optim_grads_params", timeout=240):
        assert differing(found, wanted, 1e-5) == []


def result_of_a_graph() -> list[str]:
    """Return what kinds of tensors one compiled function makes of a parameter."""
    model = shard_model(make_model(), world_mesh())
    function = torch.compile(lambda p: (p * 2, p.sum()), backend=BACKEND, fullgraph=True)
    weight = model.head.weight.detach()
    twice, total = function(weight)
    assert isinstance(twice, DTensor)
    assert isinstance(weight, DTensor)
    assert torch.equal(twice.full_tensor(), weight.full_tensor() * 2)
    torch.testing.assert_close(total.full_tensor() if isinstance(total, DTensor) else total, weight.full_tensor().sum())
    return [type(twice).__name__]


def test_results_of_a_compiled_function_keep_their_kind() -> None:
    assert run_ranks(2, result_of_a_graph, timeout=240) == [["FlatDTensor"]] * 2


def is_cached_on_disk() -> bool:
    weight = shard_model(make_model(), world_mesh()).head.weight
    try:
        weight._stable_hash_for_caching()  # type: ignore[operator]
    except BypassAOTAutogradCache:
        return False
    return True


def test_compiled_steps_are_not_taken_from_disk_where_other_inputs_may_be_of_another_kind() -> None:
    # PyTorch's key of a DTensor forgets what is inside: 4-bit state would get the code of FP32 state.
    assert run_ranks(1, is_cached_on_disk) == [False]
