"""A whole run from one file: components, data, masks, training, bake, and a table of what it was worth.

``mergekit-lite masks CONFIG.yml OUT`` ends here.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
import yaml
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from model_components._folders import NewFolder, check_new, make_folder, write_json
from model_components._modes import evaluating
from model_components._report import Report, Table, plain

from ..data import TextExamples
from ..files import open_source
from ..functional import CALIBRATED, merge_models
from ..methods import get_method
from .config import KLConfig, MaskConfig
from .data import MaskCollator, TaskMixture
from .merger import Merger
from .storage import MASKS
from .training import MaskTrainer

_CALIBRATION = 256  # examples of a task
_TRAINING = {
    "learning_rate": 3e-2, "max_steps": 300, "per_device_train_batch_size": 8, "warmup_steps": 10,
    "lr_scheduler_type": "cosine", "logging_steps": 10, "save_steps": 50, "save_total_limit": 1, "report_to": "none",
    "train_sampling_strategy": "group_by_length",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """One task's data.

    Args:
        files: Of `TextExamples`, one or several.
        name: What to call it; default the first file's.
        component: The component that it follows; default: in the order of the list.
    """

    files: tuple[str, ...]
    name: str
    component: int


@dataclass(frozen=True, kw_only=True)
class MaskRun:
    """What `run_masks` does.

    Args:
        components: What `Merger.from_pretrained` takes.
        data: Each task's.
        masks: Fields of `MaskConfig`; the constraint is ``"sum_to_one"`` where none is named: free masks also scale
            what the components have in common.
        kl: Fields of `KLConfig`.
        training: Fields of `TrainingArguments`; by default 300 steps of 8 examples at a rate of 3e-2.
        compare: Methods of `merge_models` that stand beside in the table, without a base.
        held_out: The share of each task's examples that is kept for the table, or how many of them.
        max_length: Tokens of an example.
        train_on_inputs: Supervise what is asked, too.
        dtype: Of all components.
        seed: Of the split and the training.

    Raises:
        ValueError: A field that there is not, or a value that it cannot have.
    """

    components: tuple[str, ...]
    data: tuple[TaskData, ...]
    masks: MaskConfig = field(default_factory=lambda: MaskConfig(constraint="sum_to_one"))
    kl: KLConfig = field(default_factory=KLConfig)
    training: Mapping[str, Any] = field(default_factory=dict)
    compare: tuple[str, ...] = ("linear", "regmean")
    held_out: float = 0.1
    max_length: int = 512
    train_on_inputs: bool = False
    dtype: str = "auto"
    seed: int = 0

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a file; models and data in it are named as from where the command runs.

        Raises:
            ValueError: It is no YAML mapping, or as of the class.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: is not YAML ({error})") from error
        if not isinstance(values, Mapping):
            raise ValueError(f"{path}: holds a {type(values).__name__}, needed components, data, masks, ...")
        _known(str(path), values, [f.name for f in fields(cls)], needed=("components", "data"))
        given: dict[str, Any] = dict(values)
        for name, kind, usual in (("masks", MaskConfig, {"constraint": "sum_to_one"}), ("kl", KLConfig, {})):
            given[name] = _built(f"{path}: {name}", kind, _numbers(given.get(name, {})), usual)
        if not isinstance(given.get("training", {}), Mapping):
            raise ValueError(f"{path}: training is {given['training']!r}, needed fields of TrainingArguments")
        given["training"] = _numbers(given.get("training", {}))
        for name in ("components", "data", "compare"):
            if name in given and not isinstance(given[name], list):
                raise ValueError(f"{path}: {name} is {given[name]!r}, needed a list")
            given[name] = tuple(given.get(name, cls.compare))
        given["data"] = tuple(_task(f"{path}: data", i, entry) for i, entry in enumerate(given["data"]))
        return cls(**given)

    def __post_init__(self) -> None:
        _known("MaskRun: training", self.training, [f.name for f in fields(TrainingArguments)])
        outside = [d for d in self.data if not 0 <= d.component < len(self.components)]
        if len(self.components) < 2 or not self.data or outside:
            wrong = f"; {outside[0].name} follows component {outside[0].component}" if outside else ""
            raise ValueError(
                f"MaskRun: {len(self.components)} components and {len(self.data)} tasks{wrong}; needed two components "
                "or more, and data that follow them"
            )
        if isinstance(self.held_out, bool) or not isinstance(self.held_out, (int, float)) or not self.held_out > 0:
            raise ValueError(f"MaskRun: held_out is {self.held_out!r}, needed a share, or a number of examples")


def _known(where: str, values: Mapping[str, Any], known: Sequence[str], needed: Sequence[str] = ()) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known[:12])}"
            raise ValueError(f"{where}: unknown field {name!r}; {hint}")
    if lost := [name for name in needed if name not in values]:
        raise ValueError(f"{where}: has no {lost[0]}")


def _numbers(values: Any) -> Any:
    """With numbers that YAML reads as text, as 1e-2, as numbers."""
    if not isinstance(values, Mapping):
        return values
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    return found


def _built(where: str, kind: Any, values: Any, usual: Mapping[str, Any]) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}, needed fields of {kind.__name__}")
    _known(where, values, [f.name for f in fields(kind)])
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in {**usual, **values}.items()})


def _task(where: str, index: int, entry: Any) -> TaskData:
    entry = {"files": entry} if isinstance(entry, (str, list)) else entry
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: entry {index} is {entry!r}, needed a file, a list of files, or files and name")
    _known(where, entry, [f.name for f in fields(TaskData)], needed=("files",))
    files = entry["files"]
    files = (files,) if isinstance(files, str) else tuple(files)
    if not files or not all(isinstance(f, str) for f in files):
        raise ValueError(f"{where}: files of entry {index} are {files!r}, needed names of files")
    component: Any = entry.get("component", index)
    if not isinstance(component, int) or isinstance(component, bool):
        raise ValueError(f"{where}: component of entry {index} is {component!r}, needed the index of one")
    return TaskData(files=files, name=str(entry.get("name", Path(files[0]).stem)), component=component)


@dataclass(frozen=True)
class MaskRunReport(Report):
    """What the masks are worth: nats a supervised token of held-out examples, of each model on each task."""

    out: Path
    masks: Path
    tasks: tuple[str, ...]
    tokens: tuple[int, ...]
    losses: dict[str, tuple[float, ...]]

    def summary(self) -> list[str]:
        """Where things are."""
        counts = ", ".join(f"{n} of {task}" for task, n in zip(self.tasks, self.tokens, strict=True))
        return [f"merged model: {self.out}; masks: {self.masks}", f"nats a token, held out: {counts} tokens"]

    def table(self) -> Table:
        """A row for each model, a column for each task, and their mean."""
        rows = [
            (name, *(f"{loss:.4f}" for loss in losses), f"{sum(losses) / len(losses):.4f}")
            for name, losses in self.losses.items()
        ]
        return Table(("model", *self.tasks, "mean"), rows)


def run_masks(run: MaskRun, out: str | Path, *, progress: bool = True) -> MaskRunReport:
    """Train masks as a file says, bake them, and compare on held-out examples.

    Checkpoints, masks and the report are in ``OUT.training``; an interrupted run goes on from there.

    Args:
        run: What to do.
        out: Folder of the merged model; it must not exist or be empty.
        progress: Print the first example and show bars.

    Raises:
        ValueError: Data or components that do not fit; and what merges and training raise.
    """
    path = check_new(out, "masks")
    training = path.with_name(f"{path.name}.training")
    for method in run.compare:
        if method not in CALIBRATED and get_method(method).base == "required":
            raise ValueError(f"masks: compare has {method}, which needs a base; needed methods without one")
    _claim(training, run)
    merger = Merger.from_pretrained(run.components, dtype=run.dtype, **asdict(run.masks))
    tokenizer: Any = AutoTokenizer.from_pretrained(open_source(merger.labels[0]).folder)
    tasks = [_Task(run, data, tokenizer) for data in run.data]
    if progress:
        for task in tasks:
            print(f"{task.data.name}, the first example, what is supervised in brackets:\n{task.first}\n")
    mixture = TaskMixture([[t.train for t in tasks if t.data.component == k] for k in range(merger.count)])
    options: dict[str, Any] = {
        **_TRAINING,
        "seed": run.seed,
        "disable_tqdm": not progress,
        **run.training,
        "output_dir": str(training),
    }
    collator = MaskCollator(pad_token_id=tokenizer.pad_token_id or 0, max_length=run.max_length)
    trainer = MaskTrainer(
        merger, TrainingArguments(**options), kl=run.kl, train_dataset=mixture, data_collator=collator
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(training) if training.is_dir() else None)
    merger.eval()
    masks = merger.save_masks(training / MASKS)
    test = [task.test for task in tasks]
    losses = {}
    for k, name in enumerate(_names(merger.labels, run.compare)):
        with merger.component(k):
            losses[name] = held_out_losses(merger, test, collator)
    for method in run.compare:
        losses[method] = _losses_of(method, merger, tasks, collator, path.with_name(f"{path.name}.compare"))
    losses["masks"] = held_out_losses(merger.fold_(), test, collator)
    merger.unfold_().bake(path, progress=progress)
    tokens = tuple(sum(sum(label != -100 for label in e["labels"][1:]) for e in part) for part in test)
    report = MaskRunReport(path, masks, tuple(t.data.name for t in tasks), tokens, losses)
    write_json(training / "report.json", report.to_dict(), "masks")
    return report


def _claim(training: Path, run: MaskRun) -> None:
    """Note which run a folder of checkpoints is of; refuse one of another."""
    told, path = plain(run), training / "run.json"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != told:
            raise ValueError(f"masks: {training} is of a run with other settings; name another OUT, or remove it")
        return
    make_folder(training, "masks")
    write_json(path, told, "masks")


def _names(labels: Sequence[str], methods: Sequence[str]) -> list[str]:
    """What to call components in the table: folders' names, where they say which is which."""
    names = [Path(label).name for label in labels]
    taken = {*methods, "masks"}
    return [f"component {k}" if names.count(name) > 1 or name in taken else name for k, name in enumerate(names)]


class _Task:
    """A task's examples, drawn apart for training and for the table."""

    def __init__(self, run: MaskRun, data: TaskData, tokenizer: Any):
        texts = [
            TextExamples(f, tokenizer, max_length=run.max_length, train_on_inputs=run.train_on_inputs)
            for f in data.files
        ]
        self.data, self.first = data, texts[0].decoded(0)
        examples = [example for text in texts for example in text.examples]
        random.Random(f"{run.seed} {data.name}").shuffle(examples)
        count = max(1, round(run.held_out * len(examples))) if run.held_out < 1 else int(run.held_out)
        if count >= len(examples):
            raise ValueError(f"masks: {data.name} has {len(examples)} examples, {count} are held out; needed more")
        self.test, self.train = examples[:count], examples[count:]


@torch.no_grad()
def held_out_losses(
    model: nn.Module, tasks: Sequence[Sequence[Any]], collator: MaskCollator, *, batch_size: int = 8
) -> tuple[float, ...]:
    """Nats a supervised token of each task's examples.

    Args:
        model: A causal language model, or a `Merger`.
        tasks: Examples of ``input_ids`` and ``labels``.
        collator: Pads them.
        batch_size: Examples that run at once.
    """
    found = []
    with evaluating(model):
        for examples in tasks:
            total, count = 0.0, 0
            ordered = sorted(examples, key=lambda e: len(e["input_ids"]))
            for start in range(0, len(ordered), batch_size):
                batch = collator(ordered[start : start + batch_size])
                labels = batch.pop("labels")[:, 1:]
                logits = model(**{k: v.to(model.device) for k, v in batch.items()}).logits[:, :-1]
                chosen = labels != -100
                losses = F.cross_entropy(logits[chosen].float(), labels[chosen].to(logits.device), reduction="sum")
                total, count = total + float(losses), count + int(chosen.sum())
            found.append(total / max(1, count))
    return tuple(found)


def _losses_of(
    method: str, merger: Merger, tasks: Sequence[_Task], collator: MaskCollator, beside: Path
) -> tuple[float, ...]:
    """What a merge by a method of `merge_models` is worth."""
    options: dict[str, Any] = {}
    if method in CALIBRATED:
        parts = [[t.train[:_CALIBRATION] for t in tasks if t.data.component == k] for k in range(merger.count)]
        calibration = [[example for part in own for example in part] for own in parts]
        options = {"calibration": calibration, "max_length": collator.max_length}
    elif "weight" in get_method(method).parameters:
        options = {"weight": [1.0] * merger.count}
    stage = NewFolder(beside, "masks").open()
    try:
        merge_models(merger.labels, method, out=stage.folder / "merged", progress=False, **options)
        model = AutoModelForCausalLM.from_pretrained(stage.folder / "merged", dtype=merger.dtype)
        return held_out_losses(model.to(merger.device), [task.test for task in tasks], collator)
    finally:
        stage.discard()
