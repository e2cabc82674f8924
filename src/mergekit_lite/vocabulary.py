"""One vocabulary for models that have several: rows of embeddings and heads are matched by token string.

A model that lacks a token of the output gets, for that token, the base model's row, or else the mean of the rows
of the models that have it; a recipe's ``tokens`` entry can name the model to take it from. Rows past the last token
(padding) are matched by position. Rows are gathered while the tensor streams; no embedding is ever built whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import CheckpointError, Source, TensorInfo
from .recipe import RecipeError, TokenizerSpec

EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight$")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|cls\.predictions\.decoder)\.weight$")
_HEAD_BIAS = re.compile(r"(^|\.)(lm_head|cls\.predictions(\.decoder)?)\.bias$")
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
    "chat_template.jinja",
    "chat_template.json",
)


def read_vocabulary(folder: Path | None, label: str) -> dict[str, int]:
    """Token string to id, from tokenizer.json, or vocab.json or vocab.txt where there is none.

    Raises:
        CheckpointError: The model has no tokenizer that can be read.
    """
    if folder is not None and (folder / "tokenizer.json").exists():
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = data["model"]["vocab"]
        ids = {t[0]: i for i, t in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        return ids | {t["content"]: t["id"] for t in data.get("added_tokens", [])}
    if folder is not None and (folder / "vocab.json").exists():
        ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        added = folder / "added_tokens.json"
        return ids | (json.loads(added.read_text(encoding="utf-8")) if added.exists() else {})
    if folder is not None and (folder / "vocab.txt").exists():
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        return {line: i for i, line in enumerate(lines)}
    raise CheckpointError(f"{label}: has no tokenizer.json (or vocab.json, vocab.txt) to match its vocabulary by")


def is_vocabulary_tensor(name: str) -> bool:
    """Whether a tensor's rows are tokens."""
    return bool(EMBEDDING.search(name) or HEAD.search(name) or _HEAD_BIAS.search(name))


def _rows(source: Source) -> int:
    rows = {info.shape[0] for name, info in source.tensors.items() if EMBEDDING.search(name)}
    if len(rows) != 1:
        raise CheckpointError(f"{source.label}: found {len(rows)} sizes of token embedding, needed one")
    return rows.pop()


@dataclass(frozen=True)
class Vocabulary:
    """The output's vocabulary: its rows, and for each model the row that each comes from (-1: lacks it)."""

    rows: int
    tokens: Mapping[str, int]
    row_of: Sequence[np.ndarray]
    folder: Path | None
    tokenizer_json: str | None = None

    def write_tokenizer(self, out: Path) -> None:
        """Put the tokenizer's files into ``out``, tokens of the union added."""
        if self.folder is None:
            return
        for name in TOKENIZER_FILES:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, out / name)
        if self.tokenizer_json is not None:
            (out / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")


def extend_tokenizer(path: Path, tokens: Mapping[str, int], others: Sequence[Path]) -> str:
    """A tokenizer.json with every one of ``tokens``, and the BPE merges of ``others`` that build the new ones.

    Raises:
        CheckpointError: The kind of tokenizer cannot be extended with its ids in place.
    """
    from tokenizers import Tokenizer

    data = json.loads(path.read_text(encoding="utf-8"))
    model = data["model"]
    if not isinstance(model["vocab"], dict):
        raise CheckpointError(f"{path}: a union cannot extend a {model.get('type')} tokenizer; use base or a path")
    added = {t["content"]: t for t in data.get("added_tokens", [])}
    held = {json.dumps(m) for m in model.get("merges", [])}
    for other in others:
        theirs = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
        for token in theirs.get("added_tokens", []):
            if token["content"] in tokens:
                added.setdefault(token["content"], token | {"id": tokens[token["content"]]})
        for merge in theirs["model"].get("merges", []) if "merges" in model else ():
            pair = merge if isinstance(merge, list) else merge.split(" ")
            new = "".join(pair) not in model["vocab"]
            if new and all(t in tokens for t in (*pair, "".join(pair))) and json.dumps(merge) not in held:
                model["merges"].append(merge)
                held.add(json.dumps(merge))
    # Added tokens stand in the model's vocabulary too, or loading would number them after it.
    model["vocab"] = dict(sorted(tokens.items(), key=lambda item: item[1]))
    data["added_tokens"] = sorted(added.values(), key=lambda t: t["id"])
    text = json.dumps(data, ensure_ascii=False)
    loaded = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    if wrong := [t for t, row in tokens.items() if loaded.get(t) != row]:
        raise CheckpointError(f"{path}: in a union token {wrong[0]!r} would lose its row; use base or a path")
    return text


def plan_vocabulary(
    sources: Sequence[Source], spec: TokenizerSpec, base: int, index_of: Callable[[str], int]
) -> Vocabulary:
    """Decide the output's tokens and where each model's rows for them come from.

    Args:
        sources: The models, base included.
        spec: The recipe's tokenizer entry.
        base: Index of the model whose ids are kept.
        index_of: From a model's name in the recipe to its index.

    Raises:
        CheckpointError: A tokenizer that is missing.
        RecipeError: A token rule that names an unknown token.
    """
    vocabularies = [read_vocabulary(source.folder, source.label) for source in sources]
    folder, extended = sources[base].folder, None
    tokens = dict(vocabularies[base])
    rows = _rows(sources[base])
    if spec.source == "union":
        free = max(tokens.values(), default=-1) + 1
        for vocabulary in vocabularies:
            for token in sorted(vocabulary, key=vocabulary.__getitem__):
                if token not in tokens:
                    tokens[token] = free
                    free += 1
        if len(tokens) > len(vocabularies[base]):
            if folder is None or not (folder / "tokenizer.json").exists():
                raise CheckpointError(
                    f"{sources[base].label}: a union of vocabularies needs a tokenizer.json to extend"
                )
            others = [s.folder for s in sources if s.folder is not None and (s.folder / "tokenizer.json").exists()]
            extended = extend_tokenizer(folder / "tokenizer.json", tokens, others)
    elif spec.source != "base":
        folder = sources[index_of(spec.source)].folder if _known(spec.source, index_of) else Path(spec.source)
        tokens = read_vocabulary(folder, spec.source)
        rows = _rows(sources[index_of(spec.source)]) if _known(spec.source, index_of) else 0
    rows = max(rows, max(tokens.values(), default=-1) + 1)
    multiple = spec.pad_to_multiple_of or 1
    rows = -(-rows // multiple) * multiple
    for token in spec.tokens:
        if token not in tokens:
            raise RecipeError(f"tokenizer tokens: {token!r} is not a token of the output")
    used = set(tokens.values())
    maps = []
    for vocabulary, source in zip(vocabularies, sources, strict=True):
        own = np.full(rows, -1, np.int64)
        for token, row in tokens.items():
            own[row] = vocabulary.get(token, -1)
        for row in range(rows):  # rows that are no token of the output keep their place, where the model has one
            if row not in used and row < _rows(source):
                own[row] = row
        own[own >= _rows(source)] = -1
        maps.append(own)
    return Vocabulary(rows, tokens, maps, folder, extended)


def _known(name: str, index_of: Callable[[str], int]) -> bool:
    try:
        index_of(name)
    except KeyError:
        return False
    return True


class AlignedSource:
    """A model seen through the output's vocabulary; other tensors pass through.

    Args:
        sources: All models.
        index: Which of them this is.
        vocabulary: The output's.
        base: Index of the base, whose row is taken first where this model has none.
        placed: Row to model index: taken from there; with ``forced``, even where this model has the token.
        forced: Rows whose rule says force.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        index: int,
        vocabulary: Vocabulary,
        base: int,
        placed: Mapping[int, int],
        forced: frozenset[int],
    ):
        own = sources[index]
        self.label, self.folder, self.config = own.label, own.folder, own.config
        self._sources, self._vocabulary, self._index = sources, vocabulary, index
        self.tensors = {
            name: TensorInfo(name, (vocabulary.rows, *info.shape[1:]), info.dtype)
            if is_vocabulary_tensor(name)
            else info
            for name, info in own.tensors.items()
        }
        # Where each row is read: (model, row) of one donor, or (-1, ·) for a mean over all that have it.
        rows = vocabulary.row_of[index]
        self._donor = np.where(rows >= 0, index, -1)
        base_rows = vocabulary.row_of[base]
        self._donor = np.where((self._donor < 0) & (base_rows >= 0), base, self._donor)
        for row, model in placed.items():
            if row in forced or rows[row] < 0:
                self._donor[row] = model
        stacked = np.stack(vocabulary.row_of)
        self._row = np.where(self._donor >= 0, stacked[self._donor, np.arange(vocabulary.rows)], -1)

    def _read_row_run(self, model: int, name: str, first: int, count: int, width: int) -> Tensor:
        return self._sources[model].read(name, first * width, (first + count) * width)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of the aligned tensor; a missing row that takes a mean is computed in float32."""
        if not is_vocabulary_tensor(name) or start == stop:
            return self._sources[self._index].read(name, start, stop)
        info = self.tensors[name]
        width = info.count // info.shape[0]
        first, last = start // width, -(-stop // width)
        donor, row = self._donor[first:last], self._row[first:last]
        breaks = np.flatnonzero((np.diff(donor) != 0) | (np.diff(row) != 1) | (row[1:] < 0)) + 1
        edges = [0, *breaks.tolist(), last - first]
        pieces = []
        for left, right in pairwise(edges):
            if row[left] < 0:
                pieces += [self._mean_row(name, first + i, width, info.dtype) for i in range(left, right)]
            else:
                model = int(donor[left])
                held = name if name in self._sources[model].tensors else self._embedding_of(model)
                pieces.append(self._read_row_run(model, held, int(row[left]), right - left, width))
        return torch.cat(pieces)[start - first * width : stop - first * width]

    def _embedding_of(self, model: int) -> str:
        return next(name for name in self._sources[model].tensors if EMBEDDING.search(name))

    def _mean_row(self, name: str, row: int, width: int, dtype: torch.dtype) -> Tensor:
        held = [
            self._sources[m].read(name, int(r[row]) * width, (int(r[row]) + 1) * width).float()
            for m, r in enumerate(self._vocabulary.row_of)
            if r[row] >= 0 and name in self._sources[m].tensors
        ]
        return torch.stack(held).mean(0) if held else torch.zeros(width, dtype=dtype)

    def prefetch(self, name: str) -> None:
        """The model's own tensor; rows of others are few."""
        self._sources[self._index].prefetch(name)

    def fingerprint(self) -> Any:
        """The model's own, and where its rows come from."""
        rows = hashlib.sha256(self._donor.tobytes() + self._row.tobytes()).hexdigest()
        return [self._sources[self._index].fingerprint(), rows]
