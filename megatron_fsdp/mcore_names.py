"""Another object in the place of a package's own, by assignment: wherever a module that is loaded holds it by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["assign_everywhere"]


def assign_everywhere(found: Any, wanted: Any) -> list[str]:
    """Assign ``wanted`` to every name of a loaded module that is bound to ``found``; no file is touched.

    Names that modules bind later are those of the modules they import from, so they get ``wanted`` too. What was put
    into a class, a function's default or a container keeps ``found``. The way back is the same call the other way
    round.

    Returns:
        The names, as "module.name", sorted.
    """
    loaded: Mapping[str, object] = dict(sys.modules)
    places = [
        (module, name)
        for module in loaded.values()
        # A module may have put another object in its place.
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is found
    ]
    for module, name in places:
        setattr(module, name, wanted)
    return sorted(f"{module.__name__}.{name}" for module, name in places)
