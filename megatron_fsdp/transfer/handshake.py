"""Handshake: ranks that iterate one stream go on together; one that leaves says so, and the others raise."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fsdp.checks.rendezvous import meet, report_failure
from megatron_fsdp.errors import StateError

__all__ = ["Handshake"]


class Handshake:
    """The meetings of the ranks of one stream, one before each bucket.

    Args:
        ranks: that iterate the stream. what: the call, for messages: "weight_stream(model)".
        count: of the buckets.
    """

    def __init__(self, ranks: Sequence[int], what: str, count: int) -> None:
        self._ranks, self._what, self._count = ranks, what, count
        self._num_met = 0
        self._is_over = False
        # Of the first meeting; the next ones name it, so that ranks do not mix two streams.
        self._name = ""

    def meet(self, lines: Sequence[str] = ()) -> None:
        """Wait until all ranks are about to gather the next bucket.

        Raises:
            AgreementError, MeshError: a rank left, ended, or is about to do something else.
        """
        begun = [f"the stream that began with meeting {self._name.rpartition(' ')[2]}"] if self._name else []
        try:
            name = meet(
                self._ranks, f"gathers bucket {self._num_met} of {self._what}", [*begun, *lines],
                "the ranks would send different weights",
                f"fix: call {self._what} with the same arguments on every rank, and iterate it to its end on all; of "
                "several streams, ask for their buckets in the same order on every rank",
            )  # fmt: skip
        except BaseException:
            self.cut_off()
            raise
        self._name = self._name or name
        self._num_met += 1

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on, and why."""
        if not self._is_over:
            self.cut_off()
            report_failure(self._ranks, f"gathers bucket {self._num_met} of {self._what}", error)

    def leave(self) -> None:
        """Tell the other ranks that this one skips the next meeting, unless all meetings are over."""
        if self._num_met < self._count and not self._is_over:
            self.cut_off()
            where = f"after {self._num_met} of {self._count} buckets"
            report_failure(self._ranks, f"leaves {self._what}", StateError(f"the loop ended {where}"))

    def cut_off(self) -> None:
        """Meet the others no more: they know already."""
        self._is_over = True
