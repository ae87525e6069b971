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

from gpt.arguments import SAMPLING, add_flags
from gpt.checkpoint import checkpoints_in
from gpt.data import build_tokenizer
from gpt.model import GptConfig, GptModel, continued
from megatron_fsdp import ConfigError, FsdpError, load_checkpoint
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.reader import open_checkpoint
from megatron_fsdp.command_parser import CommandParser


def continue_prompt(args: argparse.Namespace) -> str:
    """Return the prompt and its continuation by the newest checkpoint in ``--load``, or by ``--load`` if it is one."""
    path: Path = args.load
    if not (path / "manifest.json").is_file():
        if not (steps := checkpoints_in(path).resumable_steps()):
            raise ConfigError(f"--load: no whole checkpoint in {path}. fix: give the --save folder of pretrain_gpt.py")
        path = checkpoints_in(path).path(steps[-1])
    extra: dict[str, Any] = open_checkpoint(path, checkpoint_ranks("reads a checkpoint"), verify=False).state.get(
        "extra", {}
    )
    if "model" not in extra:
        raise ConfigError(f"--load: {path} does not describe its model. fix: give a checkpoint of pretrain_gpt.py")
    model = GptModel(GptConfig(**extra["model"]))
    load_checkpoint(model, None, path)
    file = args.tokenizer_model or extra["data"].get("tokenizer_model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = build_tokenizer(file and Path(file))
    return continued(model.to(device), tokenizer, model.config.max_position_embeddings, args, device)


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit status: 0, or 2 after an error that the user can mend."""
    parser = CommandParser("generate_gpt.py", __doc__ or "")
    parser.add_argument("--load", type=Path, required=True, help="a run's --save folder, or one iter_... in it")
    parser.add_argument("--tokenizer-model", type=Path, help="tokenizer.json (default where it was in training)")
    parser.add_argument("--seed", type=int, default=1234, help="of the draws")
    add_flags(parser, SAMPLING)
    try:
        print(continue_prompt(parser.parse_args(arguments)))
    except FsdpError as error:
        print(f"generate_gpt.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
