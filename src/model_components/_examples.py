"""`TextExamples`: rows of conversations, instructions or text as tokens and labels."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ._checks import is_whole
from ._layouts import BadRowError, Layout, check_unicode, kind_of_row, layouts_of
from ._rows import SUFFIXES, each_row, kind_of, read_text

IGNORED = -100
"""The label of a token that is not supervised, as in torch's cross-entropy."""

_EXPECTED = (
    "messages, conversations, prompt and completion, instruction and output (and perhaps input), "
    "or text"
)
# reading these files as plain text would fail with an error about their encoding
_NO_TEXT = (".arrow", ".xlsx", ".zip", ".safetensors", ".bin", ".pt")
_ROWS_NAMED = 5  # how many row numbers an error lists
Example = dict[str, list[int]]
"""The ``input_ids`` and ``labels`` of one example."""


class TextExamples:
    """Examples of ``input_ids`` and ``labels``, made from rows of text.

    Answers are supervised, prompts are not. In a conversation of several turns, all answers of the
    assistant are supervised. If the tokenizer's chat template renders earlier turns differently
    once later ones follow (for example, without their reasoning), the conversation becomes one
    example for each answer.

    A row is one of:

    - ``messages``: a list of ``role`` and ``content``, or ShareGPT's ``conversations`` of ``from``
      and ``value``. A ``tools`` field may accompany either.
    - ``prompt`` and ``completion``: two texts, or two lists of messages. Only the completion is
      supervised.
    - ``instruction``, ``output`` and optionally ``input``. Without a chat template, the
      prompt has the format of Stanford Alpaca, on which many models have been trained.
    - ``text``: the whole text is supervised.
    - A string: the whole string is supervised, in pieces of ``max_length`` tokens.

    Rows without an answer, and rows whose answers begin beyond ``max_length``, are left out with a
    warning. Invalid rows raise one error that lists each reason and the row numbers.

    The examples can be passed to `transformers.Trainer` and `trl.SFTTrainer`, which use ``labels``
    unchanged.

    Args:
        source: Rows, or their source: a JSON, JSON lines, CSV or TSV file, which may be gzipped; a
            parquet file; a hub id; or a data set. A file of another type is read as one plain text,
            which is cut into pieces.
        tokenizer: A fast tokenizer of transformers. Its chat template lays out messages and
            instructions. Without a template, messages are joined by newlines without their roles,
            and each answer ends with the end-of-text token.
        max_length: The maximum number of tokens in an example; longer rows are truncated.
        train_on_inputs: Supervise prompts, too.

    Attributes:
        examples: The examples.
        left_out: The number of rows that are left out.
        rows: The row number of each example. Each piece of a string has a different negative
            number.
        cut: The number of examples that were truncated.
        digest: A hash of the rows as they were given.

    Raises:
        ValueError: A setting or a row is invalid, there are no rows, or no row has an answer within
            ``max_length``.
    """

    def __init__(
        self,
        source: str | Path | Iterable[object],
        tokenizer: Any,
        *,
        max_length: int = 512,
        train_on_inputs: bool = False,
    ):
        _check_settings(tokenizer, max_length, train_on_inputs)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.train_on_inputs = train_on_inputs
        self.examples: list[Example] = []
        self.rows: list[int] = []
        self.left_out = 0
        self.cut = 0
        name, rows = _read(source)
        self.digest = _digest(rows)
        # grouped by reason, because one mistake in a file often affects thousands of rows
        bad: dict[str, list[int]] = {}
        for number, row in rows:
            try:
                self._add(number, row)
            except BadRowError as error:
                bad.setdefault(str(error), []).append(number)
        if bad:
            reasons = "; ".join(f"{why} in row {_listed(where)}" for why, where in bad.items())
            raise ValueError(f"TextExamples: {name}: expected rows with {_EXPECTED}, got {reasons}")
        if not self.examples:
            raise ValueError(
                f"TextExamples: {name}: none of {len(rows)} rows has an answer within {max_length} "
                "tokens; increase max_length, or check the rows"
            )
        if self.left_out:
            warnings.warn(
                f"TextExamples: {name}: {self.left_out} of {len(rows)} rows are left out, because "
                f"they have no answer within {max_length} tokens",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def decoded(self, index: int) -> str:
        """Return the text of an example, with the supervised parts in brackets ⟦ ⟧.

        Args:
            index: The number of the example.
        """
        example = self.examples[index]
        parts = []
        tokens = zip(example["input_ids"], example["labels"], strict=True)
        for is_supervised, run in groupby(tokens, key=lambda pair: pair[1] != IGNORED):
            text = self.tokenizer.decode([token for token, _ in run])
            parts.append(f"⟦{text}⟧" if is_supervised else text)
        return "".join(parts)

    def _add(self, number: int, row: object) -> None:
        """Add the examples of a row, or count the row as left out."""
        is_text = isinstance(row, str)
        if is_text:
            examples = self._pieces(row)
        elif isinstance(row, Mapping) and kind_of_row(row) == "text":
            pieces = self._pieces(row["text"])
            self.cut += len(pieces) > 1
            examples = pieces[:1]
        else:
            whole = [self._tokens(layout) for layout in layouts_of(row, self.tokenizer)]
            examples = []
            for one in whole:
                cut: Example = {
                    "input_ids": one["input_ids"][: self.max_length],
                    "labels": one["labels"][: self.max_length],
                }
                examples.append(cut)
                if _is_usable(cut) and len(one["input_ids"]) > self.max_length:
                    self.cut += 1
        usable = [one for one in examples if _is_usable(one)]
        self.examples += usable
        # pieces of a string have negative numbers, which no row has
        count = len(self.rows)
        self.rows += [-1 - count - n if is_text else number for n in range(len(usable))]
        if not usable:
            self.left_out += 1

    def _pieces(self, text: str) -> list[Example]:
        """Split a plain text into examples in which every token is supervised."""
        ids = self.tokenizer(check_unicode(text))["input_ids"]
        starts = range(0, len(ids), self.max_length)
        pieces = [ids[start : start + self.max_length] for start in starts]
        return [{"input_ids": piece, "labels": piece} for piece in pieces]

    def _tokens(self, layout: Layout) -> Example:
        """Return the tokens of a text, with labels for its supervised parts."""
        # a chat template writes special tokens itself; otherwise the BOS token is added below
        encoded = self.tokenizer(layout.text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        labels = []
        for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
            # a token that spans the end of a prompt also has the answer's first characters, so it
            # is supervised; a token with an empty span at the answer's start belongs to the prompt
            is_answer = any(
                (start < last and stop > first) if start < stop else first < start <= last
                for first, last in layout.spans
            )
            labels.append(token if is_answer or self.train_on_inputs else IGNORED)
        beginning = [] if layout.has_special_tokens else _beginning(self.tokenizer)
        ids = beginning + ids
        return {"input_ids": ids, "labels": [IGNORED] * len(beginning) + labels}


def _is_usable(example: Example) -> bool:
    # no prediction is made for the first token
    return any(label != IGNORED for label in example["labels"][1:])


def _check_settings(tokenizer: object, max_length: object, train_on_inputs: object) -> None:
    if not isinstance(train_on_inputs, bool):
        raise ValueError(
            f"TextExamples: train_on_inputs is {train_on_inputs!r}, expected True or False"
        )
    if not is_whole(max_length, 2):
        raise ValueError(
            f"TextExamples: max_length is {max_length!r}, expected a whole number, 2 or more"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "TextExamples: expected a fast tokenizer of transformers, which returns the positions "
            f"of its tokens in a text, got {type(tokenizer).__name__}"
        )


def _beginning(tokenizer: Any) -> list[int]:
    """Return the BOS token, in a list, if a tokenizer puts one before a text; else no tokens."""
    # test with a text, because some tokenizers, such as GPT-2's, have a BOS token but do not add it
    first = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _digest(rows: Sequence[tuple[int, object]]) -> str:
    """Return a hash of the rows, not of their text, to which a chat template may add the date."""
    digest = xxhash.xxh3_128()
    for _, row in rows:
        # unpaired surrogates cannot be encoded as UTF-8
        digest.update(json.dumps(row, default=repr).encode(errors="replace"))
    return digest.hexdigest()


def _listed(numbers: Sequence[int]) -> str:
    """Return the first numbers, and how many more there are, as text.

    >>> _listed([1, 2, 3, 4, 5, 6, 7])
    '1, 2, 3, 4, 5 and 2 more'
    """
    text = ", ".join(map(str, numbers[:_ROWS_NAMED]))
    more = len(numbers) - _ROWS_NAMED
    return f"{text} and {more} more" if more > 0 else text


def _read(source: Any) -> tuple[str, list[tuple[int, object]]]:
    """Return the name of the source for error messages, and its rows with their numbers."""
    name = str(source) if isinstance(source, (str, Path)) else "rows"
    if _is_plain_text(source):
        rows: list[tuple[int, object]] = [(1, _read_plain_text(Path(source)))]
    else:
        rows = list(each_row(source, "TextExamples"))
    if not any(row for _, row in rows):
        raise ValueError(f"TextExamples: expected rows that are not empty, got none from {name}")
    return name, rows


def _is_plain_text(source: object) -> bool:
    """Return whether a source is a file that is read as plain text, not as rows."""
    if not isinstance(source, (str, Path)):
        return False
    path = Path(source)
    return path.is_file() and kind_of(path) not in SUFFIXES


def _read_plain_text(path: Path) -> str:
    if kind_of(path) in _NO_TEXT:
        raise ValueError(
            f"TextExamples: expected a file of text or of type {', '.join(SUFFIXES)}, got {path}"
        )
    return read_text(path, "TextExamples")


class Answer(NamedTuple):
    """The first answer of an example.

    Attributes:
        prompt: The token ids before the answer.
        reference: The token ids of the answer, including its end.
    """

    prompt: list[int]
    reference: list[int]


def first_answer(example: Example) -> Answer:
    """Return the first consecutive supervised tokens, and the tokens before them.

    >>> first_answer({"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, -100]})
    Answer(prompt=[1], reference=[2, 3])
    """
    ids = example["input_ids"]
    supervised = [label != IGNORED for label in example["labels"]]
    start = supervised.index(True)
    # the appended False marks the end of the example, in case nothing follows the answer
    length = [*supervised[start:], False].index(False)
    return Answer(ids[:start], ids[start : start + length])


def split_examples(
    tasks: Sequence[TextExamples], share: float, most: int
) -> list[tuple[list[Example], list[Example]]]:
    """Split the examples of each task at random into training examples and held-out examples.

    All examples of a row go to the same set. A training row is dropped if its first prompt is also
    the first prompt of a held-out row, of this or another task. A text without a prompt is dropped
    if it equals a held-out text. The split does not depend on a run's seed, so that runs with
    different seeds can be compared.

    Args:
        tasks: The examples of each task.
        share: The share of a task's rows to hold out.
        most: The maximum number of a task's rows to hold out.

    Returns:
        For each task, the training examples, and the held-out examples (at least one).
    """
    rows_by_task = [_split_rows(texts, share, most) for texts in tasks]
    held_out_keys = set()
    special = {token for texts in tasks for token in texts.tokenizer.all_special_ids}
    for _, held_out in rows_by_task:
        # all prompts of a conversation begin with the prompt of its first example
        held_out_keys |= {_key(row[0], special) for row in held_out}
    splits = []
    for rows, held_out in rows_by_task:
        train = [row for row in rows if _key(row[0], special) not in held_out_keys]
        splits.append((list(chain(*train)), list(chain(*held_out))))
    return splits


def _split_rows(
    texts: TextExamples, share: float, most: int
) -> tuple[list[list[Example]], list[list[Example]]]:
    """Split one task's rows at random into training and held-out rows (lists of examples)."""
    # each piece of a plain text has its own number, so that one text can be split
    by_row: dict[int, list[Example]] = {}
    for row, example in zip(texts.rows, texts.examples, strict=True):
        by_row.setdefault(row, []).append(example)
    shuffled = list(by_row.values())
    random.Random(0).shuffle(shuffled)
    count = max(1, min(most, round(share * len(shuffled))))
    return shuffled[count:], shuffled[:count]


def _key(example: Example, special: set[int]) -> tuple[int, ...]:
    """Return an example's first prompt, or all its tokens if the prompt has only special tokens.

    A tokenizer may add a first token to a row without a prompt.
    """
    prompt = first_answer(example).prompt
    has_text = any(token not in special for token in prompt)
    return tuple(prompt if has_text else example["input_ids"])
