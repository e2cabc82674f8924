"""Data-driven merges of whole models, block by block: `merge_models(..., calibration=...)` ends here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from model_components._folders import NewFolder, new_file

from ..data import TextExamples
from ..dtypes import Array, to_torch
from ..files import CheckpointError, Source, TensorInfo, open_source
from .blocks import Batch, Call, Skeleton, Weights, inputs_seen, linear_layers
from .closed_forms import InputStatistics, merge_by_inputs

METHODS = ("regmean", "regmean++", "activation")
_STATES = "states.safetensors"


@dataclass(frozen=True, kw_only=True)
class CalibratedMerge:
    """How a data-driven merge is made, whatever is merged.

    Args:
        method: ``"regmean"``, ``"regmean++"`` (inputs come through the blocks merged so far) or ``"activation"``.
        weight: How much each model counts; default: alike.
        reduce: What entries of Gram matrices off the diagonal are multiplied by; at ``"activation"`` they are not made.
        auto_class: Of transformers.
        batch_size: Examples that run at once.
        max_length: Tokens of an example.

    Raises:
        ValueError: Values outside what is said above.
    """

    method: str
    weight: tuple[float, ...] | None = None
    reduce: float = 0.9
    auto_class: Any = AutoModelForCausalLM
    batch_size: int = 8
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"merge_models: {self.method!r} is no method with calibration: {', '.join(METHODS)}")
        if not 0 <= self.reduce <= 1:
            raise ValueError(f"merge_models: reduce is {self.reduce}, needed 0 to 1")
        if self.batch_size < 1 or self.max_length < 2:
            raise ValueError(
                f"merge_models: batch_size {self.batch_size}, max_length {self.max_length}; needed 1 and 2 or more"
            )

    def shares(self, count: int) -> list[float]:
        """Of each model, that sum to one."""
        weight = self.weight or (1.0,) * count
        if len(weight) != count or min(weight) < 0 or not sum(weight) > 0:
            raise ValueError(f"merge_models: weight is {weight}, needed {count} numbers from 0, not all 0")
        return [w / sum(weight) for w in weight]

    @property
    def diagonal(self) -> bool:
        """Only the mean square of inputs counts."""
        return self.method == "activation" or self.reduce == 0


def merged_source(
    models: Sequence[Any],
    calibration: Sequence[Any],
    merge: CalibratedMerge,
    stage: NewFolder,
    *,
    resume: bool,
    progress: bool,
) -> Source:
    """The merged tensors, written block by block into an open stage folder, as a source that a merge can read.

    Of the models one block is resident at a time, and the merged one, and hidden states of the calibration data.

    Args:
        models: What `open_source` takes, of one architecture.
        calibration: For each model its data: a file or rows for `TextExamples`, examples, or batches.
        merge: How.
        stage: Where; what an interrupted run of the same merge left there is taken up.
        resume: Whether it is.
        progress: Show a bar.

    Raises:
        ValueError: Numbers of models and data that differ; models that do not fit each other; no data.
    """
    if len(models) < 2 or isinstance(calibration, (str, Path)) or len(calibration) != len(models):
        raise ValueError(
            f"merge_models: {len(models)} models, calibration for {len(calibration)}; needed two or more, and for each "
            "its data"
        )
    shares = merge.shares(len(models))
    sources = [open_source(model) for model in models]
    _check_alike(sources)
    skeleton = Skeleton(sources[0], merge.auto_class, torch.float32)
    data = [_batches(c, s, merge) for c, s in zip(calibration, sources, strict=True)]
    run = _Run(skeleton, sources, data, shares, merge, stage.folder)
    mark = run.fingerprint()
    first = run.resumed(mark) if resume else 0
    if not first:
        stage.clear()
        run.begin()
    count = len(skeleton.blocks)
    for number in tqdm(range(first, count), desc=merge.method, unit="block", initial=first, total=count,
                       disable=not progress):  # fmt: skip
        run.merge_block(number)
        run.save_states(number + 1, mark)
    run.merge_outside()
    return _Joined(sources[0], [open_source(path) for path in sorted(stage.folder.glob("part-*.safetensors"))])


def _check_alike(sources: Sequence[Source]) -> None:
    shapes = [{n: i.shape for n, i in s.tensors.items()} for s in sources]
    for source, own in zip(sources[1:], shapes[1:], strict=True):
        if odd := sorted(n for n in shapes[0].keys() | own.keys() if shapes[0].get(n) != own.get(n)):
            raise CheckpointError(
                f"{source.label} and {sources[0].label}: {odd[0]} is {own.get(odd[0])} and {shapes[0].get(odd[0])} "
                f"({len(odd)} such); data-driven merges needed models of one architecture"
            )


def _batches(data: Any, source: Source, merge: CalibratedMerge) -> list[Batch]:
    """Padded batches of token ids, long examples beside long ones."""
    is_file = isinstance(data, (str, Path))
    rows: list[Any] = [] if is_file else list(data)
    if not is_file and not rows:
        raise ValueError(f"merge_models: the calibration data of {source.label} are empty; needed examples")
    first: Any = rows[0] if rows else None
    if isinstance(first, Tensor):
        return [{"input_ids": batch} for batch in rows]
    has_ids = isinstance(first, Mapping) and "input_ids" in first
    if has_ids and isinstance(first["input_ids"], Tensor) and first["input_ids"].dim() == 2:
        return [{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")} for batch in rows]
    if not has_ids:
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        examples = TextExamples(data if is_file else rows, tokenizer, max_length=merge.max_length, train_on_inputs=True)
        rows = [examples[i] for i in range(len(examples))]
    ids = sorted((torch.as_tensor(row["input_ids"])[: merge.max_length] for row in rows), key=len)
    parts = [ids[i : i + merge.batch_size] for i in range(0, len(ids), merge.batch_size)]
    return [
        {
            "input_ids": pad_sequence(part, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in part], batch_first=True),
        }
        for part in parts
    ]


class _Run:
    """Where a merge is: hidden states of each model's data on their way through the blocks."""

    def __init__(
        self,
        skeleton: Skeleton,
        sources: Sequence[Source],
        data: Sequence[Sequence[Batch]],
        shares: Sequence[float],
        merge: CalibratedMerge,
        folder: Path,
    ):
        self.skeleton, self.sources, self.data = skeleton, sources, data
        self.shares, self.merge, self.folder = shares, merge, folder
        self.calls: list[list[list[Call]]] = []  # of each model, block and batch
        self.hidden: list[list[Tensor]] = []

    def fingerprint(self) -> str:
        """What the result depends on."""
        digest = hashlib.sha256()
        for batch in (b for batches in self.data for b in batches):
            digest.update(repr([(k, v.tolist()) for k, v in sorted(batch.items())]).encode())
        told = [
            [s.fingerprint() for s in self.sources], self.merge.method, self.shares, self.merge.reduce,
            digest.hexdigest(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()

    def begin(self) -> None:
        """To where the first block is called."""
        for outside, batches in zip(self._outsides(), self.data, strict=True):
            self.skeleton.load_outside(outside)
            calls, hidden = self.skeleton.calls(batches)
            self.calls.append(calls)
            self.hidden.append(hidden)

    def _outsides(self) -> Sequence[Weights]:
        """What each model's data meet before and after the blocks: its own weights, or the merged ones."""
        if self.merge.method != "regmean++":
            return self.sources
        average = {n: self._average([self.skeleton.parameter(s, n) for s in self.sources], n)
                   for n in self.skeleton.outside()}  # fmt: skip
        return [average] * len(self.sources)

    @torch.no_grad()
    def merge_block(self, number: int) -> None:
        """Write the merged block; hidden states go on through the models' own, or through it."""
        skeleton, merged_inputs = self.skeleton, self.merge.method == "regmean++"
        blocks, seen = [], []
        for k, source in enumerate(self.sources):
            block = skeleton.block(number, source)
            statistics, outputs = self._watched(block, k, number)
            if not merged_inputs:
                self.hidden[k] = outputs
            blocks.append(dict(block.named_parameters()))
            seen.append(statistics)
        layers = linear_layers(skeleton.blocks[number])
        merged: dict[str, Tensor] = {}
        for name in blocks[0]:
            weights, owner = [b[name] for b in blocks], name.rpartition(".")[0]
            if name.endswith("weight") and owner in layers:
                value = self._solved(layers[owner], weights, [s[owner] for s in seen])
            else:
                value = self._average(weights)
            full = skeleton.prefix(number) + name
            merged[full] = value.to(self._dtype(full))
        self._write(number, merged)
        if merged_inputs:
            block = skeleton.block(number, merged)
            for k in range(len(self.sources)):
                self.hidden[k] = self._outputs(block, k, number)

    @torch.no_grad()
    def merge_outside(self) -> None:
        """Write what is in no block: a head of its own by its inputs, all else averaged."""
        head, merged = self.skeleton.model.get_output_embeddings(), {}
        tied = head is not None and head.weight is self.skeleton.model.get_input_embeddings().weight
        solved = next((n for n, m in self.skeleton.model.named_modules() if m is head), "") + ".weight"
        for name in self.skeleton.outside():
            values = [self.skeleton.parameter(s, name) for s in self.sources]
            if name == solved and not tied and isinstance(head, nn.Linear):
                value = self._solved(head, values, self._of_head())
            else:
                value = self._average(values)
            merged[name] = value.to(self._dtype(name))
        self._write(len(self.skeleton.blocks), merged)

    def _of_head(self) -> list[InputStatistics]:
        """What each model's head reads."""
        found = []
        for outside, batches, hidden, calls in zip(self._outsides(), self.data, self.hidden, self.calls, strict=True):
            self.skeleton.load_outside(outside)
            statistics = InputStatistics(hidden[0].shape[-1], diagonal=self.merge.diagonal)
            for call, states in zip(calls[0], self.skeleton.after(batches, hidden), strict=True):
                statistics.add(call.tokens(states))
            found.append(statistics)
        return found

    def _watched(self, block: nn.Module, k: int, number: int) -> tuple[dict[str, InputStatistics], list[Tensor]]:
        """What a model's linear layers read of its data, and what its block makes of it."""
        statistics: dict[str, InputStatistics] = {}
        owners: dict[str, str] = {}  # of layers that read one tensor, as q, k and v do, the first
        outputs = []
        for call, hidden in zip(self.calls[k][number], self.hidden[k], strict=True):
            read: dict[str, Tensor] = {}

            def see(name: str, x: Tensor, call: Call = call, read: dict[str, Tensor] = read) -> None:
                owner = owners.setdefault(name, next((n for n, other in read.items() if other is x), name))
                read[name] = x
                if owner == name:
                    statistics.setdefault(name, InputStatistics(x.shape[-1], diagonal=self.merge.diagonal))
                    statistics[name].add(call.tokens(x))

            with inputs_seen(linear_layers(block), see):
                outputs.append(call.run(block, hidden))
        return {name: statistics[owner] for name, owner in owners.items()}, outputs

    def _outputs(self, block: nn.Module, k: int, number: int) -> list[Tensor]:
        return [c.run(block, h) for c, h in zip(self.calls[k][number], self.hidden[k], strict=True)]

    def _solved(self, layer: nn.Module, weights: Sequence[Tensor], seen: Sequence[InputStatistics]) -> Tensor:
        turned = isinstance(layer, Conv1D)
        matrices = [w.T if turned else w for w in weights]
        found = merge_by_inputs(matrices, seen, reduce=self.merge.reduce, shares=self.shares)
        return (found.T if turned else found).contiguous()

    def _average(self, values: Sequence[Tensor], name: str | None = None) -> Tensor:
        """By shares; rounded as it is stored where it has a name."""
        mean = sum(share * v.detach().double() for share, v in zip(self.shares, values, strict=True))
        return torch.as_tensor(mean).to(torch.float64 if name is None else self._dtype(name))

    def _dtype(self, name: str) -> torch.dtype:
        return to_torch(self.sources[0].tensors[self.skeleton.stored_name(self.sources[0], name)].dtype)

    def _write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """A part, under the names that the first model's files have."""
        named = {self.skeleton.stored_name(self.sources[0], n): v.contiguous() for n, v in tensors.items()}
        with new_file(self.folder / f"part-{number:05d}.safetensors", "merge") as part:
            save_file(named, part)

    def save_states(self, done: int, mark: str) -> None:
        """Where an interrupted run goes on."""
        states = {f"{k}.{i}": h for k, batches in enumerate(self.hidden) for i, h in enumerate(batches)}
        with new_file(self.folder / _STATES, "merge") as part:
            save_file(states, part, {"mark": mark, "done": str(done)})

    def resumed(self, mark: str) -> int:
        """How many blocks are written by an earlier run of the same merge, whose states are taken up."""
        path = self.folder / _STATES
        if not path.is_file():
            return 0
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            if told.get("mark") != mark:
                return 0
            self.begin()
            self.hidden = [[file.get_tensor(f"{k}.{i}") for i in range(len(b))] for k, b in enumerate(self.data)]
        return int(told["done"])


class _Joined:
    """Parts of one model as a source: config and tokenizer are the first model's, and tensors that no part has."""

    def __init__(self, first: Source, parts: Iterable[Source]):
        self.label, self.config, self.folder, self._first = "merged", first.config, first.folder, first
        self._of = {name: part for part in parts for name in part.tensors}
        self.tensors: dict[str, TensorInfo] = {
            n: self._of[n].tensors[n] if n in self._of else info for n, info in first.tensors.items()
        }

    def _source(self, name: str) -> Source:
        return self._of.get(name, self._first)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Elements of a tensor."""
        return self._source(name).read(name, start, stop)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Elements of a tensor into memory that is there."""
        return self._source(name).read_into(name, start, out)

    def prefetch(self, name: str) -> None:
        """As the part does."""
        self._source(name).prefetch(name)

    def fingerprint(self) -> Any:
        """Of all parts."""
        return [part.fingerprint() for part in dict.fromkeys(self._of.values())]
