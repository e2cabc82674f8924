"""Complete a model's folder with a tokenizer and a model card, and upload it."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ._folders import make_folder, new_file, run_hint
from ._hub import find_folder, hub_id, is_cached, is_path, user_path
from ._yaml import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CARD = "README.md"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm_char.model",
    "source.spm",
    "tekken.json",
    "tokenizer.model.v3",
    "prophetnet.tokenizer",
    "byte_maps.json",
    "chat_template.jinja",
    "chat_template.json",
)
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Settings of processors, which turn images, sounds and videos into tensors."""
_SENTENCE_MODULES = "modules.json"
_SENTENCE_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")
"""Settings of sentence-transformers; modules.json lists folders, such as one for pooling."""
_RECORDS = ("mergekit_config.yml", "merge_manifest.json")
"""Files of a merge that name local folders; the card has the recipe without these names."""


def load_tokenizer(source: str | Path, *, local: bool = False) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model's folder or hub id; return None if there is none.

    If the files of a tokenizer cannot be loaded, warn and return None.

    Args:
        source: Folder or hub id.
        local: Use only files that are on this machine.
    """
    from transformers import AutoTokenizer

    try:
        folder = find_folder(source, local_files_only=local)
    except (OSError, ValueError):
        return None
    # without files, transformers makes an empty tokenizer for many kinds of models
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged file causes KeyError, TypeError and many others
        warnings.warn(
            f"{source}: the tokenizer is left out, because it cannot be loaded "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return None


def source_of(model: Any) -> str:
    """Return the folder or hub id that a model was loaded from, or an empty string.

    The string is also empty for a name that is neither a folder nor in the hub's cache, which may
    be a path relative to another working directory.
    """
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return name if user_path(name).exists() or is_cached(name) else ""


def license_of(base: str) -> str | None:
    """Return the license in a model's card, or None if no card on this machine names a license."""
    if not base:  # a model made in memory
        return None
    card: Any = Path(base, CARD)
    repo_id = hub_id(base)
    if repo_id is not None:
        import huggingface_hub
        from huggingface_hub.utils import HFValidationError

        try:
            card = huggingface_hub.try_to_load_from_cache(repo_id, CARD)
        except HFValidationError:  # not a hub id, such as run--1/last
            return None
    if not isinstance(card, (str, Path)) or not Path(card).is_file():
        return None
    # the YAML header is between two lines of ---
    sections = Path(card).read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(sections) < 3 or sections[0].strip():
        return None
    try:
        header = next(iter(read_yaml(sections[1])), None)
    except ValueError:  # the header of somebody else's card may be invalid
        return None
    found = header.get("license") if isinstance(header, Mapping) else None
    return found if isinstance(found, str) else None


def card_of(
    title: str,
    paragraphs: Sequence[str],
    *,
    bases: Sequence[str],
    tags: Sequence[str],
    relation: str | None = None,
    **header: object,
) -> str:
    """Return a model card: a YAML header, which the hub reads, and text.

    Args:
        title: The heading.
        paragraphs: The paragraphs below the heading.
        bases: Folders or hub ids of the source models. The header names hub ids only, and no folder
            of this machine.
        tags: Tags in addition to ``model-components``.
        relation: The relation to the bases in the hub's terms, such as merge or finetune.
        **header: More fields of the header.

    >>> print(card_of("Half", ["Pruned."], bases=["org/model"], tags=["pruned"]).split("# ")[1])
    Half
    <BLANKLINE>
    Pruned.
    <BLANKLINE>
    """
    fields: dict[str, object] = {"library_name": "transformers", **header}
    ids = list(dict.fromkeys(name for base in bases if (name := hub_id(base)) is not None))
    if ids:
        fields["base_model"] = ids
        if relation is not None:
            fields["base_model_relation"] = relation
    licenses = {license_of(base) for base in bases}
    if (
        len(licenses) == 1 and None not in licenses
    ):  # if there are several licenses, the user decides
        fields["license"] = licenses.pop()
    fields["tags"] = ["model-components", *tags]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n" + "\n\n".join(
        [f"# {title}", *paragraphs, ""]
    )


def complete_folder(
    folder: Path,
    card: str,
    *,
    source: str = "",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the card, the tokenizer and the files of `copy_companions` into a model's folder.

    Args:
        folder: The folder, with weights and config.
        card: The text of the card.
        source: Folder or hub id of the model that this one was made from. The tokenizer and the
            files of `copy_companions` are copied from there if they are on this machine.
        tokenizer: A tokenizer to write instead of the source's.
    """
    if source:
        tokenizer = tokenizer or load_tokenizer(source, local=True)
        with contextlib.suppress(ValueError):  # a hub id that is not in the cache
            copy_companions(find_folder(source, local_files_only=True), folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    with new_file(folder / CARD, "save") as temporary:
        temporary.write_text(card, encoding="utf-8")


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the settings of processors, and the files of sentence-transformers, if there are any."""
    for name in (*PROCESSOR_FILES, *_sentence_files(source)):
        if (source / name).is_file():
            make_folder((folder / name).parent, "save")
            # files in a hub cache are links, so copy their contents
            shutil.copyfile(source / name, folder / name)


def _sentence_files(source: Path) -> list[str]:
    """Return the sentence-transformers files in a model's folder, or no files if in doubt.

    In old folders, one of the modules is the model itself. For such a folder, return no files.
    """
    try:
        listed = json.loads((source / _SENTENCE_MODULES).read_text(encoding="utf-8"))
        modules = [(module["path"], module["type"]) for module in listed]
    except (OSError, ValueError, TypeError, KeyError):  # the file is missing or of another kind
        return []
    names = [_SENTENCE_MODULES, *_SENTENCE_FILES]
    for path, kind in modules:
        if path == "":  # the model's folder
            continue
        # other names might lead out of the folder
        is_name = isinstance(path, str) and path == Path(path).name and path != ".."
        if not is_name or str(kind).endswith("Transformer"):
            return []
        if (source / path).is_dir():
            names += [f"{path}/{file.name}" for file in (source / path).iterdir()]
    return names


def shown_name(name: str) -> str:
    """Return the name that a card shows: the hub id, or the folder's name without its path.

    For the folder ``model`` or ``adapter`` in a run's folder, return the name of the run's folder.

    >>> shown_name("./runs/math/model"), shown_name("./models/math"), shown_name("org/math")
    ('math', 'math', 'org/math')
    """
    path = Path(name)
    if path.name in ("model", "adapter") and path.parent.name not in ("", "..", "~"):
        path = path.parent
    return hub_id(name) or path.name or "a model made in memory"


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

    Files of a merge that name local folders are not uploaded.

    Args:
        folder: A folder that this library wrote: a model, an adapter or a thinker.
        repo_id: The repository, ``owner/name``. It is created if it does not exist.
        private: Whether a new repository is private; None uses the account's default.
        token: A token of the hub; None uses the one that `hf auth login` saved.
        revision: The branch; None uses main. It is created if it does not exist.
        create_pr: Open a pull request instead of committing to the branch.
        commit_message: The message of the commit; default: "Upload by model-components".

    Returns:
        The URL of the commit.

    Raises:
        ValueError: The folder has no config.json and no adapter_config.json, or an adapter names a
            folder of this machine as its base.

    >>> push_to_hub("/nowhere", "me/model")
    Traceback (most recent call last):
    ValueError: push_to_hub: expected a folder with config.json or adapter_config.json, got /nowhere
    """
    path = Path(folder)
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(
            f"push_to_hub: expected a folder with config.json or adapter_config.json, got {path}"
            f"{run_hint(path)}"
        )
    for adapter in path.rglob("adapter_config.json"):  # peft has a subfolder for each adapter
        _check_base(adapter)
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    # refs/pr/N is an existing pull request, not a branch
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=path,
        revision=revision,
        create_pr=create_pr,
        # the hub matches whole paths, so files in subfolders need their own patterns
        ignore_patterns=[f"{start}{name}" for name in _RECORDS for start in ("", "*/")],
        commit_message=commit_message or "Upload by model-components",
    )
    return commit.commit_url


def _check_base(adapter: Path) -> None:
    """Check that an adapter's base model is not a local folder, which other users do not have."""
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"push_to_hub: expected a JSON object in {adapter}: {error}") from error
    # models/mine looks like a hub id, so check whether it is a folder
    if base and (is_path(base) or Path(base).exists()):
        raise ValueError(
            f"push_to_hub: expected a hub id as base_model_name_or_path in {adapter}, got {base!r}"
            "; upload the base first, then write its hub id there"
        )
