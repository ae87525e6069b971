"""Scratch folders: everything that a save writes, replaces or deletes is first in a marked folder next to its target.

step.tmp-3f2a91c0/
    owner.json    the mark: whose folder this is; its maker holds a lock on this file while it works
    new/          the checkpoint being written
    replaced/     the folder that had the name before, until the new one has it
    deleted/      the folder being deleted

A folder without this mark belongs to the user, whatever its name, and is never touched (docs/design/checkpoint.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_fsdp.checkpoint.manifest import sync

__all__ = ["Scratch", "delete_folder", "make_scratch", "marked_names", "names_at_rest", "resting_place", "sweep"]

_log = logging.getLogger(__name__)

_INFIX = ".tmp-"
_OWNER = "owner.json"
_KIND = "megatron-fsdp-dbuffer scratch"
# A lock may not work between hosts. A save that still writes then shows by the times of its files.
_QUIET_SECONDS = 3600.0
# Recorded as the host of a folder whose maker could not lock it.
_NO_LOCK = "no lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_ATTEMPTS = 20
# Errors of renaming a folder when a non-empty folder has the name.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder of this process next to ``path``; it exists until ``remove``.

    Attributes:
        path: the target of the save. folder: the scratch folder.
    """

    path: Path
    folder: Path
    lock: IO[str]

    @property
    def new(self) -> Path:
        """The folder to write to; ``publish`` gives it the name ``path``."""
        return self.folder / "new"

    def publish(self) -> None:
        """Rename ``new`` to ``path``; an existing folder there is moved into this scratch folder first.

        If the process is killed between the two renames, both are in the scratch folder: ``resting_place`` finds the
        old one, and ``sweep`` moves it back.

        Raises:
            OSError: a rename failed; the old folder is at ``path`` again.
        """
        replaced = self.folder / "replaced"
        for attempt in range(_MAX_ATTEMPTS):
            # Another job that saves to the same path may rename at the same time. Either way ``path`` is complete.
            try:
                with contextlib.suppress(FileNotFoundError):
                    self.path.rename(replaced)
                    sync(self.folder)
                self.new.rename(self.path)
                break
            except BaseException as error:
                is_taken = isinstance(error, OSError) and error.errno in _TAKEN
                if not is_taken or attempt == _MAX_ATTEMPTS - 1:
                    _bring_back(replaced, self.path)
                    raise
                if replaced.exists():
                    shutil.rmtree(replaced)
        sync(self.path.parent)

    def discard(self) -> None:
        """Delete the scratch folder after a failure, after moving a replaced folder back. It is kept if that fails."""
        try:
            _bring_back(self.folder / "replaced", self.path)
        except BaseException:
            self.lock.close()
            raise
        self.remove()

    def remove(self) -> None:
        """Delete the folder and its contents."""
        try:
            _remove(self.folder)
        finally:
            self.lock.close()


def make_scratch(path: Path) -> Scratch:
    """Make a scratch folder next to ``path``, and missing parent folders. Calls ``sweep`` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    folder = path.with_name(f"{path.name}{_INFIX}{secrets.token_hex(4)}")
    folder.mkdir()
    lock: IO[str] | None = None
    try:
        lock = (folder / _OWNER).open("w", encoding="utf-8")
        host = _this_host()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Without a lock, a sweep judges by the age of the files only.
            host = _NO_LOCK
        json.dump({"kind": _KIND, "of": path.name, "host": host}, lock)
        lock.flush()
        os.fsync(lock.fileno())
    except BaseException:
        if lock is not None:
            lock.close()
        _remove(folder)
        raise
    return Scratch(path, folder, lock)


def sweep(path: Path) -> None:
    """Remove leftovers of killed saves to ``path``; a checkpoint that they had moved away is moved back.

    Folders without this library's mark, and folders of jobs that may still run, are untouched.
    """
    for folder, owner in _scratches(path.parent):
        if owner["of"] != path.name:
            continue
        # The folder's maker, or another job's sweep, may remove it at any moment; nothing is left to do then.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as locks:
            if not _is_abandoned(folder, owner["host"], locks):
                continue
            _bring_back(folder / "replaced", path)
            try:
                _remove(folder)
            except FileNotFoundError:
                raise
            except OSError as error:
                _log.warning("%s, which a save left behind, cannot be removed: %s", folder, error)


def resting_place(path: Path) -> Path:
    """Return where a folder's content is: at ``path``, or in the scratch folder of a save that was killed."""
    if not path.exists() and path.parent.is_dir():
        for folder, owner in _scratches(path.parent):
            if owner["of"] == path.name and (folder / "replaced").is_dir():
                return folder / "replaced"
    return path


def marked_names(parent: Path) -> set[str]:
    """Return the names in a folder for which scratch folders exist, in use or left behind."""
    return {owner["of"] for _, owner in _scratches(parent)}


def names_at_rest(parent: Path) -> set[str]:
    """Return the names of a folder's entries, including those that a killed save had moved away."""
    moved = {owner["of"] for folder, owner in _scratches(parent) if (folder / "replaced").is_dir()}
    return moved | {entry.name for entry in parent.iterdir()}


def delete_folder(path: Path) -> None:
    """Delete a folder. It is moved into a scratch folder first, so that a kill leaves no half of it under its name."""
    scratch = make_scratch(path)
    try:
        # Another job of the same series may have deleted it.
        with contextlib.suppress(FileNotFoundError):
            path.rename(scratch.folder / "deleted")
    finally:
        scratch.remove()


def _scratches(parent: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the scratch folders in a folder, each with the content of its mark."""
    for entry in sorted(parent.iterdir()):
        if _INFIX in entry.name and entry.is_dir() and not entry.is_symlink():
            owner = _read_owner(entry)
            if owner is not None and entry.name.startswith(owner["of"] + _INFIX):
                yield entry, owner


def _read_owner(folder: Path) -> dict[str, str] | None:
    try:
        owner: Any = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        found = {key: str(owner[key]) for key in ("kind", "of", "host")}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if found["kind"] == _KIND else None


def _this_host() -> str:
    """Return host name and boot id, because a lock means nothing on another kernel, even under the same host name."""
    try:
        boot = _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        boot = "unknown boot"
    return f"{socket.gethostname()} {boot}"


def _is_abandoned(folder: Path, host: str, locks: contextlib.ExitStack) -> bool:
    """Return whether the maker of a folder is gone. Its lock is then held by ``locks``, so that one job removes it.

    Raises:
        FileNotFoundError: the folder or one of its entries was removed or renamed meanwhile.
    """
    try:
        file = locks.enter_context((folder / _OWNER).open("r+", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if host == _this_host():
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        raise
    except OSError:
        # This file system may have no locks.
        pass
    times = [entry.lstat().st_mtime for entry in (folder, *folder.rglob("*"))]
    return time.time() - max(times) > _QUIET_SECONDS


def _bring_back(replaced: Path, path: Path) -> None:
    """Move a replaced folder back to its name, unless another folder has the name."""
    if replaced.exists() and not path.exists():
        try:
            replaced.rename(path)
        except OSError as error:
            # Another job published its own checkpoint under the name at the same moment.
            if error.errno not in _TAKEN:
                raise
        sync(path.parent)


def _remove(folder: Path) -> None:
    """Delete a scratch folder, its mark last, so that a kill leaves a folder that is still recognized as one."""
    for entry in [entry for entry in folder.iterdir() if entry.name != _OWNER]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (folder / _OWNER).unlink(missing_ok=True)
    folder.rmdir()
