"""Rows of instructions for TRL's trainer.

They are read strictly from JSON and laid out; a report says what became of their tokens.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_components._report import Report
from model_components._rows import each_row

_WITH_INPUT = (
    "an instruction that describes a task, paired with an input that provides further context"
)
_WITHOUT_INPUT = "an instruction that describes a task"
_ROWS_NAMED = 5  # in an error
_ROLES = ("system", "developer", "user", "assistant", "tool")

Row = Mapping[str, Any]
"""Of instruction data: fields by name."""

Example = dict[str, Any]
"""``prompt`` and ``completion``, both texts or both lists of messages, and perhaps ``tools``."""

Template = Callable[[Row], Example]
"""What makes an example of a row."""


def alpaca_template(row: Row) -> Example:
    r"""Return prompt and completion of a row with ``instruction``, ``input`` and ``output``.

    ``input`` may be empty.

    Source: the format of Stanford Alpaca, in which many checkpoints have been trained.

    Args:
        row: One of instruction data.

    Returns:
        ``prompt`` and ``completion``.

    Raises:
        ValueError: A row without ``instruction``.

    >>> example = alpaca_template({"instruction": "Add.", "input": "1 1", "output": "2"})
    >>> print(example["prompt"].partition("\n\n")[2] + example["completion"])
    ### Instruction:
    Add.
    <BLANKLINE>
    ### Input:
    1 1
    <BLANKLINE>
    ### Response:
    2
    """
    if "instruction" not in row:
        raise ValueError(f"alpaca_template: a row has {sorted(row)}; chat_template is for messages")
    user_input = row.get("input") or ""
    task = _WITH_INPUT if user_input else _WITHOUT_INPUT
    parts = [f"Below is {task}. Write a response that appropriately completes the request."]
    parts += [
        f"### Instruction:\n{row['instruction']}",
        *([f"### Input:\n{user_input}"] if user_input else []),
        "### Response:\n",
    ]
    return {"prompt": "\n\n".join(parts), "completion": row["output"]}


def chat_template(row: Row) -> Example:
    """Prompt and completion as messages, for the tokenizer's own chat template.

    A row may hold ``messages`` already.

    The last message, the assistant's, is the completion, and all before it are the prompt: of
    several answers in a conversation the last one is trained. Tools that a row has are kept beside
    them.

    Args:
        row: One of instruction data, or of ``messages``.

    Returns:
        ``prompt`` and ``completion``, lists of messages.

    Raises:
        ValueError: The last message is not the assistant's.

    >>> chat_template({"instruction": "Add.", "input": "1 1", "output": "2"})["completion"]
    [{'role': 'assistant', 'content': '2'}]
    """
    messages = row.get("messages")
    if messages is None:
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": row["output"]},
        ]
    if messages[-1]["role"] != "assistant":
        raise ValueError(
            f"chat_template: the last message is of role {messages[-1]['role']!r}, expected the "
            "assistant's"
        )
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    return {"prompt": list(messages[:-1]), "completion": [messages[-1]]} | tools


def read_rows(
    source: str | Path | Iterable[Row], template: Template = alpaca_template
) -> list[Example]:
    """Return the rows of a file or of any iterable as ``prompt`` and ``completion``.

    ``datasets.Dataset.from_list`` of them is what `trl.SFTTrainer` takes; it trains the completion
    and its end. Rows whose answer is empty are left out, with a warning that counts them.

    Args:
        source: Rows, or where to read them: a file of JSON, JSON lines, CSV or TSV, also gzipped,
            or of parquet; a hub id; or a data set. A row has ``instruction``, ``output`` and
            optionally ``input``; or ``messages``; or any fields that your own template takes.
        template: `alpaca_template`, `chat_template` or your own.

    Returns:
        One dict a row that has an answer.

    Raises:
        ValueError: A file that is no JSON; rows that lack what is needed or hold something else, or
            on which the template fails (with their numbers); nothing left.

    >>> read_rows([{"instruction": "a", "output": "b"}, {"instruction": "c"}])
    Traceback (most recent call last):
    ValueError: read_rows: rows: no output in row 2; ...
    """
    operation = "read_rows"
    name = str(source) if isinstance(source, (str, Path)) else "rows"
    numbered = list(each_row(source, operation))
    custom = template is not alpaca_template and template is not chat_template
    bad: dict[str, list[int]] = {}
    for number, row in numbered:
        why = _wrong_with(row, custom)
        if why is not None:
            bad.setdefault(why, []).append(number)
    if bad:
        told = "; ".join(f"{why} in row {_numbers(numbers)}" for why, numbers in bad.items())
        raise ValueError(
            f"{operation}: {name}: {told}; expected instruction, output and perhaps input, or "
            "messages"
        )
    templated = [_templated(operation, template, row, number) for number, row in numbered]
    usable = [row for row in templated if _says_something(row["completion"])]
    if not usable:
        raise ValueError(f"{operation}: {name}: none of {len(numbered)} rows has an answer")
    empty = len(numbered) - len(usable)
    if empty:
        warnings.warn(
            f"{operation}: {name}: {empty} of {len(numbered)} rows have an empty answer and are "
            "left out",
            stacklevel=2,
        )
    return usable


def _templated(operation: str, template: Template, row: Row, number: int) -> Example:
    """Apply a template to a row; name the row's number in its errors."""
    try:
        example = template(row)
    except Exception as error:  # a template is the user's own code: anything can come out of it
        if isinstance(error, LookupError):
            told = f"{type(error).__name__}: {error}"
        else:
            told = error
        raise ValueError(f"{operation}: the template failed on row {number}: {told}") from error
    if isinstance(example, Mapping):
        parts = [example.get(k) for k in ("prompt", "completion")]
    else:
        parts = [None]
    if not (all(isinstance(p, str) for p in parts) or all(p and _are_messages(p) for p in parts)):
        raise ValueError(
            f"{operation}: the template made {example!r:.60} of row {number}, expected prompt and "
            "completion, both texts or both messages"
        )
    try:
        json.dumps(example, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{operation}: row {number} has half of a surrogate pair, expected Unicode text"
        ) from error
    return dict(example)


def _says_something(part: str | Sequence[Row]) -> bool:
    if isinstance(part, str):
        return bool(part.strip())
    return any(
        message.get("tool_calls") or (message.get("content") or "").strip() for message in part
    )


def _numbers(numbers: Sequence[int]) -> str:
    more = len(numbers) - _ROWS_NAMED
    return ", ".join(map(str, numbers[:_ROWS_NAMED])) + (f" and {more} more" if more > 0 else "")


def _wrong_with(row: object, any_fields: bool) -> str | None:
    if isinstance(row, ValueError):  # a line that could not be read
        return str(row)
    if not isinstance(row, Mapping):
        return f"a {type(row).__name__}"
    if any_fields:
        return None
    messages = row.get("messages")
    if messages is not None:
        sound = _are_messages(messages) and len(messages) > 1
        if sound:
            return None
        return "messages that are not a list of two or more roles and texts"
    for field in ("instruction", "output"):
        if field not in row:
            return f"no {field}"
    for field, value in (
        ("instruction", row["instruction"]),
        ("input", row.get("input") or ""),
        ("output", row["output"]),
    ):
        if not isinstance(value, str):
            return f"{field} that is not text"
    return None


def _are_messages(messages: object) -> bool:
    """Return whether all are of roles that chat templates know, with a text or calls of tools."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return False
    return all(
        isinstance(m, Mapping)
        and m.get("role") in _ROLES
        and (
            isinstance(m.get("content"), str) or (m.get("content") is None and m.get("tool_calls"))
        )
        for m in messages
    )


@dataclass(frozen=True)
class RowReport(Report):
    """Counts of the rows that a trainer kept, cut and left out.

    How many it kept, how many are as long as its limit, and their tokens.

    Attributes:
        rows: That were given.
        kept: That it trains on.
        full: That are as long as its limit: cut, likely.
        tokens: Of the rows that were kept.
        trained_tokens: Of these the ones with a loss.
    """

    rows: int
    kept: int
    full: int
    tokens: int
    trained_tokens: int

    def summary(self) -> list[str]:
        """Rows and tokens."""
        return [
            f"{self.kept} of {self.rows} rows, {self.tokens} tokens, {self.trained_tokens} of them "
            "trained"
        ]

    def remarks(self) -> list[str]:
        """List what was left out or cut."""
        lines = []
        if self.kept < self.rows:
            lines.append(
                "left out, since max_length leaves nothing of their answers: "
                f"{self.rows - self.kept}"
            )
        if self.full:
            lines.append(f"as long as max_length, so that they are cut or just fit: {self.full}")
        return lines


def row_report(rows: Sequence[object], trainer: Any) -> RowReport:
    """Report what `trl.SFTTrainer` made of rows: it leaves out some, and cuts some, without a word.

    Args:
        rows: What the trainer was given as ``train_dataset``.
        trainer: The trainer.

    Returns:
        How many rows it kept, and of how many tokens.

    Raises:
        ValueError: The trainer's data set is not tokenised rows in memory, or it is packed (report
            on a trainer without packing instead).
    """
    data: Any = getattr(trainer, "train_dataset", None)
    columns = getattr(data, "column_names", None) or ()
    if (
        not hasattr(data, "__len__")
        or not {"input_ids", "labels"} <= set(columns)
        or trainer.args.packing
    ):
        raise ValueError(
            f"row_report: a {type(trainer).__name__} with the columns {list(columns)}; expected a "
            "trainer whose rows lie in memory as input_ids and labels, not packed"
        )
    full = tokens = trained = 0
    for row in data.with_format(None):
        full += len(row["input_ids"]) == trainer.args.max_length
        tokens += len(row["input_ids"])
        # nothing comes before the first
        trained += sum(label != -100 for label in row["labels"][1:])
    return RowReport(len(rows), len(data), full, tokens, trained)
