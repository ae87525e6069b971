"""Rows of training steps."""

import pytest
import torch

from benchmarks.models import Model, Shape


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
