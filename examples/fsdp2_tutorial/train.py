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
from torch.nn import functional

ENGINES = {"torch": "torch.distributed.fsdp", "ours": "megatron_fsdp"}
VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH, BATCH = 97, 48, 4, 4, 32, 8


class Transformer(nn.Module):
    """Predicts the next token; nothing here knows about sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, **options) for _ in range(NUM_LAYERS)
        )
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, VOCABULARY) logits for (batch, length) tokens."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        result: torch.Tensor = self.output(self.norm(x))
        return result


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
    torch.manual_seed(0)
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):  # the second is of nn.MultiheadAttention
            getattr(module, name, lambda: None)()
    if args.explicit_prefetching:
        layers: list[Any] = list(model.layers)
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
            layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
    return model


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
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    first = load(model, optimizer, args.checkpoint) if args.checkpoint else 0
    for step in range(first, args.steps):
        tokens = draw(step, device)
        logits = model(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="ours", help="who shards (default ours)")
    parser.add_argument("--steps", type=int, default=20, help="those of a checkpoint included (default 20)")
    parser.add_argument("--explicit-prefetching", action="store_true", help="gather two layers ahead")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bf16, reduce in fp32")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, if it is there, and to save to")
    return parser.parse_args(arguments)


def main() -> None:
    """Train on all ranks of torchrun, on GPUs if the machine has some, otherwise on the CPU."""
    args = parse()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
