"""The numbers of the README are those of the pages that benches and tests write, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def measured(ratio: str) -> str:
    """Return what docs/performance.md says of a ratio."""
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    (value,) = re.findall(rf"^\| {re.escape(ratio)} \|[^|]*\| ([\d.]+)", page, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        ("2 x 64 tokens, fp32, over FSDP2, processor time", "| {} of FSDP2's | `python -m benchmarks step` |"),
        ("bytes moved over FSDP2, bf16, 64 ranks", "| {} and "),
        ("backward peak over FSDP2, bf16, 64 ranks", " and {} of FSDP2's | `python -m benchmarks memory` |"),
        ("AdamW(foreach=True), step and zero_grad, over FSDP2's", "| {} of that over FSDP2's |"),
        ("save speed over torch DCP (more is better)", "are saved at {} of the speed of PyTorch's own"),
    ],
)
def test_a_ratio_is_that_of_the_performance_page(ratio: str, sentence: str) -> None:
    assert sentence.format(measured(ratio)) in README


def test_what_backward_takes_more_is_that_of_the_performance_page() -> None:
    ratio = float(measured("backward peak over FSDP2, bf16, reduced in fp32, 64 ranks"))
    assert f"backward peaks {round(100 * (ratio - 1))} %" in " ".join(README.split())


def test_the_padding_is_that_of_the_page_of_padding() -> None:
    page = (ROOT / "docs/padding.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| deepseek-v3 \| 1024 \|.*$", page, re.MULTILINE)
    _, _, _, rows, _, _, _, _, chunks, _, _ = row.split("|")
    assert f"{float(rows):.2f} %; a dim-0 chunk for each rank pads by {chunks.strip()} %" in README


def test_the_meshes_are_those_of_the_page_of_megatron() -> None:
    _, table, _ = (ROOT / "docs/megatron.md").read_text(encoding="utf-8").split("<!-- meshes -->")
    assert f"| {table.count('| `')} | `make test-integrations` |" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_of_the_repository_leads_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link, _ in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
