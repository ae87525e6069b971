r"""Write text as a Megatron indexed data set for ``pretrain_gpt.py --data-path``; needs megatron-core.

    python examples/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod
    python examples/preprocess_data.py --input book.txt notes.txt --output-prefix data/books \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json

A JSONL file has one document per line; of other files each paragraph (up to and with blank lines) is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from gpt.data import DataError
from gpt.indexed import megatron_datasets
from gpt.tokenizer import add_tokenizer_flags, build_tokenizer
from megatron_fsdp import ConfigError
from megatron_fsdp.command_parser import CommandParser


def preprocess(args: argparse.Namespace) -> int:
    """Write the data set, and return the number of documents in it.

    Raises:
        DataError: a file cannot be read or written, or a line is no document.
        ConfigError: the tokenizer cannot be built, or has no token for the end of a document.
    """
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    end = [tokenizer.end_of_document] if args.append_eod and tokenizer.end_of_document is not None else []
    if args.append_eod and not end:
        raise ConfigError(f"--append-eod: {args.tokenizer_model} has no token for the end of a document; leave it away")
    indexed, prefix = megatron_datasets("indexed_dataset"), args.output_prefix
    dtype = indexed.DType.optimal_dtype(tokenizer.vocabulary_size)
    total = sum(path.stat().st_size for path in args.input if path.is_file())
    count = 0
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        # An older index must not describe the new tokens if this command is killed.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    except OSError as error:
        raise DataError(f"--output-prefix: cannot write {prefix}.bin: {error.strerror}") from error
    # disable=None: no bar where stderr is no terminal
    with (
        contextlib.closing(builder.data_file),
        tqdm(total=total, unit="B", unit_scale=True, desc="preprocess", disable=None) as bar,
    ):
        for path in args.input:
            for text, num_bytes in documents(path, args.json_keys):
                if tokens := tokenizer.encode(text):
                    builder.add_document(tokens + end, [len(tokens + end)])
                    count += 1
                bar.update(num_bytes)
    if count == 0:
        raise DataError("--input: the files hold no text, so there is nothing to write")
    # Under another name until it is whole: a killed command must leave no index that looks right.
    builder.finalize(f"{prefix}.idx.tmp")
    Path(f"{prefix}.idx.tmp").replace(f"{prefix}.idx")
    return count


def documents(path: Path, key: str) -> Iterator[tuple[str, int]]:
    """Yield the documents of a file and how many bytes of it each took.

    Raises:
        DataError: the file cannot be read as UTF-8, or a JSONL line has no text under ``key``.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix in (".jsonl", ".json"):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _text_of(line, key, f"{path}:{number}"), len(line.encode())
            else:
                for paragraph in _paragraphs(file):
                    yield paragraph, len(paragraph.encode())
    except OSError as error:
        raise DataError(f"--input: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--input: {path} is no UTF-8 text: {error}") from error


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    gathered: list[str] = []
    for line in lines:
        if gathered and line.strip() and not gathered[-1].strip():
            yield "".join(gathered)
            gathered = []
        gathered.append(line)
    if gathered:
        yield "".join(gathered)


def _text_of(line: str, key: str, where: str) -> str:
    try:
        text = json.loads(line)[key]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"--input: {where}: wanted an object with a text under {key!r} (--json-keys)") from error
    if not isinstance(text, str):
        raise DataError(f"--input: {where}: {key!r} is {type(text).__name__}, wanted a text")
    return text


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser("preprocess_data.py", __doc__ or "")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="JSONL or text files")
    parser.add_argument("--output-prefix", required=True, help="of the .bin and .idx file")
    parser.add_argument("--json-keys", default="text", help="where a JSONL document has its text")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the tokenizer's token for it")
    add_tokenizer_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit status: 0, or 2 after an error that the user can mend."""
    args = build_parser().parse_args(arguments)
    try:
        count = preprocess(args)
    except (ConfigError, DataError) as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {count} documents to {args.output_prefix}.bin and {args.output_prefix}.idx")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
