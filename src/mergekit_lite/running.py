"""Run a merge: its stages, engine, progress bar and output folder."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from model_components import __version__
from model_components._devices import peak_memory
from model_components._folders import NewFolder, OutputError, write_error, write_json, writing

from ._torch import Tensor, torch
from .dtypes import Array, stored_of, to_torch
from .engine import Engine, NotFiniteError
from .engine.beside import chosen_template, code_note
from .engine.output import OutputFolder, plan_fingerprint
from .files import CheckpointError, DictSource, Source, open_source
from .files.headers import read_json
from .planning import MergePlan, TensorPlan, make_plan
from .recipe import MergeRecipe, model_label
from .report import MergeReport

if TYPE_CHECKING:
    from tqdm import tqdm

_STAGE = "stage.json"


@dataclass(frozen=True)
class Run:
    """The settings of a run that do not depend on the merged models."""

    device: str
    impl: str
    limit: int
    seed: int
    threads: int
    progress: bool
    fresh: bool
    allow_pickle: str | None
    allow_incomplete: bool
    allow_mixed: bool
    truncate_embeddings: bool
    trust_remote_code: bool

    @property
    def allowed(self) -> dict[str, Any]:
        """The ``allow_*`` settings and ``truncate_embeddings``, as keyword arguments."""
        return {
            "allow_pickle": self.allow_pickle,
            "allow_incomplete": self.allow_incomplete,
            "allow_mixed": self.allow_mixed,
            "truncate_embeddings": self.truncate_embeddings,
        }


class Bar:
    """A progress bar that counts written bytes; tqdm is imported only if the bar is shown."""

    def __init__(self, plan: MergePlan, *, hidden: bool):
        self._bar: tqdm | None = None
        if not hidden:
            from tqdm.auto import tqdm

            name = plan.recipe.name or plan.recipe.merge_method
            self._bar = tqdm(total=plan.bytes_written, unit="B", unit_scale=True, desc=name)

    def update(self, count: int) -> None:
        """Advance by ``count`` bytes."""
        if self._bar is not None:
            self._bar.update(count)

    def say(self, text: str) -> None:
        """Show a status message at the right end of the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def _running(plan: MergePlan, run: Run) -> Iterator[tuple[Engine, Bar]]:
    """Open the engine and a progress bar, and close both at the end."""
    with (
        Bar(plan, hidden=not run.progress) as bar,
        Engine(plan, run.seed, run.device, run.threads, bar.say, run.impl) as engine,
    ):
        yield engine, bar


def merge_in_memory(
    recipe: MergeRecipe, run: Run, *, depth: int = 0
) -> tuple[dict[str, Tensor], MergePlan]:
    """Merge in memory, and return the merged state dict and the plan.

    The plan's notes are issued as warnings.

    Args:
        recipe: The recipe of the merge.
        run: The settings of the run.
        depth: Number of recipes that ``recipe`` is nested in as a stage; 0 for the outermost.
    """
    stages: dict[int, Source] = {}
    for stage in recipe.stages():
        state, stage_plan = merge_in_memory(stage, run, depth=depth + 1)
        source = DictSource(state, model_label(stage), stage_plan.config)
        # a state dict has no tokenizer: use the one of the model that provided the stage's config
        source.folder = stage_plan.sources[stage_plan.donor].folder
        source.tokens = stage_plan.vocabulary.tokens if stage_plan.vocabulary else None
        stages[id(stage)] = source
    plan = make_plan(recipe, threads=run.threads, stages=stages or None, **run.allowed)
    for note in plan.notes:
        # the warning shows the line that called `merge_models`
        warnings.warn(f"merge_models: {note}", stacklevel=3 + depth)
    merged = {t.name: torch.empty(t.shape, dtype=to_torch(t.dtype)) for t in plan.tensors}

    def sink(t: TensorPlan, start: int, values: Array) -> None:
        stored_of(merged[t.name].view(-1))[start : start + values.size] = values

    # in memory, "auto" means "eager", to avoid waiting for kernels to compile
    eager = replace(run, impl="eager" if run.impl == "auto" else run.impl)
    with _running(plan, eager) as (engine, bar):
        for t in engine.run_all(plan.tensors, sink):
            bar.update(t.nbytes)
    return _as_stored(merged, plan), plan


def _as_stored(merged: dict[str, Tensor], plan: MergePlan) -> dict[str, Tensor]:
    """Return merged tensors with the names and shapes that the first model's files have."""
    state: dict[str, Tensor] = {}
    for t in plan.tensors:
        # split experts that were merged as one stack into separate matrices
        sizes = [info.count for info in t.stored]
        pieces = merged[t.name].view(-1).split(sizes)
        for info, piece in zip(t.stored, pieces, strict=True):
            state[info.name] = piece.view(info.shape)
    return state


def merge_to_folder(recipe: MergeRecipe, out: Path, run: Run) -> MergeReport:
    """Merge into a folder that does not exist yet or is empty."""
    started = time.perf_counter()
    cpu_started = time.process_time()
    with (
        writing(f"merge to {out}"),
        _stages_beside(recipe, out, run) as (stages, notes),
    ):
        plan = make_plan(
            recipe,
            max_shard_size=run.limit,
            threads=run.threads,
            stages=stages or None,
            **run.allowed,
        )
        plan.notes += [*notes, *code_note(plan, run.trust_remote_code)]
        with _running(plan, run) as (engine, bar):
            resumed = _write(engine, out, run, bar)
    return MergeReport(
        out=out,
        paths=[out / name for name in plan.shards],
        # inputs of files that an earlier run finished were not read
        bytes_read=sum(
            plan.input_bytes(t) for t in plan.tensors if plan.shards[t.shard] not in resumed
        ),
        bytes_written=plan.bytes_written,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        peak_memory=peak_memory(),
        resumed=resumed,
        tensors=plan.described_tensors(),
        notes=[*plan.notes, *engine.notes],
    )


@contextlib.contextmanager
def _stages_beside(
    recipe: MergeRecipe, out: Path, run: Run
) -> Iterator[tuple[dict[int, Source], list[str]]]:
    """Merge the stages (recipes that are listed as models) into a hidden folder next to ``out``.

    The folder is removed when the merge is done. An interrupted run leaves finished stages in the
    folder, and a later run reuses those whose fingerprint matches.

    Yields:
        The merged stages as sources, by the `id` of their recipes, and the notes on the stages that
        this run merged.
    """
    if not recipe.stages():
        yield {}, []
        return
    folder = NewFolder(out.with_name(f"{out.name}.stages"), "merge", resumable=True)
    stages: dict[int, Source] = {}
    notes: list[str] = []
    # check the whole recipe before the first stage is merged
    make_plan(recipe, **run.allowed)
    folder.open()
    try:
        for stage in recipe.stages():
            name = model_label(stage)
            place = folder.folder / name
            if not _is_whole(place, stage, run):
                merged = [model_label(s) for s in recipe.stages() if id(s) in stages]
                # keep finished stages, and the files of an interrupted merge of this stage, which
                # is continued below; remove everything else
                folder.clear(keep=[*merged, f".{name}.partial"])
                report = merge_to_folder(replace(stage, name=name), place, run)
                notes += [f"{name}: {note}" for note in report.notes]
                # written last, because a stage without this file is merged again
                write_json(place / _STAGE, {"fingerprint": _stage_mark(stage, run)})
            stages[id(stage)] = open_source(place, label=name)
        yield stages, notes
    except BaseException:
        folder.close()
        raise
    folder.discard()


def _stage_mark(stage: MergeRecipe, run: Run) -> str | None:
    """Return the fingerprint of a stage's plan, or None if the stage has stages of its own.

    A stage without a fingerprint is always merged again.
    """
    if stage.stages():
        return None
    return plan_fingerprint(make_plan(stage, **run.allowed), run.seed, __version__)


def _is_whole(folder: Path, stage: MergeRecipe, run: Run) -> bool:
    if run.fresh or not (folder / _STAGE).is_file():
        return False
    try:
        mark = read_json(folder / _STAGE).get("fingerprint")
    except CheckpointError:
        return False
    return mark is not None and mark == _stage_mark(stage, run)


def _write(engine: Engine, out: Path, run: Run, bar: Bar) -> list[str]:
    """Write every shard that an earlier run did not finish, then all other files.

    Returns:
        The shards that an earlier run had finished.
    """
    plan = engine.plan
    chosen_template(plan)  # an invalid template raises an error here, before the merge
    folder = OutputFolder(out, plan, plan_fingerprint(plan, run.seed, __version__), fresh=run.fresh)
    folder.prepare()
    resumed = sorted(folder.finished)
    try:
        # one thread, because all finished files are recorded in the same progress.json
        with ThreadPoolExecutor(1) as hasher:
            _write_shards(engine, folder, bar, hasher)
        folder.complete(run.seed, run.trust_remote_code)
    except BaseException as error:
        # no thread may write after the folder is unlocked
        engine.stop()
        failed_write = write_error(f"merge to {out}", error)
        if isinstance(error, OutputError):  # for example from `write_json`
            failed_write = error
        # after a NaN, continuing would fail again; after a failed write, free the disk space
        if failed_write or isinstance(error, NotFiniteError):
            with contextlib.suppress(OSError):  # raise the merge's own error
                folder.discard()
        folder.close()
        if failed_write:
            # a finished folder that could not be renamed is kept, and the error names its path
            removed = "" if folder.folder.exists() else "; the files written so far were removed"
            raise OutputError(f"{failed_write}{removed}") from error
        raise
    return resumed


def _write_shards(
    engine: Engine, folder: OutputFolder, bar: Bar, hasher: ThreadPoolExecutor
) -> None:
    """Write one shard after the other, and hash each shard while the next one is computed."""
    hashing: Future[None] | None = None
    for shard, name in enumerate(engine.plan.shards):
        if name in folder.finished:
            bar.update(sum(t.nbytes for t in folder.members[shard]))
            continue
        folder.open_shard(shard)
        for t in engine.run_all(folder.members[shard], folder.write):
            bar.update(t.nbytes)
        folder.close_shard()
        # at most one hash is computed at a time; if it failed, its error is raised here
        if hashing is not None:
            hashing.result()
        hashing = hasher.submit(folder.finish, name)
    if hashing is not None:
        hashing.result()
