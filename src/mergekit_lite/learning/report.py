"""`LearnReport`: the held-out losses of a learned merge and of the merges it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_components._report import Report, Table


@dataclass(frozen=True)
class LearnReport(Report):
    """The result of `learn_merge`: losses of held-out examples, in nats per supervised token.

    Attributes:
        out: The output folder.
        delivered: The name of the merge in ``out``, which has the lowest mean loss.
        student: The name of the trained merge.
        start: The name of the merge that training began from.
        tasks: The names of the tasks, one for each component.
        tokens: The number of held-out supervised tokens of each task.
        losses: The losses of each model by its name, one for each task.
        components: The names of the components among the models.
        notes: The numbers of examples of each task, and of truncated or dropped examples.
        seconds: The training time in seconds, without merging, teachers and evaluation. If an
            interrupted run was continued, only the time since then is counted.
    """

    out: Path
    delivered: str
    student: str
    start: str
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    losses: Mapping[str, tuple[float, ...]]
    components: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    def mean(self, name: str) -> float:
        """Return the mean loss of a model over the tasks."""
        # every task has the same weight, however many held-out tokens it has
        return sum(self.losses[name]) / len(self.losses[name])

    def summary(self) -> list[str]:
        """Return the output folder, the training time and the numbers of held-out tokens."""
        counts = [f"{n} of {task}" for task, n in zip(self.tasks, self.tokens, strict=True)]
        return [
            f"{self.delivered} is in {self.out}: it has the lowest mean loss of all merges",
            f"training took {self.seconds:.0f} s",
            *self.notes,
            f"losses in nats per supervised token of held-out examples ({', '.join(counts)})",
        ]

    def table(self) -> Table:
        """Return a table with one row for each model, the components first."""
        rows = [
            (name, *(f"{loss:.4f}" for loss in losses), f"{self.mean(name):.4f}")
            for name, losses in self.losses.items()
        ]
        return Table(("model", *self.tasks, "mean"), rows)

    def remarks(self) -> list[str]:
        """Return a list with a remark if training raised the loss, else an empty list."""
        if self.mean(self.student) <= self.mean(self.start):
            return []
        return [
            f"training made {self.start} worse: the learning rate may be too high, or the examples "
            "too few"
        ]
