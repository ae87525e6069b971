"""Mutants of source files change the chosen statement and nothing else."""

import ast
from pathlib import Path

import pytest

from tests.mutation.mutants import draw, mutants_of, mutated
from tests.mutation.trial import followers

ROOT = Path(__file__).parents[3]


def mutants_in(body: str) -> dict[str, str]:
    """Return each mutant of a function's body by its description, without the lines common to all."""
    source = f"def f(a, b):\n    {body}\n"
    return {
        mutant.what: ast.unparse(mutated(source, mutant.number)).split("\n    ", 1)[1]
        for mutant in mutants_of(source, "f.py")
    }


@pytest.mark.parametrize(
    ("body", "kind", "wanted"),
    [
        ("a.issue(b)", "drop a call", "pass"),
        ("a.wait(b)", "skip a wait", "pass"),
        ("return 1 if a else b", "flip a condition", "return 1 if not a else b"),
        ("return [x for x in b if x]", "flip a condition", "return [x for x in b if not x]"),
        ("return a and b", "swap and/or", "return a or b"),
        ("return not a", "drop a not", "return not not a"),
        ("return a <= b", "another comparison", "return a < b"),
        ("return a is not b", "another comparison", "return a is b"),
        ("return a not in b", "another comparison", "return a in b"),
        ("return range(a)", "off by one", "return range(a + 1)"),
        ("return b[a:]", "off by one", "return b[a + 1:]"),
    ],
)
def test_a_mistake_is_made_at_one_place(body: str, kind: str, wanted: str) -> None:
    assert mutants_in(body) == {kind: wanted}


def test_every_mutant_of_the_library_is_another_program_and_the_draw_repeats_itself() -> None:
    folders = ("megatron_fsdp/build", "megatron_fsdp/policy")
    drawn = draw(ROOT, folders, count=20, seed=3)
    assert drawn == draw(ROOT, folders, count=20, seed=3) != draw(ROOT, folders, count=20, seed=4)
    assert len({mutant.name for mutant in drawn}) == 20
    for mutant in drawn:
        source = (ROOT / mutant.path).read_text()
        assert ast.dump(mutated(source, mutant.number)) != ast.dump(ast.parse(source))


def test_a_test_that_reads_a_fixture_runs_with_the_test_that_made_it() -> None:
    rows = [{"test": f"f.py::{name}", "ran": ran} for name, ran in (("a", ["x"]), ("b", []), ("c", ["y"]), ("d", []))]
    rows.append({"test": "g.py::e", "ran": []})
    assert followers(rows) == {"f.py::a": ["f.py::b"], "f.py::c": ["f.py::d"]}
