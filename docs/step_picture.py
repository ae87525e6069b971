"""Draw docs/how_a_step_works.svg: one unit in one training step, with the functions that run.

``python docs/step_picture.py`` draws it from the table below and looks up every function in the engine's file and in
PyTorch's FSDP2. tests/unit/test_pages.py fails when the picture is out of date.
"""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "how_a_step_works.svg"
ENGINE, FSDP2 = ROOT / "megatron_fsdp" / "engine", "torch.distributed.fsdp._fully_shard"
COLOURS = {"gather": "#7aa6d8", "forward": "#9ccb8b", "backward": "#e8b26a", "reduce": "#d98a8a", "host": "#d7d7dd"}
ROW, TOP, LEFT, WIDTH, BAR = 46, 62, 150, 1080, 84


@dataclass(frozen=True)
class Moment:
    """One row of the picture.

    Attributes:
        stream: "gather", "compute" or "reduce" for device work, "host" for work of the host alone. kind: its colour.
        words: the action on unit N.
        ours: functions of the engine, each "file.function". fsdp2: those of FSDP2; empty where it has none.
    """

    stream: str
    kind: str
    words: str
    ours: tuple[str, ...]
    fsdp2: tuple[str, ...]


MOMENTS = (
    Moment("gather", "gather", "all-gather of N, issued while N-2 runs", ("unit.prefetch", "param_group.start_gathers"),
           ("_fsdp_param_group.unshard", "_fsdp_collectives.foreach_all_gather")),
    Moment("host", "host", "compute waits; modules show N's weights", ("forward.pre_forward", "unit.wait_for_unshard"),
           ("_fsdp_state._pre_forward", "_fsdp_param_group.wait_for_unshard")),
    Moment("compute", "forward", "forward of N", (), ()),
    Moment("host", "host", "hooks on N's outputs; N's weights released", ("forward.post_forward", "unit.reshard"),
           ("_fsdp_state._post_forward", "_fsdp_param_group.reshard")),
    Moment("gather", "gather", "all-gather of N, issued when N+1 begins", ("backward.pre_backward", "unit.prefetch"),
           ("_fsdp_param_group._backward_prefetch",)),
    Moment("host", "host", "compute waits for N's weights", ("backward.pre_backward", "unit.wait_for_unshard"),
           ("_fsdp_param_group.pre_backward", "_fsdp_param_group.wait_for_unshard")),
    Moment("compute", "backward", "backward of N; gradients are packed", ("grads.receive",), ()),
    Moment("host", "host", "N is left: its weights are released", ("backward._leave_passed", "unit.reshard"),
           ("_fsdp_param_group.post_backward", "_fsdp_param_group.reshard")),
    Moment("reduce", "reduce", "reduce-scatter of N, added to main_grad",
           ("post_backward.post_backward", "grads.reduce"),
           ("_fsdp_param_group.post_backward", "_fsdp_collectives.foreach_reduce")),
    Moment("host", "host", "two units later: N's packed buffer released",
           ("backward.begin_gradients", "post_backward.drain"), ("_fsdp_param_group.post_backward",)),
    Moment("host", "host", "end of backward: .grad is shown", ("final_callback.final_callback", "accumulation.show"),
           ("_fsdp_state._root_post_backward_final_callback", "_fsdp_param_group.finalize_backward")),
)  # fmt: skip


def step_svg() -> str:
    """Return the picture: time runs down; streams on the left, then this engine's functions, then FSDP2's.

    Raises:
        LookupError: a file has no function of the name that the table gives.
    """
    height = TOP + ROW * len(MOMENTS) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    streams = ("gather", "compute", "reduce")
    for column, name in enumerate(streams):
        parts.append(_text(10 + BAR * column + BAR / 2, 40, name, "bold", "middle"))
    for x, name in ((LEFT + 120, "unit N"), (LEFT + 400, "this engine"), (LEFT + 650, "FSDP2")):
        parts.append(_text(x, 40, name, "bold"))
    for number, moment in enumerate(MOMENTS):
        y = TOP + ROW * number
        _look_up(moment)
        parts.append(f'<line x1="10" y1="{y - 6}" x2="{WIDTH - 10}" y2="{y - 6}" stroke="#e4e4e8"/>')
        if moment.stream != "host":
            x = 10 + BAR * streams.index(moment.stream)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{BAR - 8}" height="{ROW - 12}" rx="4" fill="{COLOURS[moment.kind]}"/>'
            )
        parts.append(_text(LEFT + 120, y + 20, f"{number + 1}. {moment.words}"))
        parts += _names(LEFT + 400, y, moment.ours or ("autograd",))
        parts += _names(LEFT + 650, y, moment.fsdp2 or ("autograd",))
    return "\n".join([*parts, "</svg>", ""])


def _names(x: float, y: float, names: tuple[str, ...]) -> list[str]:
    first = y + 20 - 7 * (len(names) - 1)
    return [_text(x, first + 15 * row, name) for row, name in enumerate(names)]


def _text(x: float, y: float, words: str, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def _look_up(moment: Moment) -> None:
    spec = importlib.util.find_spec(FSDP2)
    assert spec is not None
    assert spec.origin is not None
    for folder, names in ((ENGINE, moment.ours), (Path(spec.origin).parent, moment.fsdp2)):
        for file, _, function in (name.partition(".") for name in names):
            path = folder / f"{file}.py"
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(tree)):
                raise LookupError(f"{path.name} has no function {function!r}. fix: correct MOMENTS in {__file__}")


if __name__ == "__main__":
    PICTURE.write_text(step_svg(), encoding="utf-8")
