"""The pages: README's numbers equal the results of benches and tests, links work, and tables are complete."""

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
    """Yield the Python files of a folder; those of its subfolders too, unless it is the root."""
    yield from folder.glob("*.py") if folder == ROOT / "." else folder.rglob("*.py")


def measured(ratio: str) -> str:
    """Return the measured value of a ratio in the tables of results."""
    page = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    (value,) = re.findall(rf"^\| {re.escape(ratio)} \|[^|]*\| ([\d.]+)", page, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        ("bytes moved over FSDP2, bf16, 64 ranks", "in forward and backward; bf16, 64 ranks | {} of FSDP2's; "),
        (
            "bytes moved over FSDP2, bf16, reduced in fp32, 64 ranks",
            "{} if gradients are reduced in FP32 | counted on a CPU |",
        ),
        ("backward peak over FSDP2, bf16, 64 ranks", "memory of backward; bf16, 64 ranks | {} of FSDP2's; "),
        (
            "backward peak over FSDP2, bf16, reduced in fp32, 64 ranks",
            "{} if gradients are reduced in FP32 | counted on a CPU |",
        ),
        (
            "processor time over the default's, 4 ranks, fp32 on the wire",
            '(`reduction="invariant"`). A step takes {} of the default\'s\n  processor time',
        ),
        ("save speed over torch DCP (more is better)", "are saved at {} of the speed of PyTorch's own"),
    ],
)
def test_ratios_of_the_readme_equal_the_tables(ratio: str, sentence: str) -> None:
    assert sentence.format(measured(ratio)) in README


def weights_over(peer: str, ranks: int, metric: str) -> str:
    """Return the measured ratio of a weight stream to another way to gather weights."""
    rows = json.loads((ROOT / "benchmarks/results/weights.json").read_text(encoding="utf-8"))["rows"]
    of_peer = [row for row in rows if row["case"].get("peer") == peer and row["case"]["ranks"] == ranks]
    (value,) = [row["median"] for row in of_peer if row["metric"] == f"{metric} over peer's"]
    return f"{value:.2f}"


def test_costs_of_a_weight_stream_equal_the_results() -> None:
    time, memory = (weights_over("FSDP2, full_tensor", 2, metric) for metric in ("wall time", "peak memory"))
    assert f"| {time} and {memory} of FSDP2's `full_tensor()` of each parameter |" in README
    page = (ROOT / "docs/weights_to_inference.md").read_text(encoding="utf-8")
    for peer, name in (
        ("FSDP2, full_tensor", "`full_tensor()` of each parameter, FSDP2"),
        ("FSDP2, full state dict", "`get_model_state_dict(full_state_dict=True)`, FSDP2"),
    ):
        for ranks in (2, 4):
            metrics = ("wall time", "bytes gathered over the weights", "peak memory")
            values = " | ".join(weights_over(peer, ranks, metric) for metric in metrics)
            assert f"| {name} | {ranks} | {values} |" in page


def test_the_backward_peak_of_the_readme_equals_the_tables() -> None:
    ratio = float(measured("backward peak over FSDP2, bf16, reduced in fp32, 64 ranks"))
    assert f"backward peaks {round(100 * (ratio - 1))} %" in " ".join(README.split())


def test_the_padding_of_the_readme_equals_the_page_on_padding() -> None:
    page = (ROOT / "docs/padding.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| deepseek-v3 \| 1024 \|.*$", page, re.MULTILINE)
    _, _, _, rows, _, _, _, chunks, _, _ = row.split("|")
    assert f"{float(rows):.2f} %; FSDP2's dim-0 chunks pad by {chunks.strip()} %" in README


def test_the_number_of_meshes_in_the_readme_equals_the_megatron_page() -> None:
    _, table, _ = (ROOT / "docs/megatron.md").read_text(encoding="utf-8").split("<!-- meshes -->")
    assert f"{table.count('| `')} configurations of tensor" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_of_the_repository_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link, _ in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_are_unique_and_tables_are_complete(page: Path) -> None:
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = code.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table.splitlines()[0]
    broken = re.findall(r"^\|.*\n(?=[^|\n<])", text, re.MULTILINE)
    assert not broken, "put an empty line below each table: Markdown takes the next line as a row"


BLOCKS = [block for page in pages() for block in blocks_of(page)]


def test_code_blocks_name_a_known_language() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "python", *SILENT}


def test_words_of_scenes_occur_on_their_pages() -> None:
    for page, scene in SCENES.items():
        code = "".join(block.code for block in BLOCKS if block.page == page)
        for words, _ in (*scene.shorter, *scene.elsewhere):
            assert words in code, (page, words)


FILES = {path.relative_to(ROOT).as_posix() for folder in (*FOLDERS, "docs", ".") for path in code_of(ROOT / folder)}
# The style guide forbids the first name; pages call their own scripts by the second one; DeepSpeed has the third.
NO_FILES = {"utils.py", "train.py", "zero_to_fp32.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_files_named_on_pages_exist(page: Path) -> None:
    named = {name.replace("../", "") for name in re.findall(r"[\w/*.]*\w\.py\b", page.read_text(encoding="utf-8"))}
    missing = {
        name
        for name in named - NO_FILES
        if not any(fnmatch.fnmatch(file, name) or fnmatch.fnmatch(file, f"*/{name.lstrip('/')}") for file in FILES)
    }
    assert missing == set()


FIRST_GPU_RUN = (ROOT / "docs/first_gpu_run.md").read_text(encoding="utf-8")


def test_pytest_commands_of_the_first_gpu_run_have_gpu_tests() -> None:
    asked = re.findall(r"-m pytest (\S+) -m gpu", FIRST_GPU_RUN)
    assert len(asked) == 2
    for path in (*asked, "tests/functional/test_gpu_ranks.py"):
        assert "pytest.mark.gpu" in (ROOT / path).read_text(encoding="utf-8"), path


def test_the_first_gpu_run_lists_all_switches_with_their_texts() -> None:
    words = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+?) \|$", FIRST_GPU_RUN, re.MULTILINE))
    assert words.keys() == SWITCHES.keys()
    assert all(words[word].startswith(text) for word, text in SWITCHES.items())


def test_the_first_gpu_run_counts_the_tested_settings() -> None:
    (counted,) = re.findall(r"losses of (\d+) ways", FIRST_GPU_RUN)
    assert int(counted) == len(SETTINGS)


def module_of_docs(name: str) -> ModuleType:
    """Import a file of docs/; the folder is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_step_picture_is_current_and_names_existing_functions() -> None:
    step = module_of_docs("step_picture")
    drawn: str = step.step_svg()
    assert step.PICTURE.read_text(encoding="utf-8") == drawn, "run: python docs/step_picture.py"
    module_of_docs("rooms").check_links((ROOT / "docs/how_a_step_works.md").read_text(encoding="utf-8"))


def test_the_schedule_picture_is_what_the_engine_does() -> None:
    schedule = module_of_docs("schedule")
    drawn: str = schedule.schedule_svg(schedule.bars())
    assert schedule.PICTURE.read_text(encoding="utf-8") == drawn, "run: python docs/schedule.py"
