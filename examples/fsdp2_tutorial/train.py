"""Train a small Transformer with the FSDP2 interface, on PyTorch's engine or on this one: one import line decides.

    torchrun --nproc-per-node 2 examples/fsdp2_tutorial/train.py --engine ours --checkpoint runs/tutorial
    torchrun --nproc-per-node 2 examples/fsdp2_tutorial/train.py --engine torch --checkpoint runs/tutorial --steps 40

The second command goes on where the first one stopped: checkpoints hold whole tensors, so either engine reads them.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

__all__ = ["ENGINES", "Transformer", "main", "parse", "run"]

ENGINES = {"torch": "torch.distributed.fsdp", "ours": "megatron_fsdp"}
VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH, BATCH = 97, 48, 4, 4, 32, 8


# ---------------------------------------------------------------- the model: nothing in it knows about sharding


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project_out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, WIDTH) for the same."""
        query, key, value = self.project_in(x).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.project_out(attended.transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, WIDTH) for the same."""
        x = x + self.attention(self.attention_norm(x))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))
        return result


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, VOCABULARY) logits for (batch, length) tokens."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.output(self.norm(x))
        return result


# ---------------------------------------------------------------- sharding


def build(args: argparse.Namespace, fsdp: Any, device: torch.device) -> Transformer:
    """Build the model on the meta device, shard it, and only then allocate and initialise it, each rank its part."""
    with torch.device("meta"):
        model = Transformer()
    options = {}
    if args.mixed_precision:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    model.to_empty(device=device)
    torch.manual_seed(args.seed)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    inspect(model, fsdp)
    if args.explicit_prefetching:
        prefetch(list(model.layers), ahead=2)
    return model


def inspect(model: Transformer, fsdp: Any) -> None:
    """Check what ``fully_shard`` promises: the module is itself and more, its parameters are FP32 rows of DTensors."""
    assert isinstance(model, Transformer)
    assert isinstance(model, fsdp.FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.dtype == torch.float32


def prefetch(layers: Sequence[Any], *, ahead: int) -> None:
    """Let each layer start the gathers of the next layers, in forward and in backward."""
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(index - ahead, 0) : index][::-1])


# ---------------------------------------------------------------- checkpoints


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Gather the state on the first rank and write it; every rank calls this."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"step": step, "model": get_model_state_dict(model, options=whole)}
    if step:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "new.pt")
        os.replace(folder / "new.pt", folder / "state.pt")  # a save that is interrupted leaves the old state
    dist.barrier()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Give each rank its part of the first rank's state, and return the step; 0 where nothing was saved."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    part = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=part)
    if state["step"]:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=part)
    return int(state["step"])


# ---------------------------------------------------------------- training


def draw(step: int, device: torch.device) -> torch.Tensor:
    """Draw this rank's (BATCH, LENGTH + 1) tokens: sequences that count up, each by its own stride."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    first, stride = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=generator)
    tokens: torch.Tensor = (first + (stride % 5 + 1) * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens.to(device)


def run(args: argparse.Namespace) -> list[float]:
    """Train, in an initialised process group; return the mean loss over ranks of every step."""
    fsdp = importlib.import_module(ENGINES[args.engine])  # the only line that knows whose engine it is
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = build(args, fsdp, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = load(model, optimizer, args.checkpoint) if args.checkpoint else 0
    losses = []
    for step in range(first, args.steps):
        tokens = draw(step, device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"{args.engine}: step {step + 1}/{args.steps}, loss {losses[-1]:.6f}")
    if args.checkpoint:
        save(model, optimizer, args.steps, args.checkpoint)
    return losses


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: torchrun --nproc-per-node 2 examples/fsdp2_tutorial/train.py --engine torch --steps 40",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engine", choices=sorted(ENGINES), default="ours", help="who shards")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, those of a checkpoint included")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--explicit-prefetching", action="store_true", help="gather two layers ahead")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bf16, reduce in fp32")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, if it is there, and to save to")
    return parser.parse_args(arguments)


def main() -> None:
    """Train on all ranks of torchrun: on GPUs where there are some, else on CPU."""
    args = parse()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
