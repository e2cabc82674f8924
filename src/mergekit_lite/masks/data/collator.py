"""`MaskCollator`: collate examples of several tasks into a batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor

from model_components._checks import MaybeWhole, check_value

Example = Mapping[str, Any]
"""``input_ids``, and optionally ``labels``, ``task`` and other outputs of a tokenizer, as tensors
or lists of numbers."""


class Examples(Protocol):
    """Examples that can be indexed: a list, or a data set of torch or `datasets`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True, kw_only=True)
class MaskCollator:
    """A data collator that makes a batch from examples of several tasks.

    A padded batch holds ``input_ids``, ``attention_mask`` and ``labels``, (B, L) each, and
    ``task``, (B,). In a packed batch, all examples of one task share a row, ``position_ids``
    replace the ``attention_mask`` and start again at each example, and ``task`` is (rows, L).
    Packing is for decoders, in which transformers uses the positions to keep examples from
    attending to each other.

    The first label of an example is set to -100, since no logit predicts it. Labels default to the
    tokens. Either all examples of a batch have a task, or none has one. Coefficients such as
    ``"evidence"`` need no task.

    Padding that a tokenizer added, which the ``attention_mask`` marks, is removed.
    ``token_type_ids`` are kept.

    Args:
        pad_token_id: The token that rows are padded with. Padding never affects the loss.
        pack: Whether to put all examples of one task into one row.
        max_length: Maximum number of tokens of an example; longer examples are truncated.

    Raises:
        ValueError: ``max_length`` is below 1, or ``pad_token_id`` is not a whole number.

    >>> batch = MaskCollator(pad_token_id=0)(
    ...     [{"input_ids": [5, 6], "task": 0}, {"input_ids": [7], "task": 1}]
    ... )
    >>> batch["labels"].tolist(), batch["task"].tolist()
    ([[-100, 6], [-100, -100]], [0, 1])
    """

    pad_token_id: int
    pack: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_value("MaskCollator", "max_length", self.max_length, MaybeWhole)
        check_value("MaskCollator", "pad_token_id", self.pad_token_id, int)

    def __call__(self, features: Sequence[Example]) -> dict[str, Tensor]:
        """Return a batch of the examples.

        Raises:
            ValueError: There are no examples, only some of them have a certain field, a task is not
                the index of a component, or an example has more or fewer labels than tokens.
        """
        if not features:
            raise ValueError("MaskCollator: expected one or more examples, got none")
        examples = [self._example(feature) for feature in features]
        for name in ("task", "label", "token_type_ids", "teacher_hidden"):
            count = sum(name in example for example in examples)
            if count not in (0, len(examples)):
                raise ValueError(
                    f"MaskCollator: {count} of {len(examples)} examples have {name}; expected all, "
                    "or none"
                )
        rows = self._group_into_rows(examples)
        examples = []  # in the order of the rows from here on
        for row in rows:
            examples += row
        padding = {"input_ids": self.pad_token_id, "labels": -100}
        # position 0 makes each padding token a separate example, so packed rows need no mask
        padding["position_ids" if self.pack else "attention_mask"] = 0
        if "token_type_ids" in examples[0]:
            padding["token_type_ids"] = 0
        batch = {}
        for key, value in padding.items():
            batch[key] = _concatenate_and_pad(rows, key, value)
        if "task" in examples[0]:
            batch["task"] = self._tasks_of(rows, batch["input_ids"].shape[1])
        if "label" in examples[0]:  # a classifier's label, one for each example
            batch["labels"] = torch.tensor([example["label"] for example in examples])
        if "teacher_hidden" in examples[0]:
            states = [example["teacher_hidden"] for example in examples]
            batch["teacher_hidden"] = torch.cat(states)
        return batch

    def _tasks_of(self, rows: Sequence[Sequence[Example]], length: int) -> Tensor:
        """Return the task of every row (B,), or of every token (B, L) if rows are packed."""
        tasks = torch.tensor([row[0]["task"] for row in rows])
        if self.pack:
            return tasks[:, None].expand(-1, length).contiguous()
        return tasks

    def _group_into_rows(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Group examples into rows: one example per row or, if packed, one task per row."""
        if not self.pack:
            return [[example] for example in examples]
        by_task: dict[int, list[Example]] = {}
        for example in examples:
            by_task.setdefault(example.get("task", 0), []).append(example)
        return [by_task[task] for task in sorted(by_task)]

    def _example(self, feature: Example) -> Example:
        given_ids = torch.as_tensor(feature["input_ids"])
        real = torch.as_tensor(feature.get("attention_mask", torch.ones_like(given_ids))).bool()

        def own(values: object) -> Tensor:
            return torch.as_tensor(values)[real][: self.max_length]

        ids = own(given_ids)
        labels = feature.get("labels")
        if labels is None:
            labels = feature.get("label")
        example: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if feature.get("task") is not None:
            example["task"] = _component(feature["task"])
        example["position_ids"] = torch.arange(len(ids))
        if labels is not None and torch.as_tensor(labels).dim() == 0:
            example |= {"label": int(labels), "labels": torch.full_like(ids, -100)}
        else:
            if labels is not None and len(labels) != len(given_ids):
                raise ValueError(
                    "MaskCollator: expected one label per token, got an example with "
                    f"{len(given_ids)} tokens and {len(labels)} labels"
                )
            example["labels"] = own(given_ids if labels is None else labels).clone()
            # a slice, since an example may be empty
            example["labels"][:1] = -100
        if "token_type_ids" in feature:
            example["token_type_ids"] = own(feature["token_type_ids"])
        if "teacher_hidden" in feature:
            example["teacher_hidden"] = feature["teacher_hidden"]
        return example


def _concatenate_and_pad(rows: Sequence[Sequence[Example]], key: str, empty: int) -> Tensor:
    """Concatenate each row's values of ``key``, and pad all rows to the longest with ``empty``."""
    length = max(sum(len(example["input_ids"]) for example in row) for row in rows)
    padded = torch.full((len(rows), length), empty)
    for line, row in zip(padded, rows, strict=True):
        values = torch.cat([torch.as_tensor(example[key]) for example in row])
        line[: len(values)] = values
    return padded


def _component(task: SupportsIndex) -> int:
    """Convert an example's task, an integer of any type, to an int: the component's index."""
    try:
        # operator.index accepts integers of numpy and torch, rejects 1.0, and turns True into 1
        index = -1 if isinstance(task, bool) else operator.index(task)
    except (TypeError, ValueError):
        index = -1
    if index < 0:
        raise ValueError(
            f"MaskCollator: an example's task is {task!r}, expected a component's index, which "
            "TaskMixture adds"
        )
    return index
