"""A Megatron-LM checkout trains, saves and resumes on this engine: its own flags, setup, steps and checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "MEGATRON_LM_PATH" not in os.environ, reason="MEGATRON_LM_PATH is unset: no Megatron-LM checkout"
    ),
]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "megatron_script.py"
SHAPE = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --save-interval 100 --lr 1e-2 --lr-decay-style constant
    --vocab-size 64 --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --distributed-backend gloo
    --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-bias-swiglu-fusion --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --clip-grad 1.0
""".split()
OURS = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--overlap-grad-reduce", "--overlap-param-gather"]
EXPERTS = ["--bf16", "--num-experts", "4", "--moe-router-topk", "2"]


def run(folder: Path, steps: int, flags: list[str], *, is_ours: bool, ranks: int = 2) -> dict[str, Any]:
    """Run the script on some ranks, with the launcher or without, and return its results."""
    result = folder / "result.json"
    checkout = os.environ["MEGATRON_LM_PATH"]
    program = ["-m", "megatron_fsdp.megatron", str(SCRIPT), *OURS] if is_ours else [str(SCRIPT), "--ckpt-format=torch"]
    paths = [str(ROOT), str(ROOT / "kernels"), checkout, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program,
         "--result", str(result), "--steps", str(steps), *SHAPE, *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ":".join(paths), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
             "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8" if is_ours else "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("flags", [[], EXPERTS], ids=["fp32", "bf16-experts"])
def test_losses_norms_and_weights_equal_megatron_ddps_and_a_run_resumes_equally(
    flags: list[str], tmp_path: Path
) -> None:
    wanted = run(tmp_path, 4, flags, is_ours=False)
    found = run(tmp_path, 4, flags, is_ours=True)
    assert found["classes"] == [
        "megatron_fsdp.integrations.megatron.data_parallel",
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    ]
    for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(found["figures"], wanted["figures"], strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-5)
    # Looking for a checkpoint in an empty folder must not change the training.
    first = run(tmp_path, 2, [*flags, "--save", "saved", "--load", "saved"], is_ours=True)
    second = run(tmp_path, 2, [*flags, "--load", "saved"], is_ours=True)
    assert (first["first"], second["first"]) == (0, 2)
    assert [*first["figures"], *second["figures"]] == found["figures"]
    assert second["weights"] == found["weights"]


EXPERTS_FP32 = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]
# Experts with tensor parallelism need sequence parallelism, whose norms are Apex's or TransformerEngine's. With one
# data rank, a step has as many microbatches as the script has data for each rank.
ONE = ["--global-batch-size", "4"]
MESHES = {
    "tp2": (2, ["--tensor-model-parallel-size", "2", *ONE]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2", *ONE]),
    "ep2": (2, ["--expert-model-parallel-size", "2", *EXPERTS_FP32]),
    "fp16": (2, ["--fp16", "--initial-loss-scale", "1024"]),
    "tp2 pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", *ONE]),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_by_flags_is_that_of_its_ddp_and_resumes(mesh: str, tmp_path: Path) -> None:
    ranks, flags = MESHES[mesh]
    digits = 1e-2 if "--fp16" in flags else 1e-5
    wanted = run(tmp_path, 4, flags, is_ours=False, ranks=ranks)
    found = run(tmp_path, 4, flags, is_ours=True, ranks=ranks)
    for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(found["figures"], wanted["figures"], strict=True):
        assert loss == pytest.approx(wanted_loss, rel=digits)
        assert norm == pytest.approx(wanted_norm, rel=digits)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=digits)
    first = run(tmp_path, 2, [*flags, "--save", "saved"], is_ours=True, ranks=ranks)
    second = run(tmp_path, 2, [*flags, "--load", "saved"], is_ours=True, ranks=ranks)
    assert [*first["figures"], *second["figures"]] == found["figures"]
    assert second["weights"] == found["weights"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("one", "tp2"), ("tp2", "one"), ("tp2", "pp2"), ("pp2", "tp2"), ("random", "one")],
)
def test_a_checkpoint_loads_on_other_sizes_and_training_continues_equally(
    saved: str, loaded: str, tmp_path: Path
) -> None:
    meshes = {**MESHES, "one": (1, ONE), "random": (2, ["--data-parallel-random-init"])}
    # A data rank's batches are its own, so both runs have as many.
    batches = ["--global-batch-size", "8"] if saved == "random" else ONE
    (ranks, flags), (other_ranks, other_flags) = meshes[saved], meshes[loaded]
    if saved == "random":
        other_ranks, other_flags = 2, []
    whole = run(tmp_path, 4, [*flags, *batches], is_ours=True, ranks=ranks)
    run(tmp_path, 2, [*flags, *batches, "--save", "saved"], is_ours=True, ranks=ranks)
    resumed = [*other_flags, *batches, "--load", "saved", "--no-load-rng"]
    found = run(tmp_path, 2, resumed, is_ours=True, ranks=other_ranks)
    assert found["first"] == 2
    for (loss, norm, _), (wanted_loss, wanted_norm, _) in zip(found["figures"], whole["figures"][2:], strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert found["weights"] == pytest.approx(whole["weights"], rel=1e-5)
