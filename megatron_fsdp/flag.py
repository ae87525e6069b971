"""Flag: what one row of the table of Megatron-LM's flags says."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Effect", "Flag", "Value", "attribute"]

Value = bool | int | float | str | tuple[str, ...] | None


class Effect(enum.Enum):
    """What a flag does here. All but ACTS are accepted and do nothing; the value says why."""

    ACTS = "acted on"
    ALWAYS = "always so"
    HARDWARE = "needs hardware that is not used"
    PACKAGE = "needs a package that is not used"
    NOTHING = "nothing to change"
    LATER = "not supported yet"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: as on the command line. A bool flag that is True by default and names another ``dest`` switches that off.
        default: Megatron-LM's.
        effect: whether it does anything here, and if not, why.
        meaning: what it means in Megatron-LM.
        here: what happens here.
        choices: legal values; empty for any.
        kind: type of the value; a tuple takes several words.
        dest: attribute of the namespace, and field of ``FsdpConfig``.
    """

    name: str
    default: Value
    effect: Effect
    meaning: str
    here: str
    choices: tuple[str | int, ...] = ()
    kind: type = bool
    dest: str = ""

    def __post_init__(self) -> None:
        if not self.dest:
            object.__setattr__(self, "dest", attribute(self.name))

    @property
    def is_off_switch(self) -> bool:
        """Whether giving the flag makes its attribute False."""
        return self.kind is bool and self.default is True and self.dest != attribute(self.name)

    @property
    def is_silent(self) -> bool:
        """Whether giving the flag changes nothing here."""
        return self.effect is not Effect.ACTS

    def spell(self, value: object) -> str:
        """Return how the command line says ``value``: ``--bf16``, ``--optimizer sgd``, ``--no-align-param-gather``."""
        if self.kind is bool:
            is_pair = self.default is True and not self.is_off_switch
            return self.name.replace("--", "--no-", 1) if is_pair and value is False else self.name
        return f"{self.name} {' '.join(value) if isinstance(value, tuple) else value}"


def attribute(name: str) -> str:
    """Return the attribute that argparse makes of a flag's name."""
    return name.removeprefix("--").replace("-", "_")
