"""The example in docs/checkpoints.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

from tests.harness import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@on_ranks(2)
def test_the_example_saves_and_loads_on_two_ranks(tmp_path: Path) -> None:
    """Run it with another folder."""
    folder = str(tmp_path)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert '"runs/demo"' in code
    names: dict[str, Any] = {}
    exec(compile(code.replace('"runs/demo"', repr(folder)), str(PAGE), "exec"), names)  # what is under test is the text
    first = names["extra"]["sample"]
    second = names["loaded"].extra["sample"]
    names = sorted(p.name for p in Path(folder).iterdir())
    assert (first, second) == (4096, 8192)
    assert names == ["latest", "one", "step_0000100"]
