"""The script in the README runs unchanged, before and after its port from FSDP2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from tests.docs.blocks import side_of
from tests.functional.checkpoint_cases import LAYOUTS
from tests.harness import run_ranks

README = Path(__file__).parents[2] / "README.md"


def run_script(sign: str) -> tuple[float, float, bool]:
    """Run one side of the diff; return its last gradient norm and loss, and whether this rank holds all parameters."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(side_of(diff, sign), str(README), "exec"), names)  # the text itself is under test
    model, norm, loss = names["model"], names["norm"], names["loss"]
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    is_whole = all(parameter.to_local().shape == parameter.shape for parameter in model.parameters())
    return whole.item(), loss.item(), is_whole


def test_the_readmes_script_shards_learns_and_clips_by_one_norm_on_all_ranks() -> None:
    results = run_ranks(3, run_script, "+")
    assert len({norm for norm, _, _ in results}) == 1
    assert all(loss < 0.01 and not is_whole for _, loss, is_whole in results)


def test_the_readmes_script_trains_as_it_did_with_fsdp2() -> None:
    before, after = (run_ranks(3, run_script, sign) for sign in "-+")
    for (norm, loss, _), (our_norm, our_loss, _) in zip(before, after, strict=True):
        assert abs(norm - our_norm) < 1e-5
        assert abs(loss - our_loss) < 1e-6


def test_the_readme_counts_the_pairs_of_layouts_whose_checkpoints_are_exchanged() -> None:
    assert f"All {len(LAYOUTS) ** 2} pairs of nine layouts" in README.read_text(encoding="utf-8")
