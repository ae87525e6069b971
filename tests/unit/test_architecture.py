"""The rules between files hold in this repository, and the checks of them find what breaks them."""

import ast
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

import megatron_fsdp
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
    architecture.processes_in_unit_tests,
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


def test_every_folder_of_the_library_is_a_package_that_an_installation_finds(repository: list[Source]) -> None:
    paths = {source.path for source in architecture.library(repository)}
    assert {f"{path.rpartition('/')[0]}/__init__.py" for path in paths} <= paths


def sources(**texts: str) -> list[Source]:
    """Make sources from texts; ``dbuffer__buffer`` is dbuffer/buffer.py, ``dbuffer____init__`` its package's file."""
    paths = {name: "/__init__".join(part.replace("__", "/") for part in name.split("____init__")) for name in texts}
    return [Source(f"{paths[name]}.py", text) for name, text in texts.items()]


def places(violations: list[str]) -> list[str]:
    return [violation.partition(": ")[0] for violation in violations]


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron_fsdp",
        "import megatron_fsdp.runtime.step.lanes as lanes",
        "from megatron_fsdp.runtime.step.lanes import Lane",
        "if True:\n    import megatron_fsdp",
        "def late():\n    import megatron_fsdp",
        "import tests.harness",
    ],
)
def test_an_import_from_a_higher_floor_is_found(statement: str) -> None:
    found = architecture.upward_imports(
        sources(dbuffer__plan=statement, tests__harness="", megatron_fsdp__runtime__step__lanes="")
    )
    assert [place.partition(":")[0] for place in places(found)] == ["dbuffer/plan.py"]


def test_the_kernels_may_not_import_the_buffers() -> None:
    kernels = [Source("kernels/dbuffer_kernels/cast.py", "import dbuffer")]
    assert places(architecture.upward_imports(kernels)) == ["kernels/dbuffer_kernels/cast.py:1"]


def test_imports_from_lower_floors_and_other_projects_are_allowed() -> None:
    text = "import dbuffer_kernels, torch\nfrom dbuffer.plan import Plan\nfrom . import lanes"
    found = sources(megatron_fsdp__runtime__step__schedule=text, megatron_fsdp__runtime__step__lanes="")
    assert architecture.upward_imports(found) == []


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


def test_what_is_imported_for_annotations_alone_makes_no_cycle_within_a_room_but_in_the_runtime() -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_fsdp.{} import Name"
    texts = sources(
        megatron_fsdp__runtime__step__unit=guarded.format("runtime.step.schedule"),
        megatron_fsdp__runtime__step__schedule="import megatron_fsdp.runtime.step.unit",
        megatron_fsdp__policy__mesh=guarded.format("policy.strategy"),
        megatron_fsdp__policy__strategy="import megatron_fsdp.policy.mesh",
        megatron_fsdp__optim__adamw=guarded.format("checkpoint.api"),
        megatron_fsdp__checkpoint__api="import megatron_fsdp.optim.adamw",
    )
    assert places(architecture.import_cycles(texts)) == [
        "megatron_fsdp.checkpoint.api -> megatron_fsdp.optim.adamw -> megatron_fsdp.checkpoint.api",
        "megatron_fsdp.runtime.step.schedule -> megatron_fsdp.runtime.step.unit -> megatron_fsdp.runtime.step.schedule",
    ]


def test_a_room_imports_neither_the_rooms_above_nor_those_beside_it() -> None:
    texts = sources(
        megatron_fsdp__runtime__step__unit="from megatron_fsdp.api import fully_shard",
        megatron_fsdp__optim__adamw="from megatron_fsdp.checkpoint.api import a\nimport megatron_fsdp.policy",
        megatron_fsdp__api="",
        megatron_fsdp__checkpoint__api="",
    )
    assert places(architecture.upward_imports(texts)) == [
        "megatron_fsdp/runtime/step/unit.py:1",
        "megatron_fsdp/optim/adamw.py:1",
    ]


def test_files_that_share_a_lower_file_are_no_cycle() -> None:
    texts = sources(
        dbuffer____init__="from .buffer import DBuffer\nfrom .plan import Plan",
        dbuffer__buffer="from dbuffer.plan import Plan\nfrom dbuffer.errors import LayoutError",
        dbuffer__plan="from dbuffer.errors import LayoutError",
        dbuffer__errors="",
    )
    assert architecture.import_cycles(texts) == []


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
    found = architecture.stray_streams(
        sources(megatron_fsdp__runtime__step__schedule=text, megatron_fsdp__runtime__step__lanes=text)
    )
    assert set(places(found)) == {"megatron_fsdp/runtime/step/schedule.py:2"}


def test_megatron_is_imported_by_its_adapter_alone_and_late() -> None:
    late = "def adapt():\n    from megatron.core import parallel_state"
    early = "from megatron.core import parallel_state"
    assert architecture.stray_megatron_imports(sources(megatron_fsdp__integrations__megatron__adapter=late)) == []
    both = sources(megatron_fsdp__integrations__megatron__adapter=early, megatron_fsdp__api=late)
    found = places(architecture.stray_megatron_imports(both))
    assert found == ["megatron_fsdp/integrations/megatron/adapter.py:1", "megatron_fsdp/api.py:2"]


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


@pytest.mark.parametrize(
    "text",
    [
        "from tests.harness import run_ranks\nrun_ranks(2, train)",
        "import subprocess\nsubprocess.run(['true'])",
        "import subprocess as processes\nprocesses.run(['true'])",
        "import os\nos.fork()",
    ],
)
def test_a_unit_test_that_starts_a_process_is_found(text: str) -> None:
    found = architecture.processes_in_unit_tests(sources(tests__unit__test_a=text, tests__functional__test_a=text))
    assert "tests/unit/test_a.py:2" in places(found)
    assert {place.partition(":")[0] for place in places(found)} == {"tests/unit/test_a.py"}


# ---------------------------------------------------------------- the pages, and what users import


def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", Path(__file__).parents[2] / "docs" / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_rooms_is_drawn_from_the_imports() -> None:
    module = rooms()
    drawn: str = module.rooms_svg()
    assert (module.ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8") == drawn, "run: python docs/rooms.py"


def test_the_links_in_the_story_of_a_step_lead_to_files_that_define_their_functions() -> None:
    module = rooms()
    page = (module.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    module.check_links(page)
    assert page.count(".py)") > 10
    with pytest.raises(LookupError, match="'nowhere'"):
        module.check_links("[nowhere](../dbuffer/buffer.py)")


@pytest.mark.parametrize("package", ["dbuffer", "megatron_fsdp"])
def test_a_package_exports_what_its_all_says(package: str) -> None:
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not name.startswith("__")]
    assert len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)
    foreign = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in names
        and name not in NOT_LISTED
        and not isinstance(value, ModuleType)
        and name not in ("Any", "TYPE_CHECKING")
    }
    assert not foreign, "imported into the package and not exported"


# What users import from, beside the two packages; all other paths are the code's own.
PUBLIC_MODULES = (
    "megatron_fsdp.huggingface",
    "megatron_fsdp.megatron",
    "megatron_fsdp.muon",
)
# There in megatron_fsdp and not in its list: another name of FSDPModule, what its ``parameter_groups`` are made of, and
# Megatron-FSDP's call, which megatron_fsdp.megatron lists.
NOT_LISTED = {"FsdpModule", "ParameterGroup", "fully_shard_model"}


def test_every_public_name_is_spelled_once() -> None:
    modules = [importlib.import_module(path) for path in ("megatron_fsdp", *PUBLIC_MODULES)]
    # Made of a class of megatron.core's when it is first asked for.
    late = {"ShardedDataParallel"}
    places: dict[int, list[str]] = {}
    for module in modules:
        assert sorted(module.__all__) == list(module.__all__)
        for name in {*module.__all__} - late:
            places.setdefault(id(getattr(module, name)), []).append(name)
    assert [names for names in places.values() if len(names) > 1] == []
    assert megatron_fsdp.FsdpModule is megatron_fsdp.FSDPModule


def test_no_module_besides_the_public_ones_only_hands_on_names(repository: list[Source]) -> None:
    found = [
        source.module
        for source in architecture.library(repository)
        if source.package == "megatron_fsdp"
        and any(isinstance(node, ast.ImportFrom) for node in source.tree.body)
        and not any(isinstance(node, ast.ClassDef | ast.FunctionDef | ast.If) for node in source.tree.body)
        and not any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "__all__" for node in source.tree.body
        )
    ]
    assert set(found) <= set(PUBLIC_MODULES)


def test_names_for_type_checkers_are_those_that_are_imported_when_asked_for() -> None:
    tree = ast.parse(Path(megatron_fsdp.__file__).read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    stated = {
        alias.asname or alias.name: f"{node.module}".removeprefix("megatron_fsdp.")
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stated == megatron_fsdp._HOME_OF
    assert {*stated} - {*megatron_fsdp.__all__} == NOT_LISTED
    assert {*megatron_fsdp.__all__} <= {*stated}
    assert set(megatron_fsdp.__all__) <= set(dir(megatron_fsdp))
    with pytest.raises(AttributeError, match="has no attribute 'fully_shart'"):
        _ = megatron_fsdp.fully_shart
