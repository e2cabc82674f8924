"""Map each row of the output's vocabulary to a row of a model, and read models by this mapping.

If a model lacks a token of the output, the model gets the base's row for this token, or else the
mean of the token's rows in the other models. A recipe's ``tokens`` entry can name another row.
Rows without a token (padding) are matched by index. Rows are gathered while a tensor is read, so
that memory never holds a whole aligned embedding.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..dtypes import Array, numbers
from ..files import CheckpointError, Source, TensorInfo, View
from ..files.resolve import find_folder
from ..recipe import MergeRecipe, RecipeError, TokenizerSpec, TokenRule, model_key, model_label
from .tokenizers import copy_tokenizer, extend_tokenizer, has_tokenizer, read_vocabulary

# names of token embeddings and heads in the families of transformers
# wte is GPT-2's, word_embeddings BERT's, embed_in GPT-NeoX's, shared T5's
EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight$"
)
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|cls\.predictions\.decoder)\.weight$")
_HEAD_BIAS = re.compile(r"(^|\.)(lm_head|cls\.predictions(\.decoder)?)\.bias$")


def is_vocabulary_tensor(name: str) -> bool:
    """Return whether a tensor has one row per token, judging by its name."""
    return bool(EMBEDDING.search(name) or HEAD.search(name) or _HEAD_BIAS.search(name))


def stored_name(source: Source, name: str) -> str | None:
    """Return the name under which a model stores a tensor, or None if the model lacks it.

    A tied head is stored under the name of the embedding.
    """
    if name in source.tensors:
        return name
    # tied by default: GPT-2's config.json does not set the key, and a state dict has no config
    if HEAD.search(name) and source.config.get("tie_word_embeddings", True):
        for other in source.tensors:
            if EMBEDDING.search(other):
                return other
    return None


def embedding_rows(source: Source) -> set[int]:
    """Return the set of row counts of a model's token embeddings."""
    rows = set()
    for name, info in source.tensors.items():
        if EMBEDDING.search(name) and info.shape:
            rows.add(info.shape[0])
    return rows


def _rows(source: Source) -> int:
    """Return the number of rows of a model's token embeddings.

    Raises:
        CheckpointError: There is no token embedding, or the numbers of rows differ.
    """
    rows = embedding_rows(source)
    if len(rows) != 1:
        raise CheckpointError(
            f"{source.label}: expected token embeddings with the same number of rows, got "
            f"{' and '.join(map(str, sorted(rows))) or 'no token embedding'}"
        )
    return rows.pop()


ZERO = -2
"""The value in `Vocabulary.row_of` for a row of zeros."""
MEAN = -1
"""The value in `Vocabulary.row_of` for the mean of a token's rows in all models that have it."""
AVERAGE = -3
"""The value in `Vocabulary.row_of` for the mean of the model's rows of all tokens.

It is used for padding rows that no model has.
"""

_AVERAGED = 1 << 18  # elements read at a time
_SHOWN = 5  # maximum number of tokens that a note lists


@dataclass(frozen=True)
class Vocabulary:
    """The output's vocabulary, and the source of each model's row for each token.

    Args:
        rows: The number of rows of the output's embeddings.
        tokens: The output row of each token.
        has: For each model and output row, the model's row for the same token, or -1 for none.
        model_of: For each model and output row, the index of the model to read the row from.
        row_of: For each model and output row, the row to read from the model in ``model_of``; or
            `ZERO`, `MEAN` or `AVERAGE`.
        folder: The folder of the tokenizer's files; None if there are no files.
        tokenizer_json: The text of the output's tokenizer.json if it was changed; None if the files
            in ``folder`` are copied unchanged.
        notes: Notes on assumptions about the models' tokens.
    """

    rows: int
    tokens: Mapping[str, int]
    has: Array
    model_of: Array
    row_of: Array
    folder: Path | None
    tokenizer_json: str | None = None
    notes: Sequence[str] = ()

    def write_tokenizer(self, out: Path) -> None:
        """Write the tokenizer's files, including added tokens, into ``out``."""
        if self.folder is None:
            return
        copy_tokenizer([self.folder], out)
        if self.tokenizer_json is not None:
            (out / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")


def _add_new(tokens: dict[str, int], new: Sequence[str]) -> None:
    """Add the tokens of ``new`` that ``tokens`` lacks, in place, as rows at the end."""
    free = max(tokens.values(), default=-1) + 1
    for token in new:
        if token not in tokens:
            tokens[token] = free
            free += 1


def _add_all(
    tokens: dict[str, int], vocabularies: Sequence[Mapping[str, int]], sources: Sequence[Source]
) -> None:
    """Add to ``tokens``, in place, every model's tokens that have an embedding row."""
    for vocabulary, source in zip(vocabularies, sources, strict=True):
        stored = _with_rows(vocabulary, _rows(source))
        # in the order of rows, because the order in a file means nothing
        _add_new(tokens, sorted(stored, key=stored.__getitem__))


def _with_rows(vocabulary: Mapping[str, int], rows: int) -> dict[str, int]:
    """Return the tokens that have a row in an embedding of ``rows`` rows."""
    return {token: row for token, row in vocabulary.items() if row < rows}


def _rowless_notes(
    tokens: Mapping[str, int], vocabulary: Mapping[str, int], label: str, where: str
) -> list[str]:
    """Return a list with a note on a tokenizer's tokens that are not in ``tokens``, if any.

    Args:
        tokens: The output's tokens.
        vocabulary: The tokenizer's tokens.
        label: The tokenizer's name in the note.
        where: The words in the note for the models without a row, such as ``"any model"``.
    """
    missing = [token for token in vocabulary if token not in tokens]
    if not missing:
        return []
    shown = ", ".join(missing[:_SHOWN])
    more = ", ..." if len(missing) > _SHOWN else ""
    return [
        f"{label}: {len(missing)} tokens of the tokenizer have no row in {where} and are left out: "
        f"{shown}{more}"
    ]


def stage_tokens(source: Source) -> Mapping[str, int] | None:
    """Return the vocabulary of a stage that is not in a folder, or None for other sources."""
    return getattr(source, "tokens", None)


def _tokens_of(source: Source) -> dict[str, int]:
    tokens = stage_tokens(source)
    if tokens is None:
        return read_vocabulary(source.folder, source.label)
    # a copy, because new tokens are added to it
    return dict(tokens)


def _vocabularies(sources: Sequence[Source], donor: int) -> tuple[list[dict[str, int]], list[str]]:
    """Return each model's vocabulary, and notes.

    A model without a tokenizer gets the vocabulary of the model at index ``donor``.
    """
    donors = _tokens_of(sources[donor])
    notes = []
    vocabularies = []
    for source in sources:
        if stage_tokens(source) is not None or has_tokenizer(source.folder):
            vocabularies.append(_tokens_of(source))
        else:
            notes.append(
                f"{source.label} has no tokenizer; its rows are assumed to belong to the tokens of "
                f"{sources[donor].label}"
            )
            vocabularies.append(donors)
    return vocabularies, notes


def plan_vocabulary(
    sources: Sequence[Source],
    spec: TokenizerSpec,
    donor: int,
    base: int | None,
    index: Mapping[str | int, int],
) -> Vocabulary:
    """Choose the output's tokens, and the source of each model's row for each token.

    Args:
        sources: The models, including the base.
        spec: The recipe's tokenizer entry.
        donor: The index of the model whose token ids are kept if the source is base or union.
        base: The index of the recipe's base, if any. Models that lack a token get the base's row.
        index: The index in ``sources`` of each model, by the model's key.

    Raises:
        CheckpointError: A tokenizer is missing or cannot be extended.
        RecipeError: A token rule names an unknown model, or a token that the model lacks.
    """
    vocabularies, notes = _vocabularies(sources, donor)
    folder, tokens, rows = _source_of_tokens(sources, spec, donor, index)
    written = tokens  # the tokens in the tokenizer's files
    if rows:
        # a tokenizer may reserve tokens beyond the model's rows, which would get a made-up row
        tokens = _with_rows(tokens, rows)
    if spec.source == "union":
        _add_all(tokens, vocabularies, sources)
        for vocabulary, source in zip(vocabularies, sources, strict=True):
            notes += _rowless_notes(tokens, vocabulary, source.label, "any model")
    else:
        notes += _rowless_notes(tokens, written, str(folder), "its model")
    # a rule may add a token that no model has
    _add_new(tokens, list(spec.tokens))
    extended, unchanged = _changed_tokenizer(folder, tokens, written, sources)
    notes += unchanged
    # new tokens fill the padding first; only then does the embedding grow
    rows = max(rows, max(tokens.values(), default=-1) + 1)
    multiple = spec.pad_to_multiple_of or 1
    rows = -(-rows // multiple) * multiple  # rounded up
    has = np.full((len(sources), rows), -1, np.int64)
    padding = np.setdiff1d(np.arange(rows), np.fromiter(tokens.values(), np.int64, len(tokens)))
    for rows_here, vocabulary, source in zip(has, vocabularies, sources, strict=True):
        size = _rows(source)
        for token, row in tokens.items():
            rows_here[row] = vocabulary.get(token, -1)
        # padding keeps its index, if the model has this row
        rows_here[padding] = np.where(padding < size, padding, -1)
        rows_here[rows_here >= size] = -1  # a tokenizer may have tokens beyond the model's rows
    model_of = np.repeat(np.arange(len(sources))[:, None], rows, 1)
    # -1, a token that the model lacks, is `MEAN` here
    row_of = has.copy()
    if base is not None:
        # models that lack a token take the base's row, if there is one
        lacking = (row_of < 0) & (has[base] >= 0)
        model_of[lacking] = base
        row_of = np.where(lacking, has[base], row_of)
    # padding that no model has
    row_of[:, padding] = np.where((has[:, padding] < 0).all(0), AVERAGE, row_of[:, padding])
    for token, rule in spec.tokens.items():
        row = tokens[token]
        takers = np.ones(len(sources), bool) if rule.force else has[:, row] < 0
        place, theirs = _given_row(token, rule, index, sources, vocabularies)
        # a rule that names no source leaves the plan unchanged
        if place is not None or theirs == ZERO:
            model_of[takers, row] = place or 0  # a row of zeros is not read
            row_of[takers, row] = theirs
    return Vocabulary(rows, tokens, has, model_of, row_of, folder, extended, notes)


def _source_of_tokens(
    sources: Sequence[Source], spec: TokenizerSpec, donor: int, index: Mapping[str | int, int]
) -> tuple[Path | None, dict[str, int], int]:
    """Return the output tokenizer's folder and tokens, and its model's number of embedding rows.

    The number is 0 if the tokenizer belongs to none of the models.
    """
    if spec.source in ("union", "base"):
        place: int | None = donor
    else:
        place = index.get(model_key(spec.source))
    if place is not None:
        source = sources[place]
        return source.folder, _tokens_of(source), _rows(source)
    if isinstance(spec.source, MergeRecipe):
        raise RecipeError(
            "tokenizer source: expected one of the recipe's models, got the stage "
            f"{model_label(spec.source)}, which is not among the models"
        )
    try:
        folder = find_folder(spec.source)
    except CheckpointError as error:
        raise CheckpointError(
            f"tokenizer source: expected base, union, one of the models or a folder, got {error}"
        ) from error
    # 0 rows: a tokenizer without a model has no padding, so only its tokens count
    return folder, read_vocabulary(folder, spec.source), 0


def _changed_tokenizer(
    folder: Path | None,
    tokens: Mapping[str, int],
    written: Mapping[str, int],
    sources: Sequence[Source],
) -> tuple[str | None, list[str]]:
    """Return the tokenizer.json for ``tokens``, and notes.

    The text is None if the files in ``folder``, whose tokens are ``written``, are to be copied.

    Raises:
        CheckpointError: Tokens are to be added, but this type of tokenizer cannot be extended.
    """
    if tokens == written:
        return None, []
    try:
        return _extend_tokenizer_of(folder, tokens, sources), []
    except CheckpointError:
        if tokens.keys() - written.keys():
            raise
    note = "this tokenizer cannot be changed, so its files keep the tokens that have no row"
    return None, [f"{folder}: {note}"]


def _extend_tokenizer_of(
    folder: Path | None, tokens: Mapping[str, int], sources: Sequence[Source]
) -> str:
    """Return a tokenizer.json extended by ``tokens`` and the BPE merges of the other models."""
    if folder is None or not (folder / "tokenizer.json").exists():
        raise CheckpointError(
            f"tokenizer: expected a tokenizer.json in {folder}, got none; tokens can be added only "
            "to this format"
        )
    folders = [source.folder for source in sources if source.folder is not None]
    others = [other for other in folders if (other / "tokenizer.json").exists()]
    return extend_tokenizer(folder / "tokenizer.json", tokens, others)


def _given_row(
    token: str,
    rule: TokenRule,
    index: Mapping[str | int, int],
    sources: Sequence[Source],
    vocabularies: Sequence[Mapping[str, int]],
) -> tuple[int | None, int]:
    """Return the index of the model that a rule names, and the number of the row to take.

    The index is None, and the row is `ZERO` or `MEAN`, if the rule names no model.
    """
    where = f"tokenizer tokens {token!r}"
    if rule.zero:
        return None, ZERO
    if rule.model is None:
        if rule.force:
            raise RecipeError(f"{where}: expected a source together with force: true, got none")
        return None, MEAN
    if model_key(rule.model) not in index:
        raise RecipeError(
            f"{where}: expected one of the recipe's models as source, got {model_label(rule.model)}"
        )
    place = index[model_key(rule.model)]
    row = rule.token_id
    described = f"row {row}"
    if row is None:
        name = token if rule.token is None else rule.token
        row = vocabularies[place].get(name, -1)
        described = f"token {name!r}"
    if not 0 <= row < _rows(sources[place]):
        raise RecipeError(f"{where}: {model_label(rule.model)} has no {described}")
    return place, row


class AlignedSource(View):
    """A view of a model with the rows of the output's vocabulary; other tensors are unchanged.

    Args:
        sources: All models.
        index: The index of the model in ``sources``.
        vocabulary: The output's vocabulary.
    """

    def __init__(self, sources: Sequence[Source], index: int, vocabulary: Vocabulary):
        source = sources[index]
        super().__init__(source, {})
        self._sources = sources
        self._vocabulary = vocabulary
        self._model_of = vocabulary.model_of[index]
        self._row_of = vocabulary.row_of[index]
        self._averages: dict[str, Array] = {}
        named = dict(source.tensors)
        for other in sources:
            for head in other.tensors:  # a head that is untied in another model may be tied here
                stored = stored_name(source, head) if HEAD.search(head) else None
                if stored is not None:
                    named[head] = source.tensors[stored]
        for name, info in named.items():
            if is_vocabulary_tensor(name):
                info = TensorInfo(name, (vocabulary.rows, *info.shape[1:]), info.dtype)
            self.tensors[name] = info

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return the elements of an aligned tensor from ``start`` to ``stop``.

        The result has the stored dtype if all rows have that dtype. Otherwise bfloat16 and float16
        become float32.
        """
        if not is_vocabulary_tensor(name) or start == stop:
            return super().read(name, start, stop)
        info = self.tensors[name]
        width = info.count // info.shape[0]
        first = start // width
        last = -(-stop // width)
        model = self._model_of[first:last]
        row = self._row_of[first:last]
        # true if a row does not directly follow the previous row in the same model
        apart = (np.diff(model) != 0) | (np.diff(row) != 1)
        # negative codes such as `MEAN` (-1) are not row numbers, so each is a range of its own
        breaks = np.flatnonzero(apart | (row[1:] < 0) | (row[:-1] < 0)) + 1
        pieces = []
        for left, right in pairwise([0, *breaks.tolist(), last - first]):
            if row[left] == AVERAGE:
                pieces.append(np.tile(self._average_row(name, width), right - left))
            elif row[left] == ZERO:
                pieces.append(np.zeros((right - left) * width, np.float32))
            elif row[left] == MEAN:
                pieces += [self._mean_row(name, first + i, width) for i in range(left, right)]
            else:
                pieces.append(
                    self._rows(int(model[left]), name, int(row[left]), right - left, width)
                )
        if len({piece.dtype for piece in pieces}) > 1:
            pieces = [numbers(piece) for piece in pieces]
        return np.concatenate(pieces)[start - first * width : stop - first * width]

    def _rows(self, model: int, name: str, first: int, count: int, width: int) -> Array:
        stored = stored_name(self._sources[model], name)
        assert stored is not None
        return self._sources[model].read(stored, first * width, (first + count) * width)

    def _average_row(self, name: str, width: int) -> Array:
        """Return the mean of this model's rows for all tokens, summed in float64."""
        if name not in self._averages:
            # rows of tokens are never AVERAGE, so `read` does not call this method again
            rows = np.array(sorted(set(self._vocabulary.tokens.values())), np.int64)
            step = max(1, _AVERAGED // width)
            total = np.zeros(width)
            # there may be padding between tokens
            for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                for begin in range(0, len(run), step):
                    first = int(run[begin])
                    last = int(run[begin : begin + step][-1]) + 1
                    stretch = numbers(self.read(name, first * width, last * width))
                    total += stretch.reshape(-1, width).sum(0, dtype=np.float64)
            self._averages[name] = (total / max(1, len(rows))).astype(np.float32)
        return self._averages[name]

    def _mean_row(self, name: str, row: int, width: int) -> Array:
        """Return the mean of the rows of all models that have a token; zeros if none has it."""
        rows_of_models = []
        for model, rows in enumerate(self._vocabulary.has):
            if rows[row] >= 0 and stored_name(self._sources[model], name) is not None:
                stored = self._rows(model, name, int(rows[row]), 1, width)
                rows_of_models.append(numbers(stored))
        if rows_of_models:
            return np.mean(rows_of_models, 0)
        return np.zeros(width, np.float32)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Let the model read into ``out``; return False for tensors with one row per token."""
        return not is_vocabulary_tensor(name) and super().read_into(name, start, out)

    def fingerprint(self) -> object:
        """Return the model's fingerprint, and a hash of the sources of the rows."""
        rows = hashlib.sha256(self._model_of.tobytes() + self._row_of.tobytes()).hexdigest()
        return [super().fingerprint(), rows]
