"""The pool of a static arena: places as planned, nothing allocated then, and no order in which memory is shared."""

import gc
import logging
import random

import pytest
import torch

from dbuffer import memory_meter
from dbuffer.arena_pool import MAX_PLANS, ArenaPool
from dbuffer.slot_pool import can_exchange_memory
from dbuffer.storage import FlatStorage

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


def storages(pool: ArenaPool, *numels: int) -> list[FlatStorage]:
    made = [FlatStorage(numel, torch.float32, CPU, name=f"storage {at}") for at, numel in enumerate(numels)]
    for storage in made:
        storage.release()
        storage.use_pool(pool)
    return made


def step(chain: list[FlatStorage]) -> list[int]:
    """Hold each storage together with the one after it, and return the addresses."""
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


def test_from_the_second_step_on_addresses_stay_and_nothing_is_allocated() -> None:
    pool, meter = ArenaPool(CPU), memory_meter()
    chain = storages(pool, 700, 300, 900, 900, 200)
    step(chain)
    pool.settle()
    meter.reset_peak()
    assert step(chain) == step(chain)
    assert meter.num_allocations == 0
    assert pool.num_misses == 0
    assert pool.plan is not None
    assert pool.plan.gap == 0


def test_addresses_are_aligned_and_inside_of_one_block() -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, 700, 300, 900)
    step(chain)
    pool.settle()
    addresses = step(chain)
    assert pool.plan is not None
    assert all(address % 512 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < pool.plan.num_bytes


def test_without_a_word_the_second_step_plans_by_itself() -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, 700, 300, 900)
    step(chain)
    assert pool.plan is None
    step(chain)
    assert pool.plan is not None
    assert "gap 0.00%" in repr(pool)


def test_an_order_that_changes_each_time_has_slots_of_its_own_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = ArenaPool(CPU)
    chain = storages(pool, *range(1000, 4000, 200))
    with caplog.at_level(logging.WARNING):
        for number in range(2, len(chain)):
            # More at once each time than any plan has seen.
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
    step(chain)
    pool.settle()
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
    step(chain)
    pool.settle()
    chain[0].reallocate()
    chain[0].use_pool(None)
    chain[0].tensor.fill_(5.0)
    step(chain[1:])
    assert chain[0].tensor.unique().tolist() == [5.0]
    chain[0].release()
    step(chain)
    chain[0].use_pool(pool)
    step(chain)


@pytest.mark.parametrize("seed", range(40))
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
