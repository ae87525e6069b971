"""Record the engine's actions in a block, as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbuffer.events import listen
from megatron_fsdp.observability.flight_recorder import TRANSCRIBED

__all__ = ["record_transcript"]


@contextmanager
def record_transcript() -> Iterator[list[str]]:
    """Record the engine's actions in host order, one "action unit" string each; see ``Journal``."""
    transcript: list[str] = []

    def hear(action: str, subject: Any) -> None:
        if action in TRANSCRIBED:
            transcript.append(f"{action} {subject.name}")

    with listen(hear):
        yield transcript
