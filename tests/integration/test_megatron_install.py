"""After ``install()`` megatron.core's own names build this engine, and train as Megatron's DistributedDataParallel."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fsdp.integrations.megatron import adapter as mcore_adapter
from megatron_fsdp.integrations.megatron.data_parallel import DataParallelMethods
from megatron_fsdp.lifecycle.module import FsdpModule
from tests.integration.megatron_meshes import (
    MOE,
    Mesh,
    Task,
    build,
    config_of,
    make_chunk,
    run_steps,
)
from tests.integration.megatron_training import (
    DistributedDataParallelConfig,
    ProcessGroupCollection,
    megatron_processes,
    optimizers,
)
from tests.integration.ranks import run_ranks

ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
INSTALLED = Mesh(is_installed=True)
Figures = list[tuple[float, float]]


@contextmanager
def installed() -> Iterator[list[str]]:
    changed = mcore_adapter.install()
    try:
        yield changed
    finally:
        mcore_adapter.uninstall()


def build_model() -> tuple[Any, Any]:
    config = config_of(Task(), Mesh())
    return config, make_chunk(Task(), config, None)


def adapter_names() -> dict[str, Any]:
    """Return the class that each name of Megatron's adapter stands for now."""
    places = (ADAPTER, "megatron.core.distributed.fsdp", "megatron.core.distributed")
    return {place: sys.modules[place].FullyShardedDataParallel for place in places}


def build_and_look() -> dict[str, bool]:
    """Return what holds of a model built through Megatron's name, whose class a script imported before."""
    with megatron_processes():
        before = adapter_names()
        with installed() as changed:
            again = mcore_adapter.install()
            (model,), _ = build(Task(), INSTALLED)
            during = adapter_names()
        return {
            "one class before": len(set(before.values())) == 1,
            "another one during": set(during.values()).isdisjoint(before.values()),
            "it names what changed": {f"{place}.FullyShardedDataParallel" for place in before} <= set(changed),
            "a second call changes nothing": not again,
            "isinstance of Megatron's": isinstance(model, before[ADAPTER]),
            "isinstance of the name": isinstance(model, during[ADAPTER]),
            "this engine": isinstance(model, DataParallelMethods) and isinstance(model.module, FsdpModule),
            "all back": adapter_names() == before,
        }


def test_install_builds_this_engine_below_megatrons_class_and_uninstall_restores() -> None:
    (found,) = run_ranks(1, build_and_look)
    assert [name for name, holds in found.items() if not holds] == []


ANOTHER = """
from megatron.core.distributed.data_parallel_base import _BaseDataParallel


class AdapterOfVersionTwo(_BaseDataParallel):
    pass
"""


def replace_another(folder: Path) -> list[bool]:
    """Add a second adapter to Megatron's package; return whether it is found, replaced, trains, and is restored."""
    with megatron_processes():
        fsdp = sys.modules["megatron.core.distributed.fsdp"]
        (folder / "version_two.py").write_text(ANOTHER, encoding="utf-8")
        with mock.patch.object(fsdp, "__path__", [*fsdp.__path__, str(folder)]):
            found = importlib.import_module("megatron.core.distributed.fsdp.version_two")
            plain = found.AdapterOfVersionTwo
            with installed() as changed:
                config, model = build_model()
                wrapped = found.AdapterOfVersionTwo(config, DistributedDataParallelConfig(), model)
        return [
            f"{found.__name__}.AdapterOfVersionTwo" in changed,
            isinstance(wrapped, plain) and isinstance(wrapped.module, FsdpModule),
            found.AdapterOfVersionTwo is plain,
        ]


def test_a_second_adapter_class_is_replaced_as_well(tmp_path: Path) -> None:
    assert run_ranks(1, replace_another, tmp_path) == [[True, True, True]]


def train_both() -> tuple[Figures, Figures, list[bool]]:
    """Train experts through Megatron's names, under its DDP and sharded; return figures, and what optimizers."""
    task = Task(MOE | {"calculate_per_token_loss": True}, is_tied=True, is_masked=True)
    with megatron_processes():
        plain = optimizers.get_megatron_optimizer
        with installed():
            chunks, optimizer = build(task, Mesh(strategy=None, is_installed=True))
            wanted, _ = run_steps(task, chunks, optimizer, range(4))
            chunks, sharded = build(task, INSTALLED)
            found, _ = run_steps(task, chunks, sharded, range(4))
            is_other = optimizers.get_megatron_optimizer is not plain
        is_back = optimizers.get_megatron_optimizer is plain
        kinds = ["Sharded" in type(each).__name__ for each in (optimizer, sharded)]
        return wanted, found, [is_other, is_back, *kinds]


def test_megatrons_ddp_keeps_its_optimizer_and_ours_has_its_losses_and_norms() -> None:
    for wanted, found, what in run_ranks(2, train_both):
        assert what == [True, True, False, True]
        for pair, wanted_pair in zip(found, wanted, strict=True):
            assert pair == pytest.approx(wanted_pair, rel=1e-5)


def pass_constructor_arguments() -> str:
    with megatron_processes(), installed():
        config, model = build_model()
        wrap = adapter_names()[ADAPTER]
        ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
        groups = ProcessGroupCollection.use_mpu_process_groups()
        arguments = {"config": config, "ddp_config": ddp_config, "disable_bucketing": True, "pg_collection": groups}
        with pytest.raises(ValueError, match=r"of_the_future=3: this wrapper does not know"):
            wrap(module=model, **arguments, of_the_future=3)
        return type(wrap(module=model, **arguments, of_the_future=None)).__name__


def test_megatrons_arguments_are_accepted_and_unknown_effective_ones_refused() -> None:
    assert run_ranks(1, pass_constructor_arguments) == ["FullyShardedDataParallel"]
