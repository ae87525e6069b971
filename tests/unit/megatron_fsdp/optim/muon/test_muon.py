"""Muon over plain parameters, without any sharding."""

import copy
from typing import Any

import torch
from torch import nn

from megatron_fsdp import Muon
from megatron_fsdp.muon import muon_param_groups


def make_optimizer(**options: Any) -> Muon:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    return Muon(muon_param_groups(model), lr=0.02, **options)


def test_options_that_a_state_dict_lacks_are_those_of_the_optimizer() -> None:
    document = copy.deepcopy(make_optimizer().state_dict())
    for group in document["param_groups"]:
        for name in ("ns_steps", "momentum") if group["use_muon"] else ("eps", "betas"):
            del group[name]
    other = make_optimizer(ns_steps=3, momentum=0.7, adamw={"eps": 1e-5, "betas": (0.5, 0.6)})
    other.load_state_dict(document)
    matrices, vectors = sorted(other.param_groups, key=lambda group: not group["use_muon"])
    assert (matrices["ns_steps"], matrices["momentum"]) == (3, 0.7)
    assert (vectors["eps"], vectors["betas"]) == (1e-5, (0.5, 0.6))
