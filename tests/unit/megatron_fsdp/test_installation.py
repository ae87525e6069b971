"""The warning about an untested torch, and the tested versions."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from megatron_fsdp.installation import NEWEST_TORCH, check_torch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0+cu132", "2.15.9", torch.__version__])
def test_a_torch_that_is_tested_is_taken_in_silence(version: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        check_torch(version)
    assert seen == []


@pytest.mark.parametrize("version", ["2.16.0.dev20261001+cpu", "3.0.0"])
def test_a_newer_torch_is_named_with_the_fix(version: str) -> None:
    with pytest.warns(UserWarning, match=f"torch {re.escape(version)} is newer than 2.15.*fix: install torch <= 2.15"):
        check_torch(version)


def test_the_other_ranks_of_a_job_leave_the_warning_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings(record=True) as seen:
        check_torch("9.0.0")
    assert seen == []


def test_the_newest_torch_is_pinned_and_run_every_night() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    newest = re.search(r"^NEWEST_TORCH := (\S+)$", makefile, re.MULTILINE)
    assert newest is not None
    assert tuple(map(int, newest[1].split(".")[:2])) == NEWEST_TORCH
    pins = (ROOT / "constraints" / f"torch-{newest[1]}.txt").read_text(encoding="utf-8")
    assert f"torch=={newest[1]}\ntriton==" in pins
    nightly = makefile.partition("\ntest-nightly:")[2].partition("\n\n")[0]
    assert "$(MAKE) test TORCH=$(NEWEST_TORCH)" in nightly
