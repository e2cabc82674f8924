"""Rows that are given as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..counters import mix, signed
from .task import Sample, Task, integers

Augment = Callable[[torch.Generator, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False)
class TensorTask(Task):
    """A fixed data set: batches are rows of it, drawn with replacement. Every row has length 1.

    A `CurriculumDataset` holds some of the rows out, and evaluates on each of them once.

    Args:
        tokens: (N, L) ids.
        targets: (N, O), -100 where there is no answer.
        mask: (N, L), where there are tokens; default everywhere.
        augment: A function of (generator, tokens, targets) to both, which makes other rows of those that were drawn;
            held-out rows stay as they are.
        grid: Each row is a square, row by row, with an answer for each cell.

    Raises:
        ValueError: Tensors that do not fit each other, or are no whole numbers.

    >>> tokens = torch.arange(6).view(3, 2)
    >>> task = TensorTask(tokens, tokens.flip(1))
    >>> task.vocab_size, task.input_length(1), task.num_samples(1)
    (6, 2, 3)
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None
    augment: Augment | None = None
    grid: bool = False  # pyrefly: ignore

    def __post_init__(self):
        for name, tensor in (("tokens", self.tokens), ("targets", self.targets)):
            whole = isinstance(tensor, Tensor) and not tensor.is_floating_point() and tensor.dtype != torch.bool
            if not whole or tensor.dim() != 2 or 0 in tensor.shape or len(tensor) != len(self.tokens):
                is_ = f"{list(tensor.shape)} of {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
                raise ValueError(f"TensorTask: {name} is {is_}; needed whole numbers, (N, L) and (N, O)")
        if self.mask is not None and self.mask.shape != self.tokens.shape:
            raise ValueError(f"TensorTask: mask is {list(self.mask.shape)}; needed {list(self.tokens.shape)}")
        if int(self.tokens.min()) < 0 or int(self.targets.max()) < 0:
            raise ValueError(
                f"TensorTask: tokens from {int(self.tokens.min())}, targets to {int(self.targets.max())}; needed ids "
                f"from 0, and an answer"
            )
        if self.grid and self.targets.shape != self.tokens.shape:
            raise ValueError(f"TensorTask: targets are {list(self.targets.shape)}; needed {list(self.tokens.shape)}")

    def __repr__(self) -> str:
        n, length = self.tokens.shape
        return f"TensorTask({n} rows of {length}, {int(self._rows.key.sum()):x})"  # pyrefly: ignore

    @cached_property
    def _rows(self) -> Sample:
        tokens, targets = self.tokens.long(), self.targets.long()
        mask = torch.ones_like(tokens, dtype=torch.bool) if self.mask is None else self.mask.bool()
        words = torch.tensor([signed(mix(7, i) | 1) for i in range(tokens.shape[1])], device=tokens.device)
        return Sample(tokens, mask, targets, None, ((tokens + 1) * mask * words).sum(1))

    @cached_property
    def vocab_size(self) -> int:  # pyrefly: ignore
        """Ids that occur are below it."""
        return int(self.tokens.max()) + 1

    @cached_property
    def output_size(self) -> int:  # pyrefly: ignore
        """Answers that occur are below it."""
        return int(self.targets.max()) + 1

    def input_length(self, length: int) -> int:
        """L."""
        return self.tokens.shape[1]

    def output_length(self, length: int) -> int:
        """O."""
        return self.targets.shape[1]

    def num_samples(self, length: int) -> int:
        """N."""
        return len(self.tokens)

    def every(self) -> Sample:
        """All rows."""
        return self._rows

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Rows, made other ones if so asked."""
        self.checked(generator, batch, length)
        chosen = integers(generator, len(self.tokens), batch)
        rows = self._rows.rows(chosen.to(self.tokens.device))
        rows = rows.map(lambda column: column.to(generator.device))
        if self.augment is None:
            return rows
        tokens, targets = self.augment(generator, rows.tokens, rows.targets)
        return rows._replace(tokens=tokens, targets=targets)
