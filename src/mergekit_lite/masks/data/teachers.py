"""`cache_teachers`: run the teachers once, and store their hidden states."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from model_components._devices import on_device
from model_components._folders import new_file
from model_components._modes import evaluating

from ..config import KLConfig
from ..distillation import positions
from ..merger import Merger
from .collator import Examples, MaskCollator

# examples per file: at most this many are in memory at once, or lost by an interruption
_SHARD = 512
# keys of an example that the collator reads
_SEEN = ("input_ids", "attention_mask", "token_type_ids", "labels", "label", "task")


class CachedTeachers(Dataset):
    """A data set of examples with teachers' final hidden states, which are read on access.

    Args:
        dataset: The examples that were passed to `cache_teachers`.
        folder: The folder that `cache_teachers` wrote.
    """

    def __init__(self, dataset: Examples, folder: str | os.PathLike[str]):
        self._dataset = dataset
        self._paths = sorted(Path(folder).glob("hidden-*.safetensors"))
        self._open: dict[int, safe_open] = {}  # each worker of a DataLoader opens its own

    def __getstate__(self) -> dict[str, object]:
        # open files cannot be pickled for the workers of a DataLoader
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a loop over the examples
        shard, place = divmod(index, _SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._paths[shard], "pt")
        start, stop = self._open[shard].get_slice("offsets")[place : place + 2].tolist()
        return {
            **self._dataset[index],
            "teacher_hidden": self._open[shard].get_slice("hidden")[start:stop],
        }


@torch.no_grad()
def cache_teachers(
    merger: Merger,
    dataset: Examples,
    collator: MaskCollator,
    folder: str | os.PathLike[str],
    *,
    kl: KLConfig | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> CachedTeachers:
    """Run the teachers once and store their final hidden states at supervised positions.

    Training on the result runs no teacher, and gives the same loss. Hidden states are stored
    because they are small: H values per position, while logits have V values, about 40 times as
    many. Files are memory-mapped. After an interruption, the same call continues where it stopped.
    Under torchrun, let one process write the cache before the other processes start.

    Args:
        merger: The merger, whose components are the teachers.
        dataset: The examples to train on. With ``coefficients="task"`` they must have a ``task``.
        collator: The collator of the training. The cache truncates examples in the same way.
        folder: The folder to write. It may hold the cache of an earlier call with the same
            arguments.
        kl: The settings of the training. With ``coefficients="task"``, only the hidden states of
            each example's own teacher are stored, otherwise the hidden states of all teachers.
        batch_size: Number of examples per forward pass.
        progress: Whether to show a progress bar.

    Returns:
        The data set to train on. Its examples have ``teacher_hidden``.

    Raises:
        ValueError: The model's logits are not the head's product with the hidden states. The folder
            holds a cache of other components, examples or settings. ``kl`` requires tasks, and an
            example has none, or one that is not the index of a component.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    >>> merger = Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)])
    >>> from mergekit_lite.masks import TaskMixture
    >>> data = TaskMixture([[{"input_ids": [1, 2, 3]}], [{"input_ids": [4, 5]}]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cached = cache_teachers(
    ...         merger, data, MaskCollator(pad_token_id=0), folder, progress=False
    ...     )
    ...     cached[0]["teacher_hidden"].shape  # positions that predict a token, teachers kept, H
    torch.Size([2, 1, 4])
    """
    kl = kl or KLConfig()
    folder = Path(folder)
    if merger.output_head() is None:
        raise ValueError(
            "cache_teachers: expected a model whose logits are the head's product with the hidden "
            f"states, got {type(merger.model).__name__}; train without a cache"
        )
    # do not pack, because the states of each example are stored separately
    plain = MaskCollator(**{**asdict(collator), "pack": False})
    settings = {
        "components": merger.hashes(),
        "collator": asdict(plain),
        "task": kl.coefficients == "task",
        "examples": len(dataset),
    }
    device = merger.model.device
    bar = tqdm(
        range(0, len(dataset), _SHARD), desc="caching teachers", disable=not progress, unit="shard"
    )
    with evaluating(merger):
        for number, first in enumerate(bar):
            path = folder / f"hidden-{number:05d}.safetensors"
            examples = [dataset[i] for i in range(first, min(first + _SHARD, len(dataset)))]
            described = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
            for example in examples:
                seen = [k for k in _SEEN if k in example]
                described.update(
                    # as lists, because tensors and lists of the same numbers are the same example
                    repr([(k, torch.as_tensor(example[k]).tolist()) for k in seen]).encode()
                )
            if path.exists():
                with safe_open(path, "pt") as file:
                    if (file.metadata() or {}).get("fingerprint") == described.hexdigest():
                        continue
                raise ValueError(
                    f"cache_teachers: {path} was made from other components, examples or settings; "
                    "delete the folder, or pass a new one"
                )
            states: list[Tensor] = []
            for start in range(0, len(examples), batch_size):
                batch = plain(examples[start : start + batch_size])
                states += _hidden(merger, on_device(batch, device), kl.coefficients == "task")
            offsets = torch.tensor([0] + [len(h) for h in states]).cumsum(0)
            with new_file(path, "cache_teachers") as part:
                save_file(
                    {"hidden": torch.cat(states), "offsets": offsets},
                    part,
                    {"fingerprint": described.hexdigest()},
                )
    return CachedTeachers(dataset, folder)


def _hidden(merger: Merger, batch: dict[str, Tensor], by_task: bool) -> list[Tensor]:
    """Return each example's final hidden states, (positions, 1 or K, H), on the CPU."""
    labels = batch.pop("labels")
    task = batch.pop("task", None)
    if task is None and by_task:
        raise ValueError(
            "cache_teachers: expected examples with a task, which coefficients='task' requires, "
            "got examples without a task"
        )
    if task is None:
        # every teacher then runs on every row, whatever its task
        task = torch.zeros(len(labels), dtype=torch.long, device=labels.device)
    if by_task and int(task.max()) >= merger.count:
        raise ValueError(
            f"cache_teachers: an example's task is {int(task.max())}, expected 0 to "
            f"{merger.count - 1}"
        )
    where, _ = positions(merger, batch["input_ids"], labels, batch.get("attention_mask"))
    states = []
    for k in range(merger.count):
        if by_task:
            rows = (task == k).nonzero()[:, 0]
        else:
            rows = torch.arange(len(task), device=task.device)
        with merger.component(k):
            if len(rows):
                hidden = merger.final_hidden(**{n: v[rows] for n, v in batch.items()})
            else:
                hidden = None
        states.append(dict(zip(rows.tolist(), hidden, strict=True)) if hidden is not None else {})
    joined = []
    for i in range(len(task)):
        of_place = [state[i][where[i]] for state in states if i in state]
        joined.append(torch.stack(of_place, 1).cpu())
    return joined
