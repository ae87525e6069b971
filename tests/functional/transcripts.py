"""What the runtime does and in which order, as text: the scenarios behind the files in ``golden/``.

After a change of the schedule that is meant, write the files anew and read the difference::

    python -m tests.functional.transcripts
    git diff tests/functional/golden
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import fully_shard, microbatch, no_sync
from tests.harness import run_ranks
from tests.harness.models import WIDTH, Block, inputs
from tests.harness.transcript import record_transcript

__all__ = ["SCENARIOS", "golden_path", "record", "write_all"]

NUM_RANKS = 2


class Model(nn.Module):
    """Four blocks, each a unit; the root owns nothing.

    Attributes:
        span: blocks per checkpointed region, 0 for none.
        use_reentrant: of ``torch.utils.checkpoint``.
        order: of the blocks in forward.
    """

    span = 0
    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        span = self.span or 1
        for start in range(0, 4, span):
            region = functools.partial(self._run, self.order[start : start + span])
            x = checkpoint(region, x, use_reentrant=self.use_reentrant) if self.span else region(x)
        return x

    def _run(self, indices: list[int], x: torch.Tensor) -> torch.Tensor:
        for index in indices:
            x = self.blocks[index](x)
        return x


class WithHead(nn.Module):
    """Two blocks, then a norm and a head that form one unit; the root owns a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Scenario:
    """A model and what is done with it, in lines of the transcript."""

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, list[str]], None]


def four_blocks(span: int = 0, use_reentrant: bool = False) -> Model:
    """Return the sharded model."""
    model = Model()
    model.span, model.use_reentrant = span, use_reentrant
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def half_frozen() -> Model:
    """Return the sharded model with block 0 and block 2 frozen."""
    model = Model()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def with_head() -> WithHead:
    """Return the sharded model with a list unit and a root that owns something."""
    model = WithHead()
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    return fully_shard(model)


def train(model: nn.Module, lines: list[str], microbatches: int = 1, steps: tuple[int, ...] = (0, 1)) -> None:
    """Train, with a heading before each phase."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        for index in range(microbatches):
            where = f"step {step + 1}" + (f", microbatch {index + 1}" if microbatches > 1 else "")
            with microbatch(model, index == microbatches - 1):
                lines.append(f"# {where}, forward")
                loss = model(inputs(dist.get_rank(), step).requires_grad_()).square().mean()
                lines.append(f"# {where}, backward")
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_without_sync(model: nn.Module, lines: list[str]) -> None:
    """Accumulate one microbatch without communication, then one with."""
    for title, context in (("without sync", no_sync(model)), ("with sync", microbatch(model, True))):
        with context:
            lines.append(f"# {title}, forward")
            loss = model(inputs(dist.get_rank(), 0)).square().mean()
            lines.append(f"# {title}, backward")
            loss.backward()


def evaluate(model: nn.Module, lines: list[str]) -> None:
    """Train one step, evaluate twice, train another."""
    train(model, lines, steps=(0,))
    model.eval()
    for index in range(2):
        lines.append(f"# evaluation {index + 1}")
        with torch.no_grad():
            model(inputs(dist.get_rank(), 9))
    model.train()
    train(model, lines, steps=(1,))


def change_order(model: nn.Module, lines: list[str]) -> None:
    """Train two steps, then two with the middle blocks exchanged."""
    train(model, lines)
    lines.append("# blocks 1 and 2 change places")
    model.order = [0, 2, 1, 3]
    train(model, lines, steps=(2, 3))


SCENARIOS: dict[str, Scenario] = {
    "two_steps": Scenario(four_blocks, train),
    "two_microbatches": Scenario(four_blocks, functools.partial(train, microbatches=2, steps=(0,))),
    "no_sync": Scenario(four_blocks, train_without_sync),
    "evaluation": Scenario(four_blocks, evaluate),
    "changed_order": Scenario(four_blocks, change_order),
    "half_frozen": Scenario(half_frozen, train),
    "list_unit": Scenario(with_head, train),
    "checkpointed_blocks": Scenario(functools.partial(four_blocks, 1), train),
    "checkpointed_pairs": Scenario(functools.partial(four_blocks, 2), train),
    "checkpointed_blocks_reentrant": Scenario(functools.partial(four_blocks, 1, True), train),
    "checkpointed_pairs_reentrant": Scenario(functools.partial(four_blocks, 2, True), train),
}


def record(name: str) -> str:
    scenario = SCENARIOS[name]
    model = scenario.build()
    with record_transcript() as lines:
        scenario.run(model, lines)
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
    # As the module that the ranks import by name, not as __main__.
    from tests.functional import transcripts

    transcripts.write_all()
