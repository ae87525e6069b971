"""Samples of indexed data sets, alone or in a weighted blend; each a pure function of (seed, sample number)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.data import TRAIN_STREAM, VALID_STREAM, DataError, Sampler, load_corpus
from gpt.indexed import is_indexed, open_indexed

DEFAULT_SPLIT = "969,30,1"  # Megatron's usual one
PERIOD = 10_000
_MASK_64 = 2**64 - 1


class Samples(Protocol):
    """What training and validation draw from."""

    def batch(self, numbers: range, device: torch.device) -> Tensor:
        """Return the samples of the given numbers, (len(numbers), seq_length + 1) int64 on ``device``."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Where samples come from.

    Attributes:
        train, valid: no text is in both.
        num_tokens: to train on.
        source: what was read, in words; another source is other data.
    """

    train: Samples
    valid: Samples
    num_tokens: int
    source: str


def load_data(args: argparse.Namespace) -> TrainingData:
    """Open what ``--data-path`` names: text (bytes), one indexed data set, or a blend of several.

    Raises:
        DataError: something is missing, unreadable, too short, or contradicts ``--split`` or ``--tokenizer-type``.
    """
    path: Path | list[str] | None = args.data_path
    if isinstance(path, list) or (path is not None and is_indexed(path)):
        words = path if isinstance(path, list) else [str(path)]
        return _load_blend(words, args)
    if args.tokenizer_type != "ByteTokenizer":
        raise DataError(
            f"--tokenizer-type {args.tokenizer_type} with text in --data-path: text is read as bytes; write it with "
            "examples/preprocess_data.py first, and name the prefix of its output"
        )
    if args.split is not None:
        raise DataError(
            f"--split {args.split} with text in --data-path, whose last twentieth is held out; leave it away"
        )
    corpus = load_corpus(path, args.seq_length)
    samplers = [
        Sampler(text, args.seq_length, args.seed, stream)
        for text, stream in ((corpus.train, TRAIN_STREAM), (corpus.valid, VALID_STREAM))
    ]
    return TrainingData(samplers[0], samplers[1], len(corpus.train), corpus.source)


@dataclass(frozen=True, slots=True)
class IndexedSamples:
    """Neighbouring pieces of one row of tokens; every epoch takes each piece once, in another order.

    Attributes:
        tokens: 1-D integers, memory-mapped.
        vocabulary_size: a token at or above it is an error.
        stream: tells data sets and their uses (training, validation) apart, below 2**64.
        source: named in errors.
    """

    tokens: NDArray[Any]
    seq_length: int
    vocabulary_size: int
    seed: int
    stream: int
    source: str

    def __len__(self) -> int:
        """Samples per epoch; neighbours share one token, which is target of the first and input of the second."""
        return (len(self.tokens) - 1) // self.seq_length

    def row(self, number: int) -> NDArray[Any]:
        """Return sample ``number``, counted on through the epochs: (seq_length + 1,) of the file's dtype."""
        epoch, place = divmod(number, len(self))
        key = np.array([self.seed, self.stream], dtype=np.uint64)
        keys = np.random.Philox(key=key, counter=epoch).random_raw(4)
        start = permuted(place, len(self), [int(word) for word in keys]) * self.seq_length
        return self.tokens[start : start + self.seq_length + 1]


@dataclass(frozen=True, slots=True)
class Blend:
    """Samples of several sources by weight.

    Which source sample ``n`` is from follows Megatron's rule (``build_blending_indices``: the source furthest behind
    its weight) for the first 10,000 samples, and repeats from there on. So its place in the source needs no memory of
    what came before, and training resumes exactly from the number of consumed samples for any number of ranks.

    Attributes:
        sources: one for each weight.
        choice: (period,) source of each sample. rank: (period,) how many of the period's earlier samples have the same.
        quota: samples of each source in a period.
    """

    sources: tuple[IndexedSamples, ...]
    choice: NDArray[np.int64]
    rank: NDArray[np.int64]
    quota: NDArray[np.int64]

    @classmethod
    def weighted(cls, sources: Sequence[IndexedSamples], weights: Sequence[float]) -> Blend:
        """Return the blend of sources by weights, which need not add up to 1.

        Raises:
            DataError: a weight is so small that a period of 10,000 samples has no place for the source.
        """
        shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        period = 1 if len(sources) == 1 else PERIOD
        counts = np.zeros(len(sources), dtype=np.int64)
        choice, rank = np.zeros(period, dtype=np.int64), np.zeros(period, dtype=np.int64)
        for number in range(period):
            furthest = int(np.argmax(shares * max(number, 1) - counts))
            choice[number], rank[number] = furthest, counts[furthest]
            counts[furthest] += 1
        for source, share in zip(sources, shares, strict=True):
            if share * period < 1:
                raise DataError(
                    f"--data-path: the weight of {source.source} is {share:.1e} of all; wanted 1/{PERIOD} or more; "
                    "leave it away or raise its weight"
                )
        return cls(tuple(sources), choice, rank, counts)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the source of sample ``number``, and its number there."""
        period, place = divmod(number, len(self.choice))
        source = int(self.choice[place])
        return source, period * int(self.quota[source]) + int(self.rank[place])

    def batch(self, numbers: range, device: torch.device) -> Tensor:
        """Return samples as ``Samples`` says.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        located = [self.locate(number) for number in numbers]
        rows = np.stack([self.sources[source].row(place).astype(np.int64) for source, place in located])
        limit = self.sources[0].vocabulary_size
        if rows.min() < 0 or rows.max() >= limit:
            culprit = self.sources[located[int(rows.max(axis=1).argmax())][0]].source
            raise DataError(
                f"--data-path: {culprit} has token {rows.max()}, the vocabulary {limit}; give the --tokenizer-type, "
                "--tokenizer-model and --vocab-size with which the data was written"
            )
        return torch.from_numpy(rows).to(device)


def permuted(place: int, size: int, keys: Sequence[int]) -> int:
    """Return where a keyed permutation of ``range(size)`` sends ``place``.

    A Feistel network over the next power of four, applied until the result is in range ("cycle walking": Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002): nothing as long as the data is made or kept.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        place = left << half | right
        if place < size:
            return place


def parse_blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights of ``--data-path``; weights None where only prefixes are given: then by size.

    Raises:
        DataError: a weight is not above 0.
    """
    weights = [_weight(word) for word in words[::2]]
    if len(words) % 2 or any(weight is None for weight in weights):
        return list(words), None
    numbers = [weight for weight in weights if weight is not None]
    if not all(0 < number < float("inf") for number in numbers):
        raise DataError(f"--data-path: the weights are {' '.join(words[::2])}; wanted numbers > 0")
    return list(words[1::2]), numbers


def split_bounds(split: str, count: int) -> tuple[int, int, int]:
    """Return where training, validation and test end among ``count`` sequences, rounded as Megatron rounds them.

    Raises:
        DataError: ``split`` is no list of up to three numbers >= 0.
    """
    shares = [_weight(word) for word in split.replace("/", ",").split(",")]
    numbers = [share if share is not None else -1.0 for share in shares] + [0.0] * (3 - len(shares))
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise DataError(f"--split {split}: wanted three numbers >= 0 for training, validation and test, as 969,30,1")
    ends = [round(sum(numbers[: index + 1]) / sum(numbers) * count) for index in range(3)]
    return ends[0], ends[1], ends[2]


def _load_blend(words: Sequence[str], args: argparse.Namespace) -> TrainingData:
    prefixes, weights = parse_blend(words)
    split = args.split or DEFAULT_SPLIT
    parts: dict[int, list[IndexedSamples]] = {TRAIN_STREAM: [], VALID_STREAM: []}
    for position, prefix in enumerate(prefixes):
        dataset = open_indexed(prefix)
        train_end, valid_end, _ = split_bounds(split, len(dataset))
        for stream, first, last in ((TRAIN_STREAM, 0, train_end), (VALID_STREAM, train_end, valid_end)):
            tokens = dataset.between(first, last)
            if len(tokens) < args.seq_length + 1 and (stream == TRAIN_STREAM or args.eval_iters > 0):
                raise _too_short(prefix, "training" if stream == TRAIN_STREAM else "validation", tokens, args, dataset)
            key = (position + 1) << 8 | stream
            parts[stream].append(
                IndexedSamples(tokens, args.seq_length, args.padded_vocab_size, args.seed, key, prefix)
            )
    train = parts[TRAIN_STREAM]
    if weights is None:
        weights = [float(len(source)) for source in train]
    blends = [Blend.weighted(parts[stream], weights) for stream in (TRAIN_STREAM, VALID_STREAM)]
    return TrainingData(blends[0], blends[1], sum(len(source.tokens) for source in train), " ".join(words))


def _too_short(prefix: str, part: str, tokens: NDArray[Any], args: argparse.Namespace, dataset: Any) -> DataError:
    return DataError(
        f"--data-path: the {part} part of {prefix} has {len(tokens)} tokens (--split {args.split or DEFAULT_SPLIT} of "
        f"{len(dataset)} documents); --seq-length {args.seq_length} needs {args.seq_length + 1}. Give more documents, "
        "another --split, or --eval-iters 0 to go without validation"
    )


def _mixed(word: int) -> int:
    """Return a 64-bit hash of a word: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK_64
    return word ^ word >> 31


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
