"""Code shared by the trainers of all packages.

The module defines typed options and `StepTrainer`. The losses of this trainer are means over a
whole step, and training stops if numbers are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import TrainOutput

from ._checkpoints import newest_whole, problem_of
from ._folders import OutputError, writing
from ._formats import reading

TrainData = Any
"""Training data of transformers' trainer: a torch or `datasets` data set, or a list of examples."""

Loss = Tensor | tuple[Tensor, object]
"""The result of ``compute_loss``: the loss, or the loss and the model's outputs."""


class TrainerOptions(TypedDict, total=False):
    """The arguments of `transformers.Trainer` except ``model``, ``args`` and ``train_dataset``."""

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


class DeadRunError(RuntimeError):
    """An error that stops a training run which cannot succeed."""


class StepTrainer(Trainer):
    """A `transformers.Trainer` whose loss is the mean over all items, such as tokens, of a step.

    Gradient accumulation does not change the loss. Training stops before the optimizer's step if
    the loss, a gradient or the norm of the gradients is not finite. In float16, the gradient scaler
    skips such steps instead. Training also stops before it writes a checkpoint if a parameter is
    not finite. After a resume, logged losses include the steps before the resume.

    Attributes:
        resumed_from: The checkpoint that the training resumed from, or None.
    """

    resumed_from: Path | None = None

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._losses = _Losses()
        self._loss_of_step: Tensor | float = 0.0
        self._norm: Any = None  # norm of gradients before clipping, if transformers computes it
        self._sampler: _SeededLengthSampler | None = None
        self.add_callback(_StepCallback(self))

    def needed_files(self) -> Sequence[str]:
        """Return the names of files that a checkpoint must have besides transformers' files."""
        return ()

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *rest: Any, **named: Any
    ) -> TrainOutput:
        """Train, or resume from a checkpoint.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the newest complete
                checkpoint in ``output_dir``.
            *rest: Passed to `Trainer.train`.
            **named: Passed to `Trainer.train`.

        Raises:
            ValueError: There is no checkpoint, or it is not complete, or it cannot be read.
            DeadRunError: A loss, gradient or parameter is not finite.
            OutputError: A checkpoint cannot be written.
        """
        # an earlier call of `train` may have resumed
        self.resumed_from = None
        checkpoint = None
        if resume_from_checkpoint:
            self.resumed_from = self._whole_checkpoint(resume_from_checkpoint)
            checkpoint = str(self.resumed_from)
        output = super().train(checkpoint, *rest, **named)
        if not self.parameters_are_finite():
            raise self._dead_run("the parameters contain NaN or infinity at the end of training")
        # transformers' value lacks the steps before a resume; the value that `log` stored has them
        return output._replace(training_loss=output.metrics["train_loss"])

    def _whole_checkpoint(self, requested: str | Path | bool) -> Path:
        operation = type(self).__name__
        if isinstance(requested, bool):
            folder = Path(str(self.args.output_dir))
            newest = newest_whole(folder, operation, self.needed_files())
            if newest is None:
                raise ValueError(f"{operation}: {folder} has no complete checkpoint to resume from")
            return newest
        problem = problem_of(Path(requested), self.needed_files())
        if problem:
            raise ValueError(
                f"{operation}: expected a complete checkpoint, got {requested}: {problem}"
            )
        return Path(requested)

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Return the batches of a step, or no batches after the last step.

        After a resume, transformers' trainer would take one step too many.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        """Run forward and backward on a micro-batch, and return its share of the step's loss."""
        loss = super().training_step(*args, **named)
        # kept on the device: reading the loss here would wait for each micro-batch
        self._loss_of_step = self._loss_of_step + loss.detach().float()
        return loss

    def _get_grad_norm(self, *args: Any, **named: Any) -> Any:
        """Return the norm of the gradients before clipping, and keep it for `check_step`."""
        # with an infinite norm, clipping sets all gradients to zero, which hides the problem
        self._norm = super()._get_grad_norm(*args, **named)
        return self._norm

    def check_step(self) -> None:
        """Check that a step's loss and gradients are finite, and add the loss to the sum to log."""
        loss = float(self._loss_of_step)
        self._loss_of_step = 0.0
        is_finite = math.isfinite(loss)
        # float16: the gradient scaler skips steps that overflow, and finds a smaller scale
        if self.accelerator.scaler is None:
            # the optimizer may also have parameters outside the model, such as a loss's parameters
            gradients = [p.grad for p in self._trained_parameters() if p.grad is not None]
            are_finite = _is_finite(self._norm) and _are_finite(gradients)
            # either all processes stop (or skip the step), or none does
            bad = self._mean_of_processes(float(not (is_finite and are_finite)))
            step = self.state.global_step + 1
            if bad and not is_finite:
                self.on_not_finite(f"the loss of step {step} is {loss}")
            elif bad:
                self.on_not_finite(f"the gradients of step {step} or their norm are not finite")
        if is_finite:
            self._losses.total += loss
            self._losses.steps += 1

    def parameters_are_finite(self) -> bool:
        """Return whether the parameters that are trained are finite, in all processes."""
        # the mean is above 0 if at least one process has found such a parameter
        return not self._mean_of_processes(float(not _are_finite(self._trained_parameters())))

    def _trained_parameters(self) -> list[nn.Parameter]:
        groups = bare_optimizer(self.optimizer).param_groups
        # frozen parameters are left out, since they may hold infinities on purpose
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def on_not_finite(self, what: str) -> None:
        """Stop the training; subclasses may skip the step instead.

        Args:
            what: The cause, worded for the error message.

        Raises:
            DeadRunError: Always.
        """
        raise self._dead_run(what)

    def on_bad_parameters(self, what: str) -> None:
        """Stop the training before a checkpoint with parameters that are not finite is written.

        Subclasses may return to an earlier state instead.

        Args:
            what: The cause, worded for the error message.

        Raises:
            DeadRunError: Always.
        """
        raise self._dead_run(what)

    def _dead_run(self, what: str) -> DeadRunError:
        operation = type(self).__name__
        newest = newest_whole(Path(str(self.args.output_dir)), operation, self.needed_files())
        if newest is None:
            saved = "there is no checkpoint"
        else:
            saved = (
                f"the newest checkpoint is {newest}; a run resumed from it keeps its learning rate"
            )
        return DeadRunError(
            f"{operation}: expected finite numbers, but {what}; {saved}. In a new run, try a "
            "lower learning rate, float32 or bfloat16, or look for outliers in the data"
        )

    def _save_checkpoint(self, *args: Any, **named: Any) -> None:
        if not self.parameters_are_finite():
            self.on_bad_parameters(
                f"the parameters have NaN or infinity after step {self.state.global_step}"
            )
        # the first process saves for all, and after a resume all processes use its value
        self._losses.total = self._mean_of_processes(self._losses.total)
        states: Any = self.state.stateful_callbacks  # a mapping, contrary to its annotation
        states["StepTrainer"] = asdict(self._losses)
        to = f"{type(self).__name__}: checkpoint in {self.args.output_dir}"
        try:
            with writing(to):
                super()._save_checkpoint(*args, **named)
        except OSError as error:
            if isinstance(error, OutputError):
                raise
            raise OutputError(f"{to}: cannot be written ({error})") from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **named: Any) -> None:
        with reading(resume_from_checkpoint, type(self).__name__):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **named)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(checkpoint, type(self).__name__):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _mean_of_processes(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        device = self.accelerator.device
        # mps, the device type of Apple GPUs, has no float64
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return float(
            self.accelerator.reduce(torch.tensor(value, device=device, dtype=dtype), "mean")
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write the logs, with losses averaged over all processes.

        After a resume, ``train_loss`` covers the whole run.
        """
        losses = self._losses
        # each process has summed its own losses; from here on all processes have the mean
        is_of_steps = {"loss", "learning_rate"} <= logs.keys()  # a user may log another "loss"
        if is_of_steps or "train_loss" in logs:
            losses.total = self._mean_of_processes(losses.total)
        if is_of_steps:
            logs["loss"] = _mean(losses.total - losses.logged, losses.steps - losses.logged_steps)
            losses.logged = losses.total
            losses.logged_steps = losses.steps
        if "train_loss" in logs:
            logs["train_loss"] = _mean(losses.total, losses.steps)
        super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: TrainData = None) -> Sampler | None:
        """Return the sampler; when grouping by length, use one that a resumed run can reproduce."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return self.batches_of_like_length(sampler.lengths)
        return sampler

    def batches_of_like_length(self, lengths: list[int]) -> Sampler:
        """Return a sampler that puts examples of similar length into one step."""
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._sampler = _SeededLengthSampler(size, lengths, seed)
        return self._sampler

    def optimizer_groups(self) -> list[dict[str, object]] | None:
        """Return the optimizer's parameter groups, or None for transformers' default groups."""
        return None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer that the training arguments name, for `optimizer_groups`."""
        if self.optimizer is None and (groups := self.optimizer_groups()) is not None:
            asked = self.optimizer_cls_and_kwargs
            # pyrefly: ignore[bad-argument-type]: transformers allows None, this class does not
            kind, options = asked or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(groups, **options)
        if self.optimizer is not None:
            return self.optimizer
        return super().create_optimizer(model)

    def processes_of_mean(self) -> int:
        """Return the factor that turns DDP's mean of gradients into a sum over all processes.

        The factor is 1 if each process averages over its own items.
        """
        if self.args.average_tokens_across_devices:
            return self.accelerator.num_processes
        return 1

    def share_of_step(
        self, loss: Tensor, items: Tensor | int, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        """Return a micro-batch's share of its step's loss.

        Args:
            loss: The mean over the micro-batch's items.
            items: The number of these items.
            num_items_in_batch: The number of items of the whole step in all processes; None if the
                trainer averages the micro-batches itself.
        """
        if num_items_in_batch is None:
            return loss
        # loss * items is a sum, so the shares of a step's micro-batches add up to the step's mean;
        # a step with only prompts has no items and a loss of 0, so avoid a division by 0
        count = num_items_in_batch + (num_items_in_batch == 0)
        return loss * items / count * self.processes_of_mean()

    def unwrapped(self) -> Any:
        """Return the model without the wrappers that distributed training adds."""
        return self.accelerator.unwrap_model(self.model)


class _SeededLengthSampler(LengthGroupedSampler):
    """A sampler of batches of similar length, drawn from a seed and the epoch.

    transformers' sampler draws from the global generator, so a run that is resumed after its first
    epoch would see other batches.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # a new generator for each epoch, so that the order does not depend on earlier epochs
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


@dataclass
class _Losses:
    """The sum and number of step losses in a run: of all steps, and of the steps logged so far."""

    total: float = 0.0
    steps: int = 0
    logged: float = 0.0
    logged_steps: int = 0


class _StepCallback(TrainerCallback):
    """A callback that calls `StepTrainer` where transformers' trainer has no method to override."""

    def __init__(self, trainer: StepTrainer):
        self.trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: object,
    ) -> None:
        states: Any = state.stateful_callbacks
        # without this entry, transformers' trainer fails when it writes its next checkpoint
        states.setdefault("TrainerControl", {})
        stored = states.get("StepTrainer", {}) if self.trainer.resumed_from else {}
        with reading(self.trainer.resumed_from, type(self.trainer).__name__):
            self.trainer._losses = _Losses(**stored)
        # an earlier call of `train` may have stopped within a step and left a part of its loss
        self.trainer._loss_of_step = 0.0

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: object,
    ) -> None:
        # with several processes, a resumed run's data loader does not pass the epoch on
        if self.trainer._sampler is not None:
            self.trainer._sampler.set_epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **rest: object,
    ) -> None:
        self.trainer.check_step()


def _mean(total: float, count: int) -> float:
    return total / count if count else math.nan


@torch.no_grad()
def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether the values of this process are finite, waiting for the device only once."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    # parts of a model may lie on several devices
    checks = [tensor.isfinite().all().to(tensors[0].device) for tensor in tensors]
    return not checks or bool(torch.stack(checks).all())


def _is_finite(norm: Any) -> bool:
    """Return whether a norm is finite; None, which DeepSpeed may give, counts as finite."""
    if norm is None:
        return True
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return math.isfinite(float(norm))


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper, or the given one if it is not wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
