"""The parser of the commands: what its help says."""

import pytest

from megatron_fsdp.cli.parser import CommandParser


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"default": 3}, "size (default 3)"),
        ({"default": [8, 64]}, "size (default 8 64)"),
        ({"default": ["a b", "c"]}, "size (default 'a b' c)"),
        ({"default": "50%"}, "size (default 50%)"),
        ({"default": None}, "size"),
    ],
)
def test_help_says_the_default_of_an_option_that_has_one(options: dict[str, object], said: str) -> None:
    parser = CommandParser("tool", "Do it.", "  tool --size 3")
    parser.add_argument("--size", metavar="N", help="size", **options)  # type: ignore[arg-type]
    *_, line = (line for line in parser.format_help().splitlines() if line.startswith("  --size"))
    assert " ".join(line.split()).removeprefix("--size ").removeprefix("N ") == said


def test_a_default_that_the_help_speaks_of_is_not_said_again() -> None:
    parser = CommandParser("tool")
    parser.add_argument("--size", default=3, help="size, default that of the model")
    assert parser.format_help().count("default") == 1


def test_help_ends_with_the_examples() -> None:
    assert CommandParser("tool", "Do it.", "  tool --size 3").format_help().endswith("examples:\n  tool --size 3\n")


def test_a_switch_has_no_default_to_speak_of() -> None:
    parser = CommandParser("tool")
    parser.add_argument("--force", action="store_true", help="replace files")
    assert "default" not in parser.format_help()
