"""Read tokenizer files, and add tokens without changing existing ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_components._formats import reading
from model_components._model_folders import TOKENIZER_FILES

from ..files import CheckpointError
from ..files.headers import read_json


def has_tokenizer(folder: Path | None) -> bool:
    """Return whether a folder has a tokenizer that `read_vocabulary` reads."""
    if folder is None:
        return False
    names = ("tokenizer.json", "vocab.json", "vocab.txt")
    return any((folder / name).exists() for name in names)


def copy_tokenizer(folders: Iterable[Path | None], out: Path) -> None:
    """Copy the tokenizer files of the first folder that has any into ``out``."""
    for folder in folders:
        if folder is None:
            continue
        existing = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        for path in existing:
            shutil.copyfile(path, out / path.name)
        if existing:
            return


def read_vocabulary(folder: Path | None, label: str) -> dict[str, int]:
    """Return the id of each token, from tokenizer.json, or else from vocab.json or vocab.txt.

    Raises:
        CheckpointError: The model has no tokenizer that can be read.
    """
    if folder is None or not has_tokenizer(folder):
        raise CheckpointError(
            f"{label}: expected a tokenizer.json, vocab.json or vocab.txt, to match rows by token, "
            "got none"
        )
    if (folder / "tokenizer.json").exists():
        return _fast_vocabulary(folder / "tokenizer.json")
    path = folder / "vocab.json"
    if path.exists():
        ids = read_json(path)
    else:
        path = folder / "vocab.txt"
        with reading(path, "merge"):
            # splitlines would also split tokens at characters such as U+2028
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        ids = {line: row for row, line in enumerate(lines)}
    return _whole_numbers(path, ids | _added_tokens(folder))


def _added_tokens(folder: Path) -> dict[str, Any]:
    """Return the ids of the tokens that were added to a vocabulary, by token.

    They are read from added_tokens.json or, without this file, from tokenizer_config.json.
    """
    if (folder / "added_tokens.json").exists():
        return read_json(folder / "added_tokens.json")
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    added = {}
    with reading(path, "merge"):
        for row, token in (read_json(path).get("added_tokens_decoder") or {}).items():
            added[token["content"]] = int(row)
    return added


def _whole_numbers(path: Path, ids: dict[str, Any]) -> dict[str, int]:
    """Return ``ids``; raise a `CheckpointError` unless all are integers from 0 to 2**31 - 1."""
    # `type`, because for isinstance true and false are ints
    if not all(type(row) is int and 0 <= row < 1 << 31 for row in ids.values()):
        raise CheckpointError(
            f"{path}: expected token ids that are integers from 0 to 2**31 - 1, got other values"
        )
    return ids


def _fast_vocabulary(path: Path) -> dict[str, int]:
    data = read_json(path)
    try:
        vocab = data["model"]["vocab"]
        if isinstance(vocab, list):  # a list of pieces with scores
            ids = {piece[0]: row for row, piece in enumerate(vocab)}
        else:
            ids = dict(vocab)
        for token in data.get("added_tokens") or []:
            ids[token["content"]] = token["id"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected a tokenizer.json as the tokenizers library writes it, got another "
            f"format ({error!r})"
        ) from error
    return _whole_numbers(path, ids)


def _pair(merge: list[str] | str) -> list[str]:
    """Return the two tokens of a merge; older tokenizer.json files have one string, "a b"."""
    return merge if isinstance(merge, list) else merge.split(" ")


def _is_of(merge: list[str] | str, tokens: Mapping[str, int]) -> bool:
    """Return whether ``tokens`` has both tokens of a BPE merge and the token that it makes."""
    pair = _pair(merge)
    return all(token in tokens for token in (*pair, "".join(pair)))


def _merges(path: Path, model: Mapping[str, Any]) -> list[list[str] | str]:
    """Return the BPE merges of a tokenizer: pairs or, in older files, strings with a space.

    Args:
        path: The tokenizer.json, for messages.
        model: The tokenizer's model in the file.

    Raises:
        CheckpointError: A merge is neither a pair of tokens nor a string.
    """
    merges = model.get("merges") or []
    if not isinstance(merges, list):
        raise CheckpointError(f"{path}: expected a list of merges, got {merges!r}")
    for merge in merges:
        if isinstance(merge, str):
            continue
        if not isinstance(merge, list) or [type(token) for token in merge] != [str, str]:
            raise CheckpointError(
                f"{path}: expected merges that are pairs of tokens, got {merge!r}"
            )
    return merges


def _all_merges(
    models: Mapping[Path, Mapping[str, Any]],
    vocabulary: Mapping[str, int],
    tokens: Mapping[str, int],
) -> list[list[str] | str]:
    """Return the first model's BPE merges, and other models' merges that build new tokens.

    Args:
        models: The models of the tokenizers, by the path of their tokenizer.json.
        vocabulary: The first model's tokens.
        tokens: The output's tokens; merges of other tokens are left out.
    """
    (first, own), *others = models.items()
    merges = [merge for merge in _merges(first, own) if _is_of(merge, tokens)]
    # as JSON, because a merge may be a list, which cannot be hashed
    known = {json.dumps(merge) for merge in merges}
    for path, model in others:
        for merge in _merges(path, model):
            if json.dumps(merge) in known or "".join(_pair(merge)) in vocabulary:
                continue
            if _is_of(merge, tokens):
                # at the end, with the lowest priority, after the tokenizer's own merges
                merges.append(merge)
                known.add(json.dumps(merge))
    return merges


def extend_tokenizer(path: Path, tokens: Mapping[str, int], others: Sequence[Path]) -> str:
    """Return the text of a tokenizer.json that is extended to all of ``tokens``.

    BPE merges of ``others`` that build new tokens are added, too.

    Raises:
        CheckpointError: This type of tokenizer cannot be extended without changing ids.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    model = data["model"]
    if not isinstance(model["vocab"], dict):
        raise CheckpointError(
            f"{path}: expected a tokenizer that can be extended, got a {model.get('type')} "
            "tokenizer; set tokenizer_source to base or to the path of a model"
        )
    added = {}
    for token in data.get("added_tokens") or []:
        if token["content"] in tokens:  # otherwise no model has a row for the token
            added[token["content"]] = token
    known = set(model["vocab"]) | set(added)
    models = {path: model}
    for other in others:
        theirs = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
        models[other / "tokenizer.json"] = theirs["model"]
        known |= set(theirs["model"]["vocab"])
        for token in theirs.get("added_tokens") or []:
            if token["content"] in tokens:
                # another model's special token stays special, with the id it has in the output
                added.setdefault(token["content"], token | {"id": tokens[token["content"]]})
    # the tokenizers library rejects an added token that lacks one of these
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    for token in tokens.keys() - known:  # a token that only the recipe names
        added.setdefault(token, {"id": tokens[token], "content": token, **plain})
    if "merges" in model:
        model["merges"] = _all_merges(models, model["vocab"], tokens)
    # Added tokens are in the model's vocabulary, too: otherwise loading would give them new ids.
    model["vocab"] = dict(sorted(tokens.items(), key=lambda item: item[1]))
    data["added_tokens"] = sorted(added.values(), key=lambda t: t["id"])
    text = json.dumps(data, ensure_ascii=False)
    _check_loads(path, text, tokens)
    return text


def _check_loads(path: Path, text: str, tokens: Mapping[str, int]) -> None:
    """Check that the tokenizers library reads an extended tokenizer with the right ids."""
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library has no exception class of its own
        raise CheckpointError(
            f"{path}: expected an extended tokenizer that the tokenizers library can read, got the "
            f"error: {error}"
        ) from error
    for token, row in tokens.items():
        if loaded.get(token) != row:
            raise CheckpointError(
                f"{path}: expected the id {row} for token {token!r} in the extended tokenizer, got "
                f"{loaded.get(token)}; set tokenizer_source to base or to the path of a model"
            )
