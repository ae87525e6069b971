"""Translation between a model's parameter names and those of another ecosystem, such as Hugging Face's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.errors import ConfigError

__all__ = ["NameMap"]


@dataclass(frozen=True, slots=True)
class NameMap:
    """Patterns of names here and the names there.

    Attributes:
        patterns: here to there; "*" stands for the same run of characters without dots on both sides, in order:
            ``{"blocks.*.query.weight": "model.layers.*.self_attn.q_proj.weight"}``. The first that matches counts; a
            name that none matches stays as it is.
    """

    patterns: Mapping[str, str]

    def __post_init__(self) -> None:
        for here, there in self.patterns.items():
            if here.count("*") != there.count("*"):
                raise ConfigError(
                    f"name map: {here!r} and {there!r} have different numbers of *; wanted as many in both"
                )

    @classmethod
    def from_json(cls, path: Path) -> NameMap:
        """Read the patterns from a JSON file that holds one object of strings.

        Raises:
            ConfigError: the file cannot be read or holds something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"name map {path} cannot be read: {error}") from None
        if not isinstance(content, dict) or not all(isinstance(there, str) for there in content.values()):
            raise ConfigError(f'name map {path} holds no object of strings; wanted {{"name here": "name there"}}')
        return cls(content)

    def inverse(self) -> NameMap:
        """Return the map in the other direction."""
        return NameMap({there: here for here, there in self.patterns.items()})

    def translate(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name there of each name here.

        Raises:
            ConfigError: two names get one.
        """
        rules = [
            (re.compile(re.escape(here).replace(r"\*", "([^.]*)")), there) for here, there in self.patterns.items()
        ]
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            found[name] = _translated(name, rules)
            other = taken.setdefault(found[name], name)
            if other != name:
                raise ConfigError(f"name map: {other!r} and {name!r} both become {found[name]!r}; make them distinct")
        return found


def _translated(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, there in rules:
        match = pattern.fullmatch(name)
        if match is not None:
            literals = there.split("*")
            return literals[0] + "".join(map("".join, zip(match.groups(), literals[1:], strict=True)))
    return name
