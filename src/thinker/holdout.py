"""The hold-out: a share of a task's inputs, chosen by a hash, that training never sees."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .counters import signed
from .tasks.task import Sample, Task, row_key, row_words

_ENOUGH = 1000  # at a length with fewer inputs, none are held out
# the same for tasks with fixed rows: with fewer inputs, all inputs of a length might be held out
_ENOUGH_GIVEN = 10
_HASHES = 1 << 24  # the number of hashes: enough to divide inputs into precise shares


class HoldOut:
    """The share of a task's inputs that is held out of training.

    Args:
        task: The task. Rows are chosen by their `Sample.key`, or by their tokens if there is none.
        share: The share of the inputs of each length that is held out; 0: none.
        longest: The longest length in training.
        device: The device of the samples.
    """

    def __init__(self, task: Task, share: float, longest: int, device: torch.device):
        self.task = task
        self.share = share
        self.is_given = task.every(task.min_length) is not None
        if not self.is_given:
            enough = _ENOUGH
        elif longest > 1:
            enough = _ENOUGH_GIVEN
        else:
            enough = 1  # rows of a `TensorTask`
        has_enough = [
            share > 0 and task.num_samples(n) >= enough for n in range(task.min_length, longest + 1)
        ]
        self.lengths = torch.tensor([False] * task.min_length + has_enough, device=device)
        self._words = row_words(task.input_length(longest), device)  # the same with every seed
        self._limits = self._limits_of(math.ceil(share * _HASHES))

    def _limits_of(self, limit: int) -> Tensor:  # (longest + 1,)
        """Return, for each length, the hash below which an input is held out."""
        limits = torch.full_like(self.lengths, limit, dtype=torch.long)
        if not self.is_given:
            return limits
        for length in self.lengths.nonzero()[:, 0].tolist():
            rows = self._given(length)
            if rows is None:
                # samples of this length are rows of the nearest shorter length
                limits[length] = limits[length - 1]
            elif self.task.num_samples(length) >= _ENOUGH_GIVEN:
                # so that at least one input is held out
                limits[length] = max(limit, int(self._hashed(rows).min()) + 1)
        return limits

    def _given(self, length: int) -> Sample | None:
        """Return all rows of a length, or None if the task has no row of that length."""
        try:
            rows = self.task.every(length)
        except ValueError:
            return None
        return None if rows is None else rows.map(lambda column: column.to(self.lengths.device))

    def _hashed(self, sample: Sample) -> Tensor:  # (B,)
        """Return a hash of each row, from 0 to `_HASHES` - 1."""
        if sample.key is None:
            word = row_key(sample.tokens, sample.mask, self._words)
        else:
            word = sample.key
        # The low bits of a sum depend only on the low bits of its terms. A key is a sum, so it is
        # mixed as in SplitMix64.
        word = (word ^ (word >> 29)) * signed(0xBF58476D1CE4E5B9)
        return (word ^ (word >> 32)) & (_HASHES - 1)

    def rows(self, sample: Sample, lengths: Tensor) -> Tensor:  # (B,)
        """Return a mask of the rows that are held out."""
        if not self.share:
            return torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
        return (self._hashed(sample) < self._limits[lengths]) & self.lengths[lengths]

    def replaced(self, generator: torch.Generator, sample: Sample, lengths: Tensor) -> Sample:
        """Replace the held-out rows of a training sample with other rows, and return the sample.

        Raises:
            ValueError: All inputs of a length are held out.
        """
        wrong = self.rows(sample, lengths).nonzero()[:, 0]
        if sample.distance is not None:
            # an expanded view cannot be written to
            sample = sample._replace(distance=sample.distance.clone())
        for _ in range(64):
            if not len(wrong):
                return sample
            these = lengths[wrong]
            # one more row, of the longest length, gives the targets the same number of steps
            if self.task.by_step:
                these = torch.cat([these, lengths.amax()[None]])
            again = self.task.sample(generator, len(these), these).rows(
                torch.arange(len(wrong), device=wrong.device)
            )
            for whole, part in zip(sample, again, strict=True):
                if whole is None or part is None:
                    continue
                if whole.dim() == 1:
                    # keys have no columns
                    whole[wrong] = part
                    continue
                # without a row of the longest length, the new rows may be narrower than the batch
                width = part.shape[-1]
                if self.task.pads_left:
                    columns = slice(whole.shape[-1] - width, None)
                else:
                    columns = slice(width)
                whole[wrong, ..., columns] = part
            wrong = wrong[self.rows(again, lengths[wrong])]
        raise ValueError(
            f"CurriculumDataset: every sample of length {int(lengths[wrong[0]])} is held out; "
            "expected a smaller holdout, or a larger min_length"
        )

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample:
        """Draw held-out rows; if no inputs of the length are held out, draw from all inputs.

        If the task has fixed rows, each held-out row is returned at most once.

        Raises:
            ValueError: The task has fixed rows, but no held-out row of that length; or too few
                held-out inputs were found.
        """
        given = self.task.every(length)
        if given is not None:
            return self._of_given(generator, batch, given, length)
        if not self._has(length):
            return self.task.sample(generator, batch, length)
        samples: list[Sample] = []
        missing = batch
        for _ in range(1000):
            # the expected number of draws, a fifth more, and 16 more in case few rows are missing
            many = int(missing / self.share * 1.2) + 16
            drawn = self.task.sample(generator, many, length)
            chosen_rows = self.rows(
                drawn, torch.full((many,), length, device=generator.device)
            ).nonzero()[:missing, 0]
            samples.append(drawn.rows(chosen_rows))
            missing -= len(chosen_rows)
            if not missing:
                break
        if missing:
            raise ValueError(
                f"CurriculumDataset: {missing} of {batch} held-out inputs of length {length} were "
                f"not found in 1000 draws; expected a holdout above {self.share}"
            )
        return Sample.joined(samples)

    def _has(self, length: int) -> bool:
        """Return whether inputs of a length are divided into training and held-out ones."""
        return length < len(self.lengths) and bool(self.lengths[length])

    def _of_given(
        self, generator: torch.Generator, batch: int, given: Sample, length: int
    ) -> Sample:
        rows = given.map(lambda column: column.to(generator.device))
        lengths = torch.full((len(rows.tokens),), length, device=generator.device)
        if self.share and length < len(self.lengths):
            which = self.rows(rows, lengths).nonzero()[:, 0]
        else:
            which = torch.arange(len(lengths), device=generator.device)
        if not len(which):
            raise ValueError(
                f"CurriculumDataset: expected held-out rows of length {length}, got none among "
                f"{len(lengths)} rows; add rows with different inputs, or raise holdout"
            )
        return rows.rows(
            which[torch.randperm(len(which), generator=generator, device=generator.device)[:batch]]
        )
