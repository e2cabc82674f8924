"""Recognize the hub ids of models, and find or download the folders of models."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")  # no pickles
# the layout of the hub's cache: models--OWNER--NAME/snapshots/COMMIT
_CACHED = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def hub_id(place: str | Path) -> str | None:
    """Return the hub id of a model, from its name or its folder in the hub's cache.

    For any other folder, the result is None.

    >>> hub_id("Qwen/Qwen3-0.6B@main"), hub_id("models/mine/last"), hub_id("./models/mine")
    ('Qwen/Qwen3-0.6B', None, None)
    """
    if found := cached_commit(place):
        return found[0]
    name = str(place).partition("@")[0]
    if _ID.fullmatch(name) and not Path(name).exists():
        return name
    return None


def find_folder(
    place: str | Path, *, patterns: Sequence[str] = PATTERNS, operation: str = "", **hub: Any
) -> Path:
    """Return the local folder of a model, downloaded from the hub if necessary.

    A hub id is ``owner/name`` or ``owner/name@revision``.

    Args:
        place: The path of the folder, or a hub id.
        patterns: Patterns of the files to download.
        operation: The name that error messages begin with, or an empty string.
        **hub: Other arguments of `huggingface_hub.snapshot_download`, such as ``revision`` and
            ``token``.

    Returns:
        The path of the folder.

    Raises:
        ValueError: There is no such folder, and it could not be downloaded.
    """
    name = str(place)
    folder = user_path(name)
    if folder.is_dir():
        return folder
    before, at, _ = name.rpartition("@")
    if at and user_path(before).is_dir():  # a folder has no revisions
        return user_path(before)
    if folder.is_file():
        raise ValueError(f"{operation and f'{operation}: '}{name} is a file, expected a folder")
    missing = f"{operation and f'{operation}: '}{name}: there is no such folder"
    match = None if is_path(name) else _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{missing}{_nearest(folder)}")
    import huggingface_hub

    hub = {
        "revision": match["revision"],
        **{key: value for key, value in hub.items() if value is not None},
    }
    try:
        return Path(
            huggingface_hub.snapshot_download(match["name"], allow_patterns=list(patterns), **hub)
        )
    except (
        Exception
    ) as error:  # huggingface_hub raises many unrelated classes for a missing file or network
        reason = str(error).strip().split("\n")[0]
        # a misspelled folder name looks like an id, too
        if near := _nearest(folder):
            raise ValueError(f"{missing}{near}") from error
        raise ValueError(f"{missing}, and it cannot be downloaded ({reason})") from error


def is_cached(repo_id: str) -> bool:
    """Return whether the hub's cache on this machine has a model's repository."""
    import huggingface_hub
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    repo_id = split_revision(repo_id)[0]
    try:
        validate_repo_id(repo_id)
    except HFValidationError:  # such as ./mine or run--1/last
        return False
    name = repo_folder_name(repo_id=repo_id, repo_type="model")
    return Path(huggingface_hub.constants.HF_HUB_CACHE, name).is_dir()


def is_path(name: str) -> bool:
    """Return whether a name can only be a local path, not a hub id.

    >>> is_path("gpt2"), is_path("owner/name@main"), is_path("./mine"), is_path("a/b/c")
    (False, False, True, True)
    """
    return name.startswith((".", "/", "~")) or _NAME.fullmatch(name) is None


def _nearest(folder: Path) -> str:
    """Return "did you mean" and the folder next to this path that has the most similar name.

    The result is empty if there is no such folder.
    """
    if folder.parent.is_dir():
        beside = [p.name for p in folder.parent.iterdir() if p.is_dir()]
    else:
        beside = []
    near = difflib.get_close_matches(folder.name, beside, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {folder.with_name(near[0])}?"
    return ""


def split_revision(place: str | Path) -> tuple[str, str | None]:
    """Split ``owner/name@revision`` into the name and the revision.

    A folder, or a name without a revision, is returned unchanged, with None.
    """
    name, at, revision = str(place).rpartition("@")
    # a folder may have an @ in its own name
    is_folder = user_path(str(place)).exists() or user_path(name).exists()
    if at and not is_folder and _NAME.fullmatch(str(place)):
        return (name, revision)
    return (str(place), None)


def user_path(text: str) -> Path:
    """Return the path that a user wrote, with ``~`` expanded if that user exists."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def cached_commit(place: str | Path) -> tuple[str, str] | None:
    """Return the id and commit of a snapshot in the hub's cache; None for any other folder."""
    match = _CACHED.search(str(place))
    if match is None:
        return None
    return (match["id"].replace("--", "/", 1), match["commit"])
