"""The rules between files hold in this repository, and the checks of them find what breaks them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness import architecture
from tests.harness.architecture import Source

Rule = Callable[[Sequence[Source]], list[str]]

RULES: tuple[Rule, ...] = (
    architecture.upward_imports,
    architecture.import_cycles,
    architecture.oversized,
    architecture.wide_signatures,
    architecture.vague_files,
    architecture.stray_collectives,
    architecture.stray_streams,
    architecture.stray_megatron_imports,
    architecture.missing_docstrings,
)


@pytest.fixture(scope="module")
def repository() -> list[Source]:
    return architecture.read_sources(Path(__file__).parents[2])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, repository: list[Source]) -> None:
    violations = rule(repository)
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("package", architecture.FLOORS)
def test_every_package_of_the_library_is_checked(package: str, repository: list[Source]) -> None:
    assert package in {source.module for source in repository}


def sources(**texts: str) -> list[Source]:
    """Make sources from texts; ``dbuffer__plan`` is dbuffer/plan.py and ``dbuffer____init__`` its package's file."""
    return [Source(f"{name.replace('__', '/', 1)}.py", text) for name, text in texts.items()]


def places(violations: list[str]) -> list[str]:
    return [violation.partition(": ")[0] for violation in violations]


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron_fsdp",
        "import megatron_fsdp.lanes as lanes",
        "from megatron_fsdp.lanes import Lane",
        "if True:\n    import megatron_fsdp",
        "def late():\n    import megatron_fsdp",
        "import tests.harness",
    ],
)
def test_an_import_from_a_higher_floor_is_found(statement: str) -> None:
    found = architecture.upward_imports(sources(dbuffer__plan=statement, tests__harness="", megatron_fsdp__lanes=""))
    assert [place.partition(":")[0] for place in places(found)] == ["dbuffer/plan.py"]


def test_the_kernels_may_not_import_the_buffers() -> None:
    kernels = [Source("kernels/dbuffer_kernels/cast.py", "import dbuffer")]
    assert places(architecture.upward_imports(kernels)) == ["kernels/dbuffer_kernels/cast.py:1"]


def test_imports_from_lower_floors_and_other_projects_are_allowed() -> None:
    text = "import dbuffer_kernels, torch\nfrom dbuffer.plan import Plan\nfrom . import lanes"
    assert architecture.upward_imports(sources(megatron_fsdp__api=text, megatron_fsdp__lanes="")) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from dbuffer.buffer import DBuffer",
        "from dbuffer import buffer",
        "import dbuffer.buffer",
        "from .buffer import DBuffer",
        "from . import buffer",
        "def late():\n    from dbuffer import buffer",
    ],
)
def test_two_files_that_import_each_other_are_found(statement: str) -> None:
    found = architecture.import_cycles(sources(dbuffer__buffer="import dbuffer.plan", dbuffer__plan=statement))
    assert places(found) == ["dbuffer.buffer -> dbuffer.plan -> dbuffer.buffer"]


def test_a_file_that_imports_its_own_package_is_found() -> None:
    texts = sources(dbuffer____init__="from dbuffer.plan import Plan", dbuffer__plan="from dbuffer import Plan")
    assert places(architecture.import_cycles(texts)) == ["dbuffer -> dbuffer.plan -> dbuffer"]


def test_files_that_share_a_lower_file_are_no_cycle() -> None:
    texts = sources(
        dbuffer____init__="from .buffer import DBuffer\nfrom .plan import Plan",
        dbuffer__buffer="from dbuffer.plan import Plan\nfrom dbuffer.errors import LayoutError",
        dbuffer__plan="from dbuffer.errors import LayoutError",
        dbuffer__errors="",
    )
    assert architecture.import_cycles(texts) == []


@pytest.mark.parametrize(("num_lines", "found"), [(560, []), (561, ["tests/test_plan.py"])])
def test_a_file_is_too_long_from_561_lines(num_lines: int, found: list[str]) -> None:
    assert places(architecture.oversized(sources(tests__test_plan="pass\n" * num_lines))) == found


@pytest.mark.parametrize(("num_lines", "found"), [(60, []), (61, ["dbuffer/plan.py:2"])])
def test_a_method_is_too_long_from_61_lines_without_its_docstring(num_lines: int, found: list[str]) -> None:
    docstring = '        """Plan.\n\n        More.\n        """\n'
    body = "        pass\n" * (num_lines - 1)
    text = f"class Plan:\n    def make(self):\n{docstring}{body}"
    assert places(architecture.oversized(sources(dbuffer__plan=text))) == found


@pytest.mark.parametrize(("arguments", "found"), [("a, b, c, d, e, *, f, g", []), ("a, b, c, d, e, *, f, g, h", [2])])
def test_a_method_takes_too_much_from_eight_arguments_besides_self(arguments: str, found: list[int]) -> None:
    text = f"class Plan:\n    def make(self, {arguments}): ..."
    assert places(architecture.wide_signatures(sources(dbuffer__plan=text))) == [f"dbuffer/plan.py:{n}" for n in found]


@pytest.mark.parametrize("name", ["def fully_shard({})", "def cast_kernel({}, BLOCK: tl.constexpr)"])
def test_signatures_that_users_know_and_kernels_may_be_wide(name: str) -> None:
    text = f"{name.format('a, b, c, d, e, f, g, h')}: ..."
    assert architecture.wide_signatures(sources(megatron_fsdp__api=text)) == []


def test_a_file_called_utils_is_found() -> None:
    assert places(architecture.vague_files(sources(benchmarks__utils=""))) == ["benchmarks/utils.py"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch.distributed as dist\ndist.broadcast(x, 0)",
        "from torch import distributed\ndistributed.barrier()",
        "\nfrom torch.distributed import reduce_scatter",
        "\ngroup.all_gather_single(x, y)",
        "\nfind(dist, 'all_gather_into_tensor')",
    ],
)
def test_a_collective_outside_collectives_is_found(text: str) -> None:
    found = architecture.stray_collectives(sources(dbuffer__buffer=text, dbuffer__collectives=text))
    assert set(places(found)) == {"dbuffer/buffer.py:2"}


def test_the_engines_own_collectives_may_share_a_name_with_torchs() -> None:
    text = "from dbuffer import collectives\ncollectives.reduce_scatter(x)\nbuffer.scatter('dp')"
    assert architecture.stray_collectives(sources(dbuffer__buffer=text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.cuda.Stream()",
        "from torch import cuda\ncuda.current_stream()",
        "\nfrom torch.cuda import Event",
        "\ntensor.record_stream(gather)",
    ],
)
def test_a_stream_outside_lanes_is_found(text: str) -> None:
    found = architecture.stray_streams(sources(megatron_fsdp__schedule=text, megatron_fsdp__lanes=text))
    assert set(places(found)) == {"megatron_fsdp/schedule.py:2"}


def test_megatron_is_imported_by_its_adapter_alone_and_late() -> None:
    late = "def adapt():\n    from megatron.core import parallel_state"
    early = "from megatron.core import parallel_state"
    assert architecture.stray_megatron_imports(sources(megatron_fsdp__mcore_adapter=late)) == []
    assert places(
        architecture.stray_megatron_imports(sources(megatron_fsdp__mcore_adapter=early, megatron_fsdp__api=late))
    ) == ["megatron_fsdp/mcore_adapter.py:1", "megatron_fsdp/api.py:2"]


def test_what_is_public_and_undocumented_is_found() -> None:
    text = '''"""Plans."""
def plan(): ...
class Plan:
    """A plan."""
    def rows(self): ...
    def _offset(self): ...
    @offset.setter
    def offset(self, value): ...
if TYPE_CHECKING:
    class Shape: ...
def _measure(): ...
class _Draft:
    def rows(self): ...
'''
    found = architecture.missing_docstrings(sources(dbuffer__plan=text))
    assert sorted(places(found)) == ["dbuffer/plan.py:10", "dbuffer/plan.py:2", "dbuffer/plan.py:5"]


def test_a_module_without_docstring_is_found() -> None:
    assert places(architecture.missing_docstrings(sources(dbuffer__plan=""))) == ["dbuffer/plan.py:1"]
