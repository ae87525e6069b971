"""Whether this package was installed where it works: on a torch that it is tested with, and in files of its own.

NVIDIA's megatron-fsdp on PyPI has the same import name.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

__all__ = ["NEWEST_TORCH", "check_initialiser", "check_neighbour", "check_torch"]

NEWEST_TORCH = (2, 15)
"""The newest torch that the tests run on, whatever its third number."""

_PACKAGE = "megatron_fsdp"
_CURE = (
    "Give each an environment of its own (docs/compatibility.md, Installation): pip uninstall megatron-fsdp "
    "megatron-fsdp-dbuffer, then pip install . in this project's folder"
)


def check_neighbour(initialiser: str | Path) -> None:
    """Warn if NVIDIA's megatron-fsdp is installed into the folder that this package is imported from.

    pip says nothing of it. Here this package came last; removing the other one will remove its ``__init__.py`` too.

    Args:
        initialiser: ``megatron_fsdp/__init__.py``.
    """
    packages = Path(initialiser).parent.parent
    found = next((path for kind in ("dist-info", "egg-info") for path in packages.glob(f"{_PACKAGE}-*.{kind}")), None)
    if found is not None:
        warnings.warn(
            f"{packages} holds NVIDIA's {found.stem} beside this package, megatron-fsdp-dbuffer, and both install "
            f"{_PACKAGE}/__init__.py: this one is in place, NVIDIA's is gone, and uninstalling either breaks the "
            f"other. {_CURE}",
            stacklevel=3,
        )


def check_initialiser() -> None:
    """Refuse to go on where a file of this package is imported, and ``megatron_fsdp/__init__.py`` is not its own.

    Raises:
        ImportError: it is another project's, or is gone, as after the other project was removed.
    """
    package = sys.modules[_PACKAGE]
    if getattr(package, "__distribution__", None) == "megatron-fsdp-dbuffer":
        return
    file = getattr(package, "__file__", None)
    found = f"{file} is not this package's" if file else f"{next(iter(package.__path__))} has no __init__.py"
    raise ImportError(
        f"{found}: NVIDIA's megatron-fsdp, which has the same import name, was installed over megatron-fsdp-dbuffer, "
        f"or removed after it. {_CURE}",
        name=_PACKAGE,
        path=file,
    )


def check_torch(version: str) -> None:
    """Warn on the first rank if torch is newer than what the tests run on.

    Args:
        version: as in ``torch.__version__``.
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) > NEWEST_TORCH and os.environ.get("RANK", "0") == "0":
        newest = ".".join(map(str, NEWEST_TORCH))
        warnings.warn(
            f"torch {version} is newer than {newest}, the newest that megatron_fsdp is tested with, and may do what it "
            f"relies on differently. Install torch <= {newest}, or a newer megatron_fsdp; check first results against "
            "the unsharded model.",
            stacklevel=2,
        )
