"""Complete, outside of any backward, the gradients that backwards have left unfinished.

``FSDPModule.finalize_backward`` calls ``complete_gradients``, after ``set_manual_backward_finalization(True)``.
Megatron's ``finish_grad_sync`` calls it too.
"""

from __future__ import annotations

from dbuffer.events import listeners, tell
from megatron_fsdp.engine.final_callback import end_backward, reduce_and_show, reduce_kept, show_pending_sums
from megatron_fsdp.engine.recovery import mark_incomplete, settle
from megatron_fsdp.engine.unit import Root, is_in_backward
from megatron_fsdp.errors import StateError

__all__ = ["complete_gradients", "refuse_in_backward", "start_pending_reductions"]


def complete_gradients(root: Root) -> None:
    """Complete, outside of any backward, the gradients that earlier backwards left unreduced or unfinished.

    Raises:
        StateError: called in a backward, from a hook for example.
    """
    refuse_in_backward(root)
    state = root.backward
    if listeners:
        tell("finish", root)
    settle(root)
    try:
        reduce_and_show(root, root.units())
    except BaseException:
        mark_incomplete(root)
        raise
    show_pending_sums(root)
    end_backward(root)
    for hook in root.hooks:
        hook.after_backward()
    state.is_unfinished = False
    if listeners and (state.is_last or state.is_manual):
        tell("backward", root)


def start_pending_reductions(root: Root) -> None:
    """Issue outside of a backward the reductions of gradients kept on this rank; ``complete_gradients`` ends them."""
    settle(root)
    try:
        reduce_kept(root.units())
    except BaseException:
        mark_incomplete(root)
        raise


def refuse_in_backward(root: Root) -> None:
    """Raise ``StateError`` in a backward, in which gradients cannot be completed."""
    if is_in_backward():
        outermost = root.outermost()
        raise StateError(
            f"unit {'' if outermost is None else outermost.name!r}: gradients cannot be completed in a backward. "
            "fix: call finalize_backward(), wait() or finish_grad_sync() after loss.backward() has returned"
        )
