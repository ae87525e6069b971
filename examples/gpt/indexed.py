"""Megatron's indexed data sets and blends of them, read by megatron-core in Megatron's own order."""

from __future__ import annotations

import argparse
import functools
import importlib
import struct
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.data import DataError, SamplesAhead, TrainingData, load_text


def load_data(args: argparse.Namespace) -> TrainingData:
    """Open what ``--data-path`` names: text (bytes), or for megatron-core one indexed data set or a blend of several.

    Raises:
        DataError: something is missing, unreadable, too short, or contradicts ``--split`` or ``--tokenizer-model``.
    """
    words: list[str] = args.data_path or []
    if len(words) < 2 and not any(Path(f"{word}.idx").is_file() for word in words):
        return load_text(args)
    source = " ".join(words)
    try:
        with warnings.catch_warnings(), np.errstate(invalid="raise"):  # shares that add up to 0
            warnings.simplefilter("ignore")  # megatron-core says which GPU packages it would like to have
            return load_indexed(words, source, args)
    except ImportError as error:
        raise DataError(
            f"--data-path: indexed data sets are read by megatron-core, which cannot be imported ({error}). fix: "
            "pip install 'megatron-fsdp-dbuffer[integrations]', or give a text file or folder"
        ) from error
    except DataError:
        raise
    except (AssertionError, ArithmeticError, IndexError, OSError, ValueError, struct.error) as error:
        raise DataError(
            f"--data-path {source}, --split {args.split or 'default'} (looked from {Path.cwd()}): "
            f"{type(error).__name__}: {error}. fix: give prefixes, or "
            f"weights > 0 and prefixes in turn, and three shares to --split"
        ) from error


def load_indexed(words: list[str], source: str, args: argparse.Namespace) -> TrainingData:
    """Open indexed data sets for as many samples as the run takes; raises what megatron-core does, or DataError."""
    datasets, split = "megatron.core.datasets", args.split or "969,30,1"  # Megatron's usual one
    gpt = importlib.import_module(f"{datasets}.gpt_dataset")
    builder = importlib.import_module(f"{datasets}.blended_megatron_dataset_builder")
    prefixes, weights = importlib.import_module(f"{datasets}.utils").get_blend_from_list(words)
    assert all(0 < weight < float("inf") for weight in weights or ()), "a weight is not above 0"
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, 0]
    config = gpt.GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights),
        split=split,
        # GPTDataset reads the ids of padding (none: -1) and of document ends from it, for masks that are not used here.
        tokenizer=SimpleNamespace(vocab_size=None, pad=-1, eod=-2, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        # Indices are made anew in memory: those in a cache would outlive the data that they are of.
        path_to_cache="",
    )
    config.split_matrix = [bounds if size else None for bounds, size in zip(config.split_matrix, sizes, strict=True)]
    counts = [_num_train_tokens(prefix, config, args) for prefix in prefixes]
    if weights is None and len(prefixes) > 1:
        config.blend = (prefixes, [float(count) for count in counts])
    built = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, sizes, lambda: True, config).build()
    train, valid, _ = (functools.partial(_batch, dataset, args.padded_vocab_size) for dataset in built)
    # Megatron shuffles the samples of a run of this length, so the order depends on the length.
    flags = {"split": args.split, "train_samples": sizes[0]}
    return TrainingData(SamplesAhead(train, args.num_workers), valid, sum(counts), source, flags)


def _batch(dataset: Any, vocabulary_size: int, numbers: range, device: torch.device) -> Tensor:
    """Return samples of megatron-core's ``GPTDataset`` or ``BlendedDataset``; a token past the vocabulary raises."""
    samples = [dataset[number] for number in numbers]
    rows = torch.stack([torch.cat([sample["tokens"], sample["labels"][-1:]]) for sample in samples])
    if rows.max() >= vocabulary_size:
        raise DataError(
            f"--data-path: found token {int(rows.max())}, but the vocabulary has {vocabulary_size}. fix: give the "
            "--tokenizer-model with which the data was written"
        )
    return rows.to(device)


def _num_train_tokens(prefix: str, config: Any, args: argparse.Namespace) -> int:
    """Return how many tokens of a data set are to train on, or raise a DataError where a part has no sample.

    megatron-core would count epochs of an empty part for ever.
    """
    dataset = importlib.import_module("megatron.core.datasets.indexed_dataset").IndexedDataset(prefix)
    lengths = dataset.sequence_lengths.copy()  # the array is unmapped when the dataset is deleted
    assert Path(f"{prefix}.bin").stat().st_size == int(lengths.sum()) * dataset.index.dtype_size, "it is cut off"
    counts = []
    for part, bounds in zip(("training", "validation"), config.split_matrix, strict=False):
        # Rounded as the builder rounds them.
        first, last = (round(share * len(lengths)) for share in bounds or (0, 0))
        counts.append(int(lengths[first:last].sum()))
        if (part == "training" or args.eval_iters > 0) and counts[-1] <= args.seq_length:
            raise DataError(
                f"--data-path: the {part} part of {prefix} has {counts[-1]} tokens (--split {config.split} of "
                f"{len(lengths)} documents); --seq-length {args.seq_length} needs {args.seq_length + 1}. fix: more "
                "documents, another --split, or --eval-iters 0 to train without validation"
            )
    return counts[0]
