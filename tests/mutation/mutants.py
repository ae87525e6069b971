"""Mutants of a source file: one mistake at one place each, made on its syntax tree.

``Mistakes`` defines the kinds of mistakes: ``small_mistakes`` here, and mistakes in the order of device work in
``tests/certify/mutants.py``.
"""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Names of calls that make one piece of work wait for another.
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "block_until", "join", "follow"}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change at one place.

    Attributes:
        path: of the file, from the root of the repository. what: is done.
        function: qualified name of the function it is in. outer: of the outermost one around it.
        first_line: where that function begins, decorators included. line: of the change.
        number: among all mutants of the file.
    """

    path: str
    what: str
    function: str
    outer: str
    first_line: int
    line: int
    number: int

    @property
    def name(self) -> str:
        """Tell this mutant from all others of the same sources."""
        return f"{self.path}:{self.line} no. {self.number} {self.what}"


@dataclass(frozen=True, slots=True)
class Change:
    """A change: its description, its line, and the function that makes it in the tree."""

    what: str
    line: int
    make: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Scope:
    """A function, without the functions inside it."""

    name: str
    outer: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    def nodes(self) -> Iterator[ast.AST]:
        """Yield the nodes of its statements, without errors and assertions, which only report."""
        return (node for statement in self.node.body for node in _inside(statement))

    def blocks(self) -> Iterator[list[ast.stmt]]:
        """Yield its lists of statements."""
        for node in (self.node, *self.nodes()):
            for key in ("body", "orelse", "finalbody"):
                block = getattr(node, key, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    yield block


Mistakes = Callable[[Scope], Iterator[Change]]


def draw(root: Path, folders: Sequence[str], *, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of all Python files in some folders; the same for the same sources, count and seed."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(file.read_text(), file.relative_to(root).as_posix())]
    return random.Random(seed).sample(every, min(count, len(every)))


def mutants_of(source: str, path: str, mistakes: Mistakes | None = None) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    for number, (scope, change) in enumerate(_changes(ast.parse(source), mistakes or small_mistakes)):
        first = min([scope.node.lineno, *(one.lineno for one in scope.node.decorator_list)])
        yield Mutant(path, change.what, scope.name, scope.outer, first, change.line, number)


def mutated(source: str, number: int, mistakes: Mistakes | None = None) -> ast.Module:
    """Return a file's tree with the change of one of its mutants."""
    tree = ast.parse(source)
    changes = [change for _, change in _changes(tree, mistakes or small_mistakes)]
    changes[number].make()
    return ast.fix_missing_locations(tree)


def _changes(tree: ast.Module, mistakes: Mistakes) -> Iterator[tuple[Scope, Change]]:
    return ((scope, change) for scope in _scopes(tree, "", "") for change in mistakes(scope))


def _scopes(node: ast.AST, prefix: str, outer: str) -> Iterator[Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}{child.name}"
            yield Scope(name, outer or name, child)
            yield from _scopes(child, f"{name}.", outer or name)
        elif not isinstance(child, ast.ClassDef):
            yield from _scopes(child, prefix, outer)
        elif not any("Protocol" in ast.unparse(base) for base in child.bases):
            yield from _scopes(child, f"{prefix}{child.name}.", outer)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _inside(child)


# ---------------------------------------------------------------- small mistakes


def small_mistakes(scope: Scope) -> Iterator[Change]:
    """Yield common mistakes: a call or a wait left out, a condition inverted, a bound moved by one."""
    for block in scope.blocks():
        for position, statement in enumerate(block):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                what = "skip a wait" if called(statement.value) in WAITS else "drop a call"
                yield Change(what, statement.lineno, partial(block.__setitem__, position, ast.Pass()))
    for node in scope.nodes():
        for what, make in _of_expression(node):
            yield Change(what, getattr(node, "lineno", scope.node.lineno), make)


def called(call: ast.Call) -> str:
    """Return the last part of the name that is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


_Made = Iterator[tuple[str, Callable[[], object]]]


def _of_expression(node: ast.AST) -> _Made:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "flip a condition", partial(setattr, node, "test", _negated(node.test))
    elif isinstance(node, ast.comprehension):
        for position, test in enumerate(node.ifs):
            yield "flip a condition", partial(node.ifs.__setitem__, position, _negated(test))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        for position, bound in enumerate(node.args[:2]):
            yield "off by one", partial(node.args.__setitem__, position, _one_more(bound))
    else:
        yield from _of_operator(node)


def _of_operator(node: ast.AST) -> _Made:
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            if (bound := getattr(node, name)) is not None:
                yield "off by one", partial(setattr, node, name, _one_more(bound))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop a not", partial(setattr, node, "operand", _negated(node.operand))
    elif isinstance(node, ast.BoolOp):
        yield "swap and/or", partial(setattr, node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "another comparison", partial(node.ops.__setitem__, 0, COMPARISONS[type(node.ops[0])]())


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _one_more(bound: Any) -> ast.expr:
    return ast.BinOp(bound, ast.Add(), ast.Constant(1))
