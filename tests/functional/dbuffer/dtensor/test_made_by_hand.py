"""DTensors that users make from the placements of a sharded tensor have its rows through every operator."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from dbuffer import PlacementError
from tests.functional.dbuffer.dtensor.operator_cases import LAYOUTS, make_mesh, num_ranks, sharded, values
from tests.harness import on_ranks

EVERY_LAYOUT = list(LAYOUTS)


def by_hand(tensor: DTensor, local: torch.Tensor | None = None, **options: Any) -> Any:
    """Return a copy that is made from the local part and the placements alone."""
    local = tensor.to_local().detach().clone() if local is None else local
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **options)


def operators(made: Any, plain: torch.Tensor, like: DTensor) -> None:
    """Compare operators on a tensor made by hand, alone and with its origin, with operators on plain tensors."""
    for function in (torch.clone, torch.sqrt, torch.Tensor.double, torch.zeros_like, lambda x: x * 2 - 1, torch.cumsum):
        arguments = (0,) if function is torch.cumsum else ()
        found = function(made, *arguments)  # type: ignore[operator]
        torch.testing.assert_close(found.full_tensor(), function(plain, *arguments), equal_nan=True)  # type: ignore[operator]
    reductions: Any = (torch.sum, torch.max) if plain.numel() else (torch.sum,)
    for reduction in reductions:
        torch.testing.assert_close(reduction(made).full_tensor(), reduction(plain))
    assert torch.equal((made + like).full_tensor(), plain + plain)
    assert torch.equal((like - 3 * made).full_tensor(), plain - 3 * plain)
    average = made.clone()
    average.mul_(0.5).add_(like.detach(), alpha=0.25)
    assert torch.equal(average.full_tensor(), plain * 0.5 + plain * 0.25)
    like.copy_(average)
    assert torch.equal(like.full_tensor(), plain * 0.5 + plain * 0.25)
    made.copy_(like)
    assert torch.equal(made.full_tensor(), like.full_tensor())


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("is_shape_given", [False, True])
@on_ranks(lambda layout, is_shape_given: num_ranks(layout))
def test_a_tensor_from_local_has_the_rows_of_its_placements(layout: str, is_shape_given: bool) -> None:
    whole = values(1)
    for plain, tensor in zip(whole, sharded(layout, whole, make_mesh(layout)), strict=True):
        options: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()} if is_shape_given else {}
        for run_check in (False, True) if is_shape_given else (False,):
            made = by_hand(tensor, run_check=run_check, **options)
            assert made.shape == plain.shape
            assert made.stride() == plain.stride()
            assert torch.equal(made.full_tensor(), plain)
        operators(made, plain, tensor)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@on_ranks(num_ranks)
def test_other_ways_to_make_a_tensor_have_the_rows_too(layout: str) -> None:
    mesh, whole = make_mesh(layout), values(1)
    for plain, tensor in zip(whole, sharded(layout, whole, mesh), strict=True):
        local, placements = tensor.to_local(), copy.deepcopy(pickle.loads(pickle.dumps(tensor.placements)))
        made: list[Any] = [
            DTensor(local.clone(), tensor._spec, requires_grad=False),
            DTensor.from_local(local.clone(), tensor.device_mesh, placements, run_check=False),
            distribute_tensor(plain, tensor.device_mesh, tensor.placements),
            distribute_tensor(plain, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim).redistribute(
                tensor.device_mesh, tensor.placements
            ),
            copy.deepcopy(by_hand(tensor)),
        ]
        for each in made:
            assert torch.equal(each.full_tensor(), plain)
            assert torch.equal((each * 2).full_tensor(), plain * 2)
            assert torch.equal((tensor + each).full_tensor(), plain * 2)
        back = made[1].redistribute(tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
        assert torch.equal(back.to_local(), plain)


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: torch.tensor(tensor),
    "tensor of another dtype": lambda tensor: torch.tensor(tensor, dtype=torch.float64),
    "as_tensor of another dtype": lambda tensor: torch.as_tensor(tensor, dtype=torch.float64),
    "asarray": lambda tensor: torch.asarray(tensor, copy=True),
}


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@on_ranks(lambda way, layout: num_ranks(layout))
def test_torch_tensor_of_a_sharded_tensor_has_its_rows(way: str, layout: str) -> None:
    whole = values(1)
    for plain, tensor in zip(whole, sharded(layout, whole, make_mesh(layout)), strict=True):
        made = COPIES[way](tensor)
        plain = plain.to(made.dtype)
        assert torch.equal(made.full_tensor(), plain)
        assert torch.equal((made * 2).full_tensor(), plain * 2)
        assert made.to_local().data_ptr() != tensor.to_local().data_ptr() or not made.to_local().numel()


@on_ranks(2)
def test_torch_tensor_of_a_plain_dtensor_stays_one() -> None:
    whole = torch.arange(15.0).view(5, 3)
    plain = distribute_tensor(whole, make_mesh("two ranks"), [Shard(0)])
    for _ in range(2):
        made = torch.as_tensor(plain, dtype=torch.float64).clone()
        assert type(made) is DTensor
        assert torch.equal(made.full_tensor(), whole.double())


class _CopyMeanwhile(TorchDispatchMode):
    """While PyTorch copies the local part of a plain DTensor, copy a sharded tensor in another thread."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.copies: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor not in types and func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            thread = threading.Thread(target=lambda: self.copies.append(torch.tensor(self.tensor)))
            thread.start()
            thread.join()
        return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@on_ranks(3)
def test_threads_copy_plain_and_sharded_dtensors_at_once() -> None:
    mesh = make_mesh("three ranks")
    (tensor,) = sharded("three ranks", [torch.arange(26.0).view(13, 2)], mesh)
    plain = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    for copy_plain in (torch.clone, lambda each: each.to(torch.float64)):
        with _CopyMeanwhile(tensor) as meanwhile:
            made = copy_plain(plain)
        assert meanwhile.copies, "no copy in the other thread"
        assert torch.equal(made.full_tensor(), plain.full_tensor().to(made.dtype))
        for each in meanwhile.copies:
            assert torch.equal(each.full_tensor(), torch.arange(26.0).view(13, 2))


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@on_ranks(3)
def test_copies_of_a_plain_dtensor_keep_its_placement(way: str, placement: Placement) -> None:
    whole = torch.arange(15.0).view(5, 3)
    mesh = make_mesh("three ranks")
    if placement.is_partial():
        plain = DTensor.from_local(whole * (dist.get_rank() == 1), mesh, [placement])
    else:
        plain = distribute_tensor(whole, mesh, [placement])
    made = COPIES[way](plain)
    # Before PyTorch 2.15, its clone of a partial tensor is the sum.
    is_clone = placement.is_partial() and way == "asarray"
    assert made.placements in [(placement,), *([(Replicate(),)] if is_clone else [])]
    assert torch.equal(made.full_tensor(), whole.to(made.dtype))


@on_ranks(3)
def test_zeros_with_the_placements_of_a_tensor_have_its_rows() -> None:
    (tensor,) = sharded("three ranks", [torch.arange(26.0).view(13, 2)], make_mesh("three ranks"))
    made: Any = zeros(13, 2, device_mesh=tensor.device_mesh, placements=tensor.placements)
    assert torch.equal(made.add_(tensor).full_tensor(), torch.arange(26.0).view(13, 2))


@on_ranks(3)
def test_a_tensor_with_other_columns_has_the_same_rows() -> None:
    (tensor,) = sharded("three ranks", [torch.arange(28.0).view(14, 2)], make_mesh("three ranks"))
    made = by_hand(tensor, tensor.to_local().sum(1, keepdim=True))
    assert torch.equal(made.full_tensor(), torch.arange(28.0).view(14, 2).sum(1, keepdim=True))


@on_ranks(3)
def test_a_local_part_of_other_rows_is_refused() -> None:
    (tensor,) = sharded("three ranks", [torch.arange(26.0).view(13, 2)], make_mesh("three ranks"))
    with pytest.raises(PlacementError, match="fix: "):
        by_hand(tensor, torch.zeros(100, 2))


@on_ranks(2)
def test_a_wrong_global_shape_is_refused() -> None:
    (tensor,) = sharded("two ranks", [torch.arange(26.0).view(13, 2)], make_mesh("two ranks"))
    with pytest.raises(PlacementError, match=r"shape=p\.shape"):
        by_hand(tensor, shape=torch.Size((17, 2)), stride=(2, 1))


@on_ranks(2)
def test_plain_dtensors_stay_plain() -> None:
    mesh = make_mesh("two ranks")
    for placements in ([Shard(0)], [Replicate()]):
        made = DTensor.from_local(torch.ones(2, 3), mesh, placements)
        assert type(made) is type(made * 2) is DTensor


@on_ranks(3)
def test_the_local_part_gets_the_gradient_of_its_rows() -> None:
    plain = torch.randn(7, 3, requires_grad=True)
    (tensor,) = sharded("three ranks", [plain.detach()], make_mesh("three ranks"))
    local = tensor.to_local().clone().requires_grad_()
    made: Any = DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    (made * made.detach()).sum().to_local().backward()
    (plain * plain.detach()).sum().backward()
    assert local.grad is not None
    assert plain.grad is not None
    rows = tensor.distribution.rows
    torch.testing.assert_close(local.grad, plain.grad[rows.start : rows.stop])
