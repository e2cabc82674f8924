"""Rows of instructions: read from JSON, made into prompt and answer by a template, and a prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_WITH_INPUT = "an instruction that describes a task, paired with an input that provides further context"
_WITHOUT_INPUT = "an instruction that describes a task"
_ROWS_NAMED = 5  # in an error


def alpaca_template(row: Mapping[str, Any]) -> tuple[str, str]:
    r"""Prompt and answer of a row with ``instruction``, ``input`` (may be empty or absent) and ``output``.

    Source: the format of Stanford Alpaca, in which many checkpoints have been trained.

    >>> prompt, answer = alpaca_template({"instruction": "Add.", "input": "1 1", "output": "2"})
    >>> print(prompt.partition("\n\n")[2] + answer)
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
        raise ValueError(f"alpaca_template: a row has {sorted(row)}; ChatTemplate(tokenizer) is for messages")
    given = row.get("input") or ""
    task = _WITH_INPUT if given else _WITHOUT_INPUT
    parts = [f"Below is {task}. Write a response that appropriately completes the request."]
    parts += [
        f"### Instruction:\n{row['instruction']}",
        *([f"### Input:\n{given}"] if given else []),
        "### Response:\n",
    ]
    return "\n\n".join(parts), row["output"]


class ChatTemplate:
    """A template from a tokenizer's chat template: rows with ``messages``, or Alpaca's, as one turn of a user.

    The last message is the answer, all before it are the prompt.

    Raises:
        ValueError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"ChatTemplate: {type(tokenizer).__name__} has no chat template; alpaca_template needs none"
            )
        self.tokenizer = tokenizer

    def __call__(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Prompt and answer of a row."""
        messages = row.get("messages")
        if messages is None:
            asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        if messages[-1]["role"] == "user":
            raise ValueError("ChatTemplate: the last message is a user's, needed the answer that is to be learnt")
        whole = self.tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = self.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        if not whole.startswith(prompt):
            raise ValueError("ChatTemplate: the tokenizer's text of the prompt does not begin its text of the whole")
        return prompt, whole[len(prompt) :].rstrip()


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt: one beginning, whether the text or the tokenizer writes it, and no end."""
    written = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    ids = list(tokenizer(text, add_special_tokens=not written)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()  # some tokenizers end every text
    return ids


def read_rows(source: str | Path | Iterable[Mapping[str, Any]], *, any_fields: bool = False) -> list[dict[str, Any]]:
    """Rows of a JSON list, of JSON lines, or of any iterable; each has ``instruction`` and ``output``, or ``messages``.

    Args:
        source: A file, or rows.
        any_fields: Take rows with other fields, for a template of one's own.

    Raises:
        ValueError: A file that is no JSON, rows that lack what is needed or hold something else (with their numbers).

    >>> read_rows([{"instruction": "a", "output": "b"}, {"instruction": "c"}])
    Traceback (most recent call last):
    ValueError: read_rows: rows: no output in row 2; needed instruction, output and perhaps input, or messages
    """
    operation, name = "read_rows", "rows"
    if isinstance(source, (str, Path)):
        name = str(source)
        text = Path(source).read_text(encoding="utf-8")
        try:
            if text.lstrip().startswith("["):
                rows = json.loads(text)
            else:  # not splitlines, which also splits at marks that JSON may hold
                rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(f"{operation}: {name} is neither a JSON list nor JSON lines: {error}") from error
    else:
        rows = list(source)
    bad: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        why = _wrong_with(row, any_fields)
        if why is not None:
            bad.setdefault(why, []).append(number)
    if bad:
        told = "; ".join(f"{why} in row {_numbers(numbers)}" for why, numbers in bad.items())
        raise ValueError(f"{operation}: {name}: {told}; needed instruction, output and perhaps input, or messages")
    if not rows:
        raise ValueError(f"{operation}: {name} has no rows")
    return [dict(row) for row in rows]


def _numbers(numbers: Sequence[int]) -> str:
    more = len(numbers) - _ROWS_NAMED
    return ", ".join(map(str, numbers[:_ROWS_NAMED])) + (f" and {more} more" if more > 0 else "")


def _wrong_with(row: Any, any_fields: bool) -> str | None:
    if not isinstance(row, Mapping):
        return f"a {type(row).__name__}"
    if any_fields:
        return None
    if "messages" in row:
        return None if _are_messages(row["messages"]) else "messages that are not a list of two or more roles and texts"
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


def _are_messages(messages: Any) -> bool:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) < 2:
        return False
    return all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in messages)
