"""`AtTokens`: a wrapper of tasks for models whose latents start from the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .task import IGNORED, Sample, Task


def without_layout(task: Task) -> Task:
    """Return the task that `AtTokens` wraps, or the task itself."""
    return task.task if isinstance(task, AtTokens) else task


@dataclass(frozen=True)
class AtTokens(Task):
    """A wrapper that adapts a task to models with ``latent_init="tokens"``.

    A row is a start token and the input. If the answer is not as long as the input, one blank token
    for each symbol of the answer follows. Labels are at the blanks, if there are any, and otherwise
    at the input's tokens. Rows are padded on the left, as causal models need. A grid has no start
    token, so that it stays a grid. The start token's id is the wrapped task's ``vocab_size``, and
    the blank's id is the next.

    Args:
        task: The task to wrap.

    Raises:
        ValueError: The task is not a `Task` or is already wrapped, or its answers cannot be
            assigned to tokens.

    >>> from thinker import make_task
    >>> task = AtTokens(make_task("prefix_sum"))
    >>> tokens, mask, targets, distance, _ = task.sample(torch.Generator().manual_seed(0), 1, 4)
    >>> tokens, targets, distance
    (tensor([[2, 0, 1, 1, 0]]), tensor([[-100,    0,    1,    0,    0]]), tensor([[0, 1, 2, 3, 4]]))
    """

    pads_left: ClassVar[bool] = True
    task: Task

    def __post_init__(self):
        if not isinstance(self.task, Task) or isinstance(self.task, AtTokens):
            raise ValueError(
                f"AtTokens: the task is {self.task!r}; expected a Task that is not wrapped yet, "
                "such as make_task returns"
            )
        if self.task.by_step and self._blanks:
            raise ValueError(
                f"AtTokens: {self.task!r} has an answer for each step, not for each token; use it "
                "without AtTokens, with a model whose latents are not tokens"
            )

    @property
    # pyrefly: ignore[bad-override]: a property, since the wrapped task sets it
    def min_length(self) -> int:
        """The wrapped task's shortest length."""
        return self.task.min_length

    @property
    # pyrefly: ignore[bad-override]: a property, since the wrapped task sets it
    def default_length(self) -> int:
        """The wrapped task's default length."""
        return self.task.default_length

    @property
    # pyrefly: ignore[bad-override]: a property, since the wrapped task sets it
    def by_step(self) -> bool:
        """Return whether the wrapped task has an answer for each step."""
        return self.task.by_step

    @property
    # pyrefly: ignore[bad-override]: a property, since the wrapped task sets it
    def grid(self) -> bool:
        """Return whether the wrapped task's rows are grids."""
        return self.task.grid

    @property
    def _blanks(self) -> bool:
        # several lengths: at one of them, an answer of fixed size may be as long as the input
        lengths = range(self.min_length + 1, self.min_length + 3)
        return any(self.task.output_length(n) != self.task.input_length(n) for n in lengths)

    @property
    def _start(self) -> int:
        return self.task.vocab_size

    @property
    def vocab_size(self) -> int:
        """The number of the wrapped task's ids, plus the ids of start and blank tokens if used."""
        return self._start + (not self.grid) + self._blanks

    @property
    def output_size(self) -> int:
        """The number of the wrapped task's answer ids."""
        return self.task.output_size

    @property
    def separators(self) -> tuple[int, ...]:
        """The wrapped task's separators."""
        return self.task.separators

    def input_length(self, length: int) -> int:
        """Return the length of the wrapped task's input, with the start and blank tokens."""
        blanks = self.task.output_length(length) if self._blanks else 0
        return self.task.input_length(length) + (not self.grid) + blanks

    def output_length(self, length: int) -> int:
        """Return the same as `input_length`, since labels are placed at tokens."""
        return self.input_length(length)

    def reach(self, length: int) -> int:
        """Return the number of steps after which each answer can depend on the whole input.

        This assumes that information moves one token per step. Answers that follow the input need
        more steps, since they are farther from its start.
        """
        if self._blanks:
            return self.input_length(length) - (not self.grid)
        return length

    def num_samples(self, length: int) -> int:
        """Return the approximate number of different inputs of this length in the wrapped task."""
        return self.task.num_samples(length)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw a batch of the wrapped task, and convert it with `laid_out`."""
        return self.laid_out(self.task.sample(generator, batch, length))

    def every(self, length: int) -> Sample | None:
        """Return `laid_out` of all rows of a length; None if the wrapped task draws its inputs."""
        rows = self.task.every(length)
        if rows is None:
            return None
        return self.laid_out(rows)

    def laid_out(self, sample: Sample) -> Sample:
        """Lay out a sample of the wrapped task for a model with latents at the tokens."""
        tokens, mask, targets, distance, key = sample
        start = self._start
        blank = self._start + 1
        if distance is None:  # any answer may depend on any token
            distance = mask.sum(1, keepdim=True).expand(-1, targets.shape[-1])
        if not self._blanks:  # there are no answers at padding
            targets = targets.masked_fill(~mask[:, None] if targets.dim() == 3 else ~mask, IGNORED)
        known = targets != IGNORED
        if self._blanks:
            nothing = torch.full_like(tokens, IGNORED)
            tokens = torch.cat([tokens, torch.full_like(targets, blank)], 1)
            mask = torch.cat([mask, known], 1)
            targets = torch.cat([nothing, targets], 1)
            # the i-th blank is i positions after the end of the input
            distance = torch.cat([torch.zeros_like(nothing), distance + known.cumsum(1)], 1)
        if not self.grid:
            first = torch.full_like(tokens[:, :1], start)
            tokens = torch.cat([first, tokens], 1)
            mask = torch.cat([first == start, mask], 1)
            targets = torch.cat([torch.full_like(targets[..., :1], IGNORED), targets], -1)
            distance = torch.cat([torch.zeros_like(first), distance], 1)
        order = mask.long().argsort(dim=1, stable=True)  # padding to the left
        tokens, mask, distance = (column.gather(1, order) for column in (tokens, mask, distance))
        if targets.dim() == 3:
            turned = order[:, None].expand(-1, targets.shape[1], -1)
        else:
            turned = order
        targets = targets.gather(-1, turned)
        if targets.dim() == 3:
            answered = (targets != IGNORED).any(1)
        else:
            answered = targets != IGNORED
        return Sample(
            tokens.masked_fill(~mask, 0), mask, targets, distance.masked_fill(~answered, 0), key
        )
