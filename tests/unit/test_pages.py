"""The pages: numbers of the README are those that benches and tests write, links lead somewhere, tables are whole."""

import fnmatch
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dbuffer_kernels.switches import SWITCHES
from tests.docs.blocks import SILENT, blocks_of, pages
from tests.docs.scenes import SCENES
from tests.functional.test_gpu_ranks import SETTINGS
from tests.harness.architecture import FOLDERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
PAGES = [*(ROOT / name for name in FIRST_PAGES), *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder, and below it unless it is the root."""
    yield from folder.glob("*.py") if folder == ROOT / "." else folder.rglob("*.py")


def measured(ratio: str) -> str:
    """Return the value of a ratio in the tables of results."""
    page = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    (value,) = re.findall(rf"^\| {re.escape(ratio)} \|[^|]*\| ([\d.]+)", page, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        ("bytes moved over FSDP2, bf16, 64 ranks", "bf16, 64 ranks | {} of FSDP2's |"),
        ("backward peak over FSDP2, bf16, 64 ranks", "in the same step | {} of FSDP2's |"),
        ("save speed over torch DCP (more is better)", "are saved at {} of the speed of PyTorch's own"),
    ],
)
def test_a_ratio_of_the_readme_is_that_of_the_tables(ratio: str, sentence: str) -> None:
    assert sentence.format(measured(ratio)) in README


def weights_over(peer: str, ranks: int, metric: str) -> str:
    """Return a ratio of the stream of weights to another way to get them."""
    rows = json.loads((ROOT / "benchmarks/results/weights.json").read_text(encoding="utf-8"))["rows"]
    of_peer = [row for row in rows if row["case"].get("peer") == peer and row["case"]["ranks"] == ranks]
    (value,) = [row["median"] for row in of_peer if row["metric"] == f"{metric} over peer's"]
    return f"{value:.2f}"


def test_what_a_stream_of_weights_costs_is_what_was_measured() -> None:
    time, memory = (weights_over("FSDP2, full_tensor", 2, metric) for metric in ("wall time", "peak memory"))
    assert f"| {time} of `full_tensor()` of each parameter, at {memory} of its memory |" in README
    page = (ROOT / "docs/weights_to_inference.md").read_text(encoding="utf-8")
    for peer, name in (
        ("FSDP2, full_tensor", "`full_tensor()` of each parameter, FSDP2"),
        ("FSDP2, full state dict", "`get_model_state_dict(full_state_dict=True)`, FSDP2"),
    ):
        for ranks in (2, 4):
            metrics = ("wall time", "bytes gathered over the weights", "peak memory")
            values = " | ".join(weights_over(peer, ranks, metric) for metric in metrics)
            assert f"| {name} | {ranks} | {values} |" in page


def test_the_peak_of_backward_is_that_of_the_tables() -> None:
    ratio = float(measured("backward peak over FSDP2, bf16, reduced in fp32, 64 ranks"))
    assert f"backward peaks {round(100 * (ratio - 1))} %" in " ".join(README.split())


def test_the_padding_is_that_of_the_page_of_padding() -> None:
    page = (ROOT / "docs/padding.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| deepseek-v3 \| 1024 \|.*$", page, re.MULTILINE)
    _, _, _, rows, _, _, _, chunks, _, _ = row.split("|")
    assert f"{float(rows):.2f} %; a dim-0 chunk for each rank pads by {chunks.strip()} %" in README


def test_the_meshes_are_those_of_the_page_of_megatron() -> None:
    _, table, _ = (ROOT / "docs/megatron.md").read_text(encoding="utf-8").split("<!-- meshes -->")
    assert f"without TransformerEngine | {table.count('| `')} | " in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_of_the_repository_leads_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link, _ in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_each_thing_once_and_its_tables_are_whole(page: Path) -> None:
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = code.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table.splitlines()[0]
    broken = re.findall(r"^\|.*\n(?=[^|\n<])", text, re.MULTILINE)
    assert not broken, "a line that follows a table without an empty one between is a row of it"


BLOCKS = [block for page in pages() for block in blocks_of(page)]


def test_every_block_of_code_says_its_language() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "python", *SILENT}


def test_what_is_shortened_or_left_out_when_pages_are_run_is_on_its_page() -> None:
    for page, scene in SCENES.items():
        code = "".join(block.code for block in BLOCKS if block.page == page)
        for words, _ in (*scene.shorter, *scene.elsewhere):
            assert words in code, (page, words)


FILES = {path.relative_to(ROOT).as_posix() for folder in (*FOLDERS, "docs", ".") for path in code_of(ROOT / folder)}
# A name that the style forbids, and one that a page gives its own script.
NO_FILES = {"utils.py", "train.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_code_that_a_page_names_is_there(page: Path) -> None:
    named = {name.replace("../", "") for name in re.findall(r"[\w/*.]*\w\.py\b", page.read_text(encoding="utf-8"))}
    missing = {
        name
        for name in named - NO_FILES
        if not any(fnmatch.fnmatch(file, name) or fnmatch.fnmatch(file, f"*/{name.lstrip('/')}") for file in FILES)
    }
    assert missing == set()


FIRST_GPU_RUN = (ROOT / "docs/first_gpu_run.md").read_text(encoding="utf-8")


def test_what_the_first_run_on_a_gpu_asks_pytest_for_has_tests_that_need_one() -> None:
    asked = re.findall(r"-m pytest (\S+) -m gpu", FIRST_GPU_RUN)
    assert len(asked) == 2
    for path in (*asked, "tests/functional/test_gpu_ranks.py"):
        assert "pytest.mark.gpu" in (ROOT / path).read_text(encoding="utf-8"), path


def test_the_words_of_the_first_run_are_those_there_are_and_say_the_same() -> None:
    words = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+?) \|$", FIRST_GPU_RUN, re.MULTILINE))
    assert words.keys() == SWITCHES.keys()
    assert all(words[word].startswith(text) for word, text in SWITCHES.items())


def test_the_first_run_counts_the_ways_to_train_that_are_tested() -> None:
    (counted,) = re.findall(r"losses of (\d+) ways", FIRST_GPU_RUN)
    assert int(counted) == len(SETTINGS)


def module_of_docs(name: str) -> ModuleType:
    """Import a file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_a_unit_in_a_step_names_functions_that_exist() -> None:
    step = module_of_docs("step_picture")
    drawn: str = step.step_svg()
    assert step.PICTURE.read_text(encoding="utf-8") == drawn, "run: python docs/step_picture.py"
    module_of_docs("rooms").check_links((ROOT / "docs/how_a_step_works.md").read_text(encoding="utf-8"))


def test_the_picture_of_the_schedule_is_what_the_engine_does() -> None:
    schedule = module_of_docs("schedule")
    drawn: str = schedule.schedule_svg(schedule.bars())
    assert schedule.PICTURE.read_text(encoding="utf-8") == drawn, "run: python docs/schedule.py"
