"""`LearnReport`: what a learned merge is worth beside other merges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_components._report import Report, Table


@dataclass(frozen=True)
class LearnReport(Report):
    """The result of `learn_merge`: losses of held-out examples, in nats per supervised token.

    Attributes:
        out: The folder of the delivered model.
        delivered: The name of the merge in it: the one with the lowest mean loss.
        student: The name of the trained merge.
        start: The name of the merge that training began from.
        tasks: The names of the tasks, one for each component.
        tokens: The number of held-out supervised tokens of each task.
        losses: The loss of each model on each task.
        components: The names of the components among the models.
        seconds: The seconds of training, without start, teachers and evaluation; after an
            interruption, since it was continued.
    """

    out: Path
    delivered: str
    student: str
    start: str
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    losses: Mapping[str, tuple[float, ...]]
    components: tuple[str, ...]
    seconds: float

    def mean(self, name: str) -> float:
        """Return the mean loss of a model over the tasks."""
        # tasks count alike, however many held-out tokens each has
        return sum(self.losses[name]) / len(self.losses[name])

    def summary(self) -> list[str]:
        """Return where the model is, and on how many tokens the table rests."""
        counts = [f"{n} of {task}" for task, n in zip(self.tasks, self.tokens, strict=True)]
        return [
            f"{self.delivered} is in {self.out}: of all merges it has the lowest mean loss",
            f"training took {self.seconds:.0f} s",
            f"nats a supervised token of held-out examples ({', '.join(counts)})",
        ]

    def table(self) -> Table:
        """Return one line for each model, the components first."""
        rows = [
            (name, *(f"{loss:.4f}" for loss in losses), f"{self.mean(name):.4f}")
            for name, losses in self.losses.items()
        ]
        return Table(("model", *self.tasks, "mean"), rows)

    def remarks(self) -> list[str]:
        """Return a remark if training made the start worse."""
        if self.mean(self.student) <= self.mean(self.start):
            return []
        return [
            f"training made {self.start} worse: the learning rate may be too high, or the examples "
            "too few"
        ]
