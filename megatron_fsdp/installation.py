"""Check the installation: a torch version that the tests run on, and no conflict with NVIDIA's megatron-fsdp.

NVIDIA's package on PyPI has the same import name.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

__all__ = ["NEWEST_TORCH", "check_initialiser", "check_neighbour", "check_torch"]

NEWEST_TORCH = (2, 15)
"""The newest torch that the tests run on: major and minor version."""

_PACKAGE = "megatron_fsdp"
_FIX = (
    "fix: pip uninstall megatron-fsdp megatron-fsdp-dbuffer, then pip install . in this project's folder; use another "
    "environment for NVIDIA's package (docs/compatibility.md, Installation)"
)


def check_neighbour(initialiser: str | Path) -> None:
    """Warn if NVIDIA's megatron-fsdp is installed into the folder that this package is imported from.

    pip reports no conflict. This check finds the case that this package was installed last: uninstalling NVIDIA's
    package would then remove this package's ``__init__.py``.

    Args:
        initialiser: ``megatron_fsdp/__init__.py``.
    """
    packages = Path(initialiser).parent.parent
    found = next((path for kind in ("dist-info", "egg-info") for path in packages.glob(f"{_PACKAGE}-*.{kind}")), None)
    if found is not None:
        warnings.warn(
            f"{packages} contains both NVIDIA's {found.stem} and this package, megatron-fsdp-dbuffer. Both install "
            f"{_PACKAGE}/__init__.py; this package's has overwritten NVIDIA's, and uninstalling either package breaks "
            f"the other. {_FIX}",
            stacklevel=3,
        )


def check_initialiser() -> None:
    """Check that ``megatron_fsdp/__init__.py`` belongs to this package.

    Raises:
        ImportError: NVIDIA's package has overwritten the file, or has removed it while being uninstalled.
    """
    package = sys.modules[_PACKAGE]
    if getattr(package, "__distribution__", None) == "megatron-fsdp-dbuffer":
        return
    file = getattr(package, "__file__", None)
    found = f"{file} is not this package's" if file else f"{next(iter(package.__path__))} has no __init__.py"
    raise ImportError(
        f"{found}: NVIDIA's megatron-fsdp has the same import name, and was installed over megatron-fsdp-dbuffer or "
        f"uninstalled after it. {_FIX}",
        name=_PACKAGE,
        path=file,
    )


def check_torch(version: str) -> None:
    """Warn on rank 0 if torch is newer than ``NEWEST_TORCH``.

    Args:
        version: ``torch.__version__``.
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) > NEWEST_TORCH and os.environ.get("RANK", "0") == "0":
        newest = ".".join(map(str, NEWEST_TORCH))
        warnings.warn(
            f"torch {version} is newer than {newest}, the newest version that megatron_fsdp is tested with. Compare "
            f"first results with the unsharded model. fix: install torch <= {newest}, or a newer megatron_fsdp",
            stacklevel=2,
        )
