"""Parts that the trainers of all packages share.

Typed options, and losses that are means over a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput

from ._checkpoints import newest_whole, problem_of

TrainData = Any
"""What a stock trainer takes: a data set of torch's or of `datasets`, or a list of examples."""

Loss = Tensor | tuple[Tensor, object]
"""What ``compute_loss`` returns: a loss, or it and the model's outputs."""


class TrainerOptions(TypedDict, total=False):
    """The arguments of `transformers.Trainer` but for ``model``, ``args`` and ``train_dataset``."""

    data_collator: Callable[[list[Any]], dict[str, Any]] | None
    eval_dataset: Dataset | IterableDataset | dict[str, Dataset] | None
    processing_class: Any
    model_init: Callable[..., PreTrainedModel] | None
    compute_loss_func: Callable[..., object] | None
    compute_metrics: Callable[..., dict[str, float]] | None
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[torch.optim.Optimizer | None, Any]
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, object]] | None
    preprocess_logits_for_metrics: Callable[..., Tensor] | None


class StepTrainer(Trainer):
    """A `transformers.Trainer` whose losses are means over all items of a step.

    Micro-batches change nothing.

    Attributes:
        resumed_from: The checkpoint that the training goes on from, or None.
    """

    resumed_from: Path | None = None

    def needed_files(self) -> Sequence[str]:
        """Return the names of files that a checkpoint must have besides those of transformers."""
        return ()

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *rest: Any, **named: Any
    ) -> TrainOutput:
        """Train, or go on from a checkpoint.

        Args:
            resume_from_checkpoint: A folder, or True for the newest whole checkpoint of
                ``output_dir``.
            *rest: Of `Trainer.train`.
            **named: Of `Trainer.train`.

        Raises:
            ValueError: There is no checkpoint, or it is not whole.
        """
        self.resumed_from = None
        if resume_from_checkpoint:
            self.resumed_from = self._whole_checkpoint(resume_from_checkpoint)
            return super().train(str(self.resumed_from), *rest, **named)
        return super().train(None, *rest, **named)

    def _whole_checkpoint(self, asked: str | Path | bool) -> Path:
        operation = type(self).__name__
        if isinstance(asked, bool):
            folder = Path(str(self.args.output_dir))
            newest = newest_whole(folder, operation, self.needed_files())
            if newest is None:
                raise ValueError(f"{operation}: {folder} has no whole checkpoint to resume from")
            return newest
        problem = problem_of(Path(asked), self.needed_files())
        if problem:
            raise ValueError(f"{operation}: expected a whole checkpoint, got {asked}: {problem}")
        return Path(asked)

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """The batches of a step.

        None after the last step, where a stock trainer that resumes would take one more.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def optimizer_groups(self) -> list[dict[str, object]] | None:
        """Groups of parameters for the arguments' optimizer; None for the stock trainer's own."""
        return None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The arguments' optimizer over `optimizer_groups`."""
        if self.optimizer is None and (groups := self.optimizer_groups()) is not None:
            asked = self.optimizer_cls_and_kwargs
            # pyrefly: ignore[bad-argument-type]: transformers allows no model, we do not
            kind, options = asked or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(groups, **options)
        if self.optimizer is not None:
            return self.optimizer
        return super().create_optimizer(model)

    def processes_of_mean(self) -> int:
        """Return the factor of a loss over the items of all processes.

        DDP takes the mean of gradients.
        """
        if self.args.average_tokens_across_devices:
            return self.accelerator.num_processes
        return 1

    def share_of_step(
        self, loss: Tensor, items: Tensor | int, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        """A micro-batch's part of its step's loss.

        Args:
            loss: The mean over the micro-batch's items.
            items: How many those are.
            num_items_in_batch: Items of the whole step, all processes; None where the trainer takes
                the mean itself.
        """
        if num_items_in_batch is None:
            return loss
        return loss * items / num_items_in_batch * self.processes_of_mean()

    def unwrapped(self) -> Any:
        """The model, out of what wraps it in training with several processes."""
        return self.accelerator.unwrap_model(self.model)


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper, or the given one if it is not wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
