"""What a complete model folder has besides weights and config: tokenizer and card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ._folders import new_file
from ._hub import find_folder, hub_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CARD = "README.md"


def find_tokenizer(place: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a model's folder, or under its hub id; None if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(find_folder(place))
    except (OSError, ValueError):
        return None


def name_of(model: Any) -> str:
    """Return the folder or hub id that a model was loaded from; empty where it was made here."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of what a model was loaded from, without the network; or None."""
    from transformers import AutoTokenizer

    if not name_of(model):
        return None
    try:
        return AutoTokenizer.from_pretrained(name_of(model), local_files_only=True)
    except (OSError, ValueError):
        return None


def license_of(base: str) -> str | None:
    """Return the license that a model's card names; None without a card on this machine."""
    card: Any = Path(base, CARD)
    repo_id = hub_id(base)
    if repo_id is not None:
        import huggingface_hub

        card = huggingface_hub.try_to_load_from_cache(repo_id, CARD)
    if not isinstance(card, (str, Path)) or not Path(card).is_file():
        return None
    parts = Path(card).read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        head = yaml.safe_load(parts[1])
    except yaml.YAMLError:  # of somebody else's card
        return None
    found = head.get("license") if isinstance(head, Mapping) else None
    return found if isinstance(found, str) else None


def card_of(
    title: str,
    parts: Sequence[str],
    *,
    bases: Sequence[str],
    tags: Sequence[str],
    relation: str | None = None,
    **head: object,
) -> str:
    """Return a model card, whose head the hub reads.

    Args:
        title: Its heading.
        parts: Its paragraphs.
        bases: Folders or hub ids of what the model was made from. The head names hub ids, and no
            folder of this machine.
        tags: Tags besides ``model-components``.
        relation: How the model relates to its bases, in the hub's words.
        **head: More fields of the head.

    >>> print(card_of("Half", ["Pruned."], bases=["org/model"], tags=["pruned"]).split("# ")[1])
    Half
    <BLANKLINE>
    Pruned.
    <BLANKLINE>
    """
    fields: dict[str, object] = {"library_name": "transformers", **head}
    ids = list(dict.fromkeys(name for base in bases if (name := hub_id(base)) is not None))
    if ids:
        fields["base_model"] = ids[0] if len(ids) == 1 else ids
        if relation is not None:
            fields["base_model_relation"] = relation
    licenses = {license_of(base) for base in bases}
    if len(licenses) == 1 and None not in licenses:  # of several, a person has to decide
        fields["license"] = licenses.pop()
    fields["tags"] = ["model-components", *tags]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n" + "\n\n".join(
        [f"# {title}", *parts, ""]
    )


def complete_folder(
    folder: Path, card: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the card, and the tokenizer where there is one, beside a model's weights."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    with new_file(folder / CARD, "save") as part:
        part.write_text(card, encoding="utf-8")


def shown_name(name: str) -> str:
    """Return how a card calls a model: by its hub id, or by its folder's name without the path."""
    return hub_id(name) or Path(name).name or "a model made in memory"


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> str:
    """Upload a model's folder to the hub, as one commit.

    Args:
        folder: What any function or command here wrote: a model, an adapter, a thinker.
        repo_id: The repository, ``owner/name``; it is made if there is none.
        private: Whether a new repository is; None for what the account's owner has set.
        token: A token of the hub; None for the one that `hf auth login` saved.
        revision: A branch, made if there is none.
        create_pr: Propose the commit.
        commit_message: Default says what uploaded it.

    Returns:
        The commit's address.

    Raises:
        ValueError: The folder holds no model and no adapter.

    >>> push_to_hub("/nowhere", "me/model")
    Traceback (most recent call last):
    ValueError: push_to_hub: expected a folder with config.json or adapter_config.json, got /nowhere
    """
    path = Path(folder)
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(
            f"push_to_hub: expected a folder with config.json or adapter_config.json, got {path}"
        )
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=path,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message or "Upload by model-components",
    )
    return commit.commit_url
