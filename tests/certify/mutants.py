"""Mutants: the engine with one wait, record, join, release, slot, copy or lane less or otherwise.

Whatever orders device work is one of a few kinds of statement. Every one of them in the modules below is found in the
syntax tree and taken away or changed, one at a time. A mutant is killed when the certificate of some configuration
finds something. It is put into the running ranks by exchanging the code of one function.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from megatron_fsdp.certify.certificate import Certificate
from tests.certify.cases import CASES
from tests.certify.matrix import TIMEOUT_S, merged, run_on_rank
from tests.harness import RankError, run_ranks
from tests.harness.storage_guard import guard_released_storage
from tests.mutation.mutants import Change, Mutant, Scope, called, mutants_of, mutated

MODULES = (
    "megatron_fsdp.engine.streams",
    "megatron_fsdp.engine.forward",
    "megatron_fsdp.engine.backward",
    "megatron_fsdp.engine.post_backward",
    "megatron_fsdp.engine.last_reduction",
    "megatron_fsdp.engine.final_callback",
    "megatron_fsdp.engine.recovery",
    "megatron_fsdp.engine.manual_finalization",
    "megatron_fsdp.engine.unit",
    "megatron_fsdp.engine.param_group",
    "megatron_fsdp.engine.weight_buffers",
    "megatron_fsdp.lifecycle.make_param_group",
    "megatron_fsdp.lifecycle.unit_changes",
    "megatron_fsdp.engine.grads",
    "megatron_fsdp.engine.lane_packer",
    "megatron_fsdp.engine.reduce",
    "megatron_fsdp.variants.memory_slots",
    "megatron_fsdp.checks.missing_gradients",
    "megatron_fsdp.optim.adamw.adamw",
    "megatron_fsdp.optim.adamw.update",
    "dbuffer.storage",
    "dbuffer.slot_pool",
)
# Statements that order work: the last part of the name of the called function.
_ORDERS = frozenset(
    """wait wait_event wait_stream record synchronize join join_lanes take note finish_turn wait_for_event wait_on_host
    wait_for_unshard drain""".split()
)
# Statements that give memory back or take it.
_MEMORY = frozenset(
    "release_storage reallocate_storage release reallocate _release exchange _exchange give_back keep drop".split()
)
# Those of them without which there is none.
_TAKES = frozenset("reallocate_storage reallocate exchange _exchange".split())
# These short configurations already cover the order of host and lanes; the rest runs for mutants that survive them.
_FIRST = (
    "two streams, small, copied",
    "two streams, open",
    "slots largest, prefetch lists",
    "slots by_size, optim_grads_params",
    "unshard by hand",
    "gradients asked for",
    "captured backward",
    "step elsewhere",
    "evaluation elsewhere",
    "two streams, small, late",
    "captured",
    "two streams, large, multiplied",
    "trouble: backward, optimizer",
    "deleted in flight",
    "offload, optim_grads_params, fp32, no_sync",
    "offload, optim_grads_params, fp32, microbatch",
    "trouble: evaluation, offloaded",
    "optim_grads_params, bf16, microbatch",
    "recompute reentrant",
    "trouble: frozen, optimizer",
    "reshard False, microbatches",
)
_PAIRS = (
    "missing gradients",
    "closed twice",
    "wire, optim",
    "summed, microbatch",
    "offload, optim_grads_params, summed, none",
    "prefetch lists",
    "repeats, reentrant",
    "offload, optim_grads_params, fp32, none",
    "split, microbatch",
)
_LAST = (
    "hsdp, bf16, microbatch",
    "reshard 2",
    "recompute reentrant, reshard 2",
    "slots by_size, hfsdp",
    "hfsdp, bf16, microbatch",
    "offload, hfsdp, fp32, none",
)

# Mutants that no order of device work can tell from the engine, with the reason.
EQUIVALENT: dict[str, str] = {
    "Turns.take: without `compute.note()`": (
        "who closes the unit takes the next turn after this stream, so lanes wait for it by way of that one"
    ),
    "Turns.take: `compute.note()` at the end of its block": ("to count a stream in is no work of a device"),
    "Lane._run: `event.record(mine)` at the end of its block": "nothing is issued between the two places",
    "wait_on_host: `if compute is not None` taken as True": ("on a device with streams it is never None"),
    "UnitGradientListener.begin_gradients: without `drain(root, state.max_packed_buffers - 1)`": (
        "it bounds memory; the end of the backward waits for the same reductions"
    ),
    "reduce_and_show: `drain(root, 0)` at the end of its block": (
        "compute has joined the lanes before anything reads what they reduced"
    ),
    "finish_last: without `ticket.wait()`": ("compute joins the lanes right after; on a CPU the host has to wait"),
    "_issue: without `state.wire_ticket.wait()`": "there is one where there are no streams",
    "_issue: `state.wire_ticket.wait()` at the end of its block": "there is one where there are no streams",
    "_issue: `if state.wire_ticket is not None` taken as False": "there is one where there are no streams",
    "Reduction.keep: `self.release()` at the start of its block": "nothing is issued between the two places",
    "Reduction.keep: without `self._reduced.reallocate_storage()`": (
        "a reduction takes the memory where it is not there"
    ),
    "Compute.forget_unused: `if self.is_captured(self._known[number]) is is_capturing` taken as False": (
        "it costs waits, which tests/functional/megatron_fsdp/engine/test_overlap.py counts"
    ),
    "ParameterGroup.release: `self.weights.release(keep_generation=self.freshness.gathered_generation if keep_part "
    "else None)` "
    "at the start of its block": ("nothing is issued between the two places"),
    "_build: `group.weights.release()` at the start of its block": "nothing is issued between the two places",
    "GradientBuffer.receive: `if self._turns is not None` taken as True": ("on a device with streams it is never None"),
    "GradientBuffer.receive_product: `if self._turns is not None` taken as True": (
        "on a device with streams it is never None"
    ),
    "GradientBuffer.close: `if self._turns is not None` taken as True": ("on a device with streams it is never None"),
    "GradientBuffer.wait: `self.packed.release_storage()` at the start of its block": (
        "nothing is allocated between the two places"
    ),
    "GradientBuffer.wait: `self.reduction.release()` at the start of its block": (
        "nothing is allocated between the two places"
    ),
    "GradientBuffer.keep: `self.reduction.keep(keeps)` at the start of its block": (
        "each has memory of its own, and nothing is issued between the two places"
    ),
    "Unit.reshard: `if self.weight_state is WeightState.GATHERING` taken as True": (
        "for weights that are there it shows what is shown anyway"
    ),
    "_finalize: `join_lanes()` at the end of its block": (
        "what completes gradients waits for its own tickets, and the caller's compute comes after both places"
    ),
    "place_unit: `gradients.keep(pools is not None or group.spec.is_offloaded)` at the start of its block": (
        "what is kept and what takes turns have memory of their own, and nothing is issued between the two places"
    ),
    "keep_gathered: without `group.gathered.reallocate_storage()`": "a gather takes the memory where it is not there",
    "wait_for_event: `if compute is not None` taken as True": ("on a device with streams it is never None"),
    "UnitGradientListener.begin_gradients: `if root.order is None or root.order.drains` taken as False": (
        "it bounds memory; the end of the backward waits for the same reductions"
    ),
}

# Mutants that no configuration tells from the engine so far, with what would be needed.
OPEN: dict[str, str] = {
    "Ticket.cancel: `if self._event is not None` taken as True": "an interrupt before a lane waited for compute",
    "Turns.take: without `finish_turn()`": (
        "a stream that allocates, before it follows any lane, what another one has copied"
    ),
    "UnitGradientListener.begin_gradients: `if root.order is None or root.order.drains` taken as True": (
        "a forward order whose ranks skip units: tests/functional/megatron_fsdp/uneven"
    ),
    "Lane.synchronize: `if self._last is not None and (not self._is_last_captured)` taken as True": (
        "a captured evaluation of offloaded weights"
    ),
    "WeightBuffers.gather: `main.to(source.device, non_blocking=True)` that blocks": (
        "a copy to a GPU: on a CPU there is none"
    ),
    "WeightBuffers.start_refresh: `main.local_buffer.to(staged.device, non_blocking=True)` that blocks": (
        "a copy to a GPU: on a CPU there is none"
    ),
    "Rows._table: `table.to(device, non_blocking=True)` that blocks": "a copy to a GPU: on a CPU there is none",
}


# ---------------------------------------------------------------- making them


def mutants(module: str) -> list[Mutant]:
    """Return all mutants of a module; ``path`` is its name."""
    return list(mutants_of(inspect.getsource(importlib.import_module(module)), module, order_mistakes))


def key(mutant: Mutant) -> str:
    """Return a mutant's name without module and line, which change with edits elsewhere."""
    return f"{mutant.outer}: {mutant.what}"


def order_mistakes(scope: Scope) -> Iterator[Change]:
    """Yield possible mistakes in the order of device work."""
    for block in scope.blocks():
        for position, statement in enumerate(block):
            for what, make in _of_statement(block, position):
                yield Change(what, statement.lineno, make)
    for node in scope.nodes():
        for what, make in _of_expression(node):
            yield Change(what, getattr(node, "lineno", scope.node.lineno), make)


_Made = Iterator[tuple[str, Callable[[], object]]]


def _of_statement(block: list[ast.stmt], position: int) -> _Made:
    statement = block[position]
    name, text = _called(statement), ast.unparse(statement)
    is_alone = isinstance(statement, ast.Expr)
    if is_alone and name in _ORDERS | _TAKES:
        yield f"without `{text}`", partial(block.__setitem__, position, ast.Pass())
    if isinstance(statement, ast.With) and "use(" in ast.unparse(statement.items[0]):
        inside = partial(block.__setitem__, slice(position, position + 1), statement.body)
        yield f"not in `with {ast.unparse(statement.items[0])}`", inside
    if isinstance(statement, ast.If) and {_called(inner) for inner in statement.body} & _ORDERS:
        for value in (True, False):
            taken = partial(setattr, statement, "test", ast.Constant(value))
            yield f"`if {ast.unparse(statement.test)}` taken as {value}", taken
    begin = int(isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant))
    if is_alone and name in _ORDERS and position + 1 < len(block):
        yield f"`{text}` at the end of its block", lambda: block.append(block.pop(position))
    if is_alone and name in _MEMORY and position > begin:
        yield f"`{text}` at the start of its block", lambda: block.insert(begin, block.pop(position))


def _called(statement: ast.stmt) -> str:
    """Return the last part of the name that a statement calls; empty for any other statement."""
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    return called(value) if isinstance(value, ast.Call) else ""


def _of_expression(node: ast.AST) -> _Made:
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    if isinstance(node, ast.For) and "compute.all()" in (whole := ast.unparse(node.iter)):
        first = ast.parse(f"{whole}[:1]", mode="eval").body
        yield f"for the first alone of `{whole}`", partial(setattr, node, "iter", first)


def _of_call(node: ast.Call) -> _Made:
    first = node.args[0] if node.args else None
    if called(node) == "lane" and isinstance(first, ast.Constant) and first.value in ("gather", "reduce"):
        other = "reduce" if first.value == "gather" else "gather"
        yield f"on the lane {other!r} instead of {first.value!r}", partial(setattr, first, "value", other)
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg == "non_blocking" and isinstance(value, ast.Constant) and value.value is True:
            yield f"`{ast.unparse(node)}` that blocks", partial(setattr, value, "value", False)
        if keyword.arg in ("on_host", "then"):
            yield f"`{ast.unparse(node)}` without {keyword.arg}", partial(setattr, keyword, "value", ast.Constant(None))
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "free.pop":
        kept = ast.parse("free.__getitem__(-1)", mode="eval").body
        yield "a slot that is not taken out of the free ones", lambda: vars(node).update(vars(kept))


# ---------------------------------------------------------------- running them


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run the block with the mutant in place of the module's code, in this process."""
    module = importlib.import_module(mutant.path)
    tree = mutated(inspect.getsource(module), mutant.number, order_mistakes)
    whole = compile(tree, inspect.getsourcefile(module) or "", "exec")
    function = _function(module, mutant.outer)
    before = function.__code__
    function.__code__ = _code(whole, mutant.outer.split("."))
    try:
        yield
    finally:
        function.__code__ = before


def _function(module: Any, name: str) -> FunctionType:
    holder = module
    for part in name.split("."):
        holder = inspect.getattr_static(holder, part)
    while not isinstance(holder, FunctionType) or hasattr(holder, "__wrapped__"):
        holder = next(
            getattr(holder, key)
            for key in ("fget", "__func__", "__wrapped__")
            if getattr(holder, key, None) is not None
        )
    return holder


def _code(code: CodeType, names: Sequence[str]) -> CodeType:
    if not names:
        return code
    inner = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == names[0])
    return _code(inner, names[1:])


def _run_mutants(chosen: Sequence[Mutant], names: Sequence[str]) -> list[list[Certificate]]:
    """Run each mutant until a configuration finds something; every rank calls it."""
    found = []
    for mutant in chosen:
        certificates: list[Certificate] = []
        # Released memory that a mutant uses is an error of that case then, not the end of the process.
        with applied(mutant), guard_released_storage():
            for name in names:
                certificates += run_on_rank([name])
                if not _is_clean(certificates[-1]):
                    break
        found.append(certificates)
    return found


def _is_clean(certificate: Certificate) -> bool:
    case = next(case for case in CASES if case.name == certificate.name)
    return certificate.is_clean(case.host_may)


def survey(modules: Sequence[str] = MODULES) -> dict[Mutant, str]:
    """Run every mutant of the modules on one rank, and what survives on two and on four.

    Returns:
        The findings for each mutant, each beginning with its configuration; empty if the mutant survived.
    """
    outcomes = {mutant: "" for module in modules for mutant in mutants(module) if key(mutant) not in EQUIVALENT}
    for num_ranks, names in ((1, _FIRST), (2, _PAIRS), (4, _LAST)):
        for module in modules:
            left = [mutant for mutant, found in outcomes.items() if mutant.path == module and not found]
            if left:
                outcomes |= _survey(left, num_ranks, names)
    return outcomes


def _survey(left: Sequence[Mutant], num_ranks: int, names: Sequence[str]) -> dict[Mutant, str]:
    try:
        by_rank = run_ranks(num_ranks, _run_mutants, left, names, timeout=TIMEOUT_S, fresh=True)
    except RankError:
        if len(left) == 1:
            return {left[0]: f"{names[0]}: a process ended"}
        # One of them ends its process: find out which.
        half = len(left) // 2
        return _survey(left[:half], num_ranks, names) | _survey(left[half:], num_ranks, names)
    outcomes = {}
    for number, mutant in enumerate(left):
        ranks = zip(*(of_rank[number] for of_rank in by_rank), strict=False)
        whole = [merged(certificates[0].name, certificates) for certificates in ranks]
        bad = [certificate for certificate in whole if not _is_clean(certificate)]
        outcomes[mutant] = "\n".join(bad[0].lines()) if bad else ""
    return outcomes
