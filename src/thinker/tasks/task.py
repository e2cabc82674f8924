"""`Task`: batches of inputs and answers, made by tensor operations on any device.

`register_task` registers a task class under a name.

Shapes: B batch, L input length, O answer length. Each task counts its ``length`` in its own unit,
such as symbols, digits or hops.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from model_components._checks import is_whole, refuse_unknown

from ..counters import mix, signed

IGNORED = -100  # the target where there is no answer; torch's cross-entropy ignores it

TASKS: dict[str, type[Task]] = {}


class Sample(NamedTuple):
    """A batch of inputs and answers.

    Args:
        tokens: (B, L) ids.
        mask: (B, L), True at tokens.
        targets: (B, O) answers, -100 where there is no answer. For a task with ``by_step``,
            (B, T, O), the answers of each step.
        distance: (B, O), the distance in tokens from each answer to the farthest token that it
            depends on, including the start token before the input; at least 1. None: answers may
            depend on all tokens.
        key: (B,) numbers that decide which rows are held out; None: computed from the tokens.
    """

    tokens: Tensor
    mask: Tensor
    targets: Tensor
    distance: Tensor | None = None
    key: Tensor | None = None

    def rows(self, index: Tensor) -> Sample:
        """Return the rows at ``index``."""
        return self.map(lambda column: column[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """Return the sample with a function applied to every column that is not None."""
        columns: list[Any] = [None if column is None else change(column) for column in self]
        return Sample(*columns)

    @staticmethod
    def joined(samples: Sequence[Sample]) -> Sample:
        """Join several batches of one length."""
        columns: list[Any] = [
            None if c[0] is None else torch.cat(c) for c in zip(*samples, strict=True)
        ]
        return Sample(*columns)


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Register a `Task` class for `make_task`, such as a task that you wrote.

    Args:
        name: The name for `make_task`.

    Returns:
        A class decorator.

    Raises:
        ValueError: The name is taken, or the class is not a `Task`.
    """

    def put(kind: type[Task]) -> type[Task]:
        if not (isinstance(kind, type) and issubclass(kind, Task)):
            raise ValueError(
                f"register_task: {name!r} is {kind!r}; expected a subclass of Task or SequenceTask"
            )
        if name in TASKS:
            raise ValueError(
                f"register_task: {name!r} is taken by {TASKS[name].__name__}; expected another name"
            )
        TASKS[name] = kind
        return kind

    return put


def make_task(name: str, **options: object) -> Task:
    """Make a registered task.

    Args:
        name: A name in `TASKS`.
        **options: Fields of the task.

    Returns:
        The task.

    Raises:
        ValueError: There is no such task, or the task rejects an option.

    >>> make_task("roll", shift=2).vocab_size
    16
    """
    if name not in TASKS:
        raise ValueError(
            f"make_task: there is no task {name!r}; expected one of {', '.join(sorted(TASKS))}"
        )
    known = list(inspect.signature(TASKS[name]).parameters)
    refuse_unknown(f"make_task {name}", options, known or ["no options"])
    try:
        return TASKS[name](**options)
    except TypeError as error:
        raise ValueError(f"make_task: {name} does not accept {options}: {error}") from error


class Task(ABC):
    """The base class of tasks, which declare their sizes and draw samples.

    ``length`` is a whole number, or a tensor (B,) with a length for each row. Shorter rows are
    padded on the right, or on the left with ``pads_left``. ``default_length`` is the longest length
    in training, unless a schedule sets another.

    With ``by_step`` the targets are (B, T, O): each of the first T steps has its own answers. With
    ``grid`` the input is a grid, read row by row, and each answer belongs to one of its tokens.
    """

    min_length: ClassVar[int] = 1
    default_length: ClassVar[int] = 20
    by_step: ClassVar[bool] = False
    pads_left: ClassVar[bool] = False
    grid: ClassVar[bool] = False

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of input ids; all ids are below this number."""

    @property
    def output_size(self) -> int:
        """The number of answer ids; all ids are below this number."""
        return self.vocab_size

    @property
    def separators(self) -> tuple[int, ...]:
        """The ids that end an operand; ``positions="aligned"`` uses them."""
        return ()

    def input_length(self, length: int) -> int:
        """Return the input length L of rows of this length."""
        return length

    def output_length(self, length: int) -> int:
        """Return the answer length O of rows of this length."""
        return length

    @abstractmethod
    def num_samples(self, length: int) -> int:
        """Return the approximate number of different inputs of a length."""

    @abstractmethod
    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw a batch on the generator's device."""

    def every(self, length: int) -> Sample | None:
        """Return all rows of a length, or None if the task draws its inputs."""
        return None

    def encode(self, row: Any) -> list[int]:
        """Return an input's token ids; by default, the input must already be a list of ids."""
        return list(row)

    def decode(self, ids: Sequence[int]) -> Any:
        """Return an answer in the form of the task's rows; by default a tuple of ids."""
        return tuple(ids)

    def checked(
        self, generator: torch.Generator, batch: int, length: int | Tensor
    ) -> tuple[Tensor, int]:
        """Check lengths; return them as (B, 1) on the generator's device, and the longest one."""
        if isinstance(length, int):
            longest = shortest = length
            lengths = torch.full((batch, 1), length, device=generator.device)
        else:
            if length.shape != (batch,):
                raise ValueError(
                    f"{type(self).__name__}: lengths have shape {list(length.shape)}; expected "
                    f"({batch},)"
                )
            shortest, longest = (int(v) for v in torch.aminmax(length))
            lengths = length.to(generator.device)[:, None]
        if shortest < self.min_length:
            raise ValueError(
                f"{type(self).__name__}: length is {shortest}; expected {self.min_length} or more"
            )
        return lengths, longest


def check_sample(task: Task, name: str, generator: torch.Generator, length: int) -> None:
    """Raise an error if a task's samples do not have the shapes and ids that the task declares.

    Args:
        task: The task.
        name: The name of its class, or of the class of the task that `AtTokens` wraps.
        generator: The generator of the samples.
        length: The length of the samples.
    """
    sample = task.sample(generator, 2, length)
    try:  # training asks for rows of several lengths
        task.sample(generator, 2, torch.full((2,), length))
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name}.sample: expected a method that accepts length as a tensor (B,), got the error "
            f"{error}; self.checked(generator, batch, length) returns the lengths as (B, 1)"
        ) from error
    if not isinstance(sample, Sample):
        raise ValueError(f"{name}.sample returned {type(sample).__name__}; expected a Sample")
    sizes = len(sample.tokens), sample.targets.shape[-1] if sample.targets.dim() else 0
    for column, size, dims, limit in (
        ("tokens", task.input_length(length), 2, "vocab_size"),
        ("targets", task.output_length(length), 3 if task.by_step else 2, "output_size"),
    ):
        ids = getattr(sample, column)
        if ids.dim() != dims or len(ids) != sizes[0] or not 1 <= ids.shape[-1] <= size:
            needed = f"(2, steps, {size})" if dims == 3 else f"(2, {size})"
            raise ValueError(
                f"{name}.sample: {column} of 2 rows have shape {tuple(ids.shape)}; expected "
                f"{needed}"
            )
        if column == "targets":
            ids = ids[ids != IGNORED]
        _check_ids(f"{name}.sample: {column}", ids, limit, getattr(task, limit))
    optional = {"mask": sample.tokens.shape, "distance": sizes, "key": sizes[:1]}
    for column, shape in optional.items():
        value = getattr(sample, column)
        if value is not None and value.shape != shape:
            raise ValueError(
                f"{name}.sample: {column} has shape {tuple(value.shape)}; expected {tuple(shape)}"
            )


def _check_ids(what: str, ids: Tensor, limit: str, high: int) -> None:
    """Check that ids are int64 from 0 to ``high`` - 1; ``limit`` names the bound in the error.

    An empty int64 tensor is accepted.
    """
    if ids.dtype == torch.int64 and not ids.numel():
        return
    if ids.dtype != torch.int64 or not 0 <= int(ids.min()) <= int(ids.max()) < high:
        span = f" from {ids.min()} to {ids.max()}" if ids.numel() else ""
        raise ValueError(
            f"{what} have dtype {ids.dtype}{span}; expected int64 from 0 to {high - 1}, because "
            f"the task's {limit} is {high}"
        )


def row_words(length: int, device: torch.device) -> Tensor:  # (length,)
    """Return the factors by which `row_key` multiplies the tokens at each position."""
    # odd: a product with an odd number loses no bits modulo 2^64
    return torch.tensor([signed(mix(7, i) | 1) for i in range(length)], device=device)


def row_key(
    tokens: Tensor,  # (B, L)
    mask: Tensor,  # (B, L)
    words: Tensor,  # (L or more,)
) -> Tensor:  # (B,)
    """Return a hash of each row's tokens, which does not depend on the side of the padding."""
    place = (mask.cumsum(1) - 1).clamp(min=0)
    # + 1, so that a token 0 is not the same as padding
    return ((tokens + 1) * mask * words[place]).sum(1)


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Draw uniform integers from 0 to ``high`` - 1 on the generator's device."""
    return torch.randint(high, shape, generator=generator, device=generator.device)


def at_least(what: str, **least: tuple[int, int]) -> None:
    """Raise an error for options (value, minimum) that are not whole numbers or are too small."""
    for name, (value, needed) in least.items():
        if not is_whole(value, needed):
            raise ValueError(
                f"{what}: {name} is {value!r}; expected a whole number, {needed} or more"
            )
