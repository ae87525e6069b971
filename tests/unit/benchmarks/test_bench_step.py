"""Rows of training steps."""

import argparse

import pytest
import torch

from benchmarks import bench_step
from benchmarks.models import Model, Shape


def options(**changed: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_step.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changed})


def test_a_model_name_says_batch_and_length() -> None:
    shape = bench_step.shape_of("4x256", options())
    assert (shape.batch, shape.length, shape.num_experts, shape.width) == (4, 256, 0, 512)
    assert bench_step.shape_of("moe", options()).num_experts == 4


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_step.run(options(device="cuda"))


@pytest.mark.parametrize("num_experts", [0, 3])
def test_every_parameter_of_a_model_gets_a_gradient(num_experts: int) -> None:
    torch.manual_seed(0)
    model = Model(Shape(2, 16, 23, num_experts, batch=2, length=5, head_width=8))
    model(torch.randint(23, (2, 6))).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_weights_in_bf16_compute_in_fp32_unless_told_otherwise() -> None:
    tokens = torch.randint(23, (2, 6))
    seen = []
    for compute in (torch.float32, None):
        model = Model(Shape(1, 16, 23, batch=2, length=5, head_width=8, compute=compute)).to(torch.bfloat16)
        model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
        model(tokens)
    assert seen == [torch.float32, torch.bfloat16]
