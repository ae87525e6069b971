"""Newton-Schulz equals torch's bit for bit in each batch; other forms and coefficients converge equally."""

import math

import pytest
import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.muon.newton_schulz import (
    COEFFICIENT_SETS,
    Iteration,
    coefficients,
    newton_schulz_flops,
    scale_factor,
)

SIMPLE = (3.4445, -4.7750, 2.0315)
SHAPES = [(1, 1), (3, 5), (5, 3), (7, 7), (1, 9), (33, 17)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_in_bf16_has_torchs_bits(shape: tuple[int, int]) -> None:
    matrices = torch.randn(4, *shape)
    wanted = [_zeropower_via_newtonschulz(matrix, SIMPLE, 5, 1e-7) for matrix in matrices]
    found = Iteration(coefficients(SIMPLE, 5))(matrices.bfloat16())
    assert torch.equal(found, torch.stack(wanted))


def singular_values(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())


def polynomial(values: torch.Tensor, steps: tuple[tuple[float, float, float], ...]) -> torch.Tensor:
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5)], ids=str)
def test_singular_values_go_through_the_polynomials(name: str, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    steps = coefficients(name, 8)
    found = Iteration(steps)(matrix.clone()[None])[0]
    values = singular_values(matrix)
    wanted = polynomial(values / values.square().sum().sqrt(), steps).sort(descending=True).values
    assert torch.allclose(singular_values(found), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_steps"), [("simple", 8), ("quintic", 5), ("polar_express", 8), ("deepseekv4", 10)]
)
def test_every_set_brings_singular_values_near_one(name: str, num_steps: int) -> None:
    values = torch.logspace(-2, 0, 200, dtype=torch.float64)
    found = polynomial(values, coefficients(name, num_steps))
    width = 0.01 if name in ("polar_express", "deepseekv4") else 0.35
    assert (found - 1).abs().max() < width


def test_coefficient_sets_continue_beyond_their_length() -> None:
    assert coefficients("simple", 3) == (SIMPLE,) * 3
    assert coefficients("quintic", 6)[5] == COEFFICIENT_SETS["quintic"][0]
    assert coefficients("polar_express", 10)[8:] == (COEFFICIENT_SETS["polar_express"][-1],) * 2
    assert coefficients("deepseekv4", 10) == (*(SIMPLE,) * 8, (2.0, -1.5, 0.5), (2.0, -1.5, 0.5))


def test_a_matrix_of_zeros_stays_one() -> None:
    found = Iteration(coefficients(SIMPLE, 5))(torch.zeros(1, 3, 4))
    assert found.abs().max() == 0


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("mode", [None, "original", "match_rms_adamw"])
def test_factors_are_torchs(mode: str | None, shape: tuple[int, int]) -> None:
    assert 0.02 * scale_factor(*shape, mode) == _adjust_lr(0.02, mode, torch.Size(shape))


def test_factors_of_emerging_optimizers() -> None:
    assert scale_factor(2, 8, "shape_scaling") == 1.0
    assert scale_factor(8, 2, "shape_scaling") == 2.0
    assert scale_factor(2, 8, "spectral") == math.sqrt(8)
    assert scale_factor(2, 8, "unit_rms_norm") == 0.5


def test_operations_are_those_of_the_products() -> None:
    assert newton_schulz_flops(2, 3) == 5 * (4 * 4 * 3 + 2 * 8) == newton_schulz_flops(3, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: coefficients("quartic", 5), ["quartic", "quintic"]),
        (lambda: coefficients((1.0, 2.0), 5), ["three numbers"]),
        (lambda: coefficients(SIMPLE, 0), ["ns_steps=0"]),
        (lambda: scale_factor(1, 1, "rms"), ["rms", "match_rms_adamw"]),
    ],
)
def test_unknown_names_of_coefficients_and_modes_are_refused(call: object, words: list[str]) -> None:
    assert callable(call)
    with pytest.raises(ConfigError) as error:
        call()
    assert all(word in str(error.value) for word in words)
