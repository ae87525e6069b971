"""Samples of indexed data: each once per epoch, by weight, as a function of seed and number alone."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.blend import Blend, IndexedSamples, load_data, parse_blend, permuted, split_bounds
from gpt.data import DataError
from gpt.indexed import IndexedWriter

CPU = torch.device("cpu")
LENGTH = 4


def make_samples(first: int = 0, count: int = 29, *, stream: int = 0, seed: int = 1) -> IndexedSamples:
    """Return samples of the row ``first, first + 1, ...``."""
    return IndexedSamples(np.arange(first, first + count, dtype=np.uint16), LENGTH, 1000, seed, stream, f"from {first}")


def write(prefix: Path, num_documents: int, first: int = 0) -> str:
    """Write documents of three equal tokens each: ``first``, ``first + 1``, ..."""
    with IndexedWriter(prefix, 300) as writer:
        for number in range(first, first + num_documents):
            writer.add_document([number] * 3)
    return str(prefix)


def arguments(data_path: object, **changes: object) -> argparse.Namespace:
    given = {"seq_length": LENGTH, "seed": 3, "split": None, "eval_iters": 1, "padded_vocab_size": 256}
    return argparse.Namespace(data_path=data_path, tokenizer_type="ByteTokenizer", **(given | changes))


@given(size=st.integers(1, 200), keys=st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4))
def test_every_place_has_a_place_of_its_own(size: int, keys: list[int]) -> None:
    assert sorted(permuted(place, size, keys) for place in range(size)) == list(range(size))


def test_an_epoch_takes_every_piece_once_and_the_next_in_another_order() -> None:
    samples = make_samples()
    epochs = [[int(samples.row(number)[0]) for number in range(start, start + 7)] for start in (0, 7)]
    assert len(samples) == 7
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 28, LENGTH))
    assert epochs[0] != epochs[1]


def test_neighbouring_pieces_share_the_token_between_them() -> None:
    rows = sorted(make_samples().row(number).tolist() for number in range(7))
    assert [row[0] for row in rows[1:]] == [row[-1] for row in rows[:-1]]


@pytest.mark.parametrize("other", [make_samples(seed=2), make_samples(stream=1)])
def test_another_seed_or_stream_takes_another_order(other: IndexedSamples) -> None:
    samples = make_samples()
    assert [other.row(n)[0] for n in range(21)] != [samples.row(n)[0] for n in range(21)]


def test_the_order_never_changes_between_releases() -> None:
    # Known values: a resumed run must see the text that the interrupted one would have seen.
    assert [int(make_samples(count=900).row(n)[0]) for n in (0, 1, 224, 10**12)] == [776, 732, 160, 404]


def test_a_blend_follows_its_weights_as_closely_as_whole_samples_can() -> None:
    blend = Blend.weighted([make_samples(), make_samples(100), make_samples(200)], [3, 6, 1])
    counts = np.zeros(3)
    for number in range(2000):
        counts[blend.locate(number)[0]] += 1
        assert np.abs(counts - (number + 1) * np.array([0.3, 0.6, 0.1])).max() < 2


def test_a_blend_starts_as_megatron_s_rule_does() -> None:
    # By hand: the largest of weight * max(n, 1) - samples so far, the first of equals.
    blend = Blend.weighted([make_samples(), make_samples(100)], [0.25, 0.75])
    assert [blend.locate(number)[0] for number in range(8)] == [1, 0, 1, 1, 0, 1, 1, 1]


def test_each_source_counts_its_samples_without_gaps_across_periods() -> None:
    blend = Blend.weighted([make_samples(), make_samples(100)], [1, 7])
    places: dict[int, list[int]] = {0: [], 1: []}
    for number in range(20_500):
        source, place = blend.locate(number)
        places[source].append(place)
    assert all(found == list(range(len(found))) for found in places.values())


def test_a_sample_does_not_depend_on_its_batch() -> None:
    blend = Blend.weighted([make_samples(), make_samples(100)], [0.3, 0.7])
    whole = blend.batch(range(50, 60), CPU)
    assert whole.dtype == torch.int64
    assert torch.equal(whole[3:5], blend.batch(range(53, 55), CPU))


def test_a_token_beyond_the_vocabulary_names_the_data() -> None:
    blend = Blend.weighted([make_samples(), make_samples(990)], [0.5, 0.5])
    with pytest.raises(DataError, match=r"from 990 has token 10\d\d, the vocabulary 1000"):
        blend.batch(range(20), CPU)


def test_a_weight_that_never_comes_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"the weight of from 100 is 1\.0e-06 of all"):
        Blend.weighted([make_samples(), make_samples(100)], [1, 1e-6])


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        (["a"], (["a"], None)),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
    ],
)
def test_weights_and_prefixes_are_told_apart(words: list[str], parsed: object) -> None:
    assert parse_blend(words) == parsed


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_that_is_not_positive_is_refused(weight: str) -> None:
    with pytest.raises(DataError, match="wanted numbers > 0"):
        parse_blend([weight, "a", "1", "b"])


@pytest.mark.parametrize(
    ("split", "ends"),
    [
        ("969,30,1", (969, 999, 1000)),
        ("1,1", (500, 1000, 1000)),
        ("100", (1000, 1000, 1000)),
        ("8/1/1", (800, 900, 1000)),
    ],
)
def test_a_split_divides_documents_by_shares(split: str, ends: object) -> None:
    assert split_bounds(split, 1000) == ends


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,-1", "1,1,1,1"])
def test_a_split_without_sense_is_refused(split: str) -> None:
    with pytest.raises(DataError, match="wanted three numbers >= 0"):
        split_bounds(split, 10)


def test_training_and_validation_share_no_document(tmp_path: Path) -> None:
    data = load_data(arguments([write(tmp_path / "a", 40)], split="3,1,0"))
    train, valid = (set(part.batch(range(200), CPU).flatten().tolist()) for part in (data.train, data.valid))
    assert train <= set(range(30))
    assert valid <= set(range(30, 40))
    assert data.num_tokens == 90


def test_sets_without_weights_count_by_their_size(tmp_path: Path) -> None:
    words = [write(tmp_path / "a", 30), write(tmp_path / "b", 90, first=100), write(tmp_path / "c", 30, first=200)]
    blend = load_data(arguments(words, split="1,1,0")).train
    assert isinstance(blend, Blend)
    assert blend.quota / blend.quota.sum() == pytest.approx([11 / 55, 33 / 55, 11 / 55], abs=1e-3)


def test_one_prefix_is_found_to_be_indexed(tmp_path: Path) -> None:
    data = load_data(arguments(Path(write(tmp_path / "a", 200))))
    assert data.source == str(tmp_path / "a")
    assert isinstance(data.train, Blend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"the validation part of .* has 0 tokens \(--split 969,30,1 of 9 documents\); --seq-length 4 needs 5"),
        ({"split": "0,1,0"}, "the training part"),
    ],
)
def test_a_part_too_short_for_one_sample_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(arguments([write(tmp_path / "a", 9)], **changes))


def test_without_validation_no_part_is_needed_for_it(tmp_path: Path) -> None:
    assert load_data(arguments([write(tmp_path / "a", 9)], eval_iters=0)).num_tokens == 27


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_type": "NullTokenizer"}, "text is read as bytes"),
        ({"split": "1,1,1"}, "last twentieth is held out"),
    ],
)
def test_text_takes_no_flags_of_indexed_data(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    args = arguments(tmp_path / "text")
    vars(args).update(changes)
    with pytest.raises(DataError, match=message):
        load_data(args)
