"""Muon's param groups follow the given rules, in order, without guesses."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import Muon
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.muon import MatrixView, muon_param_groups


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)


class LanguageModel(nn.Module):
    def __init__(self, *, ties: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.decoder = nn.Linear(8, 10, bias=False)
        if ties:
            self.decoder.weight = self.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


LINEAR = [f"layers.{n}.{part}.weight" for n in range(2) for part in ("qkv", "out")]
VECTORS = ["layers.0.qkv.bias", "layers.1.qkv.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("ties", [False, True])
def test_linear_layers_are_matrices_and_embeddings_outputs_and_vectors_are_not(ties: bool) -> None:
    model = LanguageModel(ties=ties)
    groups = muon_param_groups(model)
    outer = ["embed_tokens.weight"] + ["decoder.weight"] * (not ties)
    assert names_of(model, groups) == [LINEAR, outer, VECTORS]
    assert [group["use_muon"] for group in groups] == [True, False, False]
    assert groups[2]["weight_decay"] == 0.0
    assert [group["use_muon"] for group in Muon(groups, lr=0.1).param_groups] == [True, False, False]


def test_views_make_groups_of_their_own() -> None:
    model = LanguageModel()
    view = MatrixView(row_splits=(8, 8, 8))
    groups = muon_param_groups(model, views={"*.qkv.weight": view})
    assert names_of(model, groups)[:2] == [[LINEAR[0], LINEAR[2]], [LINEAR[1], LINEAR[3]]]
    assert [MatrixView.of(group["view"]) for group in groups[:2]] == [view, MatrixView()]


def test_names_go_before_attributes_and_these_before_modules() -> None:
    model: Any = LanguageModel()
    model.layers[0].out.weight.use_muon = False
    model.layers[1].out.weight.is_embedding_or_output_parameter = True
    model.decoder.weight.use_muon = True
    groups = muon_param_groups(model, adamw=("layers.1.qkv.weight",))
    assert names_of(model, groups)[0] == ["layers.0.qkv.weight", "decoder.weight"]
    by_rule = muon_param_groups(model, rule=lambda name, p: p.ndim == 2 and name.endswith("qkv.weight"))
    assert names_of(model, by_rule)[0] == ["layers.0.qkv.weight", "layers.1.qkv.weight"]


def test_frozen_parameters_are_in_no_group() -> None:
    model = LanguageModel()
    model.layers[0].requires_grad_(False)
    assert names_of(model, muon_param_groups(model))[0] == LINEAR[2:]


def test_a_parameter_without_a_matching_rule_is_an_error_with_its_name() -> None:
    model = LanguageModel()
    model.experts = nn.Parameter(torch.zeros(3, 4, 5))
    with pytest.raises(ConfigError, match=r"'experts' of shape \(3, 4, 5\).*use_muon"):
        muon_param_groups(model)
    groups = muon_param_groups(model, views={"experts": MatrixView(batch_dims=1)})
    assert names_of(model, groups)[0] == ["experts"]


def test_patterns_that_match_nothing_and_models_without_matrices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"views has '\*.query.weight'"):
        muon_param_groups(LanguageModel(), views={"*.query.weight": MatrixView()})
    with pytest.raises(ConfigError, match="adamw has 'lm_head'"):
        muon_param_groups(LanguageModel(), adamw=("lm_head",))
    with pytest.raises(ConfigError, match="no parameter of LayerNorm"):
        muon_param_groups(nn.LayerNorm(3))
