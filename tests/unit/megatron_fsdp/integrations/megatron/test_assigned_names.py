"""Names of loaded modules change to another object and back, and nothing else changes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from megatron_fsdp.integrations.megatron.adapter import assign_everywhere


@dataclass
class Scene:
    """Two loaded modules; the second imported a class of the first by another name. ``wanted`` replaces the class."""

    found: type
    wanted: type
    first: ModuleType
    second: Any


@pytest.fixture
def scene() -> Iterator[Scene]:
    found = type("Adapter", (), {})
    made = Scene(found, type("Ours", (found,), {}), ModuleType("a_package_made_here"), ModuleType("a_user_of_it"))
    vars(made.first)["Adapter"] = found
    vars(made.second).update(renamed=found, kept=(found,))
    for module in (made.first, made.second):
        sys.modules[module.__name__] = module
    yield made
    for module in (made.first, made.second):
        del sys.modules[module.__name__]


def test_every_name_that_is_bound_to_the_object_changes_and_is_reported(scene: Scene) -> None:
    assert assign_everywhere(scene.found, scene.wanted) == ["a_package_made_here.Adapter", "a_user_of_it.renamed"]
    assert (scene.first.Adapter, scene.second.renamed) == (scene.wanted, scene.wanted)
    assert scene.second.kept == (scene.found,)


def test_the_way_back_reaches_names_that_were_bound_in_between(scene: Scene) -> None:
    assign_everywhere(scene.found, scene.wanted)
    scene.second.later = scene.first.Adapter
    assign_everywhere(scene.wanted, scene.found)
    assert {scene.first.Adapter, scene.second.renamed, scene.second.later} == {scene.found}


def test_entries_of_sys_modules_that_are_no_modules_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "no_module_at_all", object())
    monkeypatch.setitem(sys.modules, "forbidden", None)
    assert assign_everywhere(object(), None) == []
