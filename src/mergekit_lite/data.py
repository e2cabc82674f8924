"""`TextExamples`: rows of chat, instructions or text, or files of them, as tokens and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from model_components._rows import SUFFIXES, each_row, kind_of, read_text

_NEEDED = (
    "messages (a list of role and content), instruction and output (and perhaps input), prompt and "
    "completion, or text"
)

_NO_TEXT = (".arrow", ".xlsx", ".zip", ".safetensors", ".bin", ".pt")


class TextExamples(Dataset):
    """Make examples of ``input_ids`` and ``labels`` from text.

    What a model answers is supervised, what it is asked is not.

    Args:
        source: Rows, or where to read them: a file of JSON, JSON lines, CSV or TSV, also gzipped,
            or of parquet; a hub id; or a data set. Any other file is read as one plain text. A row
            is a string, or a mapping with ``messages`` (every turn of the assistant is supervised);
            ``instruction``, ``output`` and optionally ``input``; ``prompt`` and ``completion``; or
            ``text`` (all of it is supervised).
        tokenizer: Of transformers; its chat template lays out messages and instructions; without
            one they are separated by lines.
        max_length: Most tokens of an example: a row is cut off there, a plain text is cut into
            pieces.
        train_on_inputs: Supervise what is asked, too.

    Raises:
        ValueError: No rows; a row of none of these kinds (with its number); no answer left below
            ``max_length`` in any.
    """

    def __init__(
        self,
        source: str | Path | Iterable[object],
        tokenizer: Any,
        *,
        max_length: int = 512,
        train_on_inputs: bool = False,
    ):
        if not isinstance(train_on_inputs, bool):
            raise ValueError(
                f"TextExamples: train_on_inputs is {train_on_inputs!r}, expected True or False"
            )
        if (
            not getattr(tokenizer, "is_fast", False)
            or not isinstance(max_length, int)
            or max_length < 2
        ):
            raise ValueError(
                f"TextExamples: tokenizer is {type(tokenizer).__name__}, max_length "
                f"{max_length!r}; expected a fast tokenizer of transformers, which knows where its "
                "tokens stand in a text, and 2 or more"
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.train_on_inputs = train_on_inputs
        name, rows = _read(source)
        examples = [self._example(f"{name}, row {number}", row) for number, row in rows]
        self.examples = [
            e
            for e in chain.from_iterable(examples)
            if any(label != -100 for label in e["labels"][1:])
        ]
        if not self.examples:
            raise ValueError(
                f"TextExamples: {name}: of {len(rows)} rows none has an answer within {max_length} "
                "tokens; expected one"
            )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.examples[index]

    def decoded(self, index: int) -> str:
        """An example's text, what is supervised in brackets, to look at before training.

        Args:
            index: Which.
        """
        example = self.examples[index]
        parts: list[str | int] = []
        before = False
        for token, label in zip(example["input_ids"], example["labels"], strict=True):
            if (label != -100) != before:
                parts.append("⟦" if label != -100 else "⟧")
                before = label != -100
            parts.append(token)
        text = "".join(p if isinstance(p, str) else self.tokenizer.decode([p]) for p in parts)
        return text + "⟧" * before

    def _example(self, where: str, row: object) -> list[dict[str, list[int]]]:
        """The examples of one row: one, or a plain text's pieces."""
        if isinstance(row, ValueError):  # a line that could not be read
            raise ValueError(f"TextExamples: {where}: {row}")
        if isinstance(row, str):
            ids = self.tokenizer(row)["input_ids"]
            pieces = [
                ids[start : start + self.max_length]
                for start in range(0, len(ids), self.max_length)
            ]
            return [{"input_ids": piece, "labels": piece} for piece in pieces]
        text, spans = self._laid_out(where, row)
        if spans is None:
            return self._example(where, text)[:1]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        labels = []
        for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
            # a tokenizer may trim a token of spaces to nothing
            asked = any(
                first <= start and stop <= last and (start < stop or first < start)
                for first, last in spans
            )
            labels.append(token if asked or self.train_on_inputs else -100)
        return [{"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}]

    def _laid_out(self, where: str, row: object) -> tuple[str, list[tuple[int, int]] | None]:
        """A row's text, and from where to where it is supervised.

        None: all of it, as a plain text.
        """
        if not isinstance(row, Mapping):
            raise ValueError(
                f"TextExamples: {where} is a {type(row).__name__}; expected a text, or a mapping"
            )
        messages = row.get("messages")
        if (
            messages is None
            and isinstance(row.get("instruction"), str)
            and isinstance(row.get("output"), str)
        ):
            asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": row["output"]},
            ]
        if messages is not None:
            return self._conversation(where, messages)
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            text = row["prompt"] + row["completion"] + (self.tokenizer.eos_token or "")
            return text, [(len(row["prompt"]), len(text))]
        if isinstance(row.get("text"), str):
            return row["text"], None
        raise ValueError(
            f"TextExamples: {where} has {', '.join(map(str, row)) or 'nothing'}; expected {_NEEDED}"
        )

    def _conversation(self, where: str, messages: object) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and where the assistant's turns stand in it.

        Each turn has with it what ends it.
        """
        good = (
            isinstance(messages, Sequence)
            and not isinstance(messages, str)
            and all(
                isinstance(m, Mapping)
                and isinstance(m.get("role"), str)
                and isinstance(m.get("content"), str)
                for m in messages
            )
        )
        if not good or not any(m["role"] == "assistant" for m in messages):
            raise ValueError(
                f"TextExamples: {where}: messages need roles and contents, and one of an assistant"
            )
        spans = []
        texts = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                texts += [
                    self._text(messages[:number], prompt=True),
                    self._text(messages[: number + 1]),
                ]
                spans.append((len(texts[-2]), len(texts[-1])))
        text = texts[-1]
        whole = self._text(messages)
        if not all(whole.startswith(part) for part in texts):
            raise ValueError(
                f"TextExamples: {where}: the tokenizer's chat template changes earlier turns when "
                "later ones come; expected rows of one answer"
            )
        return text, spans  # nothing after the last answer

    def _text(self, messages: Sequence[Mapping[str, str]], *, prompt: bool = False) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            if not messages:
                return ""
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        end = self.tokenizer.eos_token or "\n"
        return "".join(m["content"] + (end if m["role"] == "assistant" else "\n") for m in messages)


def _read(source: Any) -> tuple[str, list[tuple[int, object]]]:
    """Return a name of the source for messages, and its rows with their numbers."""
    name = str(source) if isinstance(source, (str, Path)) else "rows"
    if _is_plain_text(source):
        rows: list[tuple[int, object]] = [(1, _running_text(Path(source)))]
    else:
        rows = list(each_row(source, "TextExamples"))
    if not any(row for _, row in rows):
        raise ValueError(f"TextExamples: {name} has no rows")
    return name, rows


def _is_plain_text(source: object) -> bool:
    """Return whether a source is a file that holds no rows."""
    if not isinstance(source, (str, Path)):
        return False
    path = Path(source)
    return path.is_file() and kind_of(path) not in SUFFIXES


def _running_text(path: Path) -> str:
    if kind_of(path) in _NO_TEXT:
        raise ValueError(
            f"TextExamples: expected a text file, or one of {', '.join(SUFFIXES)}, got {path}"
        )
    return read_text(path, "TextExamples")
