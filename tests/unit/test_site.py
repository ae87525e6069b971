"""The site of the documentation: each page has a place, and each public name has an entry."""

import json

import pytest

from tests.unit.test_pages import ROOT, module_of_docs

SITE = module_of_docs("build_site")
NAMES = [f"{package}.{name}" for package, names in SITE.public_names().items() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_has_one_entry_for_every_public_name(name: str) -> None:
    text = "".join(SITE.reference_pages().values()) + "\n"
    assert text.count(f"::: {name}\n") + text.count(f"{{ #{name} }}\n") == 1


def test_the_reference_groups_only_public_names() -> None:
    for package, groups in SITE.REFERENCE.items():
        assert {name for group in groups.values() for name in group.split()} <= set(SITE.public_names()[package])


def test_every_page_has_one_place_in_the_navigation() -> None:
    pages = [str(path.relative_to(ROOT)) for path in SITE.source_pages()]
    pages += ["docs/quickstart.md", *SITE.reference_pages()]
    placed = [path for section in SITE.navigation(pages) for paths in section.values() for path in paths]
    assert sorted(placed) == sorted(pages)
    assert [title for section in SITE.navigation(pages) for title in section] == [
        "Start", "Guides", "Concepts", "Reference", "Design",
    ]  # fmt: skip


def test_a_page_without_a_place_is_named() -> None:
    with pytest.raises(LookupError, match=r"add them to NAVIGATION in docs/build_site.py: docs/new\.md"):
        SITE.navigation(["docs/new.md"])


def test_the_page_of_the_notebook_shows_its_code_output_and_picture() -> None:
    notebook = json.loads((ROOT / SITE.NOTEBOOK).read_text(encoding="utf-8"))
    page = SITE.notebook_page(notebook)
    assert "```python\nimport torch" in page
    assert "step 199  loss" in page
    assert "](data:image/png;base64," in page
