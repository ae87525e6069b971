"""The optimizer of the example."""

import argparse

import pytest
import torch
from torch import nn

from gpt.optimizer import build_optimizer, set_learning_rate


def make(optimizer: str = "adam") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of one linear layer and one norm, and its optimizer."""
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    args = argparse.Namespace(
        optimizer=optimizer,
        lr=0.5,
        weight_decay=0.1,
        adam_beta1=0.8,
        adam_beta2=0.7,
        adam_eps=1e-3,
        sgd_momentum=0.6,
    )
    return model, build_optimizer(model, args)


def test_only_matrices_are_decayed() -> None:
    model, optimizer = make()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = {name: parameter.unique().item() for name, parameter in model.named_parameters()}
    assert values == {"0.weight": pytest.approx(0.95), "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0}


def test_the_flags_reach_adam() -> None:
    _, optimizer = make()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [(group["betas"], group["eps"]) for group in optimizer.param_groups] == [((0.8, 0.7), 1e-3)] * 2


def test_sgd_gets_its_momentum() -> None:
    _, optimizer = make("sgd")
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.6, 0.6]


def test_a_new_learning_rate_reaches_every_group() -> None:
    _, optimizer = make()
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
