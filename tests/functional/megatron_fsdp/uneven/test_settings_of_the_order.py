"""Each setting that sets a forward order lets ranks skip units: flags, Hugging Face's settings, the training script."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp import FsdpConfig
from tests.functional.megatron_fsdp.uneven.programs import PROGRAMS, train, units_of
from tests.harness import on_ranks
from tests.harness.models import make_mesh
from tests.harness.twins import Twins, sharded

ROOT = Path(__file__).parents[4]
CONFIGS = {
    "flag": lambda: FsdpConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", fsdp_forward_order=True
    ),
    "key": lambda: FsdpConfig.from_hf({"version": 2, "forward_order": True}),
    "key of a file": lambda: FsdpConfig.from_hf({"fsdp_config": {"fsdp_version": 2, "fsdp_forward_order": True}}),
}


def shard_by_config(model: Any, name: str) -> None:
    config, mesh = CONFIGS[name](), make_mesh((2,))
    sharded(model, units=units_of, mesh=mesh, **config.fully_shard_kwargs(mesh))
    config.apply(model)


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(2)
def test_a_config_sets_the_order(name: str) -> None:
    program = PROGRAMS["early_exit"]
    assert program.routes is not None
    train(Twins(lambda: program.build(0), None, functools.partial(shard_by_config, name=name)), program.routes)


def losses(folder: Path, *flags: str) -> list[str]:
    """Return the losses that the training script prints."""
    folder.mkdir()
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 400)
    script = [str(ROOT / "examples/start_ranks.py"), "--standalone", "--nproc-per-node", "2",
              str(ROOT / "examples/pretrain_gpt.py"), "--use-megatron-fsdp", "--data-path", "text",
              "--data-parallel-sharding-strategy", "optim_grads_params", "--num-layers", "2", "--hidden-size", "32",
              "--num-attention-heads", "2", "--seq-length", "16", "--micro-batch-size", "2", "--lr", "1e-2",
              "--train-iters", "3", "--log-interval", "1"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *script, *flags], cwd=folder, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [word for line in done.stdout.splitlines() for word in line.split("|") if "lm loss:" in word]


def test_the_training_script_trains_alike_with_the_flag(tmp_path: Path) -> None:
    plain, ordered = losses(tmp_path / "plain"), losses(tmp_path / "ordered", "--fsdp-forward-order")
    assert len(plain) == 3
    assert plain == ordered
