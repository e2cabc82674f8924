"""`CurriculumDataset`: endless batches of a task.

A batch depends only on the seed, the process's rank, the batch's number and the schedule's state.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from model_components._checks import Range, Whole, check_value, is_whole

from .counters import between, mix, seed_of
from .holdout import HoldOut
from .schedules import Fixed, Frontier, Schedule
from .tasks import RowsTask, Sample, Task
from .tasks.at_tokens import without_layout
from .tasks.rows import symbols_of
from .tasks.task import check_sample

Count = int | tuple[int, int] | Callable[[int], int | tuple[int, int]]
"""A number of steps or latents: one number, two numbers to draw between, or a function that returns
either of these for the longest length in a batch."""


StateDict = dict[str, Any]
"""The state needed to resume a run, in a form that `torch.save` can write."""


class Batch(TypedDict):
    """A batch: the arguments of `LatentThinker`'s forward, so ``model(**batch)`` works.

    Attributes:
        input_ids: Token ids, (B, L).
        attention_mask: True at tokens and False at padding, (B, L).
        labels: (B, O), or (B, T, O) with labels for each step; -100 where there is no answer.
        n_step: Number of steps; absent from held-out batches.
        n_latent: Number of latents, or None for the model's default; absent from held-out batches.
        lengths: (B,), the length of each row. This field and the fields below are present only
            with ``details=True``.
        distance: (B, O), if the task has distances; see `Sample`.
        step: The batch's number.
        segment: The trainer's segment, counted from 0: the number of earlier batches with the same
            rows.
        rank: The process's rank.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    n_step: NotRequired[int]
    n_latent: NotRequired[int | None]
    lengths: NotRequired[Tensor]
    distance: NotRequired[Tensor]
    step: NotRequired[int]
    segment: NotRequired[int]
    rank: NotRequired[int]


class CurriculumDataset(IterableDataset):
    """An endless data set of batches, each with the arguments of `LatentThinker.forward`.

    Batch number ``step`` depends only on (seed, rank, step) and the schedule's state, so the
    batches are the same with any number of workers and after a resume. The exception is a schedule
    that depends on accuracy (see `report`): it needs ``num_workers=0``, since workers draw batches
    before the accuracy is known. Use the data set in a `DataLoader` with ``batch_size=None``.

    Args:
        task: The task to sample.
        schedule: The schedule of lengths; default: half of the rows have the task's
            ``default_length`` (20, or the length of the longest row of a `RowsTask`), and the other
            half have uniformly drawn lengths up to it.
        batch_size: Number of rows in a batch.
        n_step: Number of steps of each batch: one number, two numbers to draw between uniformly, or
            a function that returns either of these for the longest length in the batch. Processes
            whose longest lengths are equal draw the same number.
        n_latent: Number of latents of each batch, given like ``n_step``; default: the model's
            number.
        holdout: Share of the inputs, chosen by a hash, that training never sees and `held_out`
            returns. The same inputs are held out with every seed. At lengths with fewer than 1000
            different inputs, none are held out. For a `RowsTask` this limit is 10, and for a
            `TensorTask` there is no limit. With 0, `held_out` draws from all inputs, which is
            useful if the test data are separate.
        seed: The seed of all random choices.
        rank: The process's rank in distributed training; each process has its own batches.
        device: The device of the batches.

    Raises:
        ValueError: A number is out of its range, or the task's samples do not have the shapes and
            ids that the task declares.

    >>> from thinker import make_task
    >>> data = CurriculumDataset(make_task("copy"), Frontier(max_length=5), batch_size=2)
    >>> batch = data.batch(0)
    >>> batch["input_ids"].shape, bool((batch["labels"] == data.batch(0)["labels"]).all())
    (torch.Size([2, 5]), True)
    """

    def __init__(
        self,
        task: Task,
        schedule: Schedule | None = None,
        *,
        batch_size: int = 64,
        n_step: Count = (1, 6),
        n_latent: Count | None = None,
        holdout: float = 0.1,
        seed: int = 0,
        rank: int = 0,
        device: str | torch.device = "cpu",
    ):
        if not isinstance(task, Task) or not isinstance(schedule, Schedule | None):
            raise ValueError(
                f"CurriculumDataset: task is {task!r}, schedule is {schedule!r}; expected a Task, "
                "as make_task returns, and a Schedule, such as Frontier(max_length=20)"
            )
        self.task = task
        of_one_length = task.default_length == 1
        if of_one_length:
            usual = Fixed(max_length=1)
        else:
            usual = Frontier(max_length=task.default_length, min_length=task.min_length)
        self.schedule = schedule or usual
        longest = self.schedule.max_length
        if isinstance(without_layout(task), RowsTask) and longest > task.default_length:
            raise ValueError(
                f"CurriculumDataset: the schedule's max_length is {longest}, expected at most "
                f"{task.default_length}, the length of the longest row"
            )
        self.batch_size = batch_size
        self.holdout = holdout
        self.seed = seed
        self.rank = rank
        self.n_step = n_step
        self.n_latent = n_latent
        # a function is checked only at the smallest and the largest length
        for length in (self.schedule.min_length, self.schedule.max_length):
            _pair("n_step", n_step, length)
            _pair("n_latent", n_latent or 1, length)
        self.device = torch.device(device)
        for name, value, kind in (
            ("batch_size", batch_size, Whole),
            ("holdout", holdout, Annotated[float, Range(least=0, below=1)]),
            ("seed", seed, int),
            ("rank", rank, int),
        ):
            check_value("CurriculumDataset", name, value, kind)
        if self.schedule.min_length < task.min_length:
            raise ValueError(
                f"CurriculumDataset: {type(self.schedule).__name__} starts at length "
                f"{self.schedule.min_length}, but {type(task).__name__} needs {task.min_length} "
                "or more"
            )
        if of_one_length and longest != 1:
            raise ValueError(
                f"CurriculumDataset: {type(self.schedule).__name__} goes up to length {longest}; "
                f"expected no schedule, since all rows of {task!r} have length 1"
            )
        check_sample(task, type(without_layout(task)).__name__, self._generator(2), longest)
        self._rows_checksum = self._checksum()
        self._hold_out = HoldOut(task, holdout, longest, self.device)
        self.step = 0
        self._is_spread = False  # whether this copy, in a worker, has its own first step
        self.segments = 1
        self.state = torch.tensor(self.schedule.initial(), dtype=torch.float64)

    @property
    def most_latents(self) -> int | None:
        """The largest number of latents of a batch; None if the model sets the number."""
        if self.n_latent is None:
            return None
        return _pair("n_latent", self.n_latent, self.schedule.max_length)[1]

    @property
    def most_steps(self) -> int:
        """The largest number of steps of a batch of the longest length."""
        return _pair("n_step", self.n_step, self.schedule.max_length)[1]

    def sizes(self, length: int | None = None) -> dict[str, Any]:
        """Return the fields of `ThinkerConfig` that a model needs for samples up to ``length``.

        By default ``length`` is the schedule's longest length.

        >>> from thinker import make_task
        >>> CurriculumDataset(make_task("add"), Frontier(max_length=3)).sizes()
        {'vocab_size': 18, 'output_size': 16, 'max_input_length': 8, 'max_output_length': 4}
        """
        longest = self.schedule.max_length if length is None else length
        symbols = symbols_of(self.task)
        return {
            "vocab_size": self.task.vocab_size,
            "output_size": self.task.output_size,
            "max_input_length": self.task.input_length(longest),
            "max_output_length": self.task.output_length(longest),
        } | ({} if symbols is None else {"symbols": symbols})

    def difficulty(self, step: int | None = None) -> float:
        """Return the schedule's difficulty at a step; default: the next step."""
        return self.schedule.difficulty(self.step if step is None else step, self.state)

    def report(self, right: Tensor, total: Tensor) -> None:
        """Update the schedule with the numbers of correct answers and of all answers by length.

        Args:
            right: Numbers of correct answers by length, (max_length + 1,).
            total: Numbers of all answers by length, (max_length + 1,).
        """
        # a copy, since a schedule may change its argument
        self.state = self.schedule.update(self.state.clone(), right.cpu(), total.cpu())

    def batch(self, step: int, *, details: bool = False) -> Batch:
        """Return batch number ``step``.

        With ``segments`` above 1, each drawn batch is returned for ``segments`` steps in a row.

        Args:
            step: The batch's number.
            details: Whether to add the fields that the forward does not take; see `Batch`.
        """
        segment = step % self.segments
        first = step - segment  # so that all segments have the same rows
        # the first number gives batches (1), checks (2) and held-out rows (3) different random
        # numbers
        generator = self._generator(1, self.rank, first)
        lengths = self.schedule.lengths(generator, self.batch_size, first, self.state)
        sample = self.task.sample(generator, self.batch_size, lengths)
        if self.holdout:
            sample = self._hold_out.replaced(generator, sample, lengths)
        longest = int(lengths.max())
        n_latent = None
        if self.n_latent is not None:
            # drawn from `first`, so that all segments have the same number of latents, as a carry
            # requires
            n_latent = between(_pair("n_latent", self.n_latent, longest), mix(self.seed, 5, first))
        batch = _rows(sample, lengths, details)
        # without the rank: a process with more steps would keep other processes waiting
        batch["n_step"] = between(_pair("n_step", self.n_step, longest), mix(self.seed, 4, step))
        batch["n_latent"] = n_latent
        if details:
            batch["step"] = step
            batch["segment"] = segment
            batch["rank"] = self.rank
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, beginning at the current step. Several workers take turns."""
        return self.batches()

    def batches(self, *, details: bool = False) -> Iterator[Batch]:
        """Yield batches, beginning at the current step; see `batch` for ``details``.

        Raises:
            ValueError: The iterator runs in a worker, but the schedule uses the measured accuracy.
        """
        info = get_worker_info()
        stride = 1
        if info is not None:
            if self.schedule.initial():
                raise ValueError(
                    f"CurriculumDataset: num_workers is {info.num_workers}; expected 0, since "
                    f"{type(self.schedule).__name__} uses the measured accuracy, which is not sent "
                    "to workers"
                )
            stride = info.num_workers
            if not self._is_spread:  # a persistent worker enters here again
                self.step += info.id
                self._is_spread = True
        while True:
            # before the yield, so that a persistent worker does not repeat a batch if it restarts
            self.step += stride
            yield self.batch(self.step - stride, details=details)

    def holds_out(self, length: int) -> bool:
        """Return whether the task has fixed rows of this length, with at least one held out.

        Without a holdout, and at lengths beyond the schedule's longest one, all fixed rows count as
        held out. The result is False if the task draws its inputs.
        """
        rows = self.task.every(length)
        if rows is None:
            return False
        if length > self.schedule.max_length or not self.holdout:
            return True
        return bool(self._hold_out.rows(rows, torch.full((len(rows.tokens),), length)).any())

    def held_out(self, batch: int, length: int, *, seed: int = 0, details: bool = False) -> Batch:
        """Return a batch of held-out inputs of one length.

        If the task draws its inputs and none of that length is held out, the batch is drawn from
        all inputs.

        Args:
            batch: Number of rows. If the task has fixed rows, each held-out row is returned at most
                once, so there may be fewer.
            length: The length of all rows.
            seed: The random seed of the batch.
            details: Whether to add lengths and distances; see `Batch`.
        """
        if batch < 1:
            raise ValueError(f"CurriculumDataset.held_out: batch is {batch}; expected 1 or more")
        sample = self._hold_out.sample(self._generator(3, seed, length), batch, length)
        lengths = torch.full((len(sample.tokens),), length, device=self.device)
        return _rows(sample, lengths, details)

    def state_dict(self, step: int | None = None) -> StateDict:
        """Return the state for a resume: the number of trained batches and the schedule's state.

        Args:
            step: The number of batches trained on, which is needed if workers draw ahead; default:
                the number of batches drawn from this object.
        """
        step = self.step if step is None else step
        return {"step": step, "state": self.state.tolist(), **self._identity()}

    def _identity(self) -> StateDict:
        """Return the settings that a resumed run must share, so that it draws the same batches."""
        task, schedule = (
            re.sub(" at 0x[0-9a-f]+", "", repr(part)) for part in (self.task, self.schedule)
        )
        shortest = self.schedule.min_length
        longest = self.schedule.max_length
        # about 64 lengths, since a schedule may have a million
        some = [*range(shortest, longest, 1 + (longest - shortest) // 64), longest]
        return {
            "task": task,
            "rows_checksum": self._rows_checksum,
            "schedule": schedule,
            # functions are compared by their values
            "n_step": [list(_pair("n_step", self.n_step, length)) for length in some],
            # None, with which the model sets the number, is stored as 1
            "n_latent": [list(_pair("n_latent", self.n_latent or 1, length)) for length in some],
            "seed": self.seed,
            "segments": self.segments,
            "batch_size": self.batch_size,
            "holdout": self.holdout,
        }

    def _checksum(self) -> str:
        """Return a checksum of some rows of the task.

        A task's `repr` may not show its fields, and two tasks may have the same name.
        """
        longest = self.schedule.max_length
        # only four rows of the longest length, since they may be large
        counts = {longest: 4}
        counts[min(longest, max(self.schedule.min_length, 32))] = 64
        found = []
        for _ in range(2):
            # with 4, the rows differ from batches (1), checks (2) and held-out rows (3)
            generator = self._generator(4)
            content = b""
            for length, count in counts.items():
                sample = self.task.sample(generator, count, length)
                for column in (sample.tokens, sample.targets):
                    content += column.cpu().numpy().tobytes()
            found.append(f"{zlib.crc32(content):08x}")
        # a task that does not draw the same rows again has no checksum
        return found[0] if found[0] == found[1] else ""

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: The state has another task, schedule, seed, batch size, holdout or number of
                segments, or other numbers of steps or latents.
        """
        for name, value in self._identity().items():
            # a setting that an older state lacks counts as unchanged
            before = state.get(name, value)
            if before == value:
                continue
            if isinstance(value, list) and len(value) == len(before):
                # report only the first numbers of steps or latents that differ
                pairs = zip(before, value, strict=True)
                before, value = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"CurriculumDataset: the state was saved with {name}={before}; expected "
                f"{name}={value}, as in this data set"
            )
        self.step = state["step"]
        self.state = torch.tensor(state["state"], dtype=torch.float64)

    def _generator(self, *words: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed_of(self.seed, *words))


def _pair(name: str, count: Count, length: int) -> tuple[int, int]:
    value = count(length) if callable(count) else count
    pair: object = (value, value) if is_whole(value) else value
    if (
        not isinstance(pair, Sequence)
        or len(pair) != 2
        or not all(map(is_whole, pair))
        or not 1 <= pair[0] <= pair[1]
    ):
        where = f" at length {length}" if callable(count) else ""
        raise ValueError(
            f"CurriculumDataset: {name} is {value!r}{where}; expected a whole number, 1 or more, "
            "or two such numbers in ascending order"
        )
    return pair[0], pair[1]


class DetailedBatches(IterableDataset):
    """The batches of a `CurriculumDataset`, with lengths and distances, for a trainer's loader."""

    def __init__(self, data: CurriculumDataset):
        self.data = data

    def __iter__(self) -> Iterator[Batch]:
        return self.data.batches(details=True)


def _rows(sample: Sample, lengths: Tensor, details: bool) -> Batch:
    rows: Batch = {
        "input_ids": sample.tokens,
        "attention_mask": sample.mask,
        "labels": sample.targets,
    }
    if not details:
        return rows
    rows["lengths"] = lengths
    if sample.distance is not None:
        rows["distance"] = sample.distance
    return rows
