"""Optimizers that hold plain tensors beside sharded parameters step as on whole ones, or say what to do about them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from dbuffer.errors import PlacementError
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import draw_tokens, loss_of, make_model, world_mesh
from tests.harness.oracle import differing, shard_model, whole_state

State = dict[str, torch.Tensor]
Kind = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """Preconditions each dimension; its matrices begin as multiples of the identity.

    Attributes:
        is_plain: whether those matrices are plain tensors, rather than made by the gradient.
    """

    is_plain = False

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            sizes = gradient.shape
            if not state:
                for index, size in enumerate(sizes):
                    identity = torch.eye(size) if self.is_plain else torch.eye(size, out=gradient.new(size, size))
                    state[index] = 0.1 * identity
            for index, size in enumerate(sizes):
                gradient = gradient.transpose(0, index).contiguous()
                turned = gradient.size()
                gradient = gradient.view(size, -1)
                state[index].add_(gradient @ gradient.t())
                left, values, right = torch.svd(state[index])
                inverse = left @ values.pow(-1 / len(sizes)).diag() @ right.t()
                gradient = (inverse @ gradient).view(turned).transpose(0, index)
            parameter.add_(gradient, alpha=-0.05)


class PlainShampoo(Shampoo):
    is_plain = True


class Lamb(torch.optim.Optimizer):
    """Trust ratios between norms and a plain one, and a plain sum of squares that sharded sums are added to."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        one, total = torch.tensor(1.0), torch.zeros(1)
        for parameter in parameters:
            total.add_(parameter.grad.pow(2).sum())
        total = total.sqrt()
        clip = torch.where(total > 0.1, total / 0.1, one)
        for parameter in parameters:
            update = parameter.grad / clip + 0.01 * parameter
            weight_norm, update_norm = parameter.norm(2.0), update.norm(2.0)
            ratio = torch.where(weight_norm > 0, torch.where(update_norm > 0, weight_norm / update_norm, one), one)
            parameter.add_(update.mul_(torch.min(ratio, one)), alpha=-0.05)


class Adaptive(torch.optim.Optimizer):
    """Adaptive gradient clipping: norms of rows, clamped in place."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:

        def norm(x: torch.Tensor) -> torch.Tensor:
            return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)

        for parameter in self.param_groups[0]["params"]:
            largest = norm(parameter).clamp_(min=1e-3).mul_(0.01)
            found = norm(parameter.grad)
            clipped = parameter.grad * (largest / found.clamp(min=1e-6))
            parameter.add_(torch.where(found < largest, parameter.grad, clipped), alpha=-0.05)


class Masked(torch.optim.Optimizer):
    """State and a mask that are plain tensors of the parameter's shape."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
            momentum.mul_(0.9).add_(parameter.grad)
            mask = torch.arange(parameter.numel()).view(parameter.shape) % 2
            parameter.add_(momentum * mask, alpha=-0.05)


KINDS: dict[str, Kind] = {
    "Shampoo": Shampoo, "Shampoo of plain matrices": PlainShampoo, "LAMB": Lamb, "adaptive clipping": Adaptive,
    "a plain mask": Masked,
}  # fmt: skip
# Those that hold plain tensors of several elements.
ASSUMING = ("Shampoo of plain matrices", "a plain mask")


def train(model: nn.Module, name: str, ranks: list[int], *, is_implicit: bool) -> State:
    optimizer = KINDS[name]([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        for rank in ranks:
            tokens = draw_tokens(rank, step)
            (loss_of(model(tokens), tokens) / len(ranks)).backward()
        if is_implicit:
            with implicit_replication():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


def train_sharded(name: str, is_implicit: bool) -> State | str:
    model = shard_model(make_model(), world_mesh())
    try:
        return train(model, name, [dist.get_rank()], is_implicit=is_implicit)
    except PlacementError as error:
        return str(error)


WAYS = list(product(KINDS, (False, True)))
QUICK = [(name, is_implicit) for name, is_implicit in WAYS if name in ASSUMING or not is_implicit]


@pytest.mark.parametrize(("name", "is_implicit"), nightly_but(QUICK, WAYS))
def test_weights_equal_the_whole_models_or_the_plain_tensor_is_refused(name: str, is_implicit: bool) -> None:
    wanted = train(make_model(), name, [0, 1, 2], is_implicit=False)
    for found in run_ranks(3, train_sharded, name, is_implicit):
        if name in ASSUMING and not is_implicit:
            assert isinstance(found, str)
            assert "found a plain tensor of shape" in found
            assert "implicit_replication()" in found
        else:
            assert not isinstance(found, str), found
            assert differing(found, wanted, 2e-5) == []
