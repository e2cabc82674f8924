"""Run everything from one file.

Components, data, masks, training, bake, and a table of what it was worth.

``model-components learn SETTINGS.yml OUT`` calls `run_masks`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from model_components._checkpoints import newest_whole
from model_components._examples import TextExamples
from model_components._folders import NewFolder, check_new, write_json
from model_components._modes import evaluating
from model_components._report import Report, Table, plain
from model_components._runs import RunFolder

from ..files import open_source
from ..functional import merge_models
from ..methods import CALIBRATED, get_method
from .data import MaskCollator, TaskMixture
from .data.collator import Example
from .merger import Merger
from .run_config import MaskRun, TaskData
from .storage import MASKS
from .training import MaskTrainer

_CALIBRATION = 256  # examples of a task
_TRAINING = {
    "learning_rate": 3e-2,
    "max_steps": 300,
    "per_device_train_batch_size": 8,
    "warmup_steps": 10,
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "save_steps": 50,
    "save_total_limit": 1,
    "report_to": "none",
    "train_sampling_strategy": "group_by_length",
}


@dataclass(frozen=True)
class MaskRunReport(Report):
    """Worth of masks: nats a supervised token of held-out examples.

    There is a figure for each model on each task.
    """

    out: Path
    masks: Path
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    losses: dict[str, tuple[float, ...]]

    def summary(self) -> list[str]:
        """Tell where things are."""
        counts = ", ".join(
            f"{n} of {task}" for task, n in zip(self.tasks, self.tokens, strict=True)
        )
        return [
            f"merged model: {self.out}; masks: {self.masks}",
            f"nats a token, held out: {counts} tokens",
        ]

    def table(self) -> Table:
        """A row for each model, a column for each task, and their mean."""
        rows = [
            (name, *(f"{loss:.4f}" for loss in losses), f"{sum(losses) / len(losses):.4f}")
            for name, losses in self.losses.items()
        ]
        return Table(("model", *self.tasks, "mean"), rows)


def run_masks(
    run: MaskRun, out: str | Path, *, fresh: bool = False, progress: bool = True
) -> MaskRunReport:
    """Train masks as a file says, bake them, and compare on held-out examples.

    Checkpoints, masks and the report are in ``OUT.training``; an interrupted run goes on from
    there.

    Args:
        run: What to do.
        out: Folder of the merged model; it must not exist or be empty.
        fresh: Begin anew instead of going on from an interrupted run.
        progress: Print the first example and show bars.

    Raises:
        ValueError: Data or components that do not fit; ``OUT.training`` is of another run, or of
            other data, or another run writes it now; and what merges and training raise.
    """
    path = check_new(out, "learn")
    training = path.with_name(f"{path.name}.training")
    for method in run.methods:
        _refuse_method(method, run)
    tokenizer: Any = AutoTokenizer.from_pretrained(open_source(run.components[0]).folder)
    tasks = [_Task(run, data, tokenizer) for data in run.data]
    merger = Merger.from_pretrained(
        run.components, base=run.base, dtype=run.dtype, **asdict(run.masks)
    )
    trainer = _trainer_of(run, training, merger, tasks, tokenizer, progress=progress)
    contents = {task.data.name: task.hash for task in tasks}
    results = (MASKS, "report.json")
    folder = RunFolder(
        training, plain(run), "learn", contents=contents, results=results, fresh=fresh
    )
    with folder:
        check_new(path, "learn")  # another run may have ended while this one waited
        if progress:
            _print_first_examples(tasks)
        return _train(run, path, training, trainer, tasks, progress=progress)


def _trainer_of(
    run: MaskRun,
    training: Path,
    merger: Merger,
    tasks: Sequence[_Task],
    tokenizer: Any,
    *,
    progress: bool,
) -> MaskTrainer:
    mixture = TaskMixture(
        [[t.train for t in tasks if t.data.component == k] for k in range(merger.count)],
        weights="tokens",
    )
    options: dict[str, Any] = {
        **_TRAINING,
        "seed": run.seed,
        "disable_tqdm": not progress,
        **run.training,
        "output_dir": str(training),
    }
    if "num_train_epochs" in run.training and "max_steps" not in run.training:
        del options["max_steps"]
    return MaskTrainer(
        merger,
        TrainingArguments(**options),
        kl=run.kl,
        train_dataset=mixture,
        data_collator=MaskCollator(
            pad_token_id=tokenizer.pad_token_id or 0, max_length=run.max_length
        ),
    )


def _train(
    run: MaskRun,
    path: Path,
    training: Path,
    trainer: MaskTrainer,
    tasks: Sequence[_Task],
    *,
    progress: bool,
) -> MaskRunReport:
    merger = trainer.merger
    collator: Any = trainer.data_collator
    checkpoint = newest_whole(training, "learn", trainer.needed_files())
    if checkpoint is not None:
        print(f"learn: going on from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint)
    merger.eval()
    masks = merger.save_masks(training / MASKS)
    test = [task.test for task in tasks]
    losses = {}
    for k, name in enumerate(_names(merger.labels, run.methods)):
        with merger.component(k):
            losses[name] = held_out_losses(merger, test, collator)
    for method in run.methods:
        losses[method] = _losses_of(
            method, run, merger, tasks, collator, path.with_name(f"{path.name}.compare")
        )
    losses["masks"] = held_out_losses(merger.fold_(), test, collator)
    merger.unfold_().bake(path, progress=progress)
    tokens = tuple(map(_supervised_tokens, test))
    report = MaskRunReport(path, masks, tuple(t.data.name for t in tasks), tokens, losses)
    write_json(training / "report.json", report.to_dict(), "masks")
    return report


def _print_first_examples(tasks: Sequence[_Task]) -> None:
    for task in tasks:
        print(
            f"{task.data.name}, the first example, what is supervised in brackets:\n{task.first}\n"
        )


def _supervised_tokens(examples: Iterable[Mapping[str, Any]]) -> int:
    return sum(label != -100 for example in examples for label in example["labels"][1:])


def _refuse_method(name: str, run: MaskRun) -> None:
    """Refuse a method of ``compare`` that could not run once masks are trained."""
    if name in CALIBRATED:
        idle = [
            k for k in range(len(run.components)) if k not in {data.component for data in run.data}
        ]
        if len(run.components) < 2 or idle:
            raise ValueError(
                f"masks: compare has {name}, which needs two components, and data of each; name "
                "other methods"
            )
        return
    method = get_method(name)
    if method.base == "required" and run.base is None:
        raise ValueError(
            f"masks: compare has {name}, which needs a base; name one, or other methods"
        )
    if lost := [p.name for p in method.parameters.values() if p.required and p.name != "weight"]:
        raise ValueError(
            f"masks: compare has {name}, which needs {lost[0]}; name methods that need none but "
            "weights"
        )
    try:
        method.check_inputs(len(run.components), run.base is not None and method.base != "unused")
    except ValueError as error:
        raise ValueError(f"masks: compare has {name}: {error}") from error


def _names(labels: Sequence[str], methods: Sequence[str]) -> list[str]:
    """Name the components in the table: by folders, where those say which is which."""
    names = [Path(label).name for label in labels]
    taken = {*methods, "masks"}
    return [
        f"component {k}" if names.count(name) > 1 or name in taken else name
        for k, name in enumerate(names)
    ]


class _Task:
    """A task's examples, drawn apart for training and for the table."""

    def __init__(self, run: MaskRun, data: TaskData, tokenizer: object):
        texts = [
            TextExamples(
                f, tokenizer, max_length=run.max_length, train_on_inputs=run.train_on_inputs
            )
            for f in data.files
        ]
        self.data = data
        self.first = texts[0].decoded(0)
        examples = [example for text in texts for example in text.examples]
        self.hash = xxhash.xxh3_128(json.dumps(examples, default=list).encode()).hexdigest()
        random.Random(f"{run.seed} {data.name}").shuffle(examples)
        if run.held_out < 1:
            count = max(1, round(run.held_out * len(examples)))
        else:
            count = int(run.held_out)
        if count >= len(examples):
            raise ValueError(
                f"masks: {data.name} has {len(examples)} examples, {count} are held out; expected "
                "more"
            )
        self.test = examples[:count]
        self.train = examples[count:]


@torch.no_grad()
def held_out_losses(
    model: nn.Module,
    tasks: Sequence[Sequence[Example]],
    collator: MaskCollator,
    *,
    batch_size: int = 8,
) -> tuple[float, ...]:
    """Nats a supervised token of each task's examples.

    Args:
        model: A causal language model, or a `Merger`.
        tasks: Examples of ``input_ids`` and ``labels``.
        collator: Pads them.
        batch_size: Examples that run at once.
    """
    means = []
    with evaluating(model):
        for examples in tasks:
            total = 0.0
            count = 0
            ordered = sorted(examples, key=lambda e: len(e["input_ids"]))
            for start in range(0, len(ordered), batch_size):
                batch = collator(ordered[start : start + batch_size])
                labels = batch.pop("labels")[:, 1:]
                logits = model(**{k: v.to(model.device) for k, v in batch.items()}).logits[:, :-1]
                chosen = labels != -100
                losses = F.cross_entropy(
                    logits[chosen].float(), labels[chosen].to(logits.device), reduction="sum"
                )
                total = total + float(losses)
                count = count + int(chosen.sum())
            means.append(total / max(1, count))
    return tuple(means)


def _losses_of(
    method: str,
    run: MaskRun,
    merger: Merger,
    tasks: Sequence[_Task],
    collator: MaskCollator,
    beside: Path,
) -> tuple[float, ...]:
    """Measure what a merge by a method of `merge_models` is worth."""
    options: dict[str, Any] = {}
    if method in CALIBRATED:
        parts = [
            [t.train[:_CALIBRATION] for t in tasks if t.data.component == k]
            for k in range(merger.count)
        ]
        calibration = [[example for part in own for example in part] for own in parts]
        options = {"calibration": calibration, "max_length": collator.max_length}
    else:
        if "weight" in get_method(method).parameters:
            options = {"weight": [1.0] * merger.count}
        if run.base is not None and get_method(method).base != "unused":
            options["base_model"] = run.base
    stage = NewFolder(beside, "masks").open()
    try:
        merge_models(
            merger.labels[: merger.count],
            method,
            out=stage.folder / "merged",
            progress=False,
            **options,
        )
        model = AutoModelForCausalLM.from_pretrained(stage.folder / "merged", dtype=merger.dtype)
        return held_out_losses(model.to(merger.device), [task.test for task in tasks], collator)
    finally:
        stage.discard()
