"""Newton-Schulz: the nearest semi-orthogonal matrix by matrix products alone, of one matrix or a batch.

With X of m rows and n columns, m <= n (a taller one is transposed), its Frobenius norm brought to 1, each step is
``A = X X^T; X <- a X + (b A + c A A) X``: an odd polynomial of the singular values that drives them towards 1. Source:
Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.errors import ConfigError

__all__ = [
    "COEFFICIENT_SETS",
    "SIMPLE",
    "Coefficients",
    "Iteration",
    "coefficients",
    "newton_schulz_flops",
    "scale_factor",
]

Coefficients = tuple[float, float, float]
SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)

COEFFICIENT_SETS: dict[str, tuple[Coefficients, ...]] = {
    "simple": (SIMPLE,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
    "deepseekv4": (*(SIMPLE,) * 8, (2.0, -1.5, 0.5), (2.0, -1.5, 0.5)),
}
"""Coefficients (a, b, c) of each step by name, as NVIDIA's Emerging-Optimizers calls them. ``simple``: Jordan et al.
2024; ``quintic``: the tuned five of modded-nanogpt; ``polar_express``: Amsel et al. 2025, for singular values from
1e-3; ``deepseekv4``: eight simple steps, then two that converge."""

# Coefficient sets that repeat their last entry for further steps; the other sets start again.
_REPEATS_LAST = ("polar_express", "deepseekv4")


@dataclass(frozen=True, slots=True)
class Iteration:
    """How a matrix is made semi-orthogonal.

    Attributes:
        coefficients: (a, b, c) of each step. eps: the least norm that is divided by.
    """

    coefficients: tuple[Coefficients, ...]
    eps: float = 1e-7

    def __call__(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return the semi-orthogonal factors of (matrices, rows, columns) in their dtype; the input is overwritten.

        Arithmetic and roundings are those of ``torch.optim.Muon`` for each matrix by itself, so results do not depend
        on what else is in the batch. On accelerators the products are batched; the CPU has no launches to save, and
        rounds products of tiny FP32 matrices in a batch otherwise than alone.
        """
        is_tall = matrices.shape[1] > matrices.shape[2]
        x = matrices.mT if is_tall else matrices
        if matrices.device.type == "cpu":
            # Separate memory for each matrix, because the rounding of a product may depend on the alignment.
            singles = (matrix.clone() for matrix in x)
            x = torch.stack([self._iterate(each.div_(each.norm().clamp(min=self.eps))) for each in singles])
        else:
            norms = torch.stack(torch._foreach_norm(list(x))).clamp_(min=self.eps)
            x = self._iterate(x.div_(norms[:, None, None]))
        return x.mT if is_tall else x

    def _iterate(self, x: torch.Tensor) -> torch.Tensor:
        add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
        for a, b, c in self.coefficients:
            gram = x @ x.mT
            factor = add_product(gram, gram, gram, beta=b, alpha=c)
            x = add_product(x, factor, x, beta=a)
        return x


def coefficients(given: str | Sequence[float], num_steps: int) -> tuple[Coefficients, ...]:
    """Return (a, b, c) of each step.

    Args:
        given: a name of ``COEFFICIENT_SETS``, or three numbers that serve every step as in ``torch.optim.Muon``.
        num_steps: 1 <= num_steps < 100.
    """
    if not 1 <= num_steps < 100:
        raise ConfigError(f"Muon(ns_steps={num_steps}) is out of range. fix: give 1 to 99 steps")
    if isinstance(given, str):
        if given not in COEFFICIENT_SETS:
            known = ", ".join(map(repr, COEFFICIENT_SETS))
            raise ConfigError(
                f"Muon(ns_coefficients={given!r}) is unknown. fix: give one of {known}, or three numbers (a, b, c)"
            )
        steps = COEFFICIENT_SETS[given]
        if given in _REPEATS_LAST:
            return (*steps, *(steps[-1],) * num_steps)[:num_steps]
        return (steps * num_steps)[:num_steps]
    numbers = tuple(map(float, given))
    if len(numbers) != 3:
        raise ConfigError(
            f"Muon(ns_coefficients={given!r}) has {len(numbers)} numbers. fix: give three numbers (a, b, c), or the "
            "name of a set"
        )
    return (numbers,) * num_steps


def scale_factor(rows: int, columns: int, mode: str | None) -> float:
    """Return the factor on the learning rate of a matrix.

    ``original`` (the default) and ``shape_scaling``: sqrt(max(1, rows / columns)), Jordan et al. 2024;
    ``match_rms_adamw``: 0.2 sqrt(max(rows, columns)), Moonshot, "Muon is scalable for LLM training" (2025);
    ``spectral``: sqrt(max(rows, columns)); ``unit_rms_norm``: sqrt(rows / columns).
    Names are those of ``torch.optim.Muon`` and Emerging-Optimizers.

    Args:
        rows, columns: of the whole matrix, never of a rank's part.
    """
    factors = {
        "original": math.sqrt(max(1, rows / columns)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "shape_scaling": math.sqrt(max(1, rows / columns)),
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
    }
    mode = "original" if mode is None else mode
    if mode not in factors:
        raise ConfigError(f"Muon(adjust_lr_fn={mode!r}) is unknown. fix: give {', '.join(map(repr, factors))} or None")
    return factors[mode]


def newton_schulz_flops(rows: int, columns: int, num_steps: int = 5) -> int:
    """Return the floating-point operations for one matrix: ``num_steps * (4 m m n + 2 m m m)`` with m <= n."""
    small, large = sorted((rows, columns))
    return num_steps * (4 * small * small * large + 2 * small**3)
