"""Checks that a model can be trained on its training data."""

from __future__ import annotations

from transformers import TrainingArguments

from model_components._checks import Whole, check_value

from ..checks import check_layout, check_plan
from ..curriculum import CurriculumDataset
from ..flow import FlowPlan
from ..losses import StepLoss
from ..model import LatentThinker


def check_kinds(model: object, data: object, step_loss: object, draw_plan: object) -> None:
    """Check the types of the trainer's arguments."""
    if not isinstance(data, CurriculumDataset):
        raise ValueError(
            f"ThinkerTrainer: train_dataset is {type(data).__name__}; expected a CurriculumDataset"
        )
    if not isinstance(model, LatentThinker) or not isinstance(step_loss, StepLoss | None):
        raise ValueError(
            f"ThinkerTrainer: model is {type(model).__name__}, step_loss is {step_loss!r}; "
            "expected a LatentThinker, and a StepLoss such as AllSteps()"
        )
    if draw_plan is not None and not callable(draw_plan):
        raise ValueError(
            f"ThinkerTrainer: draw_plan is a {type(draw_plan).__name__}; expected a function of a "
            "generator and a number of steps; for a single plan, use ThinkerConfig(plan=...)"
        )


def check_workers(args: TrainingArguments, data: CurriculumDataset) -> None:
    """Check that no data loader workers are used if the schedule depends on accuracy."""
    if args.dataloader_num_workers and data.schedule.initial():
        raise ValueError(
            f"ThinkerTrainer: dataloader_num_workers is {args.dataloader_num_workers}; expected 0, "
            f"since {type(data.schedule).__name__} uses the measured accuracy, which is not sent "
            "to workers"
        )


def check_fit(model: LatentThinker, data: CurriculumDataset, plan: FlowPlan) -> None:
    """Check that a model's sizes, number of latents and plan are sufficient for the data."""
    config = model.config
    check_layout("ThinkerTrainer", config, data.task)
    sizes = data.sizes()
    sizes.pop("symbols", None)  # compared with the layout
    for name, needed in sizes.items():
        has = getattr(config, name)
        if needed > has:
            raise ValueError(
                f"ThinkerTrainer: the model's {name} is {has}, but {type(data.task).__name__} with "
                f"lengths up to {data.schedule.max_length} needs {needed}"
            )
    if data.most_latents is not None and data.most_latents > (
        config.table_size or data.most_latents
    ):
        raise ValueError(
            f"ThinkerTrainer: expected data with at most {config.table_size} latents, the size of "
            f'the model\'s table, got up to {data.most_latents}; a model with latent_init="noise" '
            "takes any number"
        )
    check_plan(config, plan.rows())


def check_reach(model: LatentThinker, data: CurriculumDataset, loss: StepLoss) -> None:
    """Check that, for a loss such as `Reach`, the data's steps reach at least one answer."""
    if loss.counts_from_start:
        distance = data.batch(data.step, details=True).get("distance")
    else:
        distance = None
    if distance is None or not bool((distance > 0).any()):
        return
    nearest = int(distance[distance > 0].min())
    most = data.most_steps * ((model.config.window or 2) - 1)
    if nearest > most:
        raise ValueError(
            f"ThinkerTrainer: every answer of {data.task!r} depends on a token at least {nearest} "
            f"positions away, but {data.most_steps} steps reach only {most}; expected more steps, "
            f"a task with a smaller Sample.distance, or another loss than {type(loss).__name__}"
        )


def check_segments(segments: int, data: CurriculumDataset, loss: StepLoss) -> None:
    """Check the number of segments.

    More than one segment is an error if the task or the loss depends on the number of steps from
    the start.
    """
    check_value("ThinkerTrainer", "segments", segments, Whole)
    if segments > 1 and (data.task.by_step or loss.counts_from_start):
        if data.task.by_step:
            cause = f"the answers of {data.task!r} depend"
            other = "a task without an answer for each step"
        else:
            cause = f"{type(loss).__name__} depends"
            other = "another loss"
        raise ValueError(
            f"ThinkerTrainer: expected segments=1 or {other}, got segments={segments}; {cause} on "
            "the number of steps since the input was read"
        )
