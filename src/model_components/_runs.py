"""Folders that one run at a time writes, and in which only the same run goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ._checkpoints import checkpoints_in
from ._folders import OutputError, make_folder, of_write, remove, write_json
from ._formats import reading
from ._locks import FolderLock, NotOursError, PosixLock, WindowsLock, holder_of, sign

_LOCK = ".lock"
_FACTS = "run.json"


class RunFolder:
    """A folder of a run that can be stopped and that the same run takes up.

    As a context manager it locks the folder, compares ``run.json`` with the run's facts, and writes
    it where it is not there yet.

    Args:
        folder: A new or empty folder, or that of an earlier run.
        facts: What the run is made of, as JSON has it: settings, and hashes of what files hold.
        operation: The name that error messages begin with.
        checkpoints: The folder of the checkpoints inside it.
        may_change: Names of facts in which a later run may differ; `update` writes them.
        results: Names of files that an earlier run wrote at its end.
        fresh: Begin anew: remove the checkpoints and results of an earlier run, whatever its facts.

    Raises:
        OutputError: Another run has the folder now; it is of a run with other facts, or of none.
        ValueError: ``run.json`` is damaged.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        operation: str,
        *,
        checkpoints: str = ".",
        may_change: tuple[str, ...] = (),
        results: tuple[str, ...] = (),
        fresh: bool = False,
    ):
        self.folder = folder
        self.facts = dict(facts)
        self.checkpoints = folder / checkpoints
        self.may_change = may_change
        self.results = results
        self.fresh = fresh
        self._to = f"{operation} to {folder}"
        self._operation = operation
        self._lock: PosixLock | WindowsLock | None = None

    def __enter__(self) -> Self:
        """Lock the folder and compare the facts."""
        make_folder(self.folder, self._operation)
        place = self.folder.resolve()  # the user may have made it a link
        try:
            self._lock = FolderLock(place, _LOCK, created=True)
        except BlockingIOError:
            raise OutputError(
                f"{self._to}: another run is writing it now{holder_of(place / _LOCK)}"
            ) from None
        except (NotOursError, OSError) as error:
            raise OutputError(f"{self._to}: the folder cannot be locked ({error})") from error
        try:
            sign(place / _LOCK)
            self._take()
        except BaseException:
            self.close()
            raise
        return self

    def _take(self) -> None:
        before = self.read()
        if before is None and any(path.name != _LOCK for path in self.folder.iterdir()):
            raise OutputError(
                f"{self._to}: expected a new folder or that of a run, got one with other files and "
                f"no {_FACTS}"
            )
        if before is not None and not self.fresh:
            self._compare(before)
            return
        if before is not None:
            results = [self.folder / name for name in self.results]
            for path in (*checkpoints_in(self.checkpoints), *results):
                remove(path)
        self.update()

    def update(self) -> None:
        """Write this run's facts."""
        write_json(self.folder / _FACTS, self.facts, self._operation)

    def read(self) -> dict[str, Any] | None:
        """Return the facts of the run that the folder is of, or None.

        Raises:
            ValueError: They cannot be read.
        """
        path = self.folder / _FACTS
        if not path.exists():
            return None
        with reading(path, self._operation):
            return dict(json.loads(path.read_text(encoding="utf-8")).items())

    def _compare(self, before: Mapping[str, Any]) -> None:
        before = _flat(before)
        now = _flat(json.loads(json.dumps(self.facts)))
        for name in sorted(now.keys() | before.keys()):
            if name in self.may_change or now.get(name) == before.get(name):
                continue
            expected = _shown(before.get(name))
            got = _shown(now.get(name))
            raise OutputError(
                f"{self._to}: {name} must be {expected}, as in the run in this folder, got {got}; "
                "give what it was, begin anew with --fresh (fresh=True), or name another folder"
            )

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is None:
            return
        # before the lock is released: afterwards the file may be another run's
        with contextlib.suppress(OSError):
            if not self._lock.holds_marker:
                remove(self.folder / _LOCK)
        self._lock.release()
        self._lock = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        told = of_write(self._to, error) if error is not None else None
        if told is not None:
            raise told from error


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with those inside a fact as ``outer.inner``."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            flat |= {f"{name}.{inner}": found for inner, found in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
