"""What ``--data-path`` names."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt.data import TRAIN_STREAM, VALID_STREAM, DataError, Sampler, TrainingData, load_corpus
from gpt.indexed import is_indexed, load_indexed


def load_data(args: argparse.Namespace) -> TrainingData:
    """Open what ``--data-path`` names: text (bytes), one indexed data set, or a blend of several.

    Raises:
        DataError: something is missing, unreadable, too short, or contradicts ``--split`` or ``--tokenizer-type``.
    """
    path: Path | list[str] | None = args.data_path
    if isinstance(path, list) or (path is not None and is_indexed(path)):
        words = path if isinstance(path, list) else [str(path)]
        return load_indexed(words, args)
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
