"""`ThinkerTrainer`: a `transformers.Trainer` for a thinker and an endless curriculum."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from model_components._checks import Whole, check_value, declared_fields
from model_components._folders import new_file
from model_components._formats import check_format, reading, stamp
from model_components._trainer import StepTrainer, TrainerOptions, bare_optimizer

from ..config import ThinkerConfig
from ..counters import seed_of
from ..curriculum import Batch, CurriculumDataset, DetailedBatches, StateDict
from ..flow import FlowPlan
from ..losses import LastAndRandom, Reach, StepLoss, labels_of_steps
from ..model import LatentThinker
from ..report import evaluate_steps
from ..state import ThinkerOutput, ThinkerState
from .arguments import thinker_arguments
from .callbacks import CurriculumCallback, RewindOnPeak, ThinkerCallback
from .checkpoints import pack_carry, unpack_carry
from .fit import check_fit, check_kinds, check_reach, check_segments, check_workers
from .parameters import parameter_groups
from .tally import Tally

logger = logging.get_logger(__name__)

DrawPlan = Callable[[torch.Generator, int], FlowPlan]


class ThinkerTrainer(StepTrainer):
    """A `transformers.Trainer` that trains a `LatentThinker` on a `CurriculumDataset`.

    Each batch sets its numbers of steps and latents, and the loss selects the steps to supervise.
    Every checkpoint stores the position in the data and the states of the schedule, the loss and
    the callbacks. The random choices of a batch depend only on the seed, the rank and the batch's
    number, so a resumed run equals one that was never interrupted. `evaluate` measures the accuracy
    on held-out samples. Logs include ``accuracy`` (on training batches) and ``difficulty`` (the
    schedule's).

    Args:
        model: The model to train.
        args: `TrainingArguments`; default: `thinker_arguments`. They are copied, and their batch
            size is replaced by the data set's.
        train_dataset: The training data.
        step_loss: The loss, which selects the supervised steps; default: `LastAndRandom`, the last
            step and one random earlier one.
        draw_plan: A function of a generator and a number of steps that draws a plan for each batch,
            such as ``lambda generator, n_step: FlowPlan.random(0.5, n_step, generator=generator)``
            for a model with a memory and static tokens. Default: the model's plan, which evaluation
            always uses. If a plan does not allow the number of steps that its batch has drawn,
            `FlowPlan.num_steps` adjusts the number.
        segments: The number of optimizer steps for each batch. Each optimizer step continues from
            the latents of the previous one, without gradients into it (deep supervision: HRM, Wang
            et al. 2025; TRM, Jolicoeur-Martineau 2025). The model thus learns to continue from
            latents of many steps, but each optimizer step computes few steps. ``max_steps`` and
            the logged speeds count segments.
        eval_lengths: The lengths of held-out samples in `evaluate`; default: the longest in
            training.
        eval_samples: The number of samples of each length.
        **options: Options of `Trainer`. ``eval_dataset`` must be a `CurriculumDataset`, too;
            default: the training data.

    Raises:
        ValueError: The samples are longer than the model supports or have other symbols, the loss
            cannot train the model, or ``segments`` is above 1 with a task or a loss that counts
            steps from the start.
    """

    def __init__(
        self,
        model: LatentThinker,
        args: TrainingArguments | None = None,
        *,
        train_dataset: CurriculumDataset,
        step_loss: StepLoss | None = None,
        draw_plan: DrawPlan | None = None,
        segments: int = 1,
        eval_lengths: Sequence[int] | None = None,
        eval_samples: int = 512,
        **options: Unpack[TrainerOptions],
    ):
        check_kinds(model, train_dataset, step_loss, draw_plan)
        check_fit(model, train_dataset, model.plan)
        self.draw_plan = draw_plan
        # a single plan may lack operations that are drawn rarely; eight plans reveal most of those
        # that the model does not support
        for seed in range(8 if draw_plan else 0):
            check_fit(
                model, train_dataset, self._plan_of(torch.Generator().manual_seed(seed), model)
            )
        self.step_loss = step_loss or LastAndRandom()
        self.step_loss.check(model.config)
        # before training, since a loss may change its attributes, such as counts, in training
        self._settings = self._settings_now(model)
        check_segments(segments, train_dataset, self.step_loss)
        check_reach(model, train_dataset, self.step_loss)
        window = model.config.window
        # with a window of 1, latents never exchange information, so the warning does not apply
        if window is not None and window > 1 and not isinstance(self.step_loss, Reach):
            logger.warning(
                "ThinkerTrainer: step_loss is %s, but the model has window=%d: this loss also "
                "trains answers that depend on tokens which the window has not reached yet, and "
                "such models often fail on longer inputs. Use step_loss=Reach(window=%d)",
                type(self.step_loss).__name__,
                window,
                window,
            )
        self.data = train_dataset
        self.segments = segments
        self.data.segments = segments
        self.eval_lengths = eval_lengths or [train_dataset.schedule.max_length]
        self.eval_samples = eval_samples
        check_value("ThinkerTrainer", "eval_lengths", self.eval_lengths, Sequence[int])
        check_value("ThinkerTrainer", "eval_samples", eval_samples, Whole)
        # the caller's arguments stay unchanged
        if args:
            args = copy.copy(args)
        else:
            args = thinker_arguments("runs/thinker")
        args.per_device_train_batch_size = train_dataset.batch_size
        args.ignore_data_skip = True  # the data set restores its own position
        args.remove_unused_columns = False
        args.ddp_find_unused_parameters = False  # compute_loss uses all parameters
        options.setdefault("eval_dataset", train_dataset)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **options)
        self._settings["seed"] = self.args.seed  # of step noise and of the steps to supervise
        self.model_accepts_loss_kwargs = True  # losses are means over the answers of a whole step
        if segments > 1 and self.args.gradient_accumulation_steps > 1:
            raise ValueError(
                f"ThinkerTrainer: segments is {segments}, gradient_accumulation_steps is "
                f"{self.args.gradient_accumulation_steps}; expected one of them to be 1"
            )
        self.data.rank = self.args.process_index
        check_workers(self.args, self.data)
        self.step_loss.to(self.args.device)
        longest = self.data.schedule.max_length
        device = self.args.device
        self.tally = Tally(longest, device, lambda counts: self.accelerator.reduce(counts, "sum"))
        self._logged = self.tally.mark()
        self._start_of_data = self.data.step
        self._skipped = 0
        self._carry: ThinkerState | None = None  # from the previous segment
        if not any(isinstance(c, CurriculumCallback) for c in self.callback_handler.callbacks):
            self.add_callback(CurriculumCallback())
        self.add_callback(_Housekeeping(self))

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback or a callback class; a `ThinkerCallback` gets access to this trainer."""
        super().add_callback(callback)
        callbacks = self.callback_handler.callbacks
        for known in callbacks:
            if isinstance(known, ThinkerCallback):
                known.trainer = self
        # `_Housekeeping` comes last, since it loads the states of other callbacks
        callbacks.sort(key=lambda known: isinstance(known, _Housekeeping))

    @property
    def seen(self) -> int:
        """The number of batches of this process in this run, including batches before a resume."""
        return self.state.global_step * self.args.gradient_accumulation_steps

    @property
    def batches(self) -> int:
        """The number of batches that this process has consumed."""
        return self._start_of_data + self.seen

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose items are whole batches; each process draws its own stream."""
        workers = self.args.dataloader_num_workers
        if workers:
            options: dict[str, Any] = {"prefetch_factor": self.args.dataloader_prefetch_factor}
        else:
            # DataLoader rejects a prefetch_factor without workers
            options = {}
        persistent = bool(workers) and self.args.dataloader_persistent_workers
        # not prepared by accelerate, which would split one stream among the processes
        return DataLoader(
            DetailedBatches(self.data),
            batch_size=None,
            num_workers=workers,
            persistent_workers=persistent,
            **options,
        )

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return `parameter_groups` of the model, and a group for the parameters of the loss."""
        assert self.model is not None
        rate = self.args.learning_rate
        decay = self.args.weight_decay
        groups = parameter_groups(self.model, learning_rate=rate, weight_decay=decay)
        learned = [p for p in self.step_loss.parameters() if p.requires_grad]
        if learned:
            return [*groups, {"params": learned, "lr": rate, "weight_decay": 0.0}]
        return groups

    def compute_loss(  # pyrefly: ignore[bad-override]
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ThinkerOutput]:
        """Return the loss of a batch, as its share of the mean over all answers of the step."""
        n_step = inputs["n_step"]
        n_latent = inputs["n_latent"]
        distance = inputs.get("distance")
        labels = self.thinker.answers_of(inputs["labels"], n_latent)
        if distance is not None:
            if self.thinker.config.causal:
                # an answer cannot depend on later tokens, whatever the task's distances are
                before = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=1)
                distance = distance.minimum(before)
            distance = self.thinker.answers_of(distance, n_latent)
        # seeded by the batch's number, so that a resumed run draws the same
        words = (self.args.seed, inputs["rank"], inputs["step"])
        choose = torch.Generator().manual_seed(seed_of(*words, 1))
        noise = torch.Generator(labels.device).manual_seed(seed_of(*words, 2))
        plan = self._plan_of(choose, self.thinker, n_step)
        # a plan may need more steps than the batch has drawn
        n_step = plan.num_steps(n_step)
        outputs = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            out_len=labels.shape[-1],
            n_step=n_step,
            n_latent=n_latent,
            plan=plan,
            output_steps=self.step_loss.supervised(n_step, plan, choose),
            grad_steps=self.step_loss.grad_steps,
            carry=self._carry if model.training and inputs["segment"] else None,
            generator=noise,
        )
        loss = self.step_loss(outputs, labels, distance)
        # A plan may not use all parameters. DDP waits for every gradient, and with a gradient of 0
        # their weight decay continues.
        loss = (
            loss + 0.0 * torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum()
        )
        if model.training:
            last = outputs.output_steps[-1:]
            (answers,) = labels_of_steps(labels, last)
            if self.step_loss.counts_from_start:
                # answers out of reach would lower the accuracy that a schedule uses
                weights = torch.as_tensor(self.step_loss.weights(outputs, last, distance))
                answers = answers.masked_fill(weights[0] == 0, -100)
            self.tally.add(outputs.logits, answers, inputs["lengths"], loss)
            if self.segments > 1:
                self._carry = outputs.carry.detach()
        loss = self.share_of_step(loss, (inputs["labels"] != -100).sum(), num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def predict(self, *ignored: object, **named: object) -> NoReturn:
        """Raise an error, since this trainer does not predict; call the model instead.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "ThinkerTrainer: predict is not supported; call model(tokens, mask) or "
            "trainer.evaluate() instead"
        )

    def needed_files(self) -> Sequence[str]:
        """Return the name of the file with the trainer's state, which each checkpoint must have."""
        return (self._state_name(0),)

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *rest: Any, **named: Any
    ) -> TrainOutput:
        """Train, or continue from a checkpoint, as in `StepTrainer.train`."""
        # a carry that is left over belongs to the rows of another run
        self._carry = None
        return super().train(resume_from_checkpoint, *rest, **named)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write the logs, with the accuracy, the difficulty and the number of non-finite losses."""
        if "loss" in logs:
            counts = self.tally.since(self._logged)
            logs["accuracy"] = float(counts["right"].sum() / counts["total"].sum().clamp(min=1))
            logs["difficulty"] = round(self.data.difficulty(self.batches), 3)
            other = int(counts["loss"][2])
            if other:
                logs["losses_not_finite"] = other
        if self.state.max_steps:
            # the stock trainer counts epochs from the resumed step, since the stream has no length
            self.state.epoch = self.state.global_step / self.state.max_steps
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: object = None,
        *ignored: object,
        metric_key_prefix: str = "eval",
        **named: object,
    ) -> dict[str, float]:
        """Measure token and sequence accuracy on held-out samples of each evaluation length."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(data, CurriculumDataset):
            raise ValueError(
                "ThinkerTrainer: expected a CurriculumDataset to evaluate on, got a "
                f"{type(data).__name__}"
            )
        curves = evaluate_steps(self.thinker, data, self.eval_lengths, samples=self.eval_samples)
        accuracies = {
            length: cells[0] for length, cells in zip(curves.lengths, curves.cells, strict=True)
        }
        metrics = {
            f"{metric_key_prefix}_accuracy": sum(a.token for a in accuracies.values())
            / len(accuracies)
        }
        metrics[f"{metric_key_prefix}_sequence_accuracy"] = sum(
            a.sequence for a in accuracies.values()
        ) / len(accuracies)
        if len(accuracies) > 1:
            metrics |= {f"{metric_key_prefix}_accuracy_{n}": a.token for n, a in accuracies.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @property
    def thinker(self) -> LatentThinker:
        """The model without the wrappers of distributed training."""
        return self.unwrapped()

    def _plan_of(
        self, generator: torch.Generator, model: LatentThinker, n_step: int = 2
    ) -> FlowPlan:
        """Return the plan of a batch: one from ``draw_plan``, or else the model's."""
        if self.draw_plan is None:
            return model.plan
        plan = self.draw_plan(generator, n_step)
        if not isinstance(plan, FlowPlan):
            raise ValueError(f"ThinkerTrainer: draw_plan returned {plan!r}; expected a FlowPlan")
        return plan

    @staticmethod
    def _state_name(rank: int) -> str:
        if rank:
            return f"thinker_state_{rank}.pt"
        return "thinker_state.pt"

    def _thinker_callbacks(self) -> dict[str, ThinkerCallback]:
        """Return the thinker callbacks, each named by its class and a number.

        With these names, a resumed run may also have callbacks of other classes.
        """
        named: dict[str, ThinkerCallback] = {}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ThinkerCallback):
                kind = type(callback).__name__
                named[f"{kind} {sum(name.startswith(f'{kind} ') for name in named)}"] = callback
        return named

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # not in on_save: by then the stock trainer has removed the previous checkpoint
        super()._save_optimizer_and_scheduler(output_dir)
        self.save_progress(Path(output_dir))

    def save_progress(self, folder: Path) -> None:
        """Write the state that a resume needs in addition to the stock checkpoint.

        Each process writes its own file, since it has its own counts.
        """
        state = {
            **stamp(1),
            "data": self.data.state_dict(self.batches),
            "counts": self.tally.counts,
            "logged": self._logged,
            "settings": self._settings,
            "step_loss": self.step_loss.state_dict(),
            "callbacks": {name: c.state_dict() for name, c in self._thinker_callbacks().items()},
            "carry": pack_carry(self._carry),
        }
        with new_file(folder / self._state_name(self.args.process_index), "ThinkerTrainer") as part:
            torch.save(state, part)

    def load_progress(self, folder: Path) -> None:
        """Restore this process's state from a checkpoint.

        A process without a file of its own uses the file of rank 0.
        """
        path = folder / self._state_name(self.args.process_index)
        is_own = path.exists()
        if not is_own:
            # there are more processes now than when the checkpoint was written
            path = folder / self._state_name(0)
        with reading(path, "ThinkerTrainer"):
            # on the CPU: other processes may read rank 0's file, which names its GPU
            state = torch.load(path, map_location="cpu", weights_only=True)
            check_format(state, 1, f"ThinkerTrainer: {folder}")
            self._restore_progress(state, with_carry=is_own)

    def _settings_now(self, model: LatentThinker) -> dict[str, Any]:
        """Return the settings of the loss and of the model that a resumed run must have."""
        loss = {f"loss {name}": value for name, value in self.step_loss.settings().items()}
        settings = json.loads(model.config.to_json_string(use_diff=False))
        # without the fields that every config of transformers has
        return loss | {
            name: settings[name] for name in declared_fields(ThinkerConfig, PreTrainedConfig)
        }

    def _check_settings(self, before: Mapping[str, Any]) -> None:
        """Raise an error if the loss or the model has other settings than in the checkpoint."""
        for name, value in self._settings.items():
            # a setting that an older checkpoint lacks counts as unchanged
            if before.get(name, value) != value:
                raise ValueError(
                    f"ThinkerTrainer: the checkpoint was saved with {name} {before[name]!r}; "
                    f"expected {value!r}, as in this trainer"
                )

    def _restore_progress(self, state: StateDict, *, with_carry: bool) -> None:
        carry = state["carry"] if with_carry else None  # rank 0's carry belongs to other rows
        self._check_settings(state.get("settings", {}))
        self.data.load_state_dict(state["data"])
        self.step_loss.load_state_dict(state["step_loss"])
        self.tally.counts, self._logged = (
            self.tally.loaded(state["counts"]),
            self.tally.loaded(state["logged"]),
        )
        self._carry = unpack_carry(carry, self.thinker.config, self.args.device)
        for name, callback in self._thinker_callbacks().items():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
            else:
                callback.on_rewind()  # new since the checkpoint: it counts from here

    def snapshot(self) -> StateDict:
        """Return a copy of the state that training changes.

        The copy has the weights, the loss's parameters, and the states of the optimizer and the
        schedule of lengths.
        """
        return copy.deepcopy(
            {
                "model": self.thinker.state_dict(),
                "step_loss": self.step_loss.state_dict(),
                "optimizer": bare_optimizer(self.optimizer).state_dict(),
                "schedule": self.data.state,
            }
        )

    def restore(self, snapshot: StateDict) -> None:
        """Go back to a `snapshot`; the data and the schedule of learning rates continue."""
        # an optimizer keeps the tensors that it loads, so training would change the snapshot
        snapshot = copy.deepcopy(snapshot)
        optimizer = bare_optimizer(self.optimizer)
        # the snapshot has its own learning rates, but their schedule continues
        rates = [group["lr"] for group in optimizer.param_groups]
        self.thinker.load_state_dict(snapshot["model"])
        self.step_loss.load_state_dict(snapshot["step_loss"])
        optimizer.load_state_dict(snapshot["optimizer"])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.data.state = snapshot["schedule"]
        self._carry = None  # it comes from steps that were undone
        for callback in self._thinker_callbacks().values():
            callback.on_rewind()

    def cool(self, factor: float) -> None:
        """Multiply the learning rate by ``factor`` for the rest of the run."""
        scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        for group in bare_optimizer(self.optimizer).param_groups:
            group["lr"] *= factor

    def on_not_finite(self, what: str) -> None:
        """Drop the step's gradients if there is a `RewindOnPeak`; otherwise raise an error.

        Args:
            what: The cause, as text for the error message.

        Raises:
            DeadRunError: There is no `RewindOnPeak`.
        """
        if not any(isinstance(c, RewindOnPeak) for c in self.callback_handler.callbacks):
            super().on_not_finite(what)
        self._skipped += 1
        # a broken run skips every step, and a few lines are enough
        if self._skipped in (1, 10, 100, 1000):
            logger.warning("ThinkerTrainer: %s; step skipped (%d so far)", what, self._skipped)
        # the optimizer would put nan into every weight
        bare_optimizer(self.optimizer).zero_grad(set_to_none=True)

    def on_bad_parameters(self, what: str) -> None:
        """Go back to the best point of a `RewindOnPeak`, or raise an error if there is none.

        Args:
            what: The cause, as text for the error message.

        Raises:
            DeadRunError: There is no `RewindOnPeak`, or it has reached its limit.
        """
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RewindOnPeak) and callback.go_back():
                return
        super().on_bad_parameters(what)


class _Housekeeping(TrainerCallback):
    """A callback for the tasks that the stock trainer leaves out.

    It restores the trainer's state from checkpoints, and handles the gradients of the loss.
    """

    def __init__(self, trainer: ThinkerTrainer):
        self.trainer = trainer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.trainer.data.segments = self.trainer.segments  # another trainer may have changed it
        if self.trainer.resumed_from is not None:
            self.trainer.load_progress(self.trainer.resumed_from)
        # a second `train` counts steps from 0 again, and continues in the data
        self.trainer._start_of_data = self.trainer.data.step - self.trainer.seen

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        # workers advance copies of the data set, not this one
        self.trainer.data.step = self.trainer.batches

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        # DDP averages only the gradients of the model
        for parameter in self.trainer.step_loss.parameters():
            if parameter.grad is not None:
                parameter.grad = self.trainer.accelerator.reduce(parameter.grad, "mean")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        # the stock trainer clears only the gradients of the model
        self.trainer.step_loss.zero_grad()
