"""Switches: what a first run on new hardware may want to leave out, one word each, without a change of code.

``DBUFFER_WITHOUT=triton,priority python ...`` leaves out two; it is read once, when it is first asked for.
"""

from __future__ import annotations

import functools
import os

SWITCHES = {
    "triton": "kernels run as their references in PyTorch",
    "separate-reduce": "reductions run on the communicator that gathers",
    "in-place": "collectives get copies of their inputs instead of slices of their outputs",
    "together": "each group of a unit is gathered and reduced by a collective of its own",
    "priority": "lanes are streams of normal priority",
    "fused-gradients": "linear layers hand weight gradients to autograd",
    "slots": "gathered weights and packed gradients come from the allocator, whatever was asked for",
}


def is_off(name: str) -> bool:
    """Whether a feature is left out.

    Raises:
        ValueError: the variable names something else.
    """
    return name in _named()


@functools.cache
def _named() -> frozenset[str]:
    named = frozenset(word.strip() for word in os.environ.get("DBUFFER_WITHOUT", "").split(",") if word.strip())
    unknown = named - SWITCHES.keys()
    if unknown:
        raise ValueError(
            f"DBUFFER_WITHOUT names {', '.join(sorted(unknown))}; there are {', '.join(SWITCHES)}, with commas between"
        )
    return named
