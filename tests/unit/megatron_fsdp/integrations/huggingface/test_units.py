"""Which modules of a Hugging Face model become units."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.config.hf_settings import HfSettings
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.huggingface.prepare import prepare_model
from megatron_fsdp.integrations.huggingface.units import PlannedUnit, ignored_parameters, plan_units
from megatron_fsdp.runtime.step.unit import units_below
from tests.unit.megatron_fsdp.integrations.huggingface.hf_model import LanguageModel


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plan(model: nn.Module, **keys: Any) -> list[PlannedUnit]:
    settings = FsdpConfig.from_hf(keys).hugging_face
    assert settings is not None
    return plan_units(model, settings)


def names(model: nn.Module, units: list[PlannedUnit]) -> list[tuple[str, ...]]:
    known = {id(module): name for name, module in model.named_modules()}
    return [tuple(known[id(module)] for module in unit.modules) for unit in units]


def test_the_embedding_is_alone_and_the_norm_is_with_the_head() -> None:
    model = LanguageModel()
    units = plan(model)
    assert names(model, units) == [("model.embed",), ("model.norm", "head"), ("model.layers.1",), ("model.layers.0",)]
    assert [unit.keeps_weights for unit in units] == [False, True, False, False]
    assert [unit.is_layer for unit in units] == [False, False, True, True]


def test_an_embedding_tied_to_the_head_joins_it_and_comes_first() -> None:
    model = LanguageModel(is_tied=True)
    units = plan(model)
    assert names(model, units)[0] == ("model.embed", "model.norm", "head")
    assert units[0].keeps_weights
    assert len(units) == 3


def test_every_module_that_holds_a_tied_embedding_joins_the_unit() -> None:
    model = LanguageModel(is_tied=True)
    model.model.other = nn.Embedding(13, 6)
    model.model.other.weight = model.model.embed.weight
    assert names(model, plan(model))[0] == ("model.embed", "model.other", "model.norm", "head")


def test_layers_become_units_by_the_names_of_their_classes() -> None:
    model = LanguageModel()
    found = names(model, plan(model, transformer_layer_cls_to_wrap="Layer,FinalNorm"))
    assert found == [("model.embed",), ("model.norm", "head"), ("model.layers.1",), ("model.layers.0",)]
    # Linear takes the four of the layers, and leaves the head where it is.
    found = names(model, plan(model, transformer_layer_cls_to_wrap=["Linear"]))
    assert len(found) == 6
    assert ("head",) not in found


def test_a_class_that_no_module_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no module is a Leyer; there are .*'Layer'"):
        plan(LanguageModel(), transformer_layer_cls_to_wrap=["Leyer"])


def test_a_model_that_does_not_name_its_layers_is_refused_with_the_cure() -> None:
    with pytest.raises(
        ConfigError, match=r"Sequential does not say .* give transformer_layer_cls_to_wrap, or .*NO_WRAP"
    ):
        plan(nn.Sequential(nn.Linear(2, 2)))


def test_a_module_is_a_unit_once_it_has_enough_parameters_that_no_unit_inside_has() -> None:
    model = LanguageModel()
    # A layer has 63 + 60 parameters in two linears; what is left of the base is its table of positions, 30.
    options = {"auto_wrap_policy": "SIZE_BASED_WRAP"}
    layers = [("model.layers.0",), ("model.layers.1",)]
    assert names(model, plan(model, **options, min_num_params=100))[2:] == layers
    assert names(model, plan(model, **options, min_num_params=123))[2:] == layers
    assert names(model, plan(model, **options, min_num_params=124))[2:] == [("model",)]
    inner = names(model, plan(model, **options, min_num_params=61))[2:]
    assert inner == [("model.layers.0.up",), ("model.layers.1.up",), ("model",)]


def test_no_wrap_makes_one_unit(process_group: None) -> None:
    model = prepare_model(LanguageModel(), {"auto_wrap_policy": "NO_WRAP"})
    assert len(list(units_below(model))) == 1


def test_a_model_without_a_head_leaves_its_norm_to_the_root() -> None:
    model = LanguageModel()
    model.get_output_embeddings = lambda: None
    assert names(model, plan(model))[0] == ("model.embed",)
    assert ("model.norm",) not in names(model, plan(model))


@pytest.mark.parametrize("reshards", [True, False])
def test_units_are_released_after_forward_unless_told_not_to(reshards: bool, process_group: None) -> None:
    model = prepare_model(LanguageModel(), {"reshard_after_forward": reshards})
    found = {unit.name: unit.reshard_after_forward for unit in units_below(model)}
    assert found["model.layers.0"] is reshards
    assert found["model.embed"] is reshards
    assert found["model.norm"] is False
    assert found["LanguageModel"] is None


@pytest.mark.parametrize("ignored", [r"model\.layers\.\d+\.up", ["model.layers.0.up", "model.layers.1.up"]])
def test_parameters_of_ignored_modules_stay_as_they_are(ignored: Any, process_group: None) -> None:
    model = LanguageModel()
    before = model.model.layers[0].up.weight
    prepare_model(model, {"ignored_modules": ignored})
    assert model.model.layers[0].up.weight is before
    whole = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    assert whole == {f"model.layers.{layer}.up.{part}" for layer in (0, 1) for part in ("weight", "bias")}


def test_a_module_itself_may_be_ignored() -> None:
    model = LanguageModel()
    assert ignored_parameters(model, [model.head]) == [model.head.weight]


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        ("layers", r"'layers' matches no whole name of a module; there are 'model', 'model.embed'"),
        ("(", "is no regular expression"),
        (["model.layer"], "'model.layer' names no module"),
        ([nn.Linear(1, 1)], "a Linear that is no part of the model"),
    ],
)
def test_what_names_no_module_is_refused(ignored: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ignored_parameters(LanguageModel(), ignored)


def test_settings_made_in_code_plan_like_those_that_are_read() -> None:
    model = LanguageModel()
    assert plan_units(model, HfSettings()) == plan(model)
    assert torch.equal(model.model.scale, torch.linspace(0.5, 1.5, 6))
