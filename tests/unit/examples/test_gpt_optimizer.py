"""The optimizer of the example, and its learning rate."""

import argparse

import pytest
import torch
from torch import nn

from gpt.arguments import parse_arguments
from gpt.model import GptConfig, GptModel
from gpt.optimizer import build_optimizer, learning_rate
from megatron_fsdp import Muon
from megatron_fsdp.muon import MatrixView


def make(optimizer: str = "adam") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of one linear layer and one norm, and its optimizer."""
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    given = {"optimizer": optimizer, "lr": 0.5, "weight_decay": 0.1, "adam_moments": "fp32", "sgd_momentum": 0.6}
    args = argparse.Namespace(**given, adam_beta1=0.8, adam_beta2=0.7, adam_eps=1e-3)
    return model, build_optimizer(model, args)


def test_only_matrices_are_decayed() -> None:
    model, optimizer = make()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = {name: parameter.unique().item() for name, parameter in model.named_parameters()}
    assert values == {"0.weight": pytest.approx(0.95), "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0}


def make_muon(flags: str) -> tuple[GptModel, Muon]:
    """Return a model of one block, and Muon with these flags."""
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 4 --seq-length 4 --lr 0.1 --optimizer muon"
    sizes = "--ffn-hidden-size 24 --micro-batch-size 1 --train-iters 1"
    args = parse_arguments(f"{shape} {sizes} {flags}".split(), num_ranks=1)
    model = GptModel(GptConfig.from_args(args))
    optimizer = build_optimizer(model, args)
    assert isinstance(optimizer, Muon)
    return model, optimizer


def test_muon_takes_the_linear_layers_of_blocks_in_their_parts() -> None:
    flags = "--swiglu --group-query-attention --num-query-groups 2 --muon-momentum 0.8 --muon-extra-scale-factor 0.2"
    model, optimizer = make_muon(flags)
    names = {id(parameter): name.rpartition(".")[0].rpartition(".")[2] for name, parameter in model.named_parameters()}
    views = {
        names[id(parameter)]: MatrixView.of(group["view"])
        for group in optimizer.param_groups
        if group["use_muon"]
        for parameter in group["params"]
    }
    assert views == {
        "linear_qkv": MatrixView(row_splits=(4, 2, 2), is_joined=True),
        "linear_proj": MatrixView(),
        "linear_fc1": MatrixView(row_splits=(24,)),
        "linear_fc2": MatrixView(),
    }
    _, whole = make_muon("--muon-no-split-qkv")
    assert [MatrixView.of(group["view"]) for group in whole.param_groups if group["use_muon"]] == [MatrixView()]
    muon = optimizer.param_groups[0]
    assert (muon["momentum"], muon["nesterov"], muon["adjust_lr_fn"]) == (0.8, False, "spectral")
    assert (muon["extra_scale_factor"], muon["ns_coefficients"], muon["ns_steps"]) == (0.2, "quintic", 5)
    rest = {names[id(p)]: group for group in optimizer.param_groups if not group["use_muon"] for p in group["params"]}
    assert rest["word_embeddings"]["weight_decay"] == 0.01
    assert rest["final_layernorm"]["weight_decay"] == 0.0


def rates(style: str, *iterations: int, warmup: int = 4, decay: int = 24) -> list[float]:
    """Return rates of a schedule from 1.0 to 0.2."""
    args = argparse.Namespace(lr=1.0, min_lr=0.2, lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=decay)
    return [learning_rate(args, iteration) for iteration in iterations]


@pytest.mark.parametrize(
    ("style", "wanted"),
    [("constant", [1.0, 1.0, 1.0]), ("linear", [0.8, 0.6, 0.2]), ("cosine", [0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2])],
)
def test_a_quarter_and_half_of_the_way_and_past_its_end_the_rate_is_on_the_curve(
    style: str, wanted: list[float]
) -> None:
    assert rates(style, 9, 14, 24) == pytest.approx(wanted)
    assert rates(style, 1, 2, 3, 4) == [0.25, 0.5, 0.75, 1.0], "of the warm-up"
    assert rates(style, 1000) == [wanted[2]]
    assert rates(style, 1, warmup=0, decay=10)[0] < 1.0 or style == "constant"
