"""Record effects on the disk while real code runs, and the folder that a crash before each effect would leave.

The interpreter's audit events report every change of a name and every file that is opened for writing, by any code.
``os.fsync`` has no event and is wrapped. Before each effect, the observed folder is copied. The copy is the state that
a killed process leaves: it lacks the contents of Python's buffers, and no process has a lock on it.

A loss of power takes more. The model is that of a journaling file system with ordered metadata: names survive in the
order of their changes, the content of a file only up to its last ``fsync``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["Recording", "Tree", "key_of", "record", "restore"]

Tree = dict[str, bytes | None]
"""A folder: content by path below it, None for a folder."""

_RENAMING = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_WRITING = os.O_WRONLY | os.O_RDWR
_LOCK = threading.RLock()
_observers: list[Recording] = []
_is_hooked = False


@dataclass
class Recording:
    """The effects recorded in a folder.

    Attributes:
        root: the folder. fault: error to raise instead of one effect, counted from 0, and that effect's number.
        effects: descriptions of the effects: "os.rename step". killed: the folder before each effect, and at the end.
        unpowered: the folder after a loss of power at the same moments, if none, or half, of each content without an
            fsync has reached the disk.
    """

    root: Path
    fault: tuple[int, BaseException] | None = None
    effects: list[str] = field(default_factory=list)
    killed: list[Tree] = field(default_factory=list)
    unpowered: list[tuple[Tree, Tree]] = field(default_factory=list)
    _durable: dict[int, bytes] = field(default_factory=dict)
    _is_looking: bool = False

    def look(self) -> None:
        """Copy the folder."""
        found: Tree = {}
        none: Tree = {}
        half: Tree = {}
        inodes = set()
        for entry in sorted(self.root.rglob("*")):
            name = str(entry.relative_to(self.root))
            if entry.is_dir():
                found[name] = none[name] = half[name] = None
                continue
            content, inode = entry.read_bytes(), entry.stat().st_ino
            inodes.add(inode)
            durable = self._durable.get(inode, b"")
            found[name] = content
            none[name] = durable
            half[name] = content if content == durable else content[: (len(durable) + len(content)) // 2]
        # A number that nothing has may be given to another file next.
        self._durable = {inode: content for inode, content in self._durable.items() if inode in inodes}
        self.killed.append(found)
        self.unpowered.append((none, half))

    def hear(self, effect: str, path: str) -> None:
        """Record the next effect, or raise the fault instead if its number is reached."""
        with _LOCK:
            if self._is_looking or not os.path.abspath(path).startswith(str(self.root)):
                return
            self._is_looking = True
            try:
                self.look()
            finally:
                self._is_looking = False
            self.effects.append(f"{effect} {os.path.relpath(path, self.root)}")
            if self.fault is not None and len(self.effects) == self.fault[0] + 1:
                raise self.fault[1]

    def settle(self) -> None:
        """Take all content as on the disk."""
        self._durable = {
            entry.stat().st_ino: entry.read_bytes() for entry in self.root.rglob("*") if not entry.is_dir()
        }

    def synced(self, descriptor: int) -> None:
        """Take the content of one file as on the disk."""
        entry = Path(_path_of(descriptor))
        if entry.is_file() and entry.is_relative_to(self.root):
            self._durable[entry.stat().st_ino] = entry.read_bytes()

    def crashes(self) -> Iterator[tuple[str, Tree]]:
        """Yield the different folders that a crash leaves, each with words for the moment and the kind of crash."""
        seen: set[int] = set()
        for number, (killed, (none, half)) in enumerate(zip(self.killed, self.unpowered, strict=True)):
            moment = f"before {number}, {self.effects[number]}" if number < len(self.effects) else "at the end"
            for kind, tree in (("kill", killed), ("loss of all", none), ("loss of half", half)):
                key = key_of(tree)
                if key not in seen:
                    seen.add(key)
                    yield f"{kind} {moment}", tree


@contextlib.contextmanager
def record(root: Path, fault: tuple[int, BaseException] | None = None) -> Iterator[Recording]:
    """Record changes in a folder, on all threads. Existing files count as written to disk.

    Args:
        fault: the number of an effect, and the exception raised instead of it.
    """
    _hook()
    recording = Recording(root, fault)
    recording.settle()
    _observers.append(recording)
    try:
        with mock.patch.object(os, "fsync", _watched(os.fsync, recording)):
            yield recording
    finally:
        _observers.remove(recording)
    recording.look()


def key_of(tree: Tree) -> int:
    """Return a number that is the same for equal folders alone."""
    return hash(tuple(sorted((name, content is None, content or b"") for name, content in tree.items())))


def restore(root: Path, tree: Tree) -> None:
    """Restore a folder to its content after a crash."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def _watched(fsync: Callable[[int], None], recording: Recording) -> Callable[[int], None]:
    def run(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        recording.hear("os.fsync", _path_of(number))
        fsync(number)
        recording.synced(number)

    return run


def _hook() -> None:
    # An audit hook cannot be removed.
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _observers or (event not in _RENAMING and event != "open"):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
        return
    for recording in tuple(_observers):
        recording.hear(event, _place(event, args))


def _place(event: str, args: tuple[Any, ...]) -> str:
    """Return the path that an event is about; relative to a folder that is open where one is."""
    if isinstance(args[0], int):
        return _path_of(args[0])
    name = os.fsdecode(args[0])
    folder = {"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2}.get(event)
    if folder is not None and isinstance(args[folder], int) and args[folder] >= 0:
        return os.path.join(_path_of(args[folder]), name)
    return name


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
