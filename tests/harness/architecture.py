"""Checks of the rules that hold between and within files, made on syntax trees: nothing is imported.

Each rule takes sources and returns one line per violation: place, found, wanted.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# Rooms from the lowest up: a file imports its own room and those on lines before it, not its neighbours on its line.
# A module belongs to the longest name here that it starts with. docs/architecture.md says what each room is for.
FOLDER_ORDER = (
    ("dbuffer_kernels",),
    ("dbuffer.errors",),
    ("dbuffer.placements", "dbuffer.planner", "dbuffer.memory_meter", "dbuffer.events", "dbuffer.slot_memory"),
    ("dbuffer.mesh", "dbuffer.slot_pool"),
    ("dbuffer.layout", "dbuffer.storage"),
    ("dbuffer.whereabouts",),
    ("dbuffer.collectives",),
    ("dbuffer.dtensor",),
    ("dbuffer.buffer",),
    ("dbuffer",),
    ("megatron_fsdp.installation",),
    ("megatron_fsdp.errors", "megatron_fsdp.formatting"),
    ("megatron_fsdp.command_parser",),
    ("megatron_fsdp.policy",),
    ("megatron_fsdp.build",),
    ("megatron_fsdp.engine",),
    ("megatron_fsdp.variants",),
    ("megatron_fsdp.lifecycle",),
    ("megatron_fsdp.checks",),
    ("megatron_fsdp.optim", "megatron_fsdp.uneven"),
    ("megatron_fsdp.optim.adamw", "megatron_fsdp.optim.stock"),
    ("megatron_fsdp.optim.muon",),
    ("megatron_fsdp.api", "megatron_fsdp.meta_init"),
    ("megatron_fsdp.virtual",),
    ("megatron_fsdp.checkpoint", "megatron_fsdp.planning", "megatron_fsdp.config"),
    ("megatron_fsdp.transfer",),
    ("megatron_fsdp.integrations", "megatron_fsdp.observability"),
    ("megatron_fsdp.certify",),
    ("megatron_fsdp.cli",),
    ("megatron_fsdp",),
)
# In this package, imports for annotations count as parts of a cycle.
STRICT_PACKAGE = "megatron_fsdp.engine."
# The packages from the lowest floor up.
FLOORS = tuple(dict.fromkeys(room.partition(".")[0] for line in FOLDER_ORDER for room in line))
FOLDERS = ("dbuffer", "kernels", "megatron_fsdp", "examples", "benchmarks", "tests")
# Folders on the import path, which are no part of a module's name.
PATH_FOLDERS = ("kernels", "examples")

MAX_FUNCTION_LINES = 60

# Classes of the engine from which checks and variants derive.
HOOK_CLASSES = ("StepHooks",)

COLLECTIVES = """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather
    gather_object irecv isend monitored_barrier recv reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor
    scatter scatter_object_list send _coalescing_manager""".split()
# No other function is called so: they count however they are reached, and as strings for getattr.
TORCH_ONLY = """all_gather_into_tensor all_gather_single reduce_scatter_single reduce_scatter_tensor all_to_all_single
    _coalescing_manager""".split()
COLLECTIVES_FILES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gloo_messages", "reduce_scatter")
LANES_FILE = "megatron_fsdp/engine/streams.py"
LIBRARY = ("dbuffer/", "kernels/", "megatron_fsdp/")


@dataclass(frozen=True)
class Reserved:
    """Words that some files alone may have: a pattern of a line of code, where it counts, and whose it is."""

    pattern: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    wanted: str


RESERVED = (
    Reserved(
        rf"\b(dist|distributed)\.({'|'.join(COLLECTIVES)})\b|[.'\"]({'|'.join(TORCH_ONLY)})(?=['\"(])"
        rf"|from torch\.distributed import .*\b({'|'.join(COLLECTIVES)})\b",
        LIBRARY, tuple(f"dbuffer/collectives/{name}.py" for name in COLLECTIVES_FILES),
        "a function of dbuffer/collectives/",
    ),
    Reserved(
        r"\bcuda\.(Event|ExternalStream|Stream|StreamContext|current_stream|default_stream|set_stream|stream)\b"
        r"|\btorch\.(Event|Stream)\b|from torch\.cuda import|\.(record_event|record_stream|wait_event|wait_stream)\(",
        LIBRARY, (LANES_FILE,), f"a lane of {LANES_FILE}, where the order of device work is decided",
    ),
    # It is optional: two files import it, when one of their functions is called.
    Reserved(
        r"^(import|from) megatron\b", LIBRARY, (), "an import inside of a function, without which the package loads",
    ),
    Reserved(
        r"\b(import|from) megatron\b", LIBRARY,
        tuple(f"megatron_fsdp/integrations/megatron/{name}.py" for name in ("adapter", "torch_dist")),
        "a function of megatron_fsdp/integrations/megatron/adapter.py",
    ),
    # Unit tests run in the process that collects them.
    Reserved(
        r"\b(import subprocess|from subprocess|subprocess\.|os\.fork|os\.posix_spawn|multiprocessing\.(Process|get_con)"
        r"|run_ranks|on_ranks)",
        ("tests/unit/",), ("tests/unit/test_architecture.py",), "a test of tests/functional",
    ),
)  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file.

    Attributes:
        path: relative to the repository's root, with forward slashes.
        text: its contents.
    """

    path: str
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        """The file's syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def is_package(self) -> bool:
        """Return whether it is a package's ``__init__.py``."""
        return self.path.endswith("__init__.py")

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        parts = self.path.removesuffix(".py").split("/")
        parts = parts[1:] if parts[0] in PATH_FOLDERS else parts
        return ".".join(parts[:-1] if self.is_package else parts)

    @property
    def package(self) -> str:
        """The first part of the module's name."""
        return self.module.partition(".")[0]

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Return the place of a node as an editor understands it."""
        return f"{self.path}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """An imported name: ``target`` is a module, or a module's attribute.

    Attributes:
        is_lazy: inside a function. is_typing: for annotations alone, under ``if TYPE_CHECKING``.
    """

    target: str
    place: str
    is_lazy: bool
    is_typing: bool = False


def read_sources(root: Path) -> list[Source]:
    """Read all Python files of the project's folders."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def library(sources: Iterable[Source]) -> list[Source]:
    """Return the sources of the three packages."""
    return [source for source in sources if source.package in FLOORS]


def upward_imports(sources: Sequence[Source]) -> list[str]:
    """Find imports of a room other than the file's own and the rooms below it."""
    outside = {source.package for source in sources} - set(FLOORS)
    lines = {room: line for line, names in enumerate(FOLDER_ORDER) for room in names}
    found = []
    for source in library(sources):
        room = room_of(source.module)
        for entry in imports(source):
            if entry.target.partition(".")[0] in outside:
                found.append(f"{entry.place}: imports {entry.target}; the library does not know what uses it")
            elif entry.target.partition(".")[0] in FLOORS:
                target = room_of(entry.target)
                if lines[target] > lines[room] or (lines[target] == lines[room] and target != room):
                    found.append(f"{entry.place}: imports {entry.target}; {room} may know only the rooms below it")
    return found


def room_of(module: str) -> str:
    """Return the room of FOLDER_ORDER that a module belongs to."""
    rooms = [room for names in FOLDER_ORDER for room in names]
    return max((room for room in rooms if module == room or module.startswith(f"{room}.")), key=len)


def room_imports(sources: Sequence[Source]) -> set[tuple[str, str]]:
    """Return which room imports which other one, as pairs."""
    pairs = {
        (room_of(source.module), room_of(entry.target))
        for source in library(sources)
        for entry in imports(source)
        if entry.target.partition(".")[0] in FLOORS
    }
    return {(above, below) for above, below in pairs if above != below}


def import_cycles(sources: Sequence[Source]) -> list[str]:
    """The files of a package form a hierarchy; an import inside a function counts too.

    An import for annotations alone may point up in its own room, but not in the engine: a program does not run it, but
    a reader of the one file has to read the other.
    """
    modules = {source.module for source in library(sources)}
    graph = {source.module: _imported_modules(source, modules) for source in library(sources)}
    found = []
    settled: set[str] = set()
    for module in sorted(graph):
        cycle = _find_cycle(graph, module, settled)
        if cycle:
            found.append(f"{' -> '.join(cycle)}: a cycle; move what both need into a file below both")
    return found


def oversized(sources: Iterable[Source]) -> list[str]:
    """Functions stay short; a docstring does not count."""
    found = []
    for source in sources:
        for name, function in functions(source.tree):
            num_lines = _num_code_lines(function)
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{source.at(function)}: {name} has {num_lines} lines; wanted <= {MAX_FUNCTION_LINES}")
    return found


def engine_seams(sources: Sequence[Source]) -> list[str]:
    """Find attributes and classes of the engine that hide the steps of a call from a reader.

    No attribute is annotated ``Any``. No ``Callable`` of a class body stands for a method of another class. No class
    has heirs outside of the engine, or exactly one.
    """
    found: list[str] = []
    homes: dict[str, Source] = {}
    heirs: dict[str, list[Source]] = {}
    for source in library(sources):
        for kind in (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)):
            for base in kind.bases:
                heirs.setdefault(ast.unparse(base).partition("[")[0], []).append(source)
            if source.module.startswith(STRICT_PACKAGE):
                homes[kind.name] = source
                found += _loose_attributes(source, kind)
    for name, source in homes.items():
        of_class = heirs.get(name, [])
        if name in HOOK_CLASSES:
            continue
        if any(not heir.module.startswith(STRICT_PACKAGE) for heir in of_class):
            found.append(f"{source.path}: {name} has heirs outside of the engine")
        if len(of_class) == 1:
            found.append(f"{source.path}: {name} has exactly one heir; hold an object instead")
    return [f"{seam}; wanted a whole class, or a typed attribute" for seam in found]


def _loose_attributes(source: Source, kind: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes of a class that are ``Any``, and those of its body that are functions."""
    in_body = {id(node) for node in kind.body}
    for node in ast.walk(kind):
        if not isinstance(node, ast.AnnAssign):
            continue
        is_own = isinstance(node.target, ast.Attribute) and ast.unparse(node.target).startswith("self.")
        name, annotation = ast.unparse(node.target).removeprefix("self."), ast.unparse(node.annotation)
        if (is_own or id(node) in in_body) and re.fullmatch(r"(typing\.)?Any( \| None)?", annotation):
            yield f"{source.at(node)}: {kind.name}.{name} is annotated {annotation}"
        elif id(node) in in_body and "Callable[" in annotation:
            yield f"{source.at(node)}: {kind.name}.{name} is a function without a body"


def stray_words(sources: Iterable[Source]) -> list[str]:
    """Find words that only a few files may use."""
    found = []
    for source in sources:
        for rule in RESERVED:
            if source.path.startswith(rule.folders) and source.path not in rule.files:
                spelled = [(number, line) for number, line in _code(source) if re.search(rule.pattern, line)]
                found += [f"{source.path}:{number}: {line.strip()}; wanted {rule.wanted}" for number, line in spelled]
    return found


@functools.cache
def _code(source: Source) -> tuple[tuple[int, str], ...]:
    """Return the lines of a file with their numbers, without docstrings and comments."""
    texts = (
        node for node in ast.walk(source.tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    said = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = enumerate(source.text.splitlines(), 1)
    return tuple((number, line.partition("# ")[0]) for number, line in lines if number not in said)


@functools.cache
def imports(source: Source) -> tuple[Import, ...]:
    """Return every name that a file imports, wherever in the file, relative ones resolved."""
    found = []
    lazy = {id(inner) for _, function in functions(source.tree) for inner in ast.walk(function)}
    guards = (node for node in ast.walk(source.tree) if isinstance(node, ast.If))
    typing = {
        id(inner)
        for guard in guards
        if ast.unparse(guard.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in guard.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base_module(source, node)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            found.append(Import(target, source.at(node), id(node) in lazy, id(node) in typing))
    return tuple(found)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function with its qualified name, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # An expression holds no definition.
        if isinstance(node, Function):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if isinstance(node, Function | ast.ClassDef) else prefix
        yield from functions(node, inner)


def _base_module(source: Source, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that a ``from`` import names."""
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    num_kept = len(parts) - node.level + source.is_package
    return ".".join([*parts[:num_kept], *([node.module] if node.module else [])])


def _imported_modules(source: Source, modules: set[str]) -> list[str]:
    """Return the modules of the same package that a file imports, from the targets' longest known prefixes."""
    found = set()
    for entry in imports(source):
        parent = entry.target.rpartition(".")[0]
        known = entry.target if entry.target in modules else parent
        is_strict = source.module.startswith(STRICT_PACKAGE)
        if entry.is_typing and known in modules and room_of(known) == room_of(source.module) and not is_strict:
            continue
        if known in modules and known.partition(".")[0] == source.package:
            found.add(known)
    return sorted(found)


def _find_cycle(graph: Mapping[str, Sequence[str]], start: str, settled: set[str]) -> list[str]:
    """Return a cycle that can be reached from ``start``, or nothing; ``settled`` modules have been reported on."""
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in settled:
            return []
        path.append(module)
        cycle = next((cycle for cycle in map(visit, graph[module]) if cycle), [])
        path.pop()
        settled.add(module)
        return cycle

    return visit(start)


def _num_code_lines(function: Function) -> int:
    assert function.end_lineno is not None
    num_lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        num_lines -= first.end_lineno - first.lineno + 1
    return num_lines
