"""The trainer in the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.functional.checkpoint_cases import LAYOUTS
from tests.harness import run_ranks

README = Path(__file__).parents[2] / "README.md"


def trainer() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


def run_trainer() -> tuple[float, float, bool]:
    """Run it; return its last gradient norm, its last loss, and whether this rank holds all of its parameters."""
    names: dict[str, object] = {}
    exec(compile(trainer(), str(README), "exec"), names)  # what is under test is the text itself
    model, norm, loss = names["model"], names["norm"], names["loss"]
    is_whole = all(parameter.to_local().shape == parameter.shape for parameter in model.parameters())
    return norm.item(), loss.item(), is_whole


def test_the_readmes_trainer_shards_learns_and_clips_by_one_norm_on_all_ranks() -> None:
    results = run_ranks(3, run_trainer)
    assert len({norm for norm, _, _ in results}) == 1
    assert all(loss < 0.01 and not is_whole for _, loss, is_whole in results)


def test_the_readme_counts_the_pairs_of_layouts_whose_checkpoints_are_exchanged() -> None:
    assert f"with no conversion between | {len(LAYOUTS) ** 2} |" in README.read_text(encoding="utf-8")
