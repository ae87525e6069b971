"""Reinforcement learning in small: two ranks train a sharded model, and a third process generates with a copy.

    python examples/rl_weight_sync.py --rounds 10

In the first round the generator receives all weights, in each later round only the bf16 values that a step has changed.
Before it generates it compares checksums, so a run that ends has sent the weights of each round bit for bit. The reward
of a text is the share of even tokens, so texts get more even tokens.

A process that fails ends the other processes. A process that receives nothing for ``--timeout`` seconds raises an
error that names the missing message.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

from megatron_fsdp import apply_bucket, apply_delta, fully_shard, remember_weights, weight_stream

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 48, 12, 16
NUM_RANKS = 2


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., WIDTH) for (..., WIDTH)."""
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


class Policy(nn.Module):
    """Predicts each next token from the last one; embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (..., VOCABULARY) for tokens (...)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_policy() -> Policy:
    """Return the policy with the same first weights in every process."""
    torch.manual_seed(0)
    return Policy()


def reward_of(texts: torch.Tensor) -> torch.Tensor:
    """Return the share of even tokens of each text, (texts,) for (texts, LENGTH)."""
    return (texts % 2 == 0).float().mean(dim=1)


# ---------------------------------------------------------------- the generator


def generate(connection: Connection, timeout_s: float) -> None:
    """Answer each round's weights with texts, until the trainer sends None."""
    torch.set_num_threads(1)
    policy = make_policy().to(torch.bfloat16)
    # Like an inference engine, keep the memory of the weights and change the values.
    state, version = policy.state_dict(), 0
    while (message := receive(connection, "the trainer's weights", timeout_s)) is not None:
        kind, payload, new_version = message
        if kind == "bucket":
            apply_bucket(state, payload)
        elif kind == "delta":
            apply_delta(state, payload, version=version)
        else:
            version = new_version
            connection.send_bytes(pickle.dumps(sample(policy, version)))


@torch.no_grad()
def sample(policy: Policy, seed: int) -> torch.Tensor:
    """Return (NUM_RANKS * BATCH, LENGTH + 1) sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (NUM_RANKS * BATCH, 1), generator=generator)
    for _ in range(LENGTH):
        odds = policy(tokens[:, -1]).float().softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=generator)], dim=1)
    return tokens


def receive(connection: Connection, what: str, timeout_s: float) -> Any:
    """Return the next message of the other process.

    Raises:
        TimeoutError: it does not come in time. RuntimeError: the other process has ended.
    """
    if not connection.poll(timeout_s):
        raise TimeoutError(
            f"{what} did not come within {timeout_s:.0f} s. fix: a longer --timeout if the machine is slow"
        )
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        raise RuntimeError(
            f"{what} cannot arrive, because the process that sends them has ended. fix: see its error above"
        ) from None


# ---------------------------------------------------------------- the trainer


def train(rank: int, folder: str, args: argparse.Namespace, connection: Connection | None) -> None:
    """Train one rank; rank 0 talks to the generator."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=args.timeout),
    )
    model: Any = make_policy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    version = -1
    for number in range(args.rounds):
        version, sent = send_weights(model, version, connection)
        texts = receive_texts(connection, args.timeout)
        rewards = reward_of(texts[:, 1:])
        if rank == 0:
            print(f"round {number}: version {version}, {sent}, mean reward {rewards.mean():.3f}", flush=True)
        mine = slice(rank * BATCH, (rank + 1) * BATCH)
        odds = model(texts[mine, :-1]).log_softmax(dim=-1)
        chosen = odds.gather(-1, texts[mine, 1:, None]).squeeze(-1).sum(dim=1)
        (-(rewards[mine] - rewards.mean()) * chosen).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if connection is not None:
        connection.send_bytes(pickle.dumps(None))
    dist.destroy_process_group()


def send_weights(model: nn.Module, version: int, connection: Connection | None) -> tuple[int, str]:
    """Send all weights, or what changed since ``version``; every rank calls it. Returns the version and words."""
    if version < 0:
        stream = weight_stream(model, checksums=True)
        for bucket in stream.buckets():
            send(connection, "bucket", bucket, stream.version)
        said = f"{stream.explain().tensor_bytes} bytes of weights"
        version = remember_weights(model)
    else:
        deltas = weight_stream(model, changed_since=version)
        for delta in deltas:
            send(connection, "delta", delta, deltas.version)
        version, report = deltas.version, deltas.report
        said = f"{report.delta_bytes} of {report.whole_bytes} bytes, {report.density:.1%} of the values changed"
    send(connection, "generate", None, version)
    return version, said


def send(connection: Connection | None, kind: str, payload: object, version: int) -> None:
    """Send a message to the generator, on the rank that is connected to it."""
    if connection is not None:
        connection.send_bytes(pickle.dumps((kind, payload, version)))


def receive_texts(connection: Connection | None, timeout_s: float) -> torch.Tensor:
    """Return the generator's texts on all ranks."""
    texts = torch.empty(NUM_RANKS * BATCH, LENGTH + 1, dtype=torch.int64)
    if connection is not None:
        texts = receive(connection, "the generator's texts", timeout_s)
    dist.broadcast(texts, 0)
    return texts


def main() -> int:
    """Start the generator and the trainer's ranks; return 0 when all have ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of generation and training")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW; fewer bf16 values change at a smaller one")
    parser.add_argument("--timeout", type=float, default=240, help="seconds to wait for another process")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(name="the generator", target=generate, args=(theirs, args.timeout))]
        for rank in range(NUM_RANKS):
            connection = ours if rank == 0 else None
            arguments = (rank, folder, args, connection)
            processes.append(context.Process(name=f"rank {rank} of the trainer", target=train, args=arguments))
        for process in processes:
            process.start()
        # Only then does one of the two that talk see that the other has ended.
        ours.close()
        theirs.close()
        return wait_for(processes)


def wait_for(processes: list[Any]) -> int:
    """Wait until all have ended, and return 0; the first that fails is named and ends the others."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                print(f"{process.name} failed with exit code {process.exitcode}", file=sys.stderr)
                for other in running.values():
                    other.terminate()
                    other.join()
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
