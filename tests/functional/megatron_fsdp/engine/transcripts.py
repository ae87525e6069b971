"""The runtime's actions in order, as text: the scenarios of the files in ``golden/``.

After an intended change of the schedule, write the files again and read the difference::

    python -m tests.functional.megatron_fsdp.engine.transcripts
    git diff tests/functional/megatron_fsdp/engine/golden
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import microbatch, no_sync
from tests.harness import run_ranks
from tests.harness.models import WIDTH, Block, Made, inputs
from tests.harness.oracle import sharded
from tests.harness.transcript import record_transcript

__all__ = ["NUM_RANKS", "SCENARIOS", "golden_path", "record", "write_all"]

NUM_RANKS = 2
Lines = list[str]


class Model(nn.Module):
    """Four blocks, each a unit; the root owns nothing.

    Attributes:
        span: blocks per checkpointed region, 0 for none. use_reentrant: of ``torch.utils.checkpoint``.
        order: of the blocks in forward.
    """

    def __init__(self, span: int, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order, self.span, self.use_reentrant = [0, 1, 2, 3], span, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        span = self.span or 1
        for start in range(0, 4, span):
            region = nn.Sequential(*(self.blocks[index] for index in self.order[start : start + span])).forward
            x = checkpoint(region, x, use_reentrant=self.use_reentrant) if self.span else region(x)
        return x


def four_blocks(span: int = 0, use_reentrant: bool = False, frozen: tuple[int, ...] = ()) -> Any:
    model = Model(span, use_reentrant)
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    return sharded(model, units=lambda m: m.blocks)


class WithHead(Made):
    """Two blocks, then a norm and a head that form one unit; the root owns a projection."""


def with_head() -> Any:
    model: Any = WithHead(
        lambda m, x: m.head(m.norm(m.blocks[1](m.blocks[0](m.stem(x))))),
        stem=nn.Linear(WIDTH, WIDTH), blocks=nn.ModuleList([Block(), Block()]), norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, 3),
    )  # fmt: skip
    return sharded(model, units=lambda m: (*m.blocks, [m.norm, m.head]))


def train(model: nn.Module, lines: Lines, microbatches: int = 1, steps: tuple[int, ...] = (0, 1)) -> None:
    """Train, with a heading before each phase."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        for index in range(microbatches):
            where = f"step {step + 1}" + (f", microbatch {index + 1}" if microbatches > 1 else "")
            with microbatch(model, index == microbatches - 1):
                pass_through(model, lines, where, inputs(dist.get_rank(), step).requires_grad_())
        optimizer.step()
        optimizer.zero_grad()


def pass_through(model: nn.Module, lines: Lines, title: str, x: torch.Tensor) -> None:
    lines.append(f"# {title}, forward")
    loss = model(x).square().mean()
    lines.append(f"# {title}, backward")
    loss.backward()


def train_without_sync(model: nn.Module, lines: Lines) -> None:
    """Accumulate one microbatch without communication, then one with."""
    for title, context in (("without sync", no_sync(model)), ("with sync", microbatch(model, True))):
        with context:
            pass_through(model, lines, title, inputs(dist.get_rank(), 0))


def evaluate(model: nn.Module, lines: Lines) -> None:
    """Train one step, evaluate twice, train another."""
    train(model, lines, steps=(0,))
    model.eval()
    for index in range(2):
        lines.append(f"# evaluation {index + 1}")
        with torch.no_grad():
            model(inputs(dist.get_rank(), 9))
    train(model.train(), lines, steps=(1,))


def change_order(model: Any, lines: Lines) -> None:
    """Train two steps, then two with the middle blocks exchanged."""
    train(model, lines)
    lines.append("# blocks 1 and 2 change places")
    model.order = [0, 2, 1, 3]
    train(model, lines, steps=(2, 3))


# A model, and its training, which writes lines of the transcript.
SCENARIOS: dict[str, tuple[Callable[[], Any], Callable[[Any, Lines], None]]] = {
    "two_steps": (four_blocks, train),
    "two_microbatches": (four_blocks, partial(train, microbatches=2, steps=(0,))),
    "no_sync": (four_blocks, train_without_sync),
    "evaluation": (four_blocks, evaluate),
    "changed_order": (four_blocks, change_order),
    "half_frozen": (partial(four_blocks, frozen=(0, 2)), train),
    "list_unit": (with_head, train),
    "checkpointed_blocks": (partial(four_blocks, 1), train),
    "checkpointed_pairs": (partial(four_blocks, 2), train),
    "checkpointed_blocks_reentrant": (partial(four_blocks, 1, True), train),
    "checkpointed_pairs_reentrant": (partial(four_blocks, 2, True), train),
}


def record(name: str) -> str:
    """Return the transcript of a scenario."""
    build, run = SCENARIOS[name]
    model = build()
    with record_transcript() as lines:
        run(model, lines)
    return "\n".join(lines) + "\n"


def golden_path(name: str) -> Path:
    """Return where the wanted transcript of a scenario is."""
    return Path(__file__).parent / "golden" / f"{name}.txt"


def write_all() -> None:
    """Record every scenario and overwrite its golden file."""
    for name in SCENARIOS:
        golden_path(name).write_text(run_ranks(NUM_RANKS, record, name)[0], encoding="utf-8")
        print(golden_path(name))


if __name__ == "__main__":
    # Import the module by the name that ranks import, not as __main__.
    from tests.functional.megatron_fsdp.engine import transcripts

    transcripts.write_all()
