"""The memory that PyTorch's own allocator takes for training steps of Llama-3-8B on one of 8 GPUs.

PYTHON -m tests.nullcuda.memory ours|fsdp2 bf16|fp32 TOKENS prints a line of JSON; without arguments, a table.
"""

import json
import subprocess
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but untyped
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from benchmarks.virtual_models import make_model

RANKS, LAYERS, STEPS = 8, 32, 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GB = 1e9


def steps(engine: str, sums: str, tokens: int) -> dict[str, float]:
    """Return the highest memory of the last of four steps in GB, and how often blocks came from the device."""
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=RANKS, device_id=device)
    mesh = init_device_mesh("cuda", (RANKS,))
    with torch.device("meta"):
        model = make_model("llama3-8b", LAYERS)
    package = {"ours": megatron_fsdp, "fsdp2": fsdp}[engine]
    policy = package.MixedPrecisionPolicy(torch.bfloat16, DTYPES[sums], cast_forward_inputs=False)
    for unit in [*model.units(), model]:
        package.fully_shard(unit, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "allocated": torch.cuda.max_memory_allocated() / GB,
        "reserved": torch.cuda.max_memory_reserved() / GB,
        "cudaMallocs": torch.cuda.memory_stats()["num_device_alloc"],
    }


def table() -> None:
    """Print what each engine takes."""
    print("| sums | tokens | engine | allocated, GB | reserved, GB | cudaMallocs |\n|---|---|---|---|---|---|")
    for sums in DTYPES:
        for tokens in (128, 4096):
            for engine in ("ours", "fsdp2"):
                command = [sys.executable, "-m", "tests.nullcuda.memory", engine, sums, str(tokens)]
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                row = json.loads(printed.splitlines()[-1])
                cells = [f"{row[name]:.1f}" for name in ("allocated", "reserved")]
                print("|", " | ".join([sums, str(tokens), engine, *cells, str(row["cudaMallocs"])]), "|")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        table()
    else:
        print(json.dumps(steps(sys.argv[1], sys.argv[2], int(sys.argv[3]))), flush=True)
