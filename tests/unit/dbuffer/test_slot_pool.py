"""Slots: storages share memory that stays allocated, and each slot counts once however often it is reused."""

import gc
from unittest import mock

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from dbuffer import SlotPool, StorageError, memory_meter
from dbuffer.slot_memory import from_communicator, from_symmetric_memory
from dbuffer.slot_pool import can_exchange_memory
from dbuffer.storage import FlatStorage
from tests.harness.storage_guard import guard_released_storage

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


def storage(pool: SlotPool | None, numel: int = 6, dtype: torch.dtype = torch.float32) -> FlatStorage:
    made = FlatStorage(numel, dtype, CPU, name="weights")
    made.release()
    made.use_pool(pool)
    return made


def test_a_slot_shows_under_views_made_before_and_is_an_error_once_released() -> None:
    made = FlatStorage(6, torch.float32, CPU, name="weights of a unit")
    view = made.tensor[1:5].view(2, 2)
    made.release()
    made.use_pool(SlotPool(CPU, "largest"))
    made.reallocate()
    made.tensor.copy_(torch.arange(6.0))
    assert view.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    made.release()
    with pytest.raises(StorageError, match="weights of a unit"):
        _ = made.tensor
    with guard_released_storage(), pytest.raises(StorageError, match="weights of a unit"):
        view.sum()


@pytest.mark.parametrize("sizing", ["largest", "by_size"])
def test_a_slot_whose_address_numpy_has_is_given_to_no_other_storage(sizing: str) -> None:
    pool = SlotPool(CPU, sizing)
    mine, other = storage(pool), storage(pool)
    mine.reallocate()
    array = mine.tensor.fill_(3.0).numpy()
    for _ in range(2):
        mine.release()
        other.reallocate()
        other.tensor.fill_(5.0)
        assert array.tolist() == [3.0] * 6
        other.release()
        mine.reallocate()
        assert mine.tensor.tolist() == [3.0] * 6
    assert pool.num_slots == 2


@pytest.mark.parametrize(
    ("sizing", "numels", "wanted"),
    [("largest", (3, 100), (1, 400)), ("largest", (3, 10, 100), (1, 400)), ("by_size", (3, 100, 3), (2, 412))],
)
def test_a_slot_holds_the_largest_storage_served_or_one_of_its_own_size(
    sizing: str, numels: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    pool = SlotPool(CPU, sizing)
    for each in [storage(pool, numel) for numel in numels]:
        each.reallocate()
        each.release()
    assert (pool.num_slots, pool.nbytes) == wanted


def test_the_meter_counts_a_slot_once_from_its_first_use_to_the_end_of_the_pool() -> None:
    meter, asked = memory_meter(), list[int]()
    gc.collect()
    before = meter.current_bytes

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    pool = SlotPool(CPU, "largest", allocate)
    made = storage(pool)
    for _ in range(3):
        made.reallocate()
        made.release()
    assert (meter.current_bytes - before, asked) == (24, [24])
    del made
    assert meter.current_bytes - before == 24
    del pool
    assert meter.current_bytes == before


def test_a_slot_goes_with_a_storage_that_is_deleted_while_it_has_it() -> None:
    before = memory_meter().current_bytes
    pool = SlotPool(CPU, "largest")
    made = storage(pool)
    made.reallocate()
    view = made.tensor.fill_(3.0)[2:]
    del made
    assert (pool.num_slots, memory_meter().current_bytes) == (0, before)
    other = storage(pool)
    other.reallocate()
    other.tensor.zero_()
    assert view.tolist() == [3.0] * 4


def test_memory_comes_from_the_allocator_after_leaving_the_pool() -> None:
    pool = SlotPool(CPU, "largest")
    made = storage(pool)
    made.reallocate()
    made.use_pool(None)
    made.tensor.fill_(1.0)
    made.release()
    made.reallocate()
    before = memory_meter().current_bytes
    made.release()
    assert (pool.num_slots, before - memory_meter().current_bytes) == (1, 24)


class _Backend:
    """A communicator's backend with or without a memory allocator."""

    def __init__(self, *, has_memory: bool, is_connected: bool = False) -> None:
        self._has_memory = has_memory
        self._is_connected = is_connected

    def _is_initialized(self) -> bool:
        return self._is_connected

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert not self._is_connected, "NCCL would make a second communicator"
        self._is_connected = True

    def _get_backend(self, device: torch.device) -> "_Backend":
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self._has_memory

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self._is_connected, "NCCL has no communicator to register memory with"
        return torch.full((numel,), 7, dtype=dtype, device=device)


def test_communicator_memory_is_used_if_it_exists_else_the_devices() -> None:
    allocate = from_communicator(_Backend(has_memory=True), CPU)  # type: ignore[arg-type]  # stands in for a group
    assert allocate is not None
    assert allocate(3).tolist() == [7, 7, 7]
    connected = from_communicator(_Backend(has_memory=True, is_connected=True), CPU)  # type: ignore[arg-type]
    assert connected is not None
    assert from_communicator(_Backend(has_memory=False), CPU) is None  # type: ignore[arg-type]  # stands in for a group


def test_symmetric_memory_of_a_cpu_is_refused() -> None:
    with pytest.raises(StorageError, match="symmetric memory is memory of GPUs, found cpu"):
        from_symmetric_memory(_Backend(has_memory=True), CPU, "NCCL")  # type: ignore[arg-type]  # stands in for a group


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_communicator_is_made_once_before_its_ranks_map_memory(is_connected: bool) -> None:
    group, device = mock.Mock(), torch.device("cuda", 0)
    backend = group._get_backend.return_value
    backend._is_initialized.return_value = is_connected
    with mock.patch.object(symmetric_memory, "set_backend"):
        from_symmetric_memory(group, device, "NCCL")
    group._get_backend.assert_called_once_with(device)
    assert backend.eager_connect_single_device.call_args_list == ([] if is_connected else [mock.call(device)])
