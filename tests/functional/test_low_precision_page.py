"""The example in docs/low_precision.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

from tests.harness import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "low_precision.md"


def run_example() -> tuple[list[str], str]:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # what is under test is the text
    return sorted(names["state"]), names["report"]


def test_the_example_trains_on_two_ranks_and_explains_its_layout() -> None:
    for state, report in run_ranks(2, run_example):
        assert state == ["exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales", "step"]
        assert "gathered as mxfp8: shards cut no block of 32 rows, no exchange of magnitudes" in report
        assert "cut at multiples of 256 elements" in report
