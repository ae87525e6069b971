"""PyTorch's own clip_grad_norm_ works on sharded parameters as it is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import differing, shard_model

State = dict[str, torch.Tensor]


def full(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def full_gradients(model: nn.Module) -> State:
    """Return the gradients of a sharded model as whole tensors; every rank calls it."""
    return {name: full(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def whole_gradients(num_ranks: int) -> State:
    model = make_model()
    for rank in range(num_ranks):
        tokens = draw_tokens(rank)
        (loss_of(model(tokens), tokens) / num_ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


INF = float("inf")
NORMS = [(2.0, True), (2.0, False), (1.0, None), (1.0, False), (3.0, True), (INF, True), (INF, False)]
MAX_NORM = 0.125


CLIPPED = [(*norm, mesh_shape) for norm in NORMS for mesh_shape in ((3,), (2, 2))]


@pytest.mark.parametrize(("norm_type", "foreach", "mesh_shape"), nightly_but(CLIPPED[::3], CLIPPED), ids=str)
@on_ranks(lambda mesh_shape: torch.Size(mesh_shape).numel())
def test_torch_finds_the_norm_of_the_whole_gradient_and_scales_it(
    norm_type: float, foreach: bool | None, mesh_shape: tuple[int, ...]
) -> None:
    wanted = whole_gradients(dist.get_world_size())
    wanted_norm = nn.utils.get_total_norm(wanted.values(), norm_type)
    scaled = {name: value * (MAX_NORM / wanted_norm) for name, value in wanted.items()}
    strategy = "optim_grads_params" if len(mesh_shape) == 1 else "hsdp"
    model = shard_model(make_model(), make_mesh(mesh_shape), strategy)
    tokens = draw_tokens(dist.get_rank())
    loss_of(model(tokens), tokens).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
    assert full(norm).item() == pytest.approx(wanted_norm.item(), rel=1e-6)
    assert differing(full_gradients(model), scaled, 1e-6) == []
