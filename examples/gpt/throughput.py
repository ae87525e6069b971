"""How fast a run is against its hardware: TFLOP/s of a rank, and MFU."""

from __future__ import annotations

import argparse

import torch

from gpt.model import GptConfig

# TFLOP/s of dense bf16 products, by the makers' data sheets; by a part of the GPU's name.
_PEAKS = {"A100": 312.0, "H100 80GB HBM3": 989.4, "H200": 989.4, "B200": 2250.0}


def flops_per_token(config: GptConfig, seq_length: int) -> int:
    """Return the number of floating-point operations of forward and backward per token.

    Counts 6 per weight of each matrix that the token uses (Kaplan et al. 2020), including the output layer, and half of
    the attention scores because of the causal mask. Recomputation does not count.
    """
    hidden, layers = config.hidden_size, config.num_layers
    head_dim = hidden // config.num_attention_heads
    groups = config.num_query_groups or config.num_attention_heads
    attention = hidden * (hidden + 2 * groups * head_dim) + hidden * hidden
    mlp = (2 + config.swiglu) * hidden * config.ffn_hidden_size
    if config.num_experts is not None:
        mlp = config.moe_router_topk * mlp + hidden * config.num_experts
    weights = layers * (attention + mlp) + hidden * config.vocab_size
    return 6 * weights + 6 * layers * seq_length * hidden


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak of a GPU in bf16; None of one that is not known, and of a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def throughput(config: GptConfig, args: argparse.Namespace, seconds: float, device: torch.device) -> dict[str, float]:
    """Return the columns of ``--log-throughput`` for steps of so many seconds: "mfu" only where the peak is known."""
    tokens = args.global_batch_size * args.seq_length / args.num_ranks
    tflops = flops_per_token(config, args.seq_length) * tokens / seconds / 1e12
    peak = peak_tflops(device)
    return {"tflops_per_rank": tflops} | ({} if peak is None else {"mfu": tflops / peak})
