"""`TensorTask`: a fixed data set, given as tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from .task import IGNORED, Sample, Task, integers, row_key, row_words

Augment = Callable[[torch.Generator, Tensor, Tensor], tuple[Tensor, Tensor]]
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False, repr=False)
class TensorTask(Task):
    """A fixed data set, from which batches are drawn with replacement; every row has length 1.

    A `CurriculumDataset` holds out a share of the rows, chosen by a hash of their tokens, and
    evaluates on each of them once.

    Args:
        tokens: (N, L) ids.
        targets: (N, O), -100 where there is no answer.
        mask: (N, L), True at tokens; default: everywhere.
        augment: A function of (generator, tokens, targets) that changes the rows drawn for training
            and returns (tokens, targets) of the same shapes. It must not turn a row into a held-out
            row; this is not checked.
        grid: Whether each row is a grid, read row by row, with an answer for each cell.
        symbols: Number of symbols; ids and answers must be below this number. Default: one more
            than the largest id for inputs, and one more than the largest answer for answers.

    Raises:
        ValueError: The tensors' shapes do not match or ids are invalid, or ``augment`` returns such
            tensors.

    >>> tokens = torch.arange(6).view(3, 2)
    >>> task = TensorTask(tokens, tokens.flip(1))
    >>> task.vocab_size, task.input_length(1), task.num_samples(1)
    (6, 2, 3)
    """

    default_length: ClassVar[int] = 1
    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None
    augment: Augment | None = None
    # pyrefly: ignore[bad-override]: set for each instance
    grid: bool = False
    symbols: int | None = None

    def __post_init__(self):
        self._check_tensors()
        self._check_ids()
        if not isinstance(self.grid, bool) or not (self.augment is None or callable(self.augment)):
            raise ValueError(
                f"TensorTask: grid is {self.grid!r}, augment is {self.augment!r}; expected True or "
                "False for grid, and a function or None for augment"
            )

    def _check_tensors(self) -> None:
        for name, tensor in (("tokens", self.tokens), ("targets", self.targets)):
            if (
                not isinstance(tensor, Tensor)
                or tensor.dtype not in _WHOLE
                or tensor.dim() != 2
                or 0 in tensor.shape
            ):
                raise ValueError(
                    f"TensorTask: {name} is {_told(tensor)}; expected integer tensors that are not "
                    "empty, tokens (N, L) and targets (N, O)"
                )
        rows = len(self.tokens)
        shape = list(self.tokens.shape)
        if len(self.targets) != rows or (self.grid and self.targets.shape != self.tokens.shape):
            needed = shape if self.grid else f"{rows} rows, as tokens have"
            raise ValueError(f"TensorTask: targets is {_told(self.targets)}; expected {needed}")
        if self.mask is not None:
            if (
                not isinstance(self.mask, Tensor)
                or list(self.mask.shape) != shape
                or self.mask.is_floating_point()
            ):
                raise ValueError(
                    f"TensorTask: mask is {_told(self.mask)}; expected a bool or integer tensor of "
                    f"shape {shape}"
                )
            if not bool(self.mask.bool().any(1).all()):
                raise ValueError(
                    "TensorTask: the mask of a row has no token; expected one or more in each row"
                )

    def _check_ids(self) -> None:
        targets = self.targets[self.targets != IGNORED]
        if int(self.tokens.min()) < 0 or not len(targets) or int(targets.min()) < 0:
            least = int(targets.min()) if len(targets) else IGNORED
            raise ValueError(
                f"TensorTask: the smallest token is {int(self.tokens.min())}, and the smallest "
                f"target is {least}; expected ids from 0, and at least one target that is not -100"
            )
        most = max(int(self.tokens.max()), int(targets.max()))
        if self.symbols is not None and self.symbols <= most:
            raise ValueError(f"TensorTask: symbols is {self.symbols}; expected {most + 1} or more")

    def __repr__(self) -> str:
        # a resume compares tasks by their repr, so it must differ if the rows differ
        rows = self._rows
        content = b"".join(
            x.cpu().numpy().tobytes() for x in (rows.tokens, rows.mask, rows.targets)
        )
        more = ", grid=True" * self.grid + ", augmented" * (self.augment is not None)
        return (
            f"TensorTask({len(rows.tokens)} rows of {rows.tokens.shape[1]}, "
            f"{zlib.crc32(content):08x}{more})"
        )

    @cached_property
    def _rows(self) -> Sample:
        tokens = self.tokens.long()
        targets = self.targets.long()
        if self.mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        else:
            mask = self.mask.bool()
        return Sample(
            tokens,
            mask,
            targets,
            None,
            # computed from the original rows: `augment` does not change keys
            row_key(tokens, mask, row_words(tokens.shape[1], tokens.device)),
        )

    @cached_property
    def vocab_size(self) -> int:
        """``symbols`` if given, otherwise one more than the largest input id."""
        return self.symbols or int(self.tokens.max()) + 1

    @cached_property
    def output_size(self) -> int:
        """``symbols`` if given, otherwise one more than the largest answer id."""
        return self.symbols or int(self.targets.max()) + 1

    def input_length(self, length: int) -> int:
        """Return the input length, L."""
        return self.tokens.shape[1]

    def output_length(self, length: int) -> int:
        """Return the answer length, O."""
        return self.targets.shape[1]

    def num_samples(self, length: int) -> int:
        """Return the number of rows, N."""
        return len(self.tokens)

    def every(self, length: int) -> Sample:
        """Return all rows, which have length 1.

        Raises:
            ValueError: ``length`` is not 1.
        """
        if length != 1:
            raise ValueError(f"TensorTask: expected length 1, which all rows have, got {length}")
        return self._rows

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw rows, changed by ``augment`` if it is given."""
        self.checked(generator, batch, length)
        chosen = integers(generator, len(self.tokens), batch)
        rows = self._rows.rows(chosen.to(self.tokens.device)).map(
            lambda column: column.to(generator.device)
        )
        if self.augment is None:
            return rows
        augmented: object = self.augment(generator, rows.tokens, rows.targets)
        if not isinstance(augmented, tuple) or len(augmented) != 2:
            raise ValueError(
                f"TensorTask: augment returned {_told(augmented)}; expected (tokens, targets)"
            )
        kinds = (("tokens", 0, self.vocab_size), ("targets", IGNORED, self.output_size))
        for after, before, (name, least, size) in zip(
            augmented, (rows.tokens, rows.targets), kinds, strict=True
        ):
            if (
                not isinstance(after, Tensor)
                or after.shape != before.shape
                or after.dtype != before.dtype
            ):
                raise ValueError(
                    f"TensorTask: augment returned {name} as {_told(after)}; expected "
                    f"{_told(before)}"
                )
            if int(after.min()) < least or int(after.max()) >= size:
                raise ValueError(
                    f"TensorTask: augment returned {name} from {int(after.min())} to "
                    f"{int(after.max())}; expected {least} to {size - 1}; if there are more "
                    "symbols, set symbols="
                )
        return rows._replace(tokens=augmented[0], targets=augmented[1])


def _told(value: object) -> str:
    """Describe a value: a tensor by its shape and dtype, anything else by its repr."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    return repr(value)
