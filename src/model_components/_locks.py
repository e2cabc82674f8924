"""Lock the folder that a run writes: with `flock` on POSIX systems, with a file on Windows.

The operating system releases the lock when the process ends, so a killed run leaves no lock.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import platform
import stat
from pathlib import Path
from typing import Any

_LOCKED_BYTE = 1 << 30  # far past the text, because Windows does not let others read a locked byte
_NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
)  # some network file systems support no locks


class NotOursError(Exception):
    """An error for a path that holds anything but a folder that this library made for this user."""


class PosixLock:
    """A lock on a folder itself; the marker file only names the process that holds the lock.

    Args:
        folder: The folder to lock.
        marker: The name of the file that marks a folder as made by this library.
        created: Whether this process has just made the folder.

    Raises:
        FileNotFoundError: The folder no longer exists.
        BlockingIOError: Another process holds the lock.
        NotOursError: The path is not a folder that this library made for this user.
    """

    holds_marker = False  # whether the lock keeps the marker file open

    def __init__(self, folder: Path, marker: str, *, created: bool):
        # O_NOFOLLOW, because a link could lead to somebody else's folder
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            # the path is a file or a link; for a link, the error depends on the system
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise NotOursError from None
            raise
        try:
            self._lock()
            # a new folder is not checked, because a network drive may report its owner wrongly; a
            # folder that is no longer at its path is not checked, because the caller does so
            if not created and self.is_at(folder) and not self._is_marked(folder, marker):
                raise NotOursError
        except BaseException:
            self.release()
            raise

    def _lock(self) -> None:
        import fcntl  # not at the top of the file: Windows has no fcntl

        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _is_marked(self, folder: Path, marker: str) -> bool:
        """Return whether the folder belongs to this user, and has the marker file or is empty."""
        owner = os.fstat(self._descriptor).st_uid
        if owner != os.geteuid():
            return False
        # the folder is empty if a run was killed between making the folder and marking it
        return not os.listdir(folder) or is_file(folder / marker, owner)

    def is_at(self, folder: Path) -> bool:
        """Return whether the locked folder is still at the path; a run may have replaced it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(folder))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock."""
        import fcntl

        with contextlib.suppress(OSError):
            # closing is not enough: a forked child may still hold the descriptor
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


class WindowsLock:
    """A lock on the folder's marker file, because Windows cannot open folders.

    The arguments and errors are the same as for `PosixLock`.
    """

    holds_marker = True  # Windows cannot remove a file while it is open

    def __init__(self, folder: Path, marker: str, *, created: bool):
        msvcrt: Any = importlib.import_module("msvcrt")  # Any: its types exist on Windows only
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotOursError
        if not created and os.listdir(folder) and not is_file(folder / marker):
            raise NotOursError
        self._marker = folder / marker
        self._descriptor = os.open(self._marker, os.O_RDWR | os.O_CREAT)
        os.lseek(self._descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(self._descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            os.close(self._descriptor)
            raise BlockingIOError from error

    def is_at(self, folder: Path) -> bool:
        """Return whether the path still holds the locked marker file."""
        try:
            there = os.lstat(folder / self._marker.name)
            return os.path.samestat(os.fstat(self._descriptor), there)
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock by closing the file."""
        os.close(self._descriptor)


FolderLock = WindowsLock if importlib.util.find_spec("fcntl") is None else PosixLock


def write_holder(path: Path) -> None:
    """Write this process's id and host name into a lock file."""
    # without O_NOFOLLOW, this could overwrite a user's file to which somebody made a link
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        file.truncate()  # opening a descriptor does not truncate the file
        file.write(f"process {os.getpid()} on {platform.node()}")


def holder_of(path: Path) -> str:
    """Return the process that a lock file names, in parentheses, or an empty string."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    # anybody may have written the file, so text with control characters is not shown
    return f" ({text[:100]})" if text.isprintable() and text else ""


def is_file(path: Path, owner: int | None = None) -> bool:
    """Return whether a path is a regular file, not a link, and belongs to ``owner`` if given."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and owner in (None, status.st_uid)
