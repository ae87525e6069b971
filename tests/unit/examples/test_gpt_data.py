"""Reading the training text and drawing samples from it."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.data import TRAIN_STREAM, VALID_STREAM, DataError, Sampler, load_corpus, rank_samples
from gpt.training_data import load_data

CPU = torch.device("cpu")


def make_sampler(*, num_bytes: int = 5000, seq_length: int = 7, seed: int = 3, stream: int = TRAIN_STREAM) -> Sampler:
    """Return a sampler of a text in which neighbouring bytes differ by 1 (mod 251)."""
    text = (np.arange(num_bytes) % 251).astype(np.uint8)
    return Sampler(text, seq_length, seed, stream)


@given(
    num_ranks=st.integers(1, 5),
    micro_batch_size=st.integers(1, 4),
    num_microbatches=st.integers(1, 3),
    first=st.integers(0, 10**9),
)
def test_the_ranks_take_every_sample_of_the_global_batch_once(
    num_ranks: int, micro_batch_size: int, num_microbatches: int, first: int
) -> None:
    taken = [
        number
        for rank in range(num_ranks)
        for index in range(num_microbatches)
        for number in rank_samples(first, index, micro_batch_size=micro_batch_size, rank=rank, num_ranks=num_ranks)
    ]
    assert sorted(taken) == list(range(first, first + num_ranks * micro_batch_size * num_microbatches))


def test_two_ranks_take_different_samples_of_the_same_microbatch() -> None:
    parts = [rank_samples(60, 1, micro_batch_size=3, rank=rank, num_ranks=2) for rank in range(2)]
    assert parts == [range(66, 69), range(69, 72)]


def test_a_sample_depends_on_its_number_only_not_on_its_batch() -> None:
    sampler = make_sampler()
    assert torch.equal(sampler.batch(range(10, 20), CPU)[4:7], make_sampler().batch(range(14, 17), CPU))


def test_a_sample_is_a_contiguous_piece_one_byte_longer_than_the_sequence() -> None:
    batch = make_sampler(seq_length=7).batch(range(50), CPU)
    assert batch.shape == (50, 8)
    assert batch.dtype == torch.int64
    assert torch.equal(batch[:, 1:], (batch[:, :-1] + 1) % 251)


def test_samples_start_at_the_first_and_at_the_last_possible_byte() -> None:
    sampler = make_sampler(num_bytes=12, seq_length=7)
    assert {sampler.start(number) for number in range(200)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("other", [make_sampler(seed=4), make_sampler(stream=VALID_STREAM)])
def test_another_seed_or_stream_draws_other_samples(other: Sampler) -> None:
    numbers = range(20)
    assert [make_sampler().start(n) for n in numbers] != [other.start(n) for n in numbers]


def test_sample_positions_never_change_between_releases() -> None:
    # Known values: a resumed run must see the text that the interrupted one would have seen.
    sampler = make_sampler(num_bytes=100_000, seq_length=128, seed=1234)
    assert [sampler.start(number) for number in (0, 1, 10**12)] == [29712, 65887, 73686]


def test_the_last_twentieth_of_a_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    content = bytes(range(200)) * 5
    path.write_bytes(content)
    corpus = load_corpus(path, seq_length=16)
    assert corpus.train.tobytes() == content[:950]
    assert corpus.valid.tobytes() == content[950:]


def test_a_folder_is_read_in_sorted_order_without_binary_hidden_and_test_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"B" * 300,
        "a/z.txt": b"Z" * 100,
        "a/c.txt": b"C" * 100,
        "blob.bin": b"\0" * 50,
        ".hidden": b"H" * 50,
        "tests/t.txt": b"T" * 50,
        ".git/config": b"G" * 50,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = load_corpus(tmp_path, seq_length=8)
    assert corpus.train.tobytes() + corpus.valid.tobytes() == b"B" * 300 + b"C" * 100 + b"Z" * 100
    assert corpus.source == f"3 files under {tmp_path}"


def test_the_default_text_is_python_source_of_at_least_a_million_bytes() -> None:
    corpus = load_corpus(None, seq_length=128)
    assert len(corpus.train) > 1_000_000
    assert b"import " in corpus.train[:100_000].tobytes()


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data-path: .*nowhere does not exist"):
        load_corpus(tmp_path / "nowhere", seq_length=8)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty is empty; wanted a text file"):
        load_corpus(tmp_path / "empty", seq_length=8)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"\0\1\2")
    with pytest.raises(DataError, match="holds no files with text"):
        load_corpus(tmp_path, seq_length=8)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Patched, because no file is unreadable to the superuser that runs the tests in many containers.
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret"
    path.write_bytes(b"x" * 1000)
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataError, match=r"cannot read .*secret: Permission denied"):
        load_corpus(path, seq_length=8)


def test_a_text_too_short_for_one_held_out_sample_is_refused_with_the_size_that_suffices(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 180)
    with pytest.raises(DataError, match="holds 180 bytes of text; --seq-length 9 needs 201 or more"):
        load_corpus(path, seq_length=9)
    path.write_bytes(b"x" * 201)
    assert len(load_corpus(path, seq_length=9).valid) == 10


def data_arguments(path: Path, **changes: object) -> argparse.Namespace:
    given = {"seq_length": 4, "seed": 3, "split": None, "tokenizer_type": "ByteTokenizer", "data_path": path}
    return argparse.Namespace(**(given | {"train_iters": 3, "eval_iters": 1, "global_batch_size": 2} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_type": "NullTokenizer"}, "text is read as bytes"),
        ({"split": "1,1,1"}, "last twentieth is held out"),
    ],
)
def test_text_takes_no_flags_of_indexed_data(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(data_arguments(tmp_path / "text", **changes))


@pytest.mark.parametrize("is_blend", [False, True])
def test_indexed_data_without_megatron_core_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blend: bool
) -> None:
    (tmp_path / "a.idx").touch()
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.gpt_dataset", None)
    args = data_arguments(tmp_path / "a")
    if is_blend:
        args.data_path = ["0.3", "a", "0.7", "b"]
    with pytest.raises(DataError, match="pip install megatron-core=="):
        load_data(args)
