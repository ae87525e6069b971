"""The pool of a static arena: buffers at planned places, no allocation, and safe sharing in any order."""

import gc
import logging
import random
from unittest import mock

import pytest
import torch

from dbuffer import memory_meter
from dbuffer.slot_pool import MAX_PLANS, ArenaPool, Holding, can_exchange_memory
from dbuffer.storage import FlatStorage
from tests.harness.grids import nightly_but

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


def storages(pool: ArenaPool, *numels: int) -> list[FlatStorage]:
    made = [FlatStorage(numel, torch.float32, CPU, name=f"storage {at}") for at, numel in enumerate(numels)]
    for storage in made:
        storage.release()
        storage.use_pool(pool)
    return made


def step(chain: list[FlatStorage]) -> list[int]:
    """Allocate each storage together with the next one, and return the addresses."""
    addresses = []
    for at, storage in enumerate(chain):
        storage.reallocate()
        storage.tensor.fill_(at)
        addresses.append(storage.tensor.data_ptr())
        if at:
            assert chain[at - 1].tensor.unique().tolist() == [at - 1]
            chain[at - 1].release()
    chain[-1].release()
    return addresses


def planned(pool: ArenaPool, chain: list[FlatStorage]) -> None:
    """Run the two steps after which the pool has a plan."""
    for _ in range(2):
        step(chain)
        pool.settle()


def test_from_the_third_step_on_addresses_stay_and_nothing_is_allocated() -> None:
    pool, meter = ArenaPool(CPU), memory_meter()
    chain = storages(pool, 700, 300, 900, 900, 200)
    planned(pool, chain)
    meter.reset_peak()
    assert step(chain) == step(chain)
    assert meter.num_allocations == 0
    assert pool.num_misses == 0
    assert pool.plan is not None
    assert pool.plan.gap == 0


def test_addresses_are_aligned_and_inside_of_one_block() -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, 700, 300, 900)
    planned(pool, chain)
    addresses = step(chain)
    assert pool.plan is not None
    assert all(address % 512 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < pool.plan.num_bytes


def test_before_a_backward_nothing_is_planned_and_nothing_stays() -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, 700, 300, 900)
    for _ in range(3):
        step(chain)
    assert (pool.plan, pool.nbytes) == (None, 0)
    planned(pool, chain)
    assert "gap 0.00%" in repr(pool)


def test_a_round_lasts_until_what_was_held_at_its_start_is_held_again() -> None:
    pool, meter = ArenaPool(CPU), memory_meter()
    *chain, kept = storages(pool, 700, 300, 900, 500)
    for _ in range(2):
        step(chain)
        kept.reallocate()
        pool.settle()
        step(chain)
        kept.release()
        assert pool.plan is None
        pool.settle()
    assert pool.plan is not None
    meter.reset_peak()
    for _ in range(2):
        first = step(chain)
        kept.reallocate()
        pool.settle()
        second = step(chain)
        kept.release()
        pool.settle()
        assert first != second or pool.plan.gap == 0
    assert (meter.num_allocations, pool.num_misses, pool.num_plans) == (0, 0, 1)


def test_two_alternating_orders_get_places_that_suit_both() -> None:
    pool, meter = ArenaPool(CPU), memory_meter()
    chain = storages(pool, 700, 300, 900, 800, 100)
    for number in range(10):
        meter.reset_peak()
        if number % 2:
            step(chain)
        step(chain[::-1])
        pool.settle()
    assert (meter.num_allocations, pool.num_plans <= 2) == (0, True)


def test_an_interrupt_before_a_storage_has_its_slot_costs_no_place() -> None:
    pool, meter = ArenaPool(CPU), memory_meter()
    chain = storages(pool, 700, 300, 900)
    planned(pool, chain)
    meter.reset_peak()
    for _ in range(3):
        with mock.patch.object(Holding, "exchange", side_effect=KeyboardInterrupt):
            for storage in chain[:2]:
                with pytest.raises(KeyboardInterrupt):
                    storage.reallocate()
        for storage in chain[:2]:
            # This is the state if the interrupt comes between the pool's return and the storage's next line.
            storage._holding.slot = storage._holding.pool = None
        step(chain)
        pool.settle()
    assert (meter.num_allocations, pool.num_misses) == (0, 0)


@pytest.mark.parametrize("before", [0, 1, 2], ids=["no plan", "no plan yet", "a plan"])
def test_a_failed_allocation_of_a_slot_or_the_arena_leaves_the_pool_unchanged(before: int) -> None:
    pool, meter = ArenaPool(CPU), memory_meter()
    held = meter.current_bytes
    chain = storages(pool, 700, 300, 900)
    for _ in range(before):
        step(chain)
        pool.settle()
    pool._drop_arena()
    with mock.patch.object(ArenaPool, "_new", side_effect=MemoryError), pytest.raises(MemoryError):
        chain[0].reallocate()
    assert (pool.nbytes, meter.current_bytes) == (0, held)
    planned(pool, chain)
    planned(pool, chain)
    meter.reset_peak()
    assert step(chain) == step(chain)
    assert meter.num_allocations == 0


def test_an_order_that_changes_each_step_falls_back_to_slots_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, *range(1000, 4000, 200))
    with caplog.at_level(logging.WARNING):
        for number in range(2, len(chain)):
            # Each time, more storages at once than in any plan so far.
            for at, each in enumerate(chain[:number]):
                each.reallocate()
                each.tensor.fill_(at)
            assert [each.tensor.unique().tolist() for each in chain[:number]] == [[at] for at in range(number)]
            for each in chain:
                each.release()
            pool.settle()
    assert pool.num_plans == MAX_PLANS
    assert pool.num_misses > 0
    assert [record.message.partition(":")[0] for record in caplog.records] == ["static arena"]


def test_views_of_a_storage_that_ends_in_the_arena_keep_their_values() -> None:
    before = memory_meter().current_bytes
    pool = ArenaPool(CPU)
    chain = storages(pool, 700, 300, 900)
    planned(pool, chain)
    chain[1].reallocate()
    view = chain[1].tensor.fill_(3.0)[2:4]
    del chain[1]
    step(chain)
    assert view.tolist() == [3.0, 3.0]
    chain.clear()
    del pool
    assert view.tolist() == [3.0, 3.0]
    assert memory_meter().current_bytes == before


def test_a_storage_may_leave_the_pool_and_come_back() -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, 700, 300, 900)
    planned(pool, chain)
    chain[0].reallocate()
    chain[0].use_pool(None)
    chain[0].tensor.fill_(5.0)
    step(chain[1:])
    assert chain[0].tensor.unique().tolist() == [5.0]
    chain[0].release()
    step(chain)
    chain[0].use_pool(pool)
    step(chain)


@pytest.mark.parametrize("seed", nightly_but(range(8), range(40)))
def test_no_random_order_of_turns_ends_and_plans_shares_memory_or_loses_count(seed: int) -> None:
    gc.collect()
    generator, before = random.Random(seed), memory_meter().current_bytes
    pool = ArenaPool(CPU)
    members = dict(enumerate(storages(pool, *(generator.randint(1, 900) for _ in range(6)))))
    for _ in range(150):
        number = generator.choice(list(members))
        storage, action = members[number], generator.random()
        if action < 0.02 and len(members) > 3:
            del members[number], storage
        elif action < 0.06:
            pool.settle()
        elif storage.is_allocated:
            storage.release()
        else:
            storage.reallocate()
            storage.tensor.fill_(number)
        for other, each in members.items():
            assert not each.is_allocated or not (each.tensor - other).count_nonzero()
        storage = each
    members.clear()
    del pool, storage, each
    assert memory_meter().current_bytes == before
