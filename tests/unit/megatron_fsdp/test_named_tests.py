"""The test that a row of a documented table names exists, and is about the flag or key of that row."""

import ast
import functools
from pathlib import Path

import pytest

from megatron_fsdp.arguments import FLAGS, Flag
from megatron_fsdp.flag import NOTICE_TEST
from megatron_fsdp.hf_keys import KEYS, Key

TESTS = Path(__file__).parents[2]
# These ask every flag, or key, that does nothing here: they are parametrized with the table itself.
OF_ALL = {NOTICE_TEST, "test_hf_config.py::test_a_silent_key_is_noticed"}


@functools.cache
def functions_of(file: str) -> dict[str, str]:
    """Return the source of each test of a file, with that of the constants of the module that it uses."""
    (path,) = TESTS.rglob(file)
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    constants: dict[str, str] = {}
    for node in module.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    constants[name.id] = ast.get_source_segment(text, node.value) or ""
    found = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            parts = [ast.get_source_segment(text, part) or "" for part in (*node.decorator_list, node)]
            used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            found[node.name] = "\n".join([*parts, *(constants[name] for name in sorted(used & constants.keys()))])
    return found


def source(test: str) -> str:
    file, _, name = test.partition("::")
    assert name in functions_of(file), f"there is no {name} in {file}"
    return functions_of(file)[name]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_s_test_is_about_it(flag: Flag) -> None:
    assert (flag.test == NOTICE_TEST) is flag.is_silent
    text = source(flag.test)
    if flag.test not in OF_ALL:
        assert flag.name in text or flag.dest in text


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_s_test_is_about_it(key: Key) -> None:
    text = source(key.test)
    if key.test not in OF_ALL:
        assert any(spelling in text for spelling in key.spellings)


def test_the_notice_test_asks_every_flag_that_does_nothing() -> None:
    assert "[flag for flag in FLAGS if flag.is_silent]" in source(NOTICE_TEST)
