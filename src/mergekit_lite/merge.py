"""merge_models: the one call that makes one checkpoint of several."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from model_components import __version__
from model_components._folders import OutputError, check_new

from .engine import Engine, NotFiniteError, TensorFact
from .memory import keep_freed_blocks
from .methods import get_method
from .outputs import OutputFolder, chosen_template, plan_fingerprint
from .plan import PlanError, TensorPlan
from .planner import make_plan
from .ranks import Ranks
from .recipe import MergeRecipe, ModelEntry, model_key
from .report import MergeReport


def parse_size(size: int | str) -> int:
    """Bytes from a number or from text such as ``"5GB"`` (decimal units).

    >>> parse_size("1.5GB"), parse_size(100)
    (1500000000, 100)
    """
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)B?\s*", str(size))
    if not match or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size: is {size!r}, needed a number of bytes or text like '5GB'")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def build_recipe(
    models: Sequence[Any], method: str, base_model: Any, parameters: Mapping[str, Any], **rest: Any
) -> MergeRecipe:
    """A recipe from `merge_models`' arguments: lists of per-model parameters go to their models.

    Raises:
        ValueError: An unknown method, or a list whose length is not the number of models.
    """
    found = get_method(method)
    own: list[dict[str, Any]] = [{} for _ in models]
    general: dict[str, Any] = {}
    for key, value in parameters.items():
        name = "lambda" if key == "lambda_" else key
        parameter = found.parameters.get(name)
        per_model = parameter is not None and parameter.per_model
        if per_model and isinstance(value, (list, tuple)) and not any(isinstance(v, Mapping) for v in value):
            takers = [o for o, m in zip(own, models, strict=True) if model_key(m) != model_key(base_model)]
            if len(value) != len(takers):
                raise ValueError(
                    f"{method}: {name} has {len(value)} values, needed one for each of {len(takers)} models"
                )
            for taker, v in zip(takers, value, strict=True):
                taker[name] = v
        else:
            general[name] = value
    entries = [ModelEntry(model=m, parameters=o) for m, o in zip(models, own, strict=True)]
    return MergeRecipe(merge_method=method, models=tuple(entries), base_model=base_model, parameters=general, **rest)


def merge_models(
    models: Sequence[Any] | MergeRecipe,
    method: str = "linear",
    *,
    base_model: Any = None,
    out: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    out_dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    seed: int = 0,
    threads: int | None = None,
    progress: bool = True,
    resume: bool = True,
    allow_pickle: str | None = None,
    **parameters: Any,
) -> MergeReport | dict[str, Tensor]:
    """Merge several models into one.

    With ``out`` tensors stream from the inputs' files to the output's in stretches, so memory does not grow with the
    model. Arithmetic is float32 or better, from the stored values, rounded once.

    Args:
        models: Folders, hub ids, ``"model+adapter"``, modules or state dicts, mixed; or a `MergeRecipe`, which then
            says everything down to ``out_dtype``.
        method: A name from the table of methods.
        base_model: The common ancestor, for methods that use one. It may also stand among ``models``.
        out: Folder to write; it must not exist or be empty. None returns a state dict.
        dtype: Dtype of the result; default: the inputs' promoted dtype. ``"float64"`` also computes in float64.
        out_dtype: Dtype of the result where it differs from ``dtype``.
        device: Where to compute.
        max_shard_size: Largest weight file, bytes or ``"5GB"``.
        seed: Of methods that draw.
        threads: Blocks in work at once; default: 1, which is fastest for light methods and smallest in memory. Heavy
            methods on large models gain from a few more. Results do not depend on it.
        progress: Show a progress bar.
        resume: Go on from an interrupted run of the same merge.
        allow_pickle: ``"weights_only"`` admits pickled checkpoints.
        **parameters: The method's: a number for all models, or for a per-model parameter a list with one value for
            each of ``models`` (the base not counted). Gradients and filters as in recipes.

    Returns:
        A `MergeReport`, or without ``out`` the merged state dict.

    Raises:
        PlanError: The merge cannot be done; every reason found is listed, and nothing was written.
        ValueError: A bad argument; `NotFiniteError`: a result that is not finite.
        OutputError: ``out`` is not empty, is being written by another run, or the disk is full.

    >>> a, b = {"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 4.0])}
    >>> merge_models([a, b], weight=[0.25, 0.75], progress=False)
    {'w': tensor([3.0000, 3.5000])}
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    if isinstance(models, MergeRecipe):
        given = {"method": method != "linear", "base_model": base_model, "dtype": dtype, "out_dtype": out_dtype}
        if extra := [k for k, v in given.items() if v] + list(parameters):
            raise ValueError(f"merge_models: {extra[0]} was given beside a recipe, which says it itself")
        recipe = models
    else:
        if isinstance(models, (str, os.PathLike, Mapping)) or not isinstance(models, Sequence) or not models:
            raise ValueError(f"merge_models: models is {type(models).__name__}, needed a list with at least one model")
        names = {"dtype": dtype, "out_dtype": out_dtype}
        rest = {k: str(v).removeprefix("torch.") for k, v in names.items() if v is not None}
        recipe = build_recipe(models, method, base_model, parameters, **rest)
    if threads is not None and threads < 1:
        raise ValueError(f"merge_models: threads is {threads}, needed 1 or more")
    limit, target = parse_size(max_shard_size), _usable(device)
    workers = threads or 1
    if out is not None:
        check_new(out, "merge")
    plan = make_plan(recipe, max_shard_size=limit, threads=workers, allow_pickle=allow_pickle)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks are the parallel unit
    keep_freed_blocks()
    try:
        with ThreadPoolExecutor(workers) as executor, torch.no_grad():
            engine = Engine(plan, seed, target, executor if workers > 1 else None)
            ranks = Ranks()
            bar = tqdm(
                total=plan.bytes_written,
                unit="B",
                unit_scale=True,
                disable=not progress or ranks.rank > 0,
                desc=recipe.merge_method,
            )
            with bar:
                if out is None:
                    return _to_memory(engine, bar)
                facts, resumed = _to_folder(engine, Path(out), seed, resume, ranks, bar, executor)
    finally:
        torch.set_num_threads(torch_threads)
    return MergeReport(
        out=Path(out),
        paths=[Path(out) / name for name in plan.shards],
        bytes_read=sum(f.passes * plan.input_bytes(t) for f, t in zip(facts, plan.tensors, strict=True)),
        bytes_written=plan.bytes_written,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        resumed=resumed,
        tensors=facts,
        notes=plan.notes,
    )


def _usable(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        if found.type == "cuda" and found.index is None and "LOCAL_RANK" in os.environ:
            found = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # one device a process under torchrun
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"merge_models: device {device!s} cannot be used here ({error})") from error
    return found


def _to_memory(engine: Engine, bar: tqdm) -> dict[str, Tensor]:
    engine.measure_globally(bar.set_postfix_str)
    merged = {t.name: torch.empty(t.shape, dtype=t.dtype) for t in engine.plan.tensors}

    def sink(t: TensorPlan, start: int, values: Tensor) -> None:
        merged[t.name].view(-1)[start : start + values.numel()] = values

    for t, _ in zip(engine.plan.tensors, engine.run_all(engine.plan.tensors, sink), strict=True):
        bar.update(t.nbytes)
    return merged


def _to_folder(
    engine: Engine, out: Path, seed: int, resume: bool, ranks: Ranks, bar: tqdm, executor: Executor
) -> tuple[list[TensorFact], list[str]]:
    plan = engine.plan
    chosen_template(plan)  # what could fail at the end is tried first
    plan.recipe.to_yaml()
    fingerprint = plan_fingerprint(plan, seed, __version__)
    folder = OutputFolder(out, plan, fingerprint)
    ranks.lead(lambda: folder.prepare(resume))
    resumed = ranks.share(sorted(folder.finished))
    facts: list[TensorFact] = []
    hashing: Future[None] | None = None
    try:
        engine.measure_globally(bar.set_postfix_str)
        for shard, name in enumerate(plan.shards):
            members = [t for t in plan.tensors if t.shard == shard]
            if name in resumed:
                facts += [engine.fact(t, 0) for t in ranks.mine(members)]
                bar.update(sum(t.nbytes for t in members))
                continue
            if ranks.rank == 0:
                folder.create(shard)
            ranks.barrier()
            folder.open_shard(shard)
            mine = ranks.mine(members)
            for t, fact in zip(mine, engine.run_all(mine, folder.write), strict=True):
                facts.append(fact)
                bar.update(t.nbytes * ranks.count)
            folder.close_shard(shard)
            ranks.barrier()
            if hashing is not None:
                hashing.result()
            hashing = executor.submit(folder.finish, shard) if ranks.rank == 0 else None
        if hashing is not None:
            hashing.result()
        order = {t.name: i for i, t in enumerate(plan.tensors)}
        facts = sorted(ranks.gather(facts), key=lambda f: order[f.name])
        ranks.lead(lambda: folder.complete([asdict(f) for f in facts], seed, __version__))
    except BaseException as error:
        executor.shutdown(wait=True, cancel_futures=True)  # nothing may write once the folder is let go
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if ranks.rank == 0 and (full or isinstance(error, NotFiniteError)):
            with contextlib.suppress(OSError):  # the error of the merge is the one to tell
                folder.discard()
        folder.close()
        if full:
            text = f"merge to {out}: the disk is full; what was written has been removed"
            raise OutputError(errno.ENOSPC, text) from error
        raise
    return facts, resumed


__all__ = ["MergeReport", "NotFiniteError", "PlanError", "TensorFact", "merge_models"]
