"""The page about the training script names flags and choices that are there, and all of the architecture."""

import re
from pathlib import Path

from gpt.flags import build_parser
from gpt.learning_rate import DECAY_STYLES, WSD_DECAY_STYLES
from gpt.tokenizer import TOKENIZER_TYPES

PAGE = (Path(__file__).parents[3] / "docs" / "training_script.md").read_text()
# Of the other two commands, and of torchrun.
ELSEWHERE = {"--help", "--input", "--output-prefix", "--append-eod", "--json-keys", "--nproc-per-node"}


def test_every_flag_on_the_page_exists() -> None:
    valid = {option for action in build_parser()._actions for option in action.option_strings}
    assert set(re.findall(r"--[a-z][a-z0-9-]*", PAGE)) - ELSEWHERE <= valid


def test_every_flag_of_the_architecture_is_on_the_page() -> None:
    (group,) = (group for group in build_parser()._action_groups if group.title == "architecture")
    flags = [option for action in group._group_actions for option in action.option_strings]
    assert len(flags) > 10
    assert [flag for flag in flags if f"`{flag}`" not in PAGE] == []


def test_every_choice_is_on_the_page() -> None:
    choices = (*DECAY_STYLES, *WSD_DECAY_STYLES, *TOKENIZER_TYPES)
    assert [choice for choice in choices if f"`{choice}`" not in PAGE] == []
