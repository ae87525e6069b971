"""Switches: features to disable on new hardware through an environment variable, without a change of code.

``DBUFFER_WITHOUT=triton,priority python ...`` disables two features. The variable is read once, on first use.
"""

from __future__ import annotations

import functools
import os

SWITCHES = {
    "triton": "kernels run as their references in PyTorch",
    "separate-reduce": "reductions run on the communicator of the gathers",
    "in-place": "collectives get copies of their inputs instead of slices of their outputs",
    "together": "each parameter group of a unit is gathered and reduced by a separate collective",
    "priority": "communication streams have normal priority",
    "fused-gradients": "linear layers return weight gradients to autograd",
    "slots": "gathered weights and packed gradients come from the allocator, even if slots were requested",
}


def is_off(name: str) -> bool:
    """Return whether a feature is disabled.

    Raises:
        ValueError: the variable names an unknown feature.
    """
    return name in _named()


@functools.cache
def _named() -> frozenset[str]:
    named = frozenset(word.strip() for word in os.environ.get("DBUFFER_WITHOUT", "").split(",") if word.strip())
    unknown = named - SWITCHES.keys()
    if unknown:
        raise ValueError(
            f"DBUFFER_WITHOUT names {', '.join(sorted(unknown))}, which no feature has. fix: use "
            f"{', '.join(SWITCHES)}, with commas between"
        )
    return named
