"""Draw docs/schedule.svg, the schedule of a training step, from a step that the engine runs on a virtual GPU.

``python docs/schedule.py`` draws it; tests/unit/test_pages.py fails when the picture is out of date.
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from megatron_fsdp import MixedPrecisionPolicy, Placements  # noqa: E402
from megatron_fsdp.planning.cost_model import Hardware, Link, play_in_time  # noqa: E402
from megatron_fsdp.planning.picture import LANES, Bar, time_line  # noqa: E402
from megatron_fsdp.planning.played_step import play_step  # noqa: E402
from megatron_fsdp.planning.stand_in import Axis, Sharding, shaped_stand_ins  # noqa: E402
from megatron_fsdp.planning.transformer import Workload  # noqa: E402

PICTURE = ROOT / "docs" / "schedule.svg"
NAMES = {"embed": "embed", "blocks.0": "block 0", "blocks.1": "block 1", "head": "head"}
ROWS = dict(zip(LANES, ("all-gather", "compute", "reduce-scatter"), strict=True))
COLOURS = {"all-gather": "#7aa6d8", "forward": "#9ccb8b", "backward": "#e8b26a", "reduce-scatter": "#d98a8a"}
WIDTH, LEFT, TOP, STEP, HEIGHT = 1000, 120, 46, 52, 34


def bars() -> list[Bar]:
    """Return what each stream does in a step of four units on eight ranks, in seconds."""
    model = nn.Module()
    model.embed = _linear()
    model.blocks = nn.ModuleList(_linear() for _ in range(2))
    model.head = _linear()
    units = [model.embed, *model.blocks, model.head]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    sharding = Sharding((Axis("dp", 8, 0),), Placements.optim_grads_params(0), policy)
    played = play_step(partial(shaped_stand_ins, model, units, sharding, {}))
    # A network so fast that a unit's collective takes about as long as its forward; copies take no time.
    hardware = Hardware(memory_bandwidth=1e15, links={"dp": Link(25e9)})
    found = time_line(play_in_time(played, Workload(sequence_length=16384), hardware))
    return [bar for bar in found if bar.kind in COLOURS and bar.unit in NAMES and bar.end - bar.start > 1e-5]


def _linear() -> nn.Linear:
    return nn.Linear(4096, 4096, bias=False, device="meta")


def schedule_svg(found: Iterable[Bar]) -> str:
    """Return the picture: a row for each stream, a box for each unit that it works for."""
    found = list(found)
    end = max(bar.end for bar in found)
    turn = min(bar.start for bar in found if bar.kind == "backward")
    scale = (WIDTH - LEFT - 10) / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + 3 * STEP + 30}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT + scale * turn / 2, 22, "forward", "bold"),
        _text(LEFT + scale * (turn + end) / 2, 22, "backward", "bold"),
    ]
    for row, lane in enumerate(ROWS):
        y = TOP + row * STEP
        parts.append(f'<line x1="{LEFT}" y1="{y + HEIGHT}" x2="{WIDTH - 10}" y2="{y + HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="12" y="{y + 22}" font-weight="bold">{ROWS[lane]}</text>')
        for bar in (bar for bar in found if bar.lane == lane):
            x, width = LEFT + scale * bar.start, scale * (bar.end - bar.start)
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{max(width - 2, 1):.0f}" height="{HEIGHT}" rx="4" '
                f'fill="{COLOURS[bar.kind]}"/>'
            )
            parts.append(_text(x + width / 2, y + 21, NAMES[bar.unit]))
    words = "While one unit computes, the next unit's weights are gathered and an earlier unit's gradients are reduced."
    return "\n".join([*parts, _text(WIDTH / 2, TOP + 3 * STEP + 16, words), "</svg>", ""])


def _text(x: float, y: float, words: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" font-weight="{weight}">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(schedule_svg(bars()), encoding="utf-8")
