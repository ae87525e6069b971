"""Slots: storages take turns in memory that stays, counted once however often it changes hands."""

import gc
import re
from unittest import mock

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from dbuffer import SlotPool, StorageError, guard_released_storage, memory_meter
from dbuffer.slot_memory import from_communicator, from_symmetric_memory
from dbuffer.slot_pool import can_exchange_memory
from dbuffer.storage import FlatStorage

CPU = torch.device("cpu")
needs_exchange = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


def storage(pool: SlotPool | None, numel: int = 6, dtype: torch.dtype = torch.float32) -> FlatStorage:
    made = FlatStorage(numel, dtype, CPU, name="weights")
    made.release()
    made.use_pool(pool)
    return made


@needs_exchange
def test_two_storages_that_take_turns_share_one_slot() -> None:
    pool = SlotPool(CPU, "largest")
    one, other = storage(pool), storage(pool)
    addresses = set()
    for _ in range(3):
        for each in (one, other):
            each.reallocate()
            addresses.add(each.tensor.data_ptr())
            each.release()
    assert (pool.num_slots, len(addresses)) == (1, 1)


@needs_exchange
def test_storages_held_at_once_have_slots_of_their_own() -> None:
    pool = SlotPool(CPU, "largest")
    one, other = storage(pool), storage(pool)
    one.reallocate()
    other.reallocate()
    one.tensor.fill_(1.0)
    other.tensor.fill_(2.0)
    assert (one.tensor.sum().item(), other.tensor.sum().item(), pool.num_slots) == (6.0, 12.0, 2)


@needs_exchange
def test_views_made_before_show_the_slot() -> None:
    made = FlatStorage(6, torch.float32, CPU, name="weights")
    view = made.tensor[1:5].view(2, 2)
    made.release()
    made.use_pool(SlotPool(CPU, "largest"))
    made.reallocate()
    made.tensor.copy_(torch.arange(6.0))
    assert view.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@needs_exchange
def test_a_slot_holds_the_largest_storage_served() -> None:
    pool = SlotPool(CPU, "largest")
    small, _ = storage(pool, 3), storage(pool, 100, torch.float64)
    small.reallocate()
    assert small.tensor.untyped_storage().nbytes() == pool.nbytes == 800


@needs_exchange
def test_slots_by_size_are_shared_by_equal_storages_alone() -> None:
    pool = SlotPool(CPU, "by_size")
    for numel in (3, 100, 3):
        each = storage(pool, numel)
        each.reallocate()
        each.release()
    assert (pool.num_slots, pool.nbytes) == (2, 412)


@needs_exchange
def test_slots_too_small_for_a_storage_served_later_are_dropped() -> None:
    pool = SlotPool(CPU, "largest")
    early, held = storage(pool, 3), storage(pool, 3)
    early.reallocate()
    held.reallocate()
    early.release()
    later = storage(pool, 10)
    held.release()
    later.reallocate()
    later.tensor.fill_(1.0)
    assert (pool.num_slots, pool.nbytes) == (1, 40)


@needs_exchange
def test_a_released_slot_is_an_error_like_any_released_storage() -> None:
    made = FlatStorage(6, torch.float32, CPU, name="weights of a unit")
    view = made.tensor[1:5]
    made.release()
    made.use_pool(SlotPool(CPU, "largest"))
    made.reallocate()
    made.release()
    with pytest.raises(StorageError, match="weights of a unit"):
        _ = made.tensor
    with guard_released_storage(), pytest.raises(StorageError, match="weights of a unit"):
        view.sum()


@needs_exchange
def test_the_meter_counts_a_slot_once_from_its_first_use_to_the_end_of_the_pool() -> None:
    meter = memory_meter()
    gc.collect()
    before = meter.current_bytes
    pool = SlotPool(CPU, "largest")
    made = storage(pool)
    for _ in range(3):
        made.reallocate()
        made.release()
    assert meter.current_bytes - before == 24
    del made
    assert meter.current_bytes - before == 24
    del pool
    assert meter.current_bytes == before


@needs_exchange
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


@needs_exchange
def test_memory_comes_from_the_allocator_again_once_the_pool_is_left() -> None:
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


@needs_exchange
def test_slots_come_from_the_given_allocator() -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    made = storage(SlotPool(CPU, "by_size", allocate))
    made.reallocate()
    made.release()
    made.reallocate()
    assert asked == [24]


class _Backend:
    """A communicator's backend with or without memory of its own."""

    def __init__(self, *, has_memory: bool) -> None:
        self._has_memory = has_memory
        self._is_connected = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._is_connected = True

    def _get_backend(self, device: torch.device) -> "_Backend":
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self._has_memory

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert self._is_connected, "NCCL has no communicator to register memory with"
        return torch.full((numel,), 7, dtype=dtype, device=device)


def test_a_communicator_with_an_allocator_gives_its_memory() -> None:
    allocate = from_communicator(_Backend(has_memory=True), CPU)  # type: ignore[arg-type]  # stands in for a group
    assert allocate is not None
    assert allocate(3).tolist() == [7, 7, 7]


def test_a_communicator_without_an_allocator_leaves_it_to_the_device() -> None:
    assert from_communicator(_Backend(has_memory=False), CPU) is None  # type: ignore[arg-type]  # stands in for a group


def test_symmetric_memory_of_a_cpu_is_refused() -> None:
    with pytest.raises(StorageError, match="symmetric memory is memory of GPUs, found cpu"):
        from_symmetric_memory(_Backend(has_memory=True), CPU, "NCCL")  # type: ignore[arg-type]  # stands in for a group


def test_another_sizing_is_refused_with_the_choices() -> None:
    with pytest.raises(StorageError, match="sizing='huge'; give one of 'by_size', 'largest', 'static'"):
        SlotPool(CPU, "huge")


def test_a_pytorch_without_the_means_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbuffer.slot_pool._CAN_EXCHANGE", False)
    with pytest.raises(StorageError, match=f"PyTorch {re.escape(torch.__version__)} cannot exchange"):
        SlotPool(CPU, "largest")


def test_a_communicator_is_made_before_its_ranks_map_memory() -> None:
    group, device = mock.Mock(), torch.device("cuda", 0)
    with mock.patch.object(symmetric_memory, "set_backend"):
        from_symmetric_memory(group, device, "NCCL")
    group._get_backend.assert_called_once_with(device)
    group._get_backend.return_value.eager_connect_single_device.assert_called_once_with(device)
