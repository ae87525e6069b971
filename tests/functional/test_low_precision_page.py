"""The example in docs/low_precision.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

from tests.harness import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "low_precision.md"


@on_ranks(2)
def test_the_example_trains_on_two_ranks_and_explains_its_layout() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # what is under test is the text
    state = sorted(names["state"])
    report = names["report"]
    assert state == ["exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales", "step"]
    assert "gathered as mxfp8: shards cut no block of 32 rows, no exchange of magnitudes" in report
    assert "cut at multiples of 256 elements" in report
