"""Reading the index of a checkpoint runs no code that it names."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_fsdp import CheckpointError, save_checkpoint
from megatron_fsdp.checkpoint.manifest import (
    METADATA,
    read_metadata,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, tmp_path / "step")
    return tmp_path / "step"


def test_metadata_equals_that_of_pytorchs_reader(folder: Path) -> None:
    ours, theirs = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


class Call:
    """Pickles as a call of the given function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("true",), "posix.system"),
        (eval, ("1",), "builtins.eval"),
        (torch.load, ("x",), "torch.serialization.load"),
        (getattr, ("x", "upper"), "builtins.getattr"),
        (io.FileIO, ("x",), "_io.FileIO"),
    ],
)
def test_a_pickled_call_is_refused_by_name_and_not_made(
    folder: Path, function: Any, args: tuple[Any, ...], name: str
) -> None:
    metadata = read_metadata(folder)
    metadata.planner_data = Call(function, *args)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"names {name}, which no checkpoint is made of"):
        read_metadata(folder)


@pytest.mark.parametrize("name", ["../state.pt", "/etc/passwd", "sub/file"])
def test_files_outside_of_the_folder_are_refused(folder: Path, name: str) -> None:
    metadata = read_metadata(folder)
    next(iter(metadata.storage_data.values())).relative_path = name
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="lies outside"):
        read_metadata(folder)
