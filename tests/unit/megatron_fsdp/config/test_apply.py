"""Prefetch by a number of elements: the chosen units and their order."""

from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard
from megatron_fsdp.config.fsdp_config import prefetch_elements
from megatron_fsdp.errors import StateError
from tests.unit.megatron_fsdp.config.lines import config

# Each of five layers has 7 * 7 + 7 elements.
LAYER = 56


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("size", "forward", "backward"),
    [
        (1, [1, 1, 1, 1, 0], [0, 1, 1, 1, 1]),
        (LAYER, [1, 1, 1, 1, 0], [0, 1, 1, 1, 1]),
        (LAYER + 1, [2, 2, 2, 1, 0], [0, 1, 2, 2, 2]),
        (3 * LAYER, [3, 3, 2, 1, 0], [0, 1, 2, 3, 3]),
        (10**9, [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]),
    ],
)
def test_units_are_prefetched_up_to_the_number_but_always_one(
    size: int, forward: list[int], backward: list[int]
) -> None:
    given, mesh = config(f"--suggested-communication-unit-size {size}"), init_device_mesh("cpu", (1,))
    layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(5)))
    for part in (*layers, layers):
        fully_shard(part, mesh, **given.fully_shard_kwargs(mesh))
    given.apply(layers)
    units: list[Any] = [layer._fsdp_unit for layer in layers]
    assert [len(unit.forward_prefetch) for unit in units] == forward
    assert [len(unit.backward_prefetch) for unit in units] == backward
    # The nearest unit first.
    for place, unit in enumerate(units):
        ahead = [units.index(other()) - place for other in unit.forward_prefetch]
        behind = [place - units.index(other()) for other in unit.backward_prefetch]
        assert ahead == [*range(1, forward[place] + 1)]
        assert behind == [*range(1, backward[place] + 1)]


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(StateError, match="Linear holds no sharded module"):
        prefetch_elements(nn.Linear(1, 1), 5)
