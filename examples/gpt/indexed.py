"""Megatron's indexed data sets and blends of them, read and written by megatron-core, in Megatron's own order."""

from __future__ import annotations

import argparse
import importlib
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.data import DataError, TrainingData

DEFAULT_SPLIT = "969,30,1"  # Megatron's usual one


def is_indexed(prefix: str | Path) -> bool:
    """Whether a data set with this prefix is there."""
    return Path(f"{prefix}.idx").is_file()


def megatron_datasets(module: str) -> Any:
    """Return a module of ``megatron.core.datasets``.

    Raises:
        DataError: megatron-core cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which GPU packages it would like to have
            return importlib.import_module(f"megatron.core.datasets.{module}")
    except ImportError as error:
        raise DataError(
            f"indexed data sets are read and written by megatron-core, which cannot be imported ({error}); "
            "pip install megatron-core==0.16.1, or give --data-path a text file or folder"
        ) from error


@dataclass(frozen=True, slots=True)
class IndexedSamples:
    """Samples of one data set or of a blend, as Megatron would take them for a run of this many.

    Attributes:
        dataset: of megatron-core, a ``GPTDataset`` or ``BlendedDataset``.
        vocabulary_size: a token at or above it is an error. source: named in errors.
    """

    dataset: Any
    vocabulary_size: int
    source: str

    def batch(self, numbers: range, device: torch.device) -> Tensor:
        """Return the samples of the given numbers, (len(numbers), seq_length + 1) int64 on ``device``.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        samples = [self.dataset[number] for number in numbers]
        rows = torch.stack([torch.cat([sample["tokens"], sample["labels"][-1:]]) for sample in samples])
        if rows.min() < 0 or rows.max() >= self.vocabulary_size:
            raise DataError(
                f"--data-path: {self.source} has token {int(rows.max())}, the vocabulary {self.vocabulary_size}; give "
                "the --tokenizer-type, --tokenizer-model and --vocab-size with which the data was written"
            )
        return rows.to(device)


def load_indexed(words: Sequence[str], args: argparse.Namespace) -> TrainingData:
    """Open the data sets that ``--data-path`` names, for as many samples as the run takes.

    Raises:
        DataError: megatron-core is missing; a data set is, is damaged or too short; or weights or ``--split`` make no
            sense.
    """
    prefixes, weights = parsed_blend(words)
    split, source = args.split or DEFAULT_SPLIT, " ".join(words)
    gpt, builder = megatron_datasets("gpt_dataset"), megatron_datasets("blended_megatron_dataset_builder")
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, 0]
    with _refused(f"--split {split}: wanted three numbers >= 0 for training, validation and test, as {DEFAULT_SPLIT}"):
        config = gpt.GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=(prefixes, weights),
            split=split,
            # It says which tokens are padding (none: -1) and end documents, for masks that are not asked for here.
            tokenizer=SimpleNamespace(vocab_size=None, pad=-1, eod=-2, unique_identifiers={}),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            # Indices are made anew in memory: those in a cache would outlive the data that they are of.
            path_to_cache="",
        )
    config.split_matrix = [bounds if size else None for bounds, size in zip(config.split_matrix, sizes, strict=True)]
    counts = [_num_train_tokens(prefix, config, split, args) for prefix in prefixes]
    if weights is None and len(prefixes) > 1:
        config.blend = (prefixes, [float(count) for count in counts])
    with _refused(f"--data-path: cannot take {sizes[0]} samples from {source}"):
        built = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, sizes, lambda: True, config).build()
    train, valid, _ = (IndexedSamples(dataset, args.padded_vocab_size, source) for dataset in built)
    return TrainingData(train, valid, sum(counts), source)


def parsed_blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights of ``--data-path``; weights None where only prefixes are given: then by size.

    Raises:
        DataError: a weight is not above 0.
    """
    try:
        weights = [float(word) for word in words[::2]] if len(words) % 2 == 0 else None
    except ValueError:
        weights = None
    if weights is None:
        return list(words), None
    if not all(0 < weight < float("inf") for weight in weights):
        raise DataError(f"--data-path: the weights are {' '.join(words[::2])}; wanted numbers > 0")
    return list(words[1::2]), weights


def _num_train_tokens(prefix: str, config: Any, split: str, args: argparse.Namespace) -> int:
    """Return how many tokens of a data set are to train on; megatron-core would count epochs of an empty part for ever.

    Raises:
        DataError: the data set is missing or damaged, or a part of it has no sample.
    """
    reader = megatron_datasets("indexed_dataset").IndexedDataset
    if not reader.exists(prefix):
        raise DataError(
            f"--data-path: {prefix}.idx and {prefix}.bin are wanted (looked from {Path.cwd()}); "
            "examples/preprocess_data.py writes both"
        )
    with _refused(f"--data-path: cannot read {prefix}.idx; copy or write it anew"):
        dataset = reader(prefix)
        # Copied: what it returns is unmapped together with it.
        lengths, num_stored = dataset.sequence_lengths.copy(), Path(f"{prefix}.bin").stat().st_size
        if num_stored != (promised := int(lengths.sum()) * dataset.index.dtype_size):
            raise ValueError(f"{prefix}.bin has {num_stored} bytes, its index promises {promised}")
    counts = []
    for part, bounds in zip(("training", "validation"), config.split_matrix, strict=False):
        # Rounded as the builder rounds them.
        first, last = (round(share * len(lengths)) for share in bounds or (0, 0))
        counts.append(int(lengths[first:last].sum()))
        is_wanted = part == "training" or args.eval_iters > 0
        if is_wanted and counts[-1] < args.seq_length + 1:
            raise DataError(
                f"--data-path: the {part} part of {prefix} has {counts[-1]} tokens (--split {split} of {len(lengths)} "
                f"documents); --seq-length {args.seq_length} needs {args.seq_length + 1}. Give more documents, another "
                "--split, or --eval-iters 0 to go without validation"
            )
    return counts[0]


@contextmanager
def _refused(message: str) -> Iterator[None]:
    """Say what megatron-core asserts and raises as an error of the data."""
    try:
        with np.errstate(invalid="raise"):  # shares that add up to 0
            yield
    except (AssertionError, ArithmeticError, IndexError, OSError, ValueError, struct.error) as error:
        raise DataError(f"{message} ({type(error).__name__}: {error})") from error
