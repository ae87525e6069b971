"""``python -m megatron_fsdp.megatron SCRIPT``, on a stand-in for a Megatron-LM checkout: a script and megatron.core."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.megatron_meshes import Mesh, Task, build, run_steps
from tests.integration.megatron_training import megatron_processes
from tests.integration.ranks import run_ranks

ROOT = Path(__file__).parents[2]
# The script imports the names from megatron.core that pretrain_gpt.py and megatron/training/training.py import.
SCRIPT = """
import argparse
import json
import sys

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as megatron_FSDP
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_fsdp.engine.unit import units_below
from tests.integration.megatron_meshes import Mesh, Task, config_of, make_chunk, megatron_processes, run_steps

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--use-megatron-fsdp", action="store_true")
parser.add_argument("--data-parallel-sharding-strategy")
parser.add_argument("--ckpt-format")
parser.add_argument("--result")
args = parser.parse_args()
assert args.use_megatron_fsdp and args.ckpt_format == "fsdp_dtensor"
dist.init_process_group("gloo")
with megatron_processes():
    config = config_of(Task(), Mesh())
    model = make_chunk(Task(), config, None)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, data_parallel_sharding_strategy=args.data_parallel_sharding_strategy
    )
    wrapped = megatron_FSDP(config=config, ddp_config=ddp_config, module=model)
    options = OptimizerConfig(lr=1e-2, adam_eps=1e-4)
    optimizer = get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=False)
    figures, _ = run_steps(Task(), [wrapped], optimizer, range(3))
    state = {
        "figures": figures,
        "has_order": [unit.root.order is not None for unit in units_below(wrapped)],
        "engine": [cls.__module__ for cls in type(wrapped).__mro__[1:3]],
        "name": __name__,
        "arguments": sys.argv,
    }
if dist.get_rank() == 0:
    with open(args.result, "w") as file:
        json.dump(state, file)
dist.destroy_process_group()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with megatron/core and a script in it."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    folder = tmp_path / "checkout"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "core").symlink_to(Path(found.origin).parent)
    (folder / "pretrain_tiny.py").write_text(SCRIPT, encoding="utf-8")
    return folder


def figures_of_ddp() -> list[tuple[float, float]]:
    with megatron_processes():
        return run_steps(Task(), *build(Task(), Mesh(strategy=None)), range(3))[0]


def test_a_script_of_a_checkout_trains_on_this_engine_as_under_megatrons_ddp(checkout: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    flags = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--result", str(result),
             "--data-parallel-sharding-strategy", "optim_grads_params"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "megatron_fsdp.megatron", str(checkout / "pretrain_tiny.py"), *flags,
         "--megatron-fsdp-version", "2", "--fsdp-forward-order"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
             "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("megatron_fsdp: pretrain_tiny.py runs on this engine") == 1
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["name"] == "__main__"
    # The version and the order are nothing that a script sees.
    assert found["arguments"] == [str(checkout / "pretrain_tiny.py"), *flags]
    assert found["engine"] == [
        "megatron_fsdp.integrations.megatron.data_parallel",
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    ]
    assert len(found["has_order"]) > 2
    assert all(found["has_order"])
    for pair, wanted in zip(found["figures"], run_ranks(2, figures_of_ddp)[0], strict=True):
        assert pair == pytest.approx(wanted, rel=1e-5)
