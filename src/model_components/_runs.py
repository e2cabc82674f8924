"""Folders of resumable runs: one process writes at a time, and settings must stay the same."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ._checkpoints import checkpoints_in, is_of_trainer
from ._folders import OutputError, make_folder, remove, write_error, write_json, writing
from ._locks import (
    FolderLock,
    NotOursError,
    PosixLock,
    WindowsLock,
    holder_of,
    is_file,
    write_holder,
)

_LOCK = ".model-components.lock"
_FILE = "run.json"


class RunFolder:
    """The folder of a run that can be stopped and resumed, as a context manager.

    Entering locks the folder, compares ``run.json`` with the run's settings, and writes that file
    if it does not exist yet.

    Args:
        folder: A new or empty folder, or the folder of an earlier run.
        settings: The run's settings, as JSON values. A run with other settings is refused.
        operation: The name of the command, with which error messages begin.
        contents: Hashes of the data's contents, by name. A run with other data is refused.
        checkpoints: The path of the checkpoints, relative to ``folder``.
        may_change: Names of settings that a later run may change; `update` writes them.
        results: Names of the files and folders that a run writes at its end.
        fresh: Start over: remove the checkpoints of an earlier run of this command, and the files
            among its results. None means that the command cannot start over.

    With several processes, only the first one locks the folder and compares the settings.

    Raises:
        OutputError: On entering. Another run has locked the folder. The folder cannot be written.
            It belongs to a run with other settings, or has results but no ``run.json``. With
            ``fresh``, its checkpoints are links.
        ValueError: On entering. ``run.json`` cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        operation: str,
        *,
        contents: Mapping[str, str] | None = None,
        checkpoints: str = ".",
        may_change: tuple[str, ...] = (),
        results: tuple[str, ...] = (),
        fresh: bool | None = False,
    ):
        self.folder = folder
        # the command is recorded, so that other commands do not use this folder
        self.settings = {"command": operation, **settings}
        if contents is not None:
            self.settings["contents"] = dict(contents)
        self.checkpoints = folder / checkpoints
        self.may_change = may_change
        self.results = results
        self.fresh = bool(fresh)
        self._instead = "or choose another folder"
        if fresh is not None:
            self._instead = f"start over with --fresh (fresh=True in Python), {self._instead}"
        self._to = f"{operation} to {folder}"
        self._operation = operation
        self._lock: PosixLock | WindowsLock | None = None
        self._signed: Path | None = None

    def __enter__(self) -> Self:
        """Lock the folder, and check that its recorded settings match this run's."""
        if int(os.environ.get("RANK", "0")):  # torchrun sets RANK
            return self
        make_folder(self.folder, self._operation)
        path = self.folder.resolve()  # the user may have made the folder a link
        try:
            # created=True skips the check for a marker, because the user may have made the folder
            self._lock = FolderLock(path, _LOCK, created=True)
        except BlockingIOError:
            raise OutputError(
                f"{self._to}: another run is writing to it now{holder_of(path / _LOCK)}"
            ) from None
        except (NotOursError, OSError) as error:
            reason = getattr(error, "strerror", None) or "it is not a folder"
            raise OutputError(
                f"{self._to}: the folder cannot be locked ({reason}); choose another folder"
            ) from error
        try:
            with writing(self._to):
                self._check()
                # a path that is not a regular file is not from an earlier run, and is not changed
                if not os.path.lexists(path / _LOCK) or is_file(path / _LOCK):
                    write_holder(path / _LOCK)
                    self._signed = path / _LOCK
                self._take()
        except BaseException:
            self.close()
            raise
        return self

    def _check(self) -> None:
        """Raise an error if the folder holds a run of another command, or with other settings."""
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise OutputError(
                f"{self._to}: {self.checkpoints} is a file, expected a folder of checkpoints or "
                "none; choose another folder"
            )
        before = self.read()
        written = [self.folder / name for name in self.results]
        written = [path for path in written if os.path.lexists(path)]
        written += checkpoints_in(self.checkpoints)
        if before is None and written:
            raise OutputError(
                f"{self._to}: expected a new folder or the folder of a run, got one with "
                f"{written[0].name} and no {_FILE}; choose another folder"
            )
        # files of another command, or of another library, are not ours to remove
        if before is not None and before.get("command") != self._operation:
            raise OutputError(
                f"{self._to}: expected a new folder or the folder of a run of {self._operation}, "
                f"got one whose {_FILE} belongs to {before.get('command', 'something else')}; "
                "choose another folder"
            )
        if before is not None and not self.fresh:
            self._compare(before)

    def _take(self) -> None:
        """Record this run's settings; if it starts over, first remove the earlier run's files."""
        is_new = not (self.folder / _FILE).exists()
        if self.fresh and not is_new:
            checkpoints = checkpoints_in(self.checkpoints)
            for path in (self.checkpoints, *checkpoints):
                if path.is_symlink():  # its target may belong to anybody
                    raise OutputError(
                        f"{self._to}: {path} is a link; remove it, or choose another folder"
                    )
            results = [self.folder / name for name in self.results]
            # a folder among the results, such as a model, stays until the next one replaces it
            for path in (*filter(is_of_trainer, checkpoints), *filter(Path.is_file, results)):
                remove(path)
        # a resumed run does not change `run.json`, because a user may have put notes into it
        if self.fresh or is_new:
            self.update()

    def update(self) -> None:
        """Write this run's settings to ``run.json``."""
        if int(os.environ.get("RANK", "0")):
            return
        write_json(self.folder / _FILE, self.settings, self._operation)

    def read(self) -> dict[str, Any] | None:
        """Return the settings in ``run.json``, or None if there is no such file.

        Raises:
            ValueError: The file cannot be read.
        """
        path = self.folder / _FILE
        if not path.exists():
            return None
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            settings = error
        if not isinstance(settings, dict):
            raise ValueError(
                f"{self._operation}: expected a JSON object in {path}, got {_shortened(settings)}; "
                "restore the file, or choose another folder"
            )
        return settings

    def _compare(self, before: Mapping[str, Any]) -> None:
        earlier = _flatten(before)
        # converted to JSON and back, so that tuples become lists, as in run.json
        now = _flatten(json.loads(json.dumps(self.settings)))
        different = [
            name
            for name in dict.fromkeys((*now, *earlier))
            if name not in self.may_change
            and now.get(name) != earlier.get(name)
            and name.partition(".")[0] in self.settings  # otherwise it is a note that the user made
        ]
        settings = [
            f"{name} is {_shortened(earlier.get(name))} there, got {_shortened(now.get(name))}"
            for name in different
            if not name.startswith("contents.")
        ]
        if settings:
            raise OutputError(
                f"{self._to}: the run in this folder has other settings: {'; '.join(settings)}; "
                f"give the same settings, {self._instead}"
            )
        if different:
            names = ", ".join(name.removeprefix("contents.") for name in different)
            raise OutputError(
                f"{self._to}: {names} changed since the run in this folder began; undo the change, "
                f"{self._instead}"
            )

    def close(self) -> None:
        """Release the lock on the folder."""
        if self._lock is None:
            return
        # remove the file before releasing the lock, because later it may belong to another run
        with contextlib.suppress(OSError):
            if self._signed is not None and not self._lock.holds_marker:
                remove(self._signed)
        self._signed = None
        self._lock.release()
        self._lock = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        failed = write_error(self._to, error)
        if failed is not None:
            raise failed from error


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings: ``{"a": {"b": 1}, "c": {}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": fact for inner, fact in _flatten(value).items()}
        else:
            flat[name] = value
    return flat


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
