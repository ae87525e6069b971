r"""Continue a text with a model that pretrain_gpt.py has saved, in one process, however many ranks saved it.

    python examples/generate_gpt.py --load runs/gpt --prompt "def main(" --num-tokens-to-generate 200

The model's shape and its tokenizer are read from the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gpt.checkpoint import checkpoints_in
from gpt.flags import add_sampling_flags
from gpt.model import GptModel
from gpt.model_config import GptConfig
from gpt.sample import Sampling, generate
from gpt.tokenizer import Tokenizer, build_tokenizer
from megatron_fsdp import ConfigError, FsdpError
from megatron_fsdp.checkpoint.api import load_checkpoint
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.reader import open_checkpoint
from megatron_fsdp.command_parser import CommandParser


def continue_prompt(args: argparse.Namespace) -> str:
    """Return the prompt and its continuation.

    Raises:
        ConfigError: there is no checkpoint of the script's in ``--load``, or its tokenizer is missing.
        CheckpointError: it is damaged.
    """
    model, tokenizer = load(newest(args.load), args.tokenizer_model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = model.config.max_position_embeddings
    sampling = Sampling(args.temperature, args.seed, context, tokenizer.vocabulary_size)
    prompt, count = tokenizer.encode(args.prompt), args.num_tokens_to_generate
    tokens = generate(model.to(device).eval(), prompt, count, sampling, device)
    # disable=None: no bar where stderr is no terminal
    return tokenizer.decode([*prompt, *tqdm(tokens, desc="generate", total=count, disable=None)])


def newest(folder: Path) -> Path:
    """Return the newest whole checkpoint of a run's folder, or the folder if it is one itself.

    Raises:
        ConfigError: there is none.
    """
    if (folder / "manifest.json").is_file():
        return folder
    series = checkpoints_in(folder)
    steps = series.steps()
    if not steps:
        raise ConfigError(f"--load: no whole checkpoint in {folder}; wanted the --save folder of a pretrain_gpt.py run")
    return series.path(steps[-1])


def load(path: Path, tokenizer_model: Path | None) -> tuple[GptModel, Tokenizer]:
    """Return the model of one checkpoint folder, and its tokenizer.

    Args:
        tokenizer_model: where the tokenizer's file lies now, None for where it lay in training.
    Raises:
        ConfigError: another program saved the checkpoint, or the tokenizer is missing.
        CheckpointError: the checkpoint is damaged.
    """
    extra: dict[str, Any] = open_checkpoint(path, checkpoint_ranks(), verify=False).state.get("extra", {})
    if "model" not in extra:
        raise ConfigError(f"--load: {path} says nothing of its model; wanted a checkpoint of pretrain_gpt.py")
    try:
        model = GptModel(GptConfig(**extra["model"]))
    except TypeError as error:
        raise ConfigError(f"--load: {path} is of another version of pretrain_gpt.py: {error}") from error
    flags: dict[str, Any] = extra.get("data", {})
    saved = flags.get("tokenizer_model")
    file = tokenizer_model or (saved and Path(saved))
    tokenizer = build_tokenizer(flags.get("tokenizer_type", "ByteTokenizer"), file, flags.get("vocab_size"))
    load_checkpoint(model, None, path)
    return model, tokenizer


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit status: 0, or 2 after an error that the user can mend."""
    parser = CommandParser("generate_gpt.py", __doc__ or "")
    parser.add_argument("--load", type=Path, required=True, help="a run's --save folder, or one iter_... in it")
    parser.add_argument("--tokenizer-model", type=Path, help="tokenizer.json (default where it was in training)")
    parser.add_argument("--seed", type=int, default=1234, help="of the draws")
    add_sampling_flags(parser)
    try:
        print(continue_prompt(parser.parse_args(arguments)))
    except FsdpError as error:
        print(f"generate_gpt.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
