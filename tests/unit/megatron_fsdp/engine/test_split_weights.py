"""FP32 weights in two halves, as plans and reports count them: 14 bytes per parameter over all ranks."""

import json
from typing import Any

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.__main__ import main
from megatron_fsdp.planning.cost_model import Hardware, Link, predict_step
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.transformer import UnitWork, Workload
from tests.unit.megatron_fsdp.planning.chains import Chain, sharding_of, stand_ins_of

BF16, FP32 = torch.bfloat16, torch.float32
SPLIT = MixedPrecisionPolicy(BF16, split_main_params=True)
MODEL = ("plan", "--model", "gpt2", "--mesh", "8", "--json")


def plan_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main((*MODEL, *options)) == 0
    plan = json.loads(capsys.readouterr().out)
    assert isinstance(plan, dict)
    return plan


def bytes_per_parameter(plan: dict[str, Any]) -> float:
    """Return the bytes of weights, gradients and moments on all ranks for each element of the buffers."""
    memory = plan["memory"]["parts"]
    kinds = ("compute weights", "main weights", "gradients", "AdamW moments")
    numel = sum(unit["count"] * group["buffer_numel"] for unit in plan["report"]["units"] for group in unit["groups"])
    return float(8 * sum(memory.get(name, 0) for name in kinds) / numel)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--split-main-params",), 14),
        (("--split-main-params", "--main-grads-dtype", "fp32"), 16),
        (("--split-main-params", "--moments-dtype", "bf16"), 10),
        (("--main-grads-dtype", "bf16"), 14),
        ((), 16),
    ],
    ids=str,
)
def test_a_plan_counts_bytes_per_parameter(
    options: tuple[str, ...], wanted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # Moments have no padding; each parameter has a step counter.
    assert bytes_per_parameter(plan_of(capsys, *options)) == pytest.approx(wanted, rel=1e-4)


def test_a_plan_refuses_to_split_what_is_not_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*MODEL, "--split-main-params", "--dtype", "fp16")) != 0
    assert "only bf16 weights are the upper half of FP32 ones" in capsys.readouterr().err


def test_the_optimizer_reads_and_writes_halves_and_fp32_moments() -> None:
    stand_ins = stand_ins_of(Chain((16,)), UnitWork(1), sharding_of(policy=SPLIT))
    played = play_step(stand_ins)
    time = predict_step(played, Workload(1, 1), Hardware(1.0, 1.0, links={"axis0": Link(1.0)}))
    numel = 16 * 4 // 4
    # Bytes moved: a bf16 gradient once; weights in two halves of 2 bytes, two FP32 moments and a step count twice each.
    assert time.optimizer == pytest.approx(numel * (2 + 2 * 4 + 2 * 2 * 4) + 2 * 4)
    assert [part.kind for part in played.units[-1].groups[0].resting] == ["main_weight", "remainder"]
