"""Create, replace and remove files and folders on a user's disk.

A result is written into the hidden folder ``.NAME.partial``, next to its final path NAME. When the
result is complete, a single rename moves it to this path. The hidden folder contains a marker file.
A folder without the marker, a folder of another user and a symbolic link are not ours: they are
not changed, and an error is raised. This module removes only marked folders, files that it has just
created, and the checkpoints and results of a run that starts over (`_runs`).

    parent of NAME/
      .NAME.partial/
        .made-by-model-components   the marker, which names the process that wrote last
        result/                     becomes NAME
        ...                         files that an interrupted run needs to resume
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ._locks import FolderLock, NotOursError, PosixLock, WindowsLock, holder_of, write_holder

_MARKER = ".made-by-model-components"
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""The error numbers of full disks, quotas, read-only file systems and file-size limits."""


class OutputError(OSError, ValueError):
    """An error for a path that cannot be written, is in use, or must not be replaced."""


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, without hidden ones such as locks.

    The list is empty if the folder does not exist, for example because it was moved.
    """
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def run_hint(folder: str | os.PathLike[str], names: Sequence[str] = ("model", "adapter")) -> str:
    """Return "did you mean" and a folder inside this one, or "" if none has one of the names."""
    for name in names:
        inner = Path(folder, name)
        if inner.is_dir():
            return f" (did you mean {inner}?)"
    return ""


def check_new(out: str | os.PathLike[str], operation: str) -> Path:
    """Check that a folder can be made at a path, and return the absolute path.

    An empty folder may be at the path already, unless it is the current folder or a mount point.

    Raises:
        OutputError: Anything else is at the path, even a symbolic link. The nearest existing parent
            is not a folder, or is not writable.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     check_new(file.name, "merge")
    Traceback (most recent call last):
    model_components._folders.OutputError: merge to ...: a file is there; choose a new folder
    """
    path = Path(os.path.abspath(out))
    to = f"{operation} to {os.fspath(out)}"
    try:
        if path.is_symlink():
            raise OutputError(
                f"{to}: a symbolic link is there; choose the folder that it points to"
            )
        if path.is_dir():
            # the result replaces an empty folder, but a mount point cannot be replaced, and a shell
            # whose current folder is replaced would stay in the old one
            if path.samefile(os.curdir) or os.path.ismount(path):
                raise OutputError(
                    f"{to}: this is the current folder or a mount point; choose a folder inside it"
                )
            if any(path.iterdir()):
                raise OutputError(f"{to}: the folder is not empty; choose a new one")
        elif os.path.lexists(path):
            raise OutputError(f"{to}: a file is there; choose a new folder")
        # the nearest existing parent, even a broken link; the folders below it will be made
        parent = next(p for p in path.parents if os.path.lexists(p))
        if not parent.is_dir():
            raise OutputError(f"{to}: {parent} is a file, expected a folder")
        if not os.access(
            parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
        ):
            raise OutputError(f"{to}: no permission to write in {parent}; choose another folder")
    except OSError as error:
        raise _told(to, error) from error
    return path


def _told(to: str, error: OSError) -> OutputError:
    if isinstance(error, OutputError):
        return error
    return OutputError(f"{to}: cannot be written ({error.strerror})")


def write_error(to: str, error: BaseException | None) -> OutputError | None:
    """Return the `OutputError` to raise instead of a write error, or None for any other error.

    Python, safetensors and torch report a full disk with different classes and messages.

    Args:
        to: The beginning of the message: the operation and the path.
        error: The exception that was raised, or None.
    """
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"\bos error (\d+)", text):  # safetensors, which is written in Rust
        number = int(found[1])
    if number in _WRITE_ERRORS:
        reason = os.strerror(number)
        if getattr(error, "filename", None):
            reason = f"{reason}: {error.filename}"
        return OutputError(f"{to}: cannot be written ({reason})")
    if isinstance(error, RuntimeError) and "inline_container" in text:  # torch's file writer
        return OutputError(f"{to}: cannot be written ({text.splitlines()[0]})")
    return None


@contextlib.contextmanager
def writing(to: str) -> Iterator[None]:
    """Turn a failed write into an `OutputError`.

    Args:
        to: The beginning of the message: the operation and the path.

    Raises:
        OutputError: The disk is full, a quota is used up, or the file system is read-only.
    """
    try:
        yield
    except Exception as error:  # torch and safetensors raise other classes than OSError
        failed = write_error(to, error)
        if failed is not None:
            raise failed from error
        raise


def is_begun(out: str | os.PathLike[str]) -> bool:
    """Return whether an interrupted run left work for ``out`` that the same command can resume."""
    path = Path(os.path.abspath(out))
    hidden = path.with_name(f".{path.name}.partial")
    # the marker and an empty result folder exist before any work is done
    return any(part.is_file() and part.name != _MARKER for part in hidden.rglob("*"))


def make_folder(path: str | os.PathLike[str], operation: str) -> Path:
    """Make a folder and its parents if they do not exist, and return its path.

    Raises:
        OutputError: A file is in the way, or the parent is not writable.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{operation} to {path}: the folder cannot be made ({error.strerror})"
        ) from error
    return Path(path)


class NewFolder:
    """A folder that is written under a hidden name, and gets its final name when it is complete.

    As a context manager, it calls `open` on entry and `publish` on exit. After an error, it
    discards the written files, unless ``resumable`` is True.

    Args:
        out: The final path. An empty folder may be there already.
        operation: The name that error messages begin with.
        resumable: After an error, keep the written files for a later run.
        fresh: Remove the files that an interrupted earlier run left.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with NewFolder(f"{parent}/model", "save") as new:
    ...         _ = (new.folder / "config.json").write_text("{}")
    ...         (new.out / "config.json").exists()
    ...     (new.out / "config.json").exists()
    False
    True
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        operation: str,
        *,
        resumable: bool = False,
        fresh: bool = False,
    ):
        self.out = check_new(out, operation)
        self.operation = operation
        self.resumable = resumable
        self.fresh = fresh
        self.place = self.out.with_name(f".{self.out.name}.partial")
        self.folder = self.place / "result"
        self._to = f"{operation} to {self.out}"
        self._lock: PosixLock | WindowsLock | None = None

    def open(self) -> Self:
        """Make the hidden folder, or take over the one that an interrupted run left, and lock it.

        Raises:
            OutputError: Another run has locked the folder, it is not ours, or its parent is not
                writable.
        """
        if self._lock is not None:
            raise OutputError(f"{self._to}: the folder is open already")
        make_folder(self.out.parent, self.operation)
        try:
            while not self._claim():  # another run finished in between
                check_new(self.out, self.operation)
            write_holder(self.place / _MARKER)
            if self.fresh or not self.resumable:
                _empty(self.place, keep=[_MARKER])
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder)
            self._check_result()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _told(self._to, error) from error
            raise
        return self

    def _claim(self) -> bool:
        """Lock the hidden folder; return False if another run removed or replaced it meanwhile."""
        created = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.place)  # with mode 0777 minus the umask
            created = True
        try:
            self._lock = FolderLock(self.place, _MARKER, created=created)
        except FileNotFoundError:
            return False
        except NotOursError:
            raise self._foreign() from None
        except BlockingIOError:
            holder = holder_of(self.place / _MARKER)
            raise OutputError(f"{self._to}: another run is writing to it now{holder}") from None
        # another run may have finished and removed the folder before this run got the lock
        if not self._has_its_name():
            self.close()
            return False
        return True

    def _foreign(self) -> OutputError:
        return OutputError(
            f"{self._to}: {self.place} was not made by model-components and is in the way; move "
            "it, or choose another folder"
        )

    def _has_its_name(self) -> bool:
        """Return whether the locked folder is still at its path."""
        assert self._lock is not None
        return self._lock.is_at(self.place)

    def _check_result(self) -> None:
        """Raise an error if the result folder was replaced by a link or a file."""
        if not stat.S_ISDIR(os.lstat(self.folder).st_mode):
            raise OutputError(
                f"{self._to}: expected a folder at {self.folder}, got a link or a file; remove it, "
                "or choose another folder"
            )

    def clear(self, keep: Collection[str] = ()) -> None:
        """Remove the contents of the result so far, except the named files."""
        self._check_result()
        _empty(self.folder, keep)

    def publish(self) -> None:
        """Move the result to its final path, and remove the hidden folder.

        Raises:
            OutputError: Something else is at the final path now. It is not changed, and the
                result is kept: no later run removes it.
        """
        # if somebody moved the hidden folder, whatever is at its path now is not ours
        if not self._has_its_name():
            raise self._foreign()
        self._check_result()
        try:
            _rename(self.folder, self.out)
        except OSError as error:
            # no run clears a folder without a marker, so the result is safe in it
            (self.place / _MARKER).unlink(missing_ok=True)
            self.close()
            if os.path.lexists(self.out):
                why = "something was put there meanwhile"
            else:
                why = error.strerror
            raise OutputError(f"{self._to}: {why}; the result is in {self.folder}") from None
        # the result is at its final path; a later run removes files that cannot be removed now
        with contextlib.suppress(OSError):
            self.discard()

    def discard(self) -> None:
        """Remove the hidden folder and its contents, but nothing at the final path."""
        try:
            if self._lock is not None and self._has_its_name():
                _empty(self.place, keep=[_MARKER])
                # an open file cannot be removed on Windows, so the lock goes first
                if self._lock.holds_marker:
                    self.close()
                (self.place / _MARKER).unlink(missing_ok=True)
                self.place.rmdir()
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock; keep the written files for a later run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is None:  # published or discarded in between
            return
        if kind is None:
            try:
                self.publish()
            finally:
                self.close()
            return
        with contextlib.suppress(OSError):  # the original error is the one to report
            nothing = sorted(os.listdir(self.place)) == [
                _MARKER,
                self.folder.name,
            ] and not os.listdir(self.folder)
            if nothing or not self.resumable:
                self.discard()
        self.close()
        failed = write_error(self._to, error)
        if failed is not None:
            raise failed from error


def _rename(folder: Path, out: Path) -> None:
    """Move a folder to a path that is free or has an empty folder, without following links.

    The move is atomic, except on Windows if the path has an empty folder.
    """
    try:
        os.rename(folder, out)
    except FileExistsError:  # Windows cannot rename onto an existing folder
        os.rmdir(out)  # fails if it is not empty
        os.rename(folder, out)


def _empty(folder: Path, keep: Collection[str]) -> None:
    for path in list(folder.iterdir()):
        if path.name not in keep:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder that this library made, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return this library's folder in the user's cache; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "model-components"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield an empty temporary folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], operation: str) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, the file there replaces the one at ``path``.

    Raises:
        OutputError: ``path`` is a folder, link or device, or cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_file(f"{folder}/a.txt", "save") as part:
    ...         _ = part.write_text("whole")
    ...     Path(folder, "a.txt").read_text()
    'whole'
    """
    path, to = Path(os.path.abspath(path)), f"{operation} to {os.fspath(path)}"
    make_folder(path.parent, operation)
    # a unique name in the same folder, because a rename cannot cross file systems
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        if os.path.lexists(path):
            mode = stat.S_IMODE(os.lstat(path).st_mode)
        else:
            mode = None
        if mode is not None and (path.is_symlink() or not path.is_file()):
            raise OutputError(
                f"{to}: a folder, link or device is there, expected the name of a file"
            )
        os.close(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        )  # O_EXCL follows no link
        if mode is not None:
            os.chmod(part, mode)  # the mode of the file that it replaces
    except OSError as error:
        raise _told(to, error) from error
    try:
        with writing(to):
            yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], data: object, operation: str = "write") -> None:
    """Write data as indented JSON; an error leaves no partial file."""
    with new_file(path, operation) as part:
        part.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
