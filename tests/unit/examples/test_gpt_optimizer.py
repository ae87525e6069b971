"""The optimizer of the example."""

import argparse

import pytest
import torch
from torch import nn

from gpt.flags import build_parser
from gpt.model import GptModel
from gpt.model_config import GptConfig
from gpt.optimizer import build_optimizer, set_learning_rate
from megatron_fsdp import Muon
from megatron_fsdp.muon import MatrixView


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
        adam_moments="fp32",
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


def make_muon(flags: str) -> tuple[GptModel, Muon]:
    """Return a model of one block, and Muon with these flags."""
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 4 --seq-length 4 --lr 0.1 --optimizer muon"
    args = build_parser().parse_args(f"{shape} {flags}".split())
    args.padded_vocab_size, args.max_position_embeddings, args.ffn_hidden_size = 16, 4, 24
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
    muon = optimizer.param_groups[0]
    assert (muon["momentum"], muon["nesterov"], muon["adjust_lr_fn"]) == (0.8, False, "spectral")
    assert (muon["extra_scale_factor"], muon["ns_coefficients"], muon["ns_steps"]) == (0.2, "quintic", 5)
    rest = {names[id(p)]: group for group in optimizer.param_groups if not group["use_muon"] for p in group["params"]}
    assert rest["word_embeddings"]["weight_decay"] == 0.01
    assert rest["final_layernorm"]["weight_decay"] == 0.0


def test_fused_projections_stay_one_matrix_when_asked() -> None:
    _, optimizer = make_muon("--muon-no-split-qkv")
    assert [MatrixView.of(group["view"]) for group in optimizer.param_groups if group["use_muon"]] == [MatrixView()]
