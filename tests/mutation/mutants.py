"""Single-point mutants of a source file: where, what was there, what is put there; from the syntax tree alone."""

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# What a call is named after that makes one thing wait for another.
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "block_until", "join", "follow"}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place.

    Attributes:
        path: of the file, from the root of the repository. kind: what sort of mistake it is.
        function: qualified name of the function it is in; empty at the top level of a file.
        first_line: where that function begins, decorators included; 0 at the top level.
        line: of the change. start, end: what of the file's UTF-8 bytes is replaced. text: by what.
    """

    path: str
    kind: str
    function: str
    first_line: int
    line: int
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """Tell this mutant from all others of the same sources."""
        return f"{self.path}:{self.line}:{self.start} {self.kind}"

    def applied_to(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def draw(root: Path, folders: Sequence[str], *, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of all Python files in some folders; the same for the same sources, count and seed."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(file.read_bytes(), file.relative_to(root).as_posix())]
    return random.Random(seed).sample(every, min(count, len(every)))


def mutants_of(source: bytes, path: str) -> Iterator[Mutant]:
    """Yield every mutant of a file, in the order of their places."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for scope in _scopes(tree):
        for node in scope.nodes:
            for change in _changes(node):
                start = starts[change.lineno - 1] + change.col_offset
                end = starts[change.end_lineno - 1] + change.end_col_offset
                text = change.edit(source[start:end].decode())
                yield Mutant(path, change.kind, scope.name, scope.first_line, change.lineno, start, end, text)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The statements of a function without those of the functions inside it."""

    name: str
    first_line: int
    nodes: tuple[ast.AST, ...]


def _scopes(tree: ast.Module) -> Iterator[_Scope]:
    def visit(node: ast.AST, prefix: str) -> Iterator[_Scope]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                nodes = tuple(node for statement in child.body for node in _inside(statement))
                yield _Scope(name, first, nodes)
                yield from visit(child, f"{name}.")
            else:
                yield from visit(child, prefix)

    return visit(tree, "")


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's nodes, without other functions, and without errors and assertions: these only tell."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _inside(child)


@dataclass(frozen=True, slots=True)
class _Change:
    """What is done to the text between two places; columns count UTF-8 bytes, as those of the syntax tree do."""

    kind: str
    lineno: int
    col_offset: int
    end_lineno: int
    end_col_offset: int
    edit: Callable[[str], str]


def _changes(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        yield _edit("skip a wait" if name in WAITS else "drop a call", node, lambda _: "pass")
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield _edit("flip a condition", node.test, _negated)
    elif isinstance(node, ast.comprehension):
        yield from (_edit("flip a condition", test, _negated) for test in node.ifs)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        yield from (_edit("off by one", bound, _one_more) for bound in node.args[:2])
    elif isinstance(node, ast.Slice):
        bounds = [bound for bound in (node.lower, node.upper) if bound is not None]
        yield from (_edit("off by one", bound, _one_more) for bound in bounds)
    else:
        yield from _changed_operators(node)


def _changed_operators(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start, end = (node.lineno, node.col_offset), (node.operand.lineno, node.operand.col_offset)
        yield _Change("drop a not", *start, *end, partial(_NOT.sub, "", count=1))
    elif isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        yield _edit_between("swap and/or", node.values[0], node.values[1], partial(_BOOLEAN.sub, other, count=1))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISONS[type(node.ops[0])]
        edit = partial(_COMPARISON.sub, other, count=1)
        yield _edit_between("another comparison", node.left, node.comparators[0], edit)


_NOT = re.compile(r"\bnot\b\s*")
_BOOLEAN = re.compile(r"\b(?:and|or)\b")
_COMPARISON = re.compile(r"\b(?:is\s+not|not\s+in|is|in)\b|[<>=!]=|[<>]")


def _negated(text: str) -> str:
    return f"(not ({text}))"


def _one_more(text: str) -> str:
    return f"(({text}) + 1)"


def _edit(kind: str, node: ast.expr | ast.stmt, edit: Callable[[str], str]) -> _Change:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _Change(kind, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, edit)


def _edit_between(kind: str, left: ast.expr, right: ast.expr, edit: Callable[[str], str]) -> _Change:
    """Edit what stands between two operands: the operator, and parentheses at times."""
    assert left.end_lineno is not None
    assert left.end_col_offset is not None
    return _Change(kind, left.end_lineno, left.end_col_offset, right.lineno, right.col_offset, edit)
