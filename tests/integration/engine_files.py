"""Run files of inference engines and of verl from their packages, without their imports, which need a GPU."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "load", "stand_in"]

FOLDER = Path(__file__).parents[2] / "build" / "inference"


def stand_in(path: str, **members: Any) -> None:
    """Replace a module that a file imports by one with the used names, and add the packages around it."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = []
            sys.modules[name] = module
    vars(sys.modules[path]).update(members)


def load(name: str) -> Any:
    """Import one module from its package's own file; its packages are empty."""
    if name in sys.modules:
        return sys.modules[name]
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    stand_in(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name.replace('.', '/')}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
