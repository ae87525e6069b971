"""Flat storage: released and brought back under views that stay, metered, and guarded against use after release."""

import contextlib
import gc
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dbuffer import StorageError, memory_meter
from dbuffer.slot_pool import Holding, SlotPool, can_exchange_memory
from dbuffer.storage import FlatStorage
from tests.harness.storage_guard import guard_released_storage

CPU = torch.device("cpu")


def make(numel: int = 7, dtype: torch.dtype = torch.float32) -> FlatStorage:
    return FlatStorage(numel, dtype, CPU, name="unit 'blocks.3': gathered weights")


def test_release_frees_bytes_that_return_under_the_same_tensor_and_views() -> None:
    storage = make()
    tensor, view = storage.tensor, storage.tensor[2:5]
    storage.release()
    assert tensor.untyped_storage().nbytes() == 0
    storage.reallocate()
    assert storage.tensor is tensor
    tensor.copy_(torch.arange(7.0))
    assert view.tolist() == [2.0, 3.0, 4.0]


def test_bytes_shared_with_numpy_stay_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    storage, before = make(), memory_meter().current_bytes
    array = storage.tensor.fill_(2.0).numpy()
    for _ in range(2):
        storage.release()
        assert array.tolist() == [2.0] * 7
        assert memory_meter().current_bytes == before
        with pytest.raises(StorageError, match="its storage is released"):
            _ = storage.tensor
        storage.reallocate()
        assert memory_meter().current_bytes == before
    storage.tensor.fill_(4.0)
    assert array.tolist() == [4.0] * 7
    (line,) = caplog.messages
    assert "unit 'blocks.3': gathered weights: .numpy() was called" in line
    assert "28 bytes" in line
    assert "fix: tensor.clone().numpy()" in line


def test_a_released_storage_raises_with_its_name_and_the_way_out() -> None:
    storage = make()
    storage.release()
    with pytest.raises(StorageError, match=r"unit 'blocks.3': gathered weights.*unshard\(\).*reshard\(\)"):
        _ = storage.tensor


def test_an_empty_storage_is_always_allocated_and_a_meta_one_takes_no_bytes() -> None:
    held, storage = memory_meter().current_bytes, make(0)
    storage.release()
    assert (storage.is_allocated, storage.tensor.shape) == (True, (0,))
    meta = FlatStorage(7, torch.bfloat16, torch.device("meta"), name="meta")
    assert (meta.nbytes, meta.tensor.dtype, memory_meter().current_bytes) == (0, torch.bfloat16, held)


def test_storage_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        storage = make()
    assert not storage.tensor.is_inference()


# ---------------------------------------------------------------- out of memory, interrupts


def resize_of_nothing_but_zero(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if size:
        raise torch.OutOfMemoryError("simulated")
    return _RESIZE(storage, size)


_RESIZE = torch.UntypedStorage.resize_


def test_a_storage_whose_allocation_failed_can_be_reallocated_later() -> None:
    storage, before = make(), memory_meter().current_bytes
    storage.release()
    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_of_nothing_but_zero),
        pytest.raises(torch.OutOfMemoryError),
    ):
        storage.reallocate()
    assert not storage.is_allocated
    storage.reallocate()
    assert storage.tensor.fill_(3).tolist() == [3.0] * 7
    assert memory_meter().current_bytes == before


@pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")
@pytest.mark.parametrize("action", ["reallocate", "release"])
@pytest.mark.parametrize("method", ["take", "exchange", "give_back"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_leaves_no_storage_without_its_slot_and_no_slot_to_two(
    action: str, method: str, is_done: bool
) -> None:
    pool = SlotPool(CPU, "largest")
    storage, other = make(), make()
    for each in (storage, other):
        each.use_pool(pool)
        each.release()
    if action == "release":
        storage.reallocate()
    owner: type = Holding if method == "exchange" else SlotPool
    original = getattr(owner, method)

    def interrupted(*args: object) -> None:
        if is_done:
            original(*args)
        raise KeyboardInterrupt

    is_static = method == "exchange"
    replacement = staticmethod(interrupted) if is_static else interrupted
    with mock.patch.object(owner, method, replacement), contextlib.suppress(KeyboardInterrupt):
        getattr(storage, action)()
    storage.reallocate()
    other.reallocate()
    storage.tensor.fill_(1)
    other.tensor.fill_(2)
    assert storage.tensor.tolist() == [1.0] * 7


# ---------------------------------------------------------------- meter


@pytest.mark.parametrize("calls", ["release", "release release", "release reallocate reallocate"])
def test_the_meter_counts_once_what_is_held_now(calls: str) -> None:
    held = memory_meter().current_bytes
    storage = make(5, torch.float64)
    assert memory_meter().current_bytes == held + 40
    for call in calls.split():
        getattr(storage, call)()
    assert memory_meter().current_bytes == held + (40 if storage.is_allocated else 0)


@pytest.mark.parametrize("released", [True, False])
def test_the_meter_forgets_an_unreferenced_storage(released: bool) -> None:
    gc.disable()
    try:
        held = memory_meter().current_bytes
        storage = make()
        if released:
            storage.release()
        del storage
        assert memory_meter().current_bytes == held
    finally:
        gc.enable()


def test_the_peak_and_the_allocations_count_from_the_last_reset() -> None:
    meter = memory_meter()
    meter.reset_peak()
    rest = meter.current_bytes
    first = make(10)
    first.release()
    second = make(6)
    second.release()
    second.reallocate()
    assert (meter.peak_bytes - rest, meter.num_allocations) == (40, 3)
    meter.reset_peak()
    assert (meter.peak_bytes - rest, meter.num_allocations) == (24, 0)


# ---------------------------------------------------------------- guard


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda view: view.sum(),
    "written": lambda view: view.zero_(),
    "in a list": lambda view: torch.cat([torch.ones(2, 3), view]),
    "sliced": lambda view: view[1:, :2],
}


@dataclass(repr=False)
class Hidden:
    view: torch.Tensor


@pytest.mark.parametrize("use", USES)
def test_the_guard_names_the_owner_of_released_memory_and_ignores_reallocated(
    use: str,
) -> None:
    storage = make()
    # Keep it out of the locals that a failure report prints: printing a view of released memory reads it.
    views = Hidden(storage.tensor[:6].view(2, 3))
    storage.release()
    with guard_released_storage():
        with pytest.raises(StorageError, match=r"unit 'blocks\.3': gathered weights"):
            USES[use](views.view)
        storage.reallocate()
        storage.tensor.zero_()
        USES[use](views.view)


def test_the_guard_watches_backward_too() -> None:
    storage = make(6)
    weight = storage.tensor.view(2, 3).fill_(1.0)
    x = torch.ones(3, requires_grad=True)
    with guard_released_storage():
        product = x * weight
        storage.release()
        with pytest.raises(StorageError, match=r"unit 'blocks\.3'"):
            product.sum().backward()
    assert len(_get_current_dispatch_mode_stack()) == 0


def test_a_storage_that_has_gone_is_not_taken_for_a_later_one_at_its_address() -> None:
    for _ in range(20):
        storage = make()
        storage.release()
        del storage
        with guard_released_storage():
            assert torch.ones(7).sum() == 7


def test_other_threads_may_allocate_while_one_releases() -> None:
    held = memory_meter().current_bytes

    def cycle() -> None:
        for _ in range(200):
            storage = make()
            storage.release()
            storage.reallocate()

    threads = [threading.Thread(target=cycle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory_meter().current_bytes == held


# ---------------------------------------------------------------- refused requests


def test_another_sizing_is_refused_with_the_choices() -> None:
    with pytest.raises(StorageError, match=r"sizing='huge'\. fix: give one of 'by_size', 'largest'"):
        SlotPool(CPU, "huge")


def test_a_pytorch_without_the_means_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbuffer.slot_pool._CAN_EXCHANGE", False)
    with pytest.raises(StorageError, match=f"PyTorch {re.escape(torch.__version__)} cannot exchange"):
        SlotPool(CPU, "largest")
