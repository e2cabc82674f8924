"""`solve`: compute a trained thinker's answers to inputs of any length.

An input takes no further steps once the exit rule is met.

Shapes: B rows, L the longest input, O the longest answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_components._checks import is_whole, refuse
from model_components._modes import evaluating
from model_components._report import Report, Table

from .checks import check_layout
from .config import ThinkerConfig
from .exits import ExitRule
from .model import LatentThinker
from .tasks import AtTokens, RowsTask, Sample, Task, TensorTask
from .tasks.at_tokens import without_layout
from .tasks.task import IGNORED

# the default maximum number of steps for each symbol of the longest row, if latents are tokens
_STEPS = 10


@dataclass(frozen=True)
class Solutions(Report):
    """The answers to inputs, one for each row.

    Attributes:
        answers: The answers in the task's form: ids, or, for a `RowsTask`, strings or symbols.
        steps: The number of steps of each row.
        settled: Whether the exit rule stopped each row before the maximum number of steps; always
            True if each step has its own answer.
    """

    answers: tuple[Any, ...]
    steps: tuple[int, ...]
    settled: tuple[bool, ...]

    def table(self) -> Table:
        """Return the number, the steps and the answer of each row."""
        rows = []
        for number, (answer, steps) in enumerate(zip(self.answers, self.steps, strict=True)):
            text = answer if isinstance(answer, str) else " ".join(map(str, answer))
            rows.append((str(number), str(steps), text))
        return Table(("row", "steps", "answer"), rows, sentences=True)

    def remarks(self) -> list[str]:
        """List the rows that the exit rule did not stop."""
        going = [number for number, settled in enumerate(self.settled) if not settled]
        if not going:
            return []
        return [f"rows not settled after {max(self.steps)} steps: {', '.join(map(str, going))}"]


def solve(
    model: LatentThinker,
    task: Task,
    rows: Iterable[str | Sequence[Any] | Tensor | np.ndarray],
    *,
    max_steps: int | None = None,
    exit_rule: ExitRule | None = None,
) -> Solutions:
    """Compute a trained model's answers to inputs. An exit rule decides when to stop.

    Args:
        model: A trained model.
        task: The task that the model was trained on, wrapped in `AtTokens` or not.
        rows: The inputs, of any lengths: lists of token ids, or, for a `RowsTask`, strings or lists
            of symbols. A tensor or an array of shape (B, L) is possible, too.
        max_steps: The maximum number of steps. Default: with a latent for each token, 10 for each
            symbol of the longest row; otherwise the config's ``n_step``. The plan or a static
            memory may change this default. If each step of the task has its own answer,
            ``max_steps`` is required, and the answer of that step is returned.
        exit_rule: The rule that stops a row; default: ``ExitRule()``.

    Returns:
        The ``answers``, the numbers of ``steps``, and whether each row has ``settled``, that is,
        the exit rule stopped it before the maximum number of steps. The result prints as a table.

    Raises:
        ValueError: A row is empty, has an id outside the vocabulary, is longer than the model's
            longest input, is too short for the task, or is not as long as the rows of a
            `TensorTask`. Or the model's latents are only the last few tokens, or each step has its
            own answer and ``max_steps`` is None.

    >>> import thinker as th
    >>> task = th.AtTokens(th.make_task("prefix_sum"))
    >>> data = th.CurriculumDataset(task, th.Frontier(max_length=5))
    >>> model = th.LatentThinker(th.ThinkerConfig(**data.sizes(), causal=True))
    >>> [len(answer) for answer in solve(model, task, [[1, 0, 1], [1]], max_steps=4).answers]
    [3, 1]
    """
    _check_kinds(model, task, rows)
    inner = without_layout(task)
    if model.config.at_tokens:
        task = AtTokens(inner)
    check_layout("solve", model.config, task)
    listed = _ids_of(rows, inner)
    most = _most_steps(model, task, max(map(len, listed)), max_steps)
    batches: Sequence[Sequence[int]] = [range(len(listed))]
    if model.config.decoder_self_attention or model.config.positions == "random":
        # an answer then depends on the longest row of its batch, so each length gets its own batch
        sizes = [len(row) for row in listed]
        batches = [[i for i, n in enumerate(sizes) if n == size] for size in sorted(set(sizes))]
    found: dict[int, tuple[Any, int, bool]] = {}
    for numbers in batches:
        batch = [listed[number] for number in numbers]
        solved = _solved(model, task, batch, most, exit_rule or ExitRule())
        found.update(zip(numbers, solved, strict=True))
    ordered = [found[number] for number in range(len(listed))]
    answers, steps, settled = zip(*ordered, strict=True)
    return Solutions(answers, steps, settled)


def _check_kinds(model: object, task: object, rows: object) -> None:
    """Check that the model is a thinker, and that `solve` accepts the task and the kind of rows."""
    # the config identifies a thinker even if the model was compiled or wrapped
    if not isinstance(getattr(model, "config", None), ThinkerConfig) or not isinstance(task, Task):
        raise ValueError(
            "solve: expected a LatentThinker and a Task, got "
            f"{type(model).__name__} and {type(task).__name__}"
        )
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise ValueError(f"solve: rows is {rows!r:.80}; expected a list of inputs")
    inner = without_layout(task)
    if isinstance(inner, TensorTask) and inner.mask is not None:
        raise ValueError(
            "solve: task is a TensorTask with a mask, which rows do not have; expected a task "
            "without a mask, or a call of model(tokens, mask) instead of solve"
        )


def _ids_of(
    rows: Iterable[str | Sequence[Any] | Tensor | np.ndarray], task: Task
) -> list[list[int]]:
    """Return the token ids of each row, after checking them."""
    listed = []
    for number, row in enumerate(rows):
        symbols = row.tolist() if isinstance(row, Tensor | np.ndarray) else row
        if not isinstance(symbols, Sequence):
            raise ValueError(
                f"solve: row {number} is {symbols!r:.80}; expected each row to be a string or a "
                "list of symbols"
            )
        if not symbols:
            raise ValueError(f"solve: row {number} is empty; expected one symbol or more")
        listed.append(task.encode(symbols))
    _check_rows(listed, task)
    return listed


def _solved(
    model: LatentThinker, task: Task, rows: Sequence[Sequence[int]], most: int, rule: ExitRule
) -> list[tuple[Any, int, bool]]:
    """Solve rows as one batch: return each one's answer, steps, and whether the rule stopped it."""
    inner = without_layout(task)
    sample = _sample(inner, rows)
    if isinstance(task, AtTokens):
        sample = task.laid_out(sample)
    if sample.tokens.shape[1] > model.config.max_input_length:
        raise ValueError(
            f"solve: the longest row takes {sample.tokens.shape[1]} tokens, but the model accepts "
            f"at most {model.config.max_input_length}; expected shorter rows, or a model made for "
            "longer ones (preset.thinker(data, longest=...), or think train --lengths)"
        )
    inputs = {
        "input_ids": sample.tokens.to(model.device),
        "attention_mask": sample.mask.to(model.device),
    }
    with torch.no_grad(), evaluating(model):
        out = model(
            **inputs,
            out_len=sample.targets.shape[1],
            n_step=most,
            # with an answer for each step, the last step's is returned, so no row stops early
            exit_rule=None if task.by_step else rule,
        )
    if not bool(out.logits.isfinite().all()):
        raise ValueError(
            "solve: expected finite logits, got NaN or infinity; the model's weights may not be "
            "finite"
        )
    said = out.logits.argmax(-1).cpu()
    known = sample.targets != IGNORED
    answers = [inner.decode(row[which].tolist()) for row, which in zip(said, known, strict=True)]
    solved = []
    for answer, steps in zip(answers, out.steps.tolist(), strict=True):
        solved.append((answer, steps, task.by_step or steps < most))
    return solved


def _check_rows(rows: Sequence[Sequence[int]], task: Task) -> None:
    """Check the token ids of rows, and their length for a `TensorTask`."""
    if not rows:
        raise ValueError("solve: expected rows, got none")
    # the shortest row of a user's data does not limit the task
    shortest = 1 if isinstance(task, RowsTask) else task.min_length
    while task.output_length(shortest) < 1:
        shortest += 1
    least = task.input_length(shortest)
    for number, row in enumerate(rows):
        if not all(is_whole(token, 0) and token < task.vocab_size for token in row):
            raise ValueError(
                f"solve: row {number} is {row!r:.80}; expected ids from 0 to {task.vocab_size - 1}"
            )
        # all rows of a `TensorTask` have the same length, which the task counts as 1
        if task.default_length == 1 and len(row) != task.input_length(1):
            raise ValueError(
                f"solve: row {number} has {len(row)} ids; expected {task.input_length(1)}, as in "
                "the rows of the task"
            )
        if len(row) < least:
            raise ValueError(
                f"solve: row {number} has {len(row)} symbols; expected at least {least}, as in the "
                "shortest inputs that the task can answer"
            )


def _most_steps(model: LatentThinker, task: Task, longest: int, max_steps: int | None) -> int:
    """Return the maximum number of steps of a call."""
    config = model.config
    if config.at_tokens and config.num_latents is not None:
        raise ValueError(
            f"solve: the model's latents are the last {config.num_latents} tokens, which answer "
            "only a part of a row; expected num_latents=None"
        )
    if max_steps is not None:
        if not is_whole(max_steps, 1):
            refuse("solve", "max_steps", max_steps, "a whole number, 1 or more")
        return int(max_steps)
    if task.by_step:
        raise ValueError(
            "solve: expected max_steps, got None; each step of the task has its own answer"
        )
    # other latents may not settle, and their answers get worse with more steps than in training
    # (see docs/thinker_questions.md)
    most = _STEPS * longest if config.at_tokens else config.n_step
    if config.memory_size is not None:
        most = min(most, config.memory_size)
    # a plan without a loop has a fixed number of steps; a loop of several rows may run until its
    # next output
    return model.plan.num_steps(most)


def _sample(task: Task, rows: Sequence[Sequence[int]]) -> Sample:
    """Return rows as a sample of the task, with 0 for every answer and padding on the right."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    sizes = torch.tensor([_answer_length(task, len(row)) for row in rows])
    place = torch.arange(int(sizes.max()))
    targets = torch.zeros(len(rows), len(place), dtype=torch.long)
    return Sample(tokens, mask, targets.masked_fill(place >= sizes[:, None], IGNORED))


def _answer_length(task: Task, tokens: int) -> int:
    """Return the number of symbols of the answer to an input of ``tokens`` tokens."""
    # a task's length may count something other than tokens, such as digits
    for length in range(1, tokens + 1):
        if task.input_length(length) >= tokens:
            return task.output_length(length)
    return task.output_length(tokens)
