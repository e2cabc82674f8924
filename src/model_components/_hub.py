"""The hub: what a model is called there, and folders that become repositories."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ._folders import temporary_folder

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHED = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def hub_id(place: str | Path) -> str | None:
    """The id under which the hub knows a model, by its name or by the cache's folder; None if it is somewhere else.

    >>> hub_id("Qwen/Qwen3-0.6B@main"), hub_id("models/mine/last"), hub_id("./models/mine")
    ('Qwen/Qwen3-0.6B', None, None)
    """
    if found := cached_commit(place):
        return found[0]
    name = str(place).partition("@")[0]
    return name if _ID.fullmatch(name) and not Path(name).exists() else None


def cached_commit(place: str | Path) -> tuple[str, str] | None:
    """Id and commit of a snapshot in the hub's cache; None for another folder."""
    match = _CACHED.search(str(place))
    return None if match is None else (match["id"].replace("--", "/", 1), match["commit"])


def upload(
    save: Callable[[Path], None], repo_id: str, *, private: bool | None = None, token: str | bool | None = None,
    revision: str | None = None, create_pr: bool = False, commit_message: str | None = None,
) -> str:  # fmt: skip
    """What ``save`` writes into a folder, as one commit on the hub.

    Args:
        save: Called with an empty folder, which is removed afterwards.
        repo_id: Made if there is none.
        private: Whether a new repository is; None for what the account's owner has set.
        token: Of the hub; None for the one that was saved by `hf auth login`.
        revision: A branch, made if there is none.
        create_pr: Propose the commit.
        commit_message: Default says what uploaded it.

    Returns:
        The commit's address.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with temporary_folder() as folder:
        save(folder)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        made = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, create_pr=create_pr,
            commit_message=commit_message or "Upload by model-components",
        )  # fmt: skip
    return made.commit_url
