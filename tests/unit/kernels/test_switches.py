"""Features that an environment variable switches off."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from dbuffer_kernels import launch, switches
from megatron_fsdp import fully_shard


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    cached = (switches._named, launch._triton_is_installed)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("without", "is_off"), [("", False), ("triton, separate-reduce,fused-gradients,slots", True)])
def test_exactly_the_named_features_are_switched_off(
    without: str, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBUFFER_WITHOUT", without)
    model: Any = fully_shard(nn.Linear(7, 7))
    model.set_slot_pool("largest")
    (group,) = model.parameter_groups
    axis = group.main_weight.axes[0]
    assert is_off is (axis.reduce_group is axis.gather_group)
    assert is_off is (group.spec.fuses_weight_gradients is False)
    assert is_off is not group.gathered.storage.takes_slots
    assert not (is_off and launch._triton_is_installed())


def test_an_unknown_feature_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUFFER_WITHOUT", "tritn")
    with pytest.raises(ValueError, match=r"tritn, which no feature has\. fix: use triton"):
        switches.is_off("triton")
