"""The parser of the commands: what its help says."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.command_parser import CommandParser


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
def test_help_says_the_default_of_an_option_that_has_one(options: dict[str, Any], said: str) -> None:
    parser = CommandParser("tool", "Do it.", "  tool --size 3")
    parser.add_argument("--size", metavar="N", help="size", **options)
    *_, line = (line for line in parser.format_help().splitlines() if line.startswith("  --size"))
    assert " ".join(line.split()).removeprefix("--size ").removeprefix("N ") == said


def test_under_torchrun_the_first_rank_speaks_and_each_leaves_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for rank, said in (
        ("0", "tool: unknown option --sise. fix: use --size, the most similar one (tool --help)\n"),
        ("1", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        parser = CommandParser("tool")
        parser.add_argument("--size")
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--sise", "3"])
        assert (ended.value.code, capsys.readouterr().err) == (2, said)
        # The format that torch's own ``record`` writes; torchrun warns about others.
        assert "fix: use --size" in json.loads(file.read_text())["message"]["message"]
        file.unlink()
