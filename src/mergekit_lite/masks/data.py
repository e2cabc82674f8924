"""Batches of several tasks (`TaskMixture`, `MaskCollator`), and teachers that run once for all (`cache_teachers`)."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from model_components._folders import new_file
from model_components._modes import evaluating

from .config import KLConfig
from .distillation import positions
from .merger import Merger


class TaskMixture(Dataset):
    """The examples of several data sets, each with the ``task`` that it is of: the index of its component.

    Args:
        datasets: One a component, in the merger's order; examples are dicts with ``input_ids`` and perhaps ``labels``.

    >>> mixture = TaskMixture([[{"input_ids": [1]}], [{"input_ids": [2]}, {"input_ids": [3]}]])
    >>> len(mixture), mixture[1]
    (3, {'input_ids': [2], 'task': 1})
    """

    def __init__(self, datasets: Sequence[Any]):
        if isinstance(datasets, Mapping):
            raise ValueError("TaskMixture: datasets is a mapping, needed a list in the order of the components")
        self.datasets = list(datasets)
        self._places = [(k, i) for k, d in enumerate(self.datasets) for i in range(len(d))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        k, i = self._places[index]
        return {**self.datasets[k][i], "task": k}


@dataclass(frozen=True, kw_only=True)
class MaskCollator:
    """Makes a batch of examples of several tasks.

    Padded, it holds ``input_ids``, ``attention_mask``, ``labels`` (B, L) and ``task`` (B,). Packed, examples of one
    task share a row, one row a task, ``position_ids`` begin anew at each example, and ``task`` is (rows, L); it is
    for decoders, which transformers keeps from looking across examples by their positions.

    The first label of an example is set to -100, since nothing predicts it. Labels default to the tokens. Examples
    without a task (then all are) are for coefficients that ask for none, as ``"evidence"``.

    Examples that a tokenizer padded are cut to their ``attention_mask``. ``token_type_ids`` are carried along.

    Args:
        pad_token_id: Fills up rows; its positions never count.
        pack: Put examples of one task into one row.
        max_length: Longer examples lose their end.

    >>> batch = MaskCollator(pad_token_id=0)([{"input_ids": [5, 6], "task": 0}, {"input_ids": [7], "task": 1}])
    >>> batch["labels"].tolist(), batch["task"].tolist()
    ([[-100, 6], [-100, -100]], [0, 1])
    """

    pad_token_id: int
    pack: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int) or isinstance(self.pad_token_id, bool):
            raise ValueError(f"MaskCollator: pad_token_id is {self.pad_token_id!r}, needed a token's id (any will do)")

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch.

        Raises:
            ValueError: No example; a task that is no whole number, or that only some have; labels that are not as long
                as the tokens.
        """
        if not features:
            raise ValueError("MaskCollator: no example came; needed one or more")
        examples = [self._example(f) for f in features]
        tasks = sum("task" in e for e in examples)
        if tasks not in (0, len(examples)):
            raise ValueError(f"MaskCollator: {tasks} of {len(examples)} examples have a task; needed all, or none")
        if self.pack and tasks:
            examples.sort(key=lambda e: e["task"])  # a stable sort: rows keep the order of the batch
            rows = [[e for e in examples if e["task"] == k] for k in sorted({e["task"] for e in examples})]
        elif self.pack:
            rows = [examples]
        else:
            rows = [[e] for e in examples]
        length = max(sum(len(e["input_ids"]) for e in row) for row in rows)

        def fill(key: str, empty: int) -> Tensor:
            made = torch.full((len(rows), length), empty)
            for line, row in zip(made, rows, strict=True):
                values = torch.cat([torch.as_tensor(e[key]) for e in row])
                line[: len(values)] = values
            return made

        batch = {"input_ids": fill("input_ids", self.pad_token_id), "labels": fill("labels", -100)}
        if self.pack:
            batch["position_ids"] = fill("position_ids", 0)
        else:
            batch["attention_mask"] = fill("attention_mask", 0)
        if tasks:
            own = torch.tensor([row[0]["task"] for row in rows])
            batch["task"] = own[:, None].expand(-1, length).contiguous() if self.pack else own
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = fill("token_type_ids", 0)
        if "label" in examples[0]:  # a classifier's, one an example
            batch["labels"] = torch.tensor([e["label"] for e in examples])
        if "teacher_hidden" in examples[0]:
            batch["teacher_hidden"] = torch.cat([e["teacher_hidden"] for e in examples])
        return batch

    def _example(self, feature: Mapping[str, Any]) -> dict[str, Any]:
        given_ids = torch.as_tensor(feature["input_ids"])
        kept = torch.as_tensor(feature.get("attention_mask", torch.ones_like(given_ids))).bool()

        def own(values: Any) -> Tensor:
            return torch.as_tensor(values)[kept][: self.max_length]

        ids = own(given_ids)
        given = feature.get("labels", feature.get("label"))
        made: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if feature.get("task") is not None:
            made["task"] = _component(feature["task"])
        made["position_ids"] = torch.arange(len(ids))
        if given is not None and torch.as_tensor(given).dim() == 0:
            made |= {"label": int(given), "labels": torch.full_like(ids, -100)}
        else:
            if given is not None and len(given) != len(given_ids):
                raise ValueError(f"MaskCollator: an example has {len(given_ids)} tokens and {len(given)} labels")
            made["labels"] = own(given_ids if given is None else given).clone()
            made["labels"][:1] = -100
        if "token_type_ids" in feature:
            made["token_type_ids"] = own(feature["token_type_ids"])
        if "teacher_hidden" in feature:
            made["teacher_hidden"] = feature["teacher_hidden"]
        return made


def _component(task: Any) -> int:
    """A task as a component's index, whatever kind of whole number it is."""
    try:
        index = -1 if isinstance(task, bool) else operator.index(task)
    except (TypeError, ValueError):
        index = -1
    if index < 0:
        raise ValueError(f"MaskCollator: an example's task is {task!r}, needed a component's index; see TaskMixture")
    return index


_SHARD = 512  # examples in a file
_SEEN = ("input_ids", "attention_mask", "token_type_ids", "labels", "label", "task")  # what the collator reads


class CachedTeachers(Dataset):
    """Examples with their teachers' final hidden states, read from disk when they are asked for.

    Args:
        dataset: The examples that `cache_teachers` saw.
        folder: Where it wrote.
    """

    def __init__(self, dataset: Any, folder: str | os.PathLike[str]):
        self._dataset = dataset
        self._paths = sorted(Path(folder).glob("hidden-*.safetensors"))
        self._open: dict[int, Any] = {}  # each process of a loader opens its own

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, place = divmod(index, _SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._paths[shard], "pt")
        start, stop = self._open[shard].get_slice("offsets")[place : place + 2].tolist()
        return {**self._dataset[index], "teacher_hidden": self._open[shard].get_slice("hidden")[start:stop]}


@torch.no_grad()
def cache_teachers(
    merger: Merger,
    dataset: Any,
    collator: MaskCollator,
    folder: str | os.PathLike[str],
    *,
    kl: KLConfig | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> CachedTeachers:
    """Run the teachers once and keep their final hidden states at supervised positions.

    Training then runs no teacher, and gives the very loss that it would have given. A hidden state has H values where
    logits have V: some 40 times less. Files are memory-mapped; a run that was interrupted goes on where it stopped.
    Under torchrun, let one process make the cache before the others.

    Args:
        merger: Whose components are the teachers.
        dataset: Examples with a ``task``, as training will see them.
        collator: The one of training; what it truncates is truncated here.
        folder: Where to write, or to find what an earlier call wrote.
        kl: What training will use: with ``coefficients="task"`` only each example's own teacher is kept, else all.
        batch_size: Examples that run at once.
        progress: Show a bar.

    Returns:
        The data set to train on, its examples with ``teacher_hidden``.

    Raises:
        ValueError: The model's head is not one plain product, so hidden states do not determine logits; or the folder
            holds a cache of other components, examples or settings.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    >>> merger = Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)])
    >>> data = TaskMixture([[{"input_ids": [1, 2, 3]}], [{"input_ids": [4, 5]}]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cached = cache_teachers(merger, data, MaskCollator(pad_token_id=0), folder, progress=False)
    ...     cached[0]["teacher_hidden"].shape  # positions that predict a token, teachers kept, H
    torch.Size([2, 1, 4])
    """
    kl, folder = kl or KLConfig(), Path(folder)
    if merger.output_head() is None:
        raise ValueError("cache_teachers: this model's logits are not one product of its hidden states; cannot cache")
    plain = MaskCollator(**{**asdict(collator), "pack": False})
    settings = {
        "components": merger.hashes(),
        "collator": asdict(plain),
        "task": kl.coefficients == "task",
        "examples": len(dataset),
    }
    device = merger.model.device
    bar = tqdm(range(0, len(dataset), _SHARD), desc="teachers", disable=not progress, unit="shard")
    with evaluating(merger):
        for number, first in enumerate(bar):
            path = folder / f"hidden-{number:05d}.safetensors"
            examples = [dataset[i] for i in range(first, min(first + _SHARD, len(dataset)))]
            described = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
            for example in examples:
                seen = [k for k in _SEEN if k in example]
                described.update(repr([(k, torch.as_tensor(example[k]).tolist()) for k in seen]).encode())
            if path.exists():
                with safe_open(path, "pt") as file:
                    if (file.metadata() or {}).get("fingerprint") == described.hexdigest():
                        continue
                raise ValueError(
                    f"cache_teachers: {path} was made from other components, examples or settings; delete the "
                    "folder or name a new one"
                )
            held: list[Tensor] = []
            for start in range(0, len(examples), batch_size):
                batch = plain(examples[start : start + batch_size])
                held += _hidden(merger, {k: v.to(device) for k, v in batch.items()}, kl.coefficients == "task")
            offsets = torch.tensor([0] + [len(h) for h in held]).cumsum(0)
            with new_file(path, "cache_teachers") as part:
                save_file({"hidden": torch.cat(held), "offsets": offsets}, part, {"fingerprint": described.hexdigest()})
    return CachedTeachers(dataset, folder)


def _hidden(merger: Merger, batch: dict[str, Tensor], by_task: bool) -> list[Tensor]:
    """For each example (positions, 1 or K, H), on the CPU."""
    labels, task = batch.pop("labels"), batch.pop("task", None)
    if task is None and by_task:
        raise ValueError("cache_teachers: the examples have no task, but coefficients 'task' keep each one's teacher")
    if task is None:
        task = torch.zeros(len(labels), dtype=torch.long, device=labels.device)
    if by_task and int(task.max()) >= merger.count:
        raise ValueError(f"cache_teachers: an example's task is {int(task.max())}, needed 0 to {merger.count - 1}")
    where, _ = positions(merger, batch["input_ids"], labels, batch.get("attention_mask"))
    states = []
    for k in range(merger.count):
        rows = (task == k).nonzero()[:, 0] if by_task else torch.arange(len(task), device=task.device)
        with merger.component(k):
            made = merger.final_hidden(**{n: v[rows] for n, v in batch.items()}) if len(rows) else None
        states.append(dict(zip(rows.tolist(), made, strict=True)) if made is not None else {})
    found = []
    for i in range(len(task)):
        own = [state[i][where[i]] for state in states if i in state]
        found.append(torch.stack(own, 1).cpu())
    return found
