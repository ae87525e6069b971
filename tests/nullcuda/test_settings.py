"""The settings of test_gpu_ranks.py on rank 0 of 8: streams and events keep apart whatever touches the same memory."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest

from megatron_fsdp.engine.streams import LANES, Compute, Ticket
from tests.functional.test_gpu_ranks import SETTINGS, STEPS, trained
from tests.harness import run_ranks
from tests.nullcuda import accesses, machine, races

MUTANTS: dict[str, AbstractContextManager[Any]] = {
    "": nullcontext(),
    "lanes do not wait for compute": mock.patch.object(Compute, "all", return_value=[]),
    "compute does not wait for lanes": mock.patch.object(Ticket, "_wait_on_streams"),
}


def stream_names() -> dict[int, str]:
    return {machine.stream_id(lane._stream): name for (name, _), lane in LANES.items() if lane._stream is not None}


def findings(setting: str, mutant: str) -> races.Findings:
    machine.become_rank_0_of(8)
    with MUTANTS[mutant], machine.logged(), accesses.recorded() as record:
        trained(setting, "cuda")
    return races.check(machine.calls(), record, stream_names())


def found_in(setting: str, mutant: str = "") -> races.Findings:
    (found,) = run_ranks(1, findings, setting, mutant, fresh=True, timeout=120)
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_two_streams_race_in_any_setting(setting: str) -> None:
    found = found_in(setting)
    assert found.num_accesses > 50 * STEPS
    assert dict(found.races) == {}
    assert found.illegal == []


@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name])
def test_a_wait_that_is_left_out_is_found(mutant: str) -> None:
    assert found_in("bf16, optim_grads_params", mutant).races
