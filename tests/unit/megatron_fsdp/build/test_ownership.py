"""The parameters of a unit: names, groups, and allowed cuts."""

from typing import Any

import pytest
import torch
from torch import nn

from dbuffer import Block, Element, Granularity, Row, Whole
from megatron_fsdp import ConfigError, OwnershipError
from megatron_fsdp.build.builder import GranularityChoice, granularity_of
from megatron_fsdp.build.ownership import OwnedParameter, collect_parameters, mark_owned
from tests.harness.models import Made


def inner() -> nn.Module:
    return Made(lambda m, x: x, linear=nn.Linear(3, 5), scale=nn.Parameter(torch.ones(5)))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = inner()
        self.norm = nn.LayerNorm(5)
        self.register_parameter("absent", None)


def names(*modules: nn.Module, nested: str | None = None, ignored: tuple[str, ...] = ()) -> list[str]:
    """Return the names that a unit of modules owns; ``nested`` is a unit inside of the first module."""
    if nested is not None:
        inner: Any = modules[0].get_submodule(nested)
        inner._fsdp_unit = "as fully_shard leaves it"
    left_out = tuple(modules[0].get_parameter(name) for name in ignored)
    return [owned.name for owned in collect_parameters(modules, left_out)]


INNER, NORM = ["inner.scale", "inner.linear.weight", "inner.linear.bias"], ["norm.weight", "norm.bias"]
OWNED: dict[str, tuple[list[str], list[str]]] = {
    "all below it in registration order": (names(Outer()), INNER + NORM),
    "names of named_parameters": (names(Outer()), [name for name, _ in Outer().named_parameters()]),
    "not what nested units own": (names(Outer(), nested="inner"), NORM),
    "not what lies below these": (
        names(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)), nested="0"),
        ["1.weight", "1.bias"],
    ),
    "not what is ignored": (
        names(Outer(), ignored=("inner.linear.weight", "norm.bias")),
        ["inner.scale", "inner.linear.bias", "norm.weight"],
    ),
    "modules of a list by their numbers": (
        names(nn.LayerNorm(3), nn.Linear(3, 2)), ["0.weight", "0.bias", "1.weight", "1.bias"]
    ),
    "nothing of a module without parameters": (names(nn.ReLU()), []),
}  # fmt: skip


@pytest.mark.parametrize("what", OWNED)
def test_a_unit_owns(what: str) -> None:
    found, wanted = OWNED[what]
    assert found == wanted


def test_a_tied_weight_is_owned_once_with_every_site() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    weight, _ = collect_parameters([model], ())
    assert weight.name == "0.weight"
    assert [(site.module, site.attribute) for site in weight.param_module_infos] == [
        (model[0], "weight"),
        (model[1], "weight"),
    ]


def test_a_shared_module_has_one_site_and_a_tied_weight_has_two() -> None:
    shared = nn.Linear(3, 3)
    weight, _ = collect_parameters([nn.ModuleList([shared, shared])], ())
    assert len(weight.param_module_infos) == 1
    first, second = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    second.weight = first.weight
    (weight,) = collect_parameters([first, second], ())
    assert [site.module for site in weight.param_module_infos] == [first, second]


def test_a_parameter_that_a_unit_has_taken_names_that_unit() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    shared = next(first.parameters())
    mark_owned(shared, "encoder", "first.weight")
    with pytest.raises(OwnershipError, match=r"Linear: parameter 'weight' .*'first.weight' of unit 'encoder'"):
        collect_parameters([second], ())


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("inner.scale", torch.tensor(1.0), "has no dimensions.*ignored_params"),
        ("norm.weight", torch.tensor(1.0), "has no dimensions.*ignored_params"),
        ("norm.weight", torch.ones(5, dtype=torch.complex64), "is complex .*view_as_real.*ignored_params"),
    ],
)
def test_a_scalar_or_complex_parameter_is_refused_unless_ignored(place: str, value: torch.Tensor, words: str) -> None:
    model = Outer()
    setattr(model.get_submodule(place.rpartition(".")[0]), place.rpartition(".")[2], nn.Parameter(value))
    with pytest.raises(ConfigError, match=f"Outer: parameter '{place}' {words}"):
        collect_parameters([model], ())
    assert place not in names(model, ignored=(place,))


def asked(shape: tuple[int, ...], granularity: GranularityChoice) -> Granularity:
    return granularity_of(OwnedParameter("weight", nn.Parameter(torch.ones(shape))), granularity)


ROWS = (7, 3, 5)
CUTS: list[tuple[tuple[int, ...], GranularityChoice, Granularity]] = [
    # Without a granularity, cuts lie between slices of the first dimension.
    ((7,), None, Row()), ((7, 3), None, Row()), (ROWS, None, Block(3)), ((7, 2, 3, 5), None, Block(6)),
    ((7, 0, 5), None, Row()),
    # The granularity is used as given, even if it is coarser; a function may choose one or return None for the default.
    ((7,), Element(), Element()), ((7, 1), Element(), Element()), (ROWS, Row(), Row()), (ROWS, Block(2), Block(2)),
    (ROWS, Block(200), Block(200)), ((5,), Whole(), Whole()),
    ((7, 3), lambda p: Block(2) if p.ndim == 2 else None, Block(2)),
    ((5,), lambda p: Block(2) if p.ndim == 2 else None, Row()),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "wish", "wanted"), CUTS)
def test_parameters_are_cut_by_the_given_granularity(
    shape: tuple[int, ...], wish: GranularityChoice, wanted: Granularity
) -> None:
    assert asked(shape, wish) == wanted


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 5), (2, 3, 4, 5)])
def test_a_cut_inside_a_row_is_refused_with_the_finest_legal_one(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"Element\(\).*fix: granularity=Row\(\)"):
        asked(shape, Element())
