"""Every architecture of transformers that can be made tiny has the gradients of the whole model, layer by layer."""

import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.twins import Twins
from tests.integration.architectures import architectures, build, layers_of, loss_of
from tests.integration.ranks import run_ranks

NUM_PARTS = 4
# How many architectures of each task transformers 5.23 can make from these small configurations.
FLOORS = {"causal": 140, "masked": 26, "sequence to sequence": 32, "images": 24, "sound": 8}


def is_usable(kind: str, model_class: Any) -> bool:
    """Return whether an architecture can be built with small numbers, and has a loss with gradients."""
    try:
        model = build(kind, model_class)
        loss = loss_of(model, 0, 0)
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception:
        return False
    return math.isfinite(loss.item())


def differences(task: str, part: int) -> dict[str, str]:
    """Return what is not as in the whole model, for each architecture that can be used; empty texts are right."""
    found = {}
    for kind, model_class in list(architectures(task))[part::NUM_PARTS]:
        if is_usable(kind, model_class):
            found[kind] = difference(kind, model_class)
        gc.collect()
    return found


def difference(kind: str, model_class: Any) -> str:
    try:
        twins = Twins(lambda: build(kind, model_class), units=layers_of)
        optimizers = twins.optimizers(torch.optim.SGD, lr=0.01)
        for step in range(2):
            twins.backward(step, loss=loss_of)
            scale = max(float(p.grad.abs().max()) for p in twins.plain.parameters() if p.grad is not None)
            apart = twins.gradients_apart() / (scale + 1e-12)
            if not apart < 1e-4:
                return f"step {step}: gradients are {apart:.2e} apart"
            twins.step(optimizers)
        with torch.no_grad():
            losses = [loss_of(model, dist.get_rank(), 9).item() for model in twins]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[1]) else f"the losses after two steps are {losses}"


# squeezebert calls its layers' forward without the hooks around it.
@pytest.mark.filterwarnings("ignore:unit 'transformer.encoder.layers.[01]'. parameter .* was used by:UserWarning")
@pytest.mark.parametrize("task", FLOORS)
def test_all_architectures_train_as_whole_models(task: str) -> None:
    found: dict[str, str] = {}
    for part in range(NUM_PARTS):
        for rank in run_ranks(2, differences, task, part, timeout=900):
            found |= {kind: words for kind, words in rank.items() if words or kind not in found}
    assert {kind: words for kind, words in found.items() if words} == {}
    assert len(found) >= FLOORS[task]
