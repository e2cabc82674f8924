"""`learn_merge`: train a merge on data, compare it with other merges, and write the best."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from model_components import __version__
from model_components._checkpoints import newest_whole
from model_components._examples import Example
from model_components._folders import NewFolder, check_new, remove, write_json
from model_components._formats import reading
from model_components._loading import read_config
from model_components._model_folders import card_of, complete_folder, shown_name
from model_components._runs import RunFolder

from ..computing import readable_tokens
from ..files import open_source
from ..functional import merge_models
from ..masks.config import KLConfig
from ..masks.data import MaskCollator, TaskMixture, cache_teachers
from ..masks.layers import MaskedLayer
from ..masks.merger import Merger
from ..masks.storage import MASKS
from ..masks.training import DistillTrainer, MaskTrainer
from ..methods import CALIBRATED
from .checks import (
    REPORT,
    check_data,
    check_devices,
    check_out,
    check_start,
    first_tokenizer,
    training_of,
)
from .config import OPERATION, RATES, LearnConfig
from .merges import COMPARED, is_folder, merges_of, options_of
from .report import LearnReport
from .student import Student, StudentTrainer
from .tasks import Task, held_out_losses, read_tasks, supervised_tokens

_CALIBRATION = 256  # number of examples per task with which merges are calibrated
_SAVED = 0.1  # a checkpoint is written each time this fraction of the steps is done


def learn_merge(
    components: Sequence[str | Path],
    data: Sequence[Any],
    *,
    out: str | Path,
    base: str | Path | None = None,
    fresh: bool = False,
    progress: bool = True,
    **settings: Any,
) -> LearnReport:
    """Train a merge of several models on their data, and write the best merge found.

    Training moves the merged model's prediction of the next token toward the prediction of the
    component whose data an example comes from. It begins from ``start``, an untrained merge. A
    final table compares the trained merge with ``start`` and other merges on held-out examples. The
    merge with the lowest mean loss is written to ``out``, even if it is not the trained one.

    Checkpoints, the cached teachers and the report are kept in ``OUT.training``. If a run was
    interrupted, the same call continues it.

    Args:
        components: Two or more models, as `merge_models` takes them: folders, hub ids or
            ``"model+adapter"``.
        data: For each component, rows of its task or a file of rows; see `TextExamples`.
        out: Output folder: a new path, or an empty folder.
        base: The model that the components were tuned from, for methods that use one.
        fresh: Start over instead of continuing the run in ``OUT.training``.
        progress: Show progress bars and the first example of each task.
        **settings: Fields of `LearnConfig`.

    Returns:
        A report with the losses of all models and the name of the merge that was written.

    Raises:
        ValueError: A setting, a row or a component is invalid. ``out`` exists and is not empty, or
            ``OUT.training`` belongs to another run. There are several processes or GPUs.
        DeadRunError: A loss or gradient is not finite.
    """
    if isinstance(settings.get("start"), Path):
        settings["start"] = os.fspath(settings["start"])
    config = LearnConfig.from_dict(settings)
    check_devices()
    check_data(components, data)
    path = check_out(out)
    names = [os.fspath(model) for model in components]
    if base is not None:
        if not isinstance(base, (str, os.PathLike)):
            raise ValueError(f"{OPERATION}: expected base as a path, got {type(base).__name__}")
        base = os.fspath(base)
    merges = merges_of(config, names, base)
    first: Any = open_source(names[0]).folder
    tokenizer = first_tokenizer(names)
    facts = {"components": names, "base": base, **config.to_dict()}
    length = readable_tokens(read_config(first, OPERATION), config.max_length)
    config = replace(config, max_length=length)
    tasks = read_tasks(data, tokenizer, config)
    if is_folder(config.start):
        check_start(config.start, first)
    teachers = Merger.from_pretrained(names, dtype=config.dtype, granularity=config.granularity).to(
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    if config.train != "masks" and teachers.output_head() is None:
        raise ValueError(
            f"{OPERATION}: train is {config.train!r}, expected 'masks' for a "
            f"{type(teachers.model).__name__}, which does more than apply the head to its hidden "
            "states (for example, it scales or caps the logits)"
        )
    training = training_of(path)
    contents = {task.name: task.hash for task in tasks}
    contents["the models"] = _hash_of_models(names, base, config.start)
    run = _Run(
        components=names,
        base=base,
        config=config,
        tasks=tasks,
        merges=merges,
        out=path,
        training=training,
        key=xxhash.xxh3_64(json.dumps([facts, contents, __version__]).encode()).hexdigest(),
        # any token can serve as padding, because the mask hides it and its label is ignored
        collator=MaskCollator(
            pad_token_id=tokenizer.pad_token_id or 0, max_length=config.max_length
        ),
        progress=progress,
        teachers=teachers,
        device=teachers.device,
    )
    del teachers  # the run must hold the only reference, so that it can free the teachers
    results = (MASKS, REPORT)
    with RunFolder(training, facts, OPERATION, contents=contents, results=results, fresh=fresh):
        check_new(path, OPERATION)  # another run may have written it while this one waited
        if fresh:
            _remove_parts(training)
        if progress:
            for task in tasks:
                print(f"{task.name}, with the supervised text in brackets:\n{task.first}\n")
        return run.learn()


def _remove_parts(training: Path) -> None:
    """Remove runs' losses, merges and cached teachers: all files whose names end in a run's key."""
    for part in training.iterdir():
        if re.fullmatch(r"(losses|teachers|[a-z+_]+)-[0-9a-f]{16}(\.json)?", part.name):
            remove(part)


def _hash_of_models(components: Sequence[str], base: str | None, start: str) -> str:
    """Return a hash of the files and configs of the components, the base and any start folder."""
    starts = [start] if is_folder(start) else []
    bases = [] if base is None else [base]
    # with fingerprints, because a model may be trained again in the same folder
    sources = [open_source(model) for model in [*components, *bases, *starts]]
    files = json.dumps([(source.fingerprint(), source.config) for source in sources])
    return xxhash.xxh3_64(files.encode()).hexdigest()


@dataclass
class _Run:
    """One call of `learn_merge`.

    Attributes:
        teachers: The components, or None once they are no longer needed and have been freed.
        device: The device that models run on.
        seconds: The duration of training in seconds.
        key: A hash of all settings, data and models, used in the names of this run's files.
    """

    components: Sequence[str]
    base: str | None
    config: LearnConfig
    tasks: list[Task]
    merges: list[str]
    out: Path
    training: Path
    key: str
    collator: MaskCollator
    progress: bool
    teachers: Any
    device: torch.device
    seconds: float = 0.0

    def learn(self) -> LearnReport:
        """Train a merge, compare it with others, and write the best."""
        config = self.config
        losses = {}
        for k, name in enumerate(_component_names(self.teachers.labels, config)):
            with self.teachers.component(k):
                losses[name] = self._measured(name, lambda: self.teachers)
        components = tuple(losses)
        for name in [config.start, *self.merges]:
            # passed as a function, so that a continued run does not repeat merges already measured
            losses[name] = self._measured(name, lambda name=name: self._load(self._merged(name)))
        for name in self.merges:
            self._discard(name)
        student = self._train_masks() if config.train == "masks" else self._train_student()
        name = f"{config.train} from {shown_name(config.start)}"
        losses[name] = held_out_losses(student, self._tests(), self.collator)
        merges = [merge for merge in losses if merge not in components]
        # a merge with NaN is never the best
        finite = [merge for merge in merges if math.isfinite(sum(losses[merge]))]
        report = LearnReport(
            out=self.out,
            delivered=min(finite or merges, key=lambda merge: sum(losses[merge])),
            student=name,
            start=config.start,
            tasks=tuple(task.name for task in self.tasks),
            tokens=tuple(map(supervised_tokens, self._tests())),
            notes=tuple(note for task in self.tasks for note in task.notes),
            losses=losses,
            components=components,
            seconds=self.seconds,
        )
        # written before the merge, so that a run that is stopped in between can continue
        write_json(self.training / REPORT, report.to_dict(), OPERATION)
        if report.delivered == config.start and not is_folder(config.start):
            with NewFolder(self.out, OPERATION) as new:
                shutil.copytree(self._merged(config.start), new.folder, dirs_exist_ok=True)
        elif report.delivered != name:
            # merge again, because merges were removed after their losses were measured
            self._merge(report.delivered, self.out)
        elif config.train == "masks":
            student.unfold_().bake(self.out, progress=self.progress)
            # replace the model card that `bake` wrote, whose recipe cannot be run
            complete_folder(self.out, self._card(report))
        else:
            self._save(student, self._card(report))
        return report

    def _tests(self) -> list[list[Example]]:
        return [task.test for task in self.tasks]

    def _measured(self, name: str, model: Callable[[], Any]) -> tuple[float, ...]:
        """Return a model's losses: from an interrupted run's file if it has them, else measured."""
        file = self.training / f"losses-{self.key}.json"
        known: dict[str, list[float]] = {}
        if file.is_file():
            with reading(file, OPERATION):
                known = json.loads(file.read_text(encoding="utf-8"))
        if name not in known:
            known[name] = list(held_out_losses(model(), self._tests(), self.collator))
            write_json(file, known, OPERATION)
        return tuple(known[name])

    def _discard(self, name: str) -> None:
        """Remove a merge that was made only for the table."""
        folder = self.training / f"{name}-{self.key}"
        if folder.exists():
            remove(folder)

    def _merged(self, name: str) -> Path:
        """Return the folder of a merge, which is written unless it exists."""
        if is_folder(name):
            return Path(name)
        folder = self.training / f"{name}-{self.key}"
        if not folder.exists():  # a folder that exists is complete
            self._merge(name, folder)
        return folder

    def _merge(self, name: str, out: Path) -> None:
        """Merge the components by a method and write the result, or copy a model's folder."""
        options: dict[str, Any] = {"out": out, "progress": self.progress}
        if self.config.dtype != "auto":
            options["dtype"] = self.config.dtype
        models = list(self.components)
        method = "linear" if name == "average" else name
        if is_folder(name):
            models = [name]
            method = "passthrough"
        elif method in CALIBRATED:
            # only training examples, because no merge may see held-out ones
            options["calibration"] = [task.train[:_CALIBRATION] for task in self.tasks]
            options["max_length"] = self.config.max_length
            options["device"] = self.device
        else:
            options |= options_of(method, self.base)
        merge_models(models, method, **options)

    def _load(self, folder: Path, dtype: Any = None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or self.teachers.dtype)
        return model.to(self.device)

    def _kl(self) -> KLConfig:
        return KLConfig(coefficients=self.config.coefficients, temperature=self.config.temperature)

    def _train(self, kind: type[DistillTrainer], model: Any, cached: Any, **more: Any) -> None:
        """Train a student, or continue from its newest checkpoint."""
        config = self.config
        arguments = TrainingArguments(
            output_dir=str(self.training),
            max_steps=config.max_steps,
            per_device_train_batch_size=config.batch_size,
            learning_rate=config.learning_rate or RATES[config.train],
            # a value below 1 is a fraction of max_steps
            warmup_steps=0.05,
            lr_scheduler_type="cosine",
            weight_decay=0.0,
            logging_steps=10,
            save_steps=_SAVED,
            save_total_limit=1,
            seed=config.seed,
            report_to="none",
            disable_tqdm=not self.progress,
            # without a GPU, transformers refuses bf16 unless use_cpu is set
            use_cpu=self.device.type == "cpu",
            train_sampling_strategy="group_by_length",  # less padding
            dataloader_pin_memory=self.device.type == "cuda",
            **more,
        )
        trainer = kind(
            model, arguments, kl=self._kl(), train_dataset=cached, data_collator=self.collator
        )
        checkpoint = newest_whole(self.training, OPERATION, trainer.needed_files())
        if checkpoint is not None:
            print(f"{OPERATION}: continuing from {checkpoint}")
        started = time.perf_counter()
        trainer.train(resume_from_checkpoint=checkpoint)
        self.seconds = time.perf_counter() - started
        model.eval()

    def _cached(self) -> Any:
        """Return the examples, with the teachers' hidden states if these determine the logits."""
        # weighted, because long answers would otherwise outweigh short ones in the mean over tokens
        mixture = TaskMixture([task.train for task in self.tasks], weights="tokens")
        if self.teachers.output_head() is None:
            return mixture
        return cache_teachers(
            self.teachers,
            self._read_by_steps(mixture),
            self.collator,
            self.training / f"teachers-{self.key}",
            kl=self._kl(),
            progress=self.progress,
        )

    def _read_by_steps(self, mixture: TaskMixture) -> TaskMixture | Subset:
        """Return the examples, or a random subset if training reads only a part of them.

        Teachers run only on this subset.
        """
        count = self.config.max_steps * self.config.batch_size
        if count >= len(mixture):
            return mixture
        drawn = random.Random(self.config.seed).sample(range(len(mixture)), count)
        return Subset(mixture, drawn)

    def _train_masks(self) -> Merger:
        """Return a merger with trained masks; its base is ``start``, unless that is the average."""
        cached = self._cached()
        if self.config.start == "average":
            merger = self.teachers
        else:
            # the components' dtype, because a start in a folder may have another dtype
            dtype = str(self.teachers.dtype).removeprefix("torch.")
            self.teachers = None  # freed before the components are loaded again
            merger = Merger.from_pretrained(
                self.components,
                base=self._merged(self.config.start),
                dtype=dtype,
                granularity=self.config.granularity,
                # masks of 0 take nothing from the components, so training begins at the base
                initial=0.0,
            )
        _fix_embedding_and_head(merger)
        self._train(MaskTrainer, merger, cached)
        merger.save_masks(self.training / MASKS)
        return merger.fold_()

    def _train_student(self) -> Any:
        """Return the starting merge with trained adapters merged in, or with trained weights."""
        cached = self._cached()
        head = self.teachers.output_head()
        heads = [weight.clone() for weight in head.frozen("weight")]
        biases = None
        if "bias" in head.masks:
            biases = [bias.clone() for bias in head.frozen("bias")]
        dtype = self.teachers.dtype
        trains_all = self.config.train == "all"
        # float32 if all weights are trained, because bfloat16 would round small steps away
        start = self._load(self._merged(self.config.start), torch.float32 if trains_all else dtype)
        self.teachers = None  # freed, because their hidden states are cached
        # peft initializes adapters at random, and a repeated call must get the same ones
        set_seed(self.config.seed)
        student = Student(start, heads, biases, None if trains_all else self.config.rank)
        is_half = trains_all and dtype == torch.bfloat16
        self._train(StudentTrainer, student, cached, bf16=is_half)
        model: Any = student.finished()
        # round before measuring, so that the table describes the model that is saved
        return model.to(dtype).eval()

    def _card(self, report: LearnReport) -> str:
        """Return the model card of the student."""
        names = ", ".join(shown_name(name) for name in self.components)
        paragraphs = [
            f"A merge of {names}, trained on their data by `mergekit_lite.learn_merge`.",
            f"Start: {shown_name(self.config.start)}; trained: {self.config.train}.",
            "Mean held-out loss in nats per token: "
            f"{report.mean(report.student):.4f}; before training: {report.mean(report.start):.4f}.",
        ]
        return card_of(
            "A learned merge",
            paragraphs,
            bases=self.components,
            tags=["merge"],
            relation="merge",
        )

    def _save(self, model: Any, card: str) -> None:
        """Write the student as an ordinary checkpoint."""
        source = str(open_source(self.components[0]).folder)
        with NewFolder(self.out, OPERATION) as new:
            model.save_pretrained(new.folder)
            complete_folder(new.folder, card, source=source)


def _fix_embedding_and_head(merger: Merger) -> None:
    """Exclude the masks of the embedding and the head from training, as for every student."""
    model = merger.model
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, MaskedLayer):
            layer.masks.requires_grad_(False)
    if not merger.trained_masks():
        raise ValueError(
            f"{OPERATION}: there are no masks to train, because the components differ from the "
            "starting merge at most in the embedding and the head, whose masks are not trained; "
            "expected components that differ in other weights"
        )


def _component_names(labels: Sequence[str], config: LearnConfig) -> list[str]:
    """Return the components' names in the table: hub ids or folder names; numbers if ambiguous."""
    names = [shown_name(label) for label in labels]
    # a component's folder may have the same name as a merge in the table, such as regmean
    taken = {config.start, *(config.compare or COMPARED), "task_arithmetic"}
    taken.add(f"{config.train} from {shown_name(config.start)}")
    unique = []
    for number, name in enumerate(names):
        is_number = re.fullmatch(r"component \d+", name) is not None
        ambiguous = names.count(name) > 1 or name in taken or is_number
        unique.append(f"component {number}" if ambiguous else name)
    return unique
