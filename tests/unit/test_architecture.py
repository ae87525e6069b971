"""This repository follows the rules between files, and the checks of the rules find violations."""

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
    architecture.upward_imports, architecture.import_cycles, architecture.oversized, architecture.stray_words,
    architecture.engine_seams,
)  # fmt: skip


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
    return sorted({violation.partition(": ")[0] for violation in violations})


LANES, UNIT = "megatron_fsdp__engine__streams", "megatron_fsdp__engine__unit"
PLAN, API = "dbuffer__plan", "megatron_fsdp__api"
GUARDED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_fsdp.{} import Name"
ADAPTER = "megatron_fsdp__integrations__megatron__adapter"


def method(num_lines: int) -> str:
    docstring = '        """Plan.\n\n        More.\n        """\n'
    return f"class Plan:\n    def make(self):\n{docstring}" + "        pass\n" * (num_lines - 1)


# The name of a case, the files that a rule looks at, and the places where it has to find something.
CASES: dict[str, tuple[Rule, dict[str, str], list[str]]] = {
    **{
        f"an import from a higher floor: {text}": (
            architecture.upward_imports, {PLAN: text, "tests__harness": "", LANES: ""},
            [f"dbuffer/plan.py:{1 + text.count(chr(10))}"],
        )
        for text in ("import megatron_fsdp.engine.streams as lanes", "def late():\n    import tests.harness")
    },
    "imports from lower floors and other projects": (
        architecture.upward_imports,
        {UNIT: "import dbuffer_kernels, torch\nfrom dbuffer.plan import Plan\nfrom . import lanes", LANES: ""}, [],
    ),
    "rooms above and beside": (
        architecture.upward_imports,
        {UNIT: "from megatron_fsdp.api import fully_shard", API: "", "megatron_fsdp__checkpoint__api": "",
         "megatron_fsdp__optim__adamw": "from megatron_fsdp.checkpoint.api import a\nimport megatron_fsdp.policy"},
        ["megatron_fsdp/engine/unit.py:1", "megatron_fsdp/optim/adamw.py:1"],
    ),
    **{
        f"two files that import each other: {text}": (
            architecture.import_cycles, {"dbuffer__buffer": "import dbuffer.plan", PLAN: text},
            ["dbuffer.buffer -> dbuffer.plan -> dbuffer.buffer"],
        )
        for text in ("from .buffer import DBuffer", "def late():\n    from dbuffer import buffer")
    },
    "imports for annotations alone, within the engine and across": (
        architecture.import_cycles,
        {UNIT: GUARDED.format("engine.forward"),
         "megatron_fsdp__engine__forward": "import megatron_fsdp.engine.unit",
         "megatron_fsdp__policy__mesh": GUARDED.format("policy.strategy"),
         "megatron_fsdp__policy__strategy": "import megatron_fsdp.policy.mesh"},
        [" -> ".join(f"megatron_fsdp.engine.{name}" for name in ("forward", "unit", "forward"))],
    ),
    "classes of the engine with loose attributes, an heir outside, and one heir": (
        architecture.engine_seams,
        {UNIT: "class Whole:\n    size: int\n    def f(self):\n        node: Any = 1\nclass Loose:\n    root: Any\n"
               "    find: Callable[[], int]\n    def g(self):\n        self.pools: Any = 1\nclass Base:\n    pass\n",
         LANES: "class One(Base):\n    pass\nclass Two(Base):\n    pass\nclass Three(One):\n    pass\n",
         "megatron_fsdp__variants__a": "class Late(Base):\n    pass\nclass Hook(StepHooks[Unit, Call]):\n    pass\n"},
        [f"megatron_fsdp/engine/{place}" for place in ("streams.py", "unit.py", "unit.py:6", "unit.py:7", "unit.py:9")],
    ),
    "a method of 61 lines beside one of 60": (
        architecture.oversized, {PLAN: method(61), API: method(60)}, ["dbuffer/plan.py:2"]
    ),
    **{
        f"words of other files: {text}": (
            architecture.stray_words, {file: f"\n{text}", home: text}, [f"{file.replace('__', '/')}.py:2"]
        )
        for file, home, text in (
            ("dbuffer__buffer", "dbuffer__collectives__all_reduce", "torch.distributed.all_reduce(x)"),
            ("dbuffer__buffer", "dbuffer__collectives__all_reduce", "find(dist, 'all_gather_into_tensor')"),
            (UNIT, LANES, "torch.cuda.Stream()"), (UNIT, LANES, "tensor.record_stream(gather)"),
            (API, ADAPTER, "def adapt(): from megatron.core import parallel_state"),
            ("tests__unit__test_a", "examples__b", "run_ranks(2, train)"),
            ("tests__unit__test_a", "examples__b", "import subprocess as processes"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_exactly_its_violations(name: str) -> None:
    rule, texts, wanted = CASES[name]
    assert places(rule(sources(**texts))) == wanted


# ---------------------------------------------------------------- the pages and the public names


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


# Modules that users import from in addition to the two packages; all other paths are internal.
PUBLIC_MODULES = (
    "megatron_fsdp.huggingface",
    "megatron_fsdp.megatron",
    "megatron_fsdp.muon",
)
# Names of megatron_fsdp outside its list: another name of FSDPModule, the class of its ``parameter_groups``, and
# Megatron-FSDP's call, which megatron_fsdp.megatron lists.
NOT_LISTED = {"FsdpModule", "ParameterGroup", "fully_shard_model"}


def test_every_public_name_is_spelled_once() -> None:
    modules = [importlib.import_module(path) for path in ("megatron_fsdp", *PUBLIC_MODULES)]
    # Made from a class of megatron.core at first use.
    late = {"ShardedDataParallel"}
    places: dict[int, list[str]] = {}
    for module in modules:
        assert sorted(module.__all__) == list(module.__all__)
        for name in {*module.__all__} - late:
            places.setdefault(id(getattr(module, name)), []).append(name)
    assert [names for names in places.values() if len(names) > 1] == []
    assert megatron_fsdp.FsdpModule is megatron_fsdp.FSDPModule


def test_only_public_modules_may_consist_of_reexports(repository: list[Source]) -> None:
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
