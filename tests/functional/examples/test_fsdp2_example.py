"""The FSDP2 tutorial's trainer gives the same losses on either engine, and goes on from either engine's checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.harness.grids import nightly_but

SCRIPT = Path(__file__).parents[3] / "examples" / "fsdp2_tutorial" / "train.py"
ENGINES = ("torch", "ours")
# On CPU, PyTorch's engine draws different random rows on each rank and warns; checkpoints replace these weights.
# PyTorch's loader asks for the default device by a name that PyTorch itself deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning"),
]


def train(*arguments: str) -> list[float]:
    from fsdp2_tutorial.train import parse, run

    return run(parse(arguments))


def steps(engine: str, number: int, folder: Path, *options: str) -> list[float]:
    """Train to a step on two ranks, from and to a checkpoint; return the losses, which all ranks print alike."""
    first, second = run_ranks(
        2, train, "--engine", engine, "--steps", str(number), "--checkpoint", str(folder), *options
    )
    assert first == second
    return first


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial")
    assert steps("ours", 0, folder) == []
    return folder


@pytest.mark.parametrize(
    "option", nightly_but(["--mixed-precision"], ["", "--explicit-prefetching", "--mixed-precision"])
)
def test_both_engines_print_the_same_losses(option: str, initial: Path, tmp_path: Path) -> None:
    options = [option] if option else []
    losses = {}
    for engine in ENGINES:
        shutil.copytree(initial, tmp_path / engine)
        losses[engine] = steps(engine, 4, tmp_path / engine, *options)
    assert losses["ours"] == pytest.approx(losses["torch"], rel=1e-3 if "--mixed-precision" in options else 1e-6)
    assert losses["ours"][-1] < losses["ours"][0] - 0.3


@pytest.mark.parametrize("first", nightly_but(["ours"], ENGINES))
def test_either_engine_goes_on_from_the_others_checkpoint(first: str, initial: Path, tmp_path: Path) -> None:
    shutil.copytree(initial, tmp_path / "whole")
    wanted = steps(first, 4, tmp_path / "whole")
    shutil.copytree(initial, tmp_path / "half")
    begun = steps(first, 2, tmp_path / "half")
    for second in ENGINES:
        shutil.copytree(tmp_path / "half", tmp_path / second)
        assert begun + steps(second, 4, tmp_path / second) == pytest.approx(wanted, rel=1e-6)


def test_the_engine_is_chosen_in_one_import() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    code = text.partition('"""\n\n')[2]
    assert code.count("import_module(") == 1
    assert code.count('"torch.distributed.fsdp"') == code.count('"megatron_fsdp"') == 1
    assert code.count("args.engine") == 2  # the import, and the line that is printed


@pytest.mark.slow
@pytest.mark.parametrize("engine", nightly_but(["ours"], ENGINES))
def test_torchrun_trains_on_two_ranks(engine: str, tmp_path: Path) -> None:
    options = ["--engine", engine, "--steps", "3", "--checkpoint", str(tmp_path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(SCRIPT), *options], capture_output=True, text=True, timeout=300, check=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith(f"{engine}: step ")]
    assert len(printed) == 3
    assert (tmp_path / "state.pt").exists()
