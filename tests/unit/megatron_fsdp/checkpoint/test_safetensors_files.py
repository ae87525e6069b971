"""The safetensors library reads the written files; split by size, and errors for damaged files."""

import builtins
import importlib
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fsdp import CheckpointError, ConfigError
from megatron_fsdp.checkpoint.reader import read_entries
from megatron_fsdp.checkpoint.safetensors_files import INDEX, SINGLE, open_folder, write_folder

TENSORS = {
    "odd": torch.arange(21, dtype=torch.float32).reshape(7, 3) / 8,
    "half": torch.randn(5, 2).to(torch.bfloat16),
    "counts": torch.arange(3),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "bytes": torch.arange(9, dtype=torch.uint8),
}


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors in the shapes and dtypes given in the files."""
    opened = open_folder(path, {})
    found = {
        name: torch.full(entry.size, 7, dtype=entry.properties.dtype)
        for name, entry in opened.metadata.state_dict_metadata.items()
    }
    read_entries(opened, found)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]
    assert same(load_file(tmp_path / SINGLE), TENSORS)


def test_files_written_by_the_safetensors_library_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    assert same(read(tmp_path), TENSORS)
    assert same(read(tmp_path / SINGLE), TENSORS)


def test_names_that_the_model_has_are_translated_and_no_file_takes_one(tmp_path: Path) -> None:
    save_file({"lm_head": torch.ones(2), "head": torch.zeros(3)}, tmp_path / SINGLE)
    found = open_folder(tmp_path, {"head": "lm_head"}).names_below("model")
    assert found == {("head",): "lm_head", ("head of the files",): "head"}
    assert open_folder(tmp_path, {"head": "lm_head"}, strict=False).names_below("model") == {("head",): "lm_head"}


def test_files_end_before_the_size_and_the_index_says_what_is_where(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__, max_file_bytes=100)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for file in files:
        content = load_file(file)
        assert sum(tensor.nbytes for tensor in content.values()) <= 100
        assert {index["weight_map"][name] for name in content} == {file.name}
    assert same(read(tmp_path), TENSORS)


def test_a_tensor_larger_than_the_file_size_gets_its_own_file(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__, max_file_bytes=1)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == len(TENSORS)


def test_one_file_takes_the_place_of_several_and_their_index(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__, max_file_bytes=100)
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__)
    assert not (tmp_path / INDEX).exists()
    assert same(read(tmp_path), TENSORS)


def test_a_write_that_fails_leaves_neither_a_half_file_nor_an_entry_point(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__)

    def fail(name: str) -> torch.Tensor:
        if name == "counts":
            raise OSError(28, "No space left on device")
        return TENSORS[name]

    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path, TENSORS, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    tensors = {"plain": torch.empty(2), "phase": torch.empty(2, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"cannot be written as safetensors, which has no .*complex128: phase"):
        write_folder(tmp_path, tensors, tensors.__getitem__)


def test_a_file_that_was_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        open_folder(tmp_path, {})


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_folder(tmp_path, {})


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is damaged"),
        ('{"weight_map": {"odd": "../x.safetensors"}}', "lies outside"),
        ('{"weight_map": {"odd": "missing.safetensors"}}', "missing.safetensors cannot be read"),
        ('{"weight_map": {"even": "part.safetensors"}}', "lacks even, which the index says it has"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, index: str, message: str) -> None:
    save_file(TENSORS, tmp_path / "part.safetensors")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path, {})


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS, TENSORS.__getitem__)
    with (
        mock.patch.object(importlib, "import_module", side_effect=builtins.ImportError("no module")),
        pytest.raises(ConfigError, match=r"pip install 'megatron-fsdp-dbuffer\[hf\]'"),
    ):
        open_folder(tmp_path, {})


def test_a_dtype_that_pytorch_lacks_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1, dtype=torch.uint8)}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content.replace(b'"U8"', b'"F4"').replace(b"[1]", b"[2]"))
    with pytest.raises(CheckpointError, match=r"'a' is of dtype F4, which .*fix: convert"):
        open_folder(tmp_path, {})
