"""Settings of every test: one thread, fixed seeds, reproducible examples, and no process-wide state left behind."""

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_fsdp.engine import fused_linear as fuse

# Examples are the same in every run and have no deadline: the load of the machine must not decide the result.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("suite")

torch.set_num_threads(1)

# The tests' layers are small. Fuse them anyway, as large layers are fused (also in ``tests/harness/preloaded.py``).
fuse.MIN_NUMEL = 0

# Files and folders that take longest, longest first: if a long file starts last, all other processes wait for it.
# `pytest --durations=0 --durations-min=3` shows changes.
LONG_FILES = (
    "tests/unit/megatron_fsdp/planning",
    "tests/functional/random_use/test_random_use.py",
    "tests/functional/megatron_fsdp/planning/test_report.py",
    "tests/unit/megatron_fsdp/cli",
    "tests/functional/compatibility/test_compatibility.py",
    "tests/functional/examples/test_start_ranks.py",
    "tests/functional/test_compile.py",
    "tests/functional/megatron_fsdp/checkpoint/test_protocols.py",
    "tests/functional/megatron_fsdp/checkpoint/test_scratch.py",
    "tests/functional/megatron_fsdp/checkpoint/test_absent_ranks.py",
    "tests/functional/megatron_fsdp/observability/test_watch.py",
    "tests/functional/megatron_fsdp/engine/test_interruptions.py",
    "tests/functional/megatron_fsdp/variants/test_invariance.py",
    "tests/functional/kernels/test_triton.py",
    "tests/functional/examples/test_gpt_invariance.py",
    "tests/functional/megatron_fsdp/variants/test_invariant_optimizers.py",
    "tests/functional/test_parity.py",
    "tests/functional/megatron_fsdp/optim/stock/test_flat_step.py",
    "tests/functional/megatron_fsdp/checkpoint/test_layouts.py",
    "tests/functional/dbuffer/dtensor/test_operators.py",
    "tests/functional/megatron_fsdp/engine/test_fused_gradients.py",
    "tests/functional/megatron_fsdp/variants/test_slots.py",
    "tests/unit/examples/test_pretrain_gpt.py",
    "tests/functional/examples/test_gpt_parallel.py",
    "tests/functional/megatron_fsdp/optim/adamw/test_adamw.py",
    "tests/functional/megatron_fsdp/lifecycle/test_state_dicts.py",
    "tests/functional/megatron_fsdp/certify/test_certify.py",
    "tests/functional/test_gpu_ranks.py",
    "tests/functional/megatron_fsdp/optim/stock/test_matrix_optimizers.py",
)


def begins(item: pytest.Item) -> int:
    """Return where a test's file stands in the order of a run: the long ones, ranks and processes, then the rest."""
    path = item.nodeid.partition("::")[0]
    for position, name in enumerate(LONG_FILES):
        if path.startswith(name):
            return position
    return len(LONG_FILES) + (not path.startswith("tests/functional"))


# This hook runs last, so that it sees the tests selected by the -m expression.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, and refuse GPU tests on a machine without one, where skipping would look like success."""
    items.sort(key=begins)
    selected = [item.nodeid for item in items if item.get_closest_marker("gpu")]
    if selected and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"{len(selected)} tests need a CUDA device and torch.cuda.is_available() is False; wanted a machine with a "
            f"GPU and a CUDA build of torch (found {torch.__version__}). Run `make test` for the tests that need none."
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection; they live as long as the session."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Start a test from fixed seeds and fail it when it leaves a process group, a dtype or a grad mode behind."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    yield
    left = [
        name
        for name, is_left in (
            ("an initialized process group", dist.is_initialized()),
            ("another default dtype", torch.get_default_dtype() != torch.float32),
            ("gradients disabled", not torch.is_grad_enabled()),
        )
        if is_left
    ]
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    assert not left, f"the test left {', '.join(left)} to the tests after it"


@pytest.fixture
def process_group() -> Iterator[None]:
    """Be the only rank of a job."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def plain_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the training script as one process without torchrun, in a new folder that holds a text."""
    # To draw a loss curve takes longer than such a run; test_gpt_train_log.py looks at curves.
    monkeypatch.setattr("gpt.train_log.draw_losses", lambda runs, path, **_: path.touch())
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
