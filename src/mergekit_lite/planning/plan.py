"""`MergePlan`: every output tensor with its inputs, settings and position on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from model_components._report import Report, Table

from ..dtypes import FLOAT32, DType
from ..files import Source, TensorInfo
from ..files.headers import Json, header_bytes
from ..methods import STRETCH, MergeMethod, has_kernel
from ..methods.parameters import Bound
from ..recipe import MergeRecipe, model_label
from ..vocabulary import Vocabulary

CHUNK = STRETCH
"""The number of elements of each input that one thread holds at a time."""

EAGER_STRETCH = 1 << 22
"""The number of elements that torch functions get at a time, if a tensor may be split.

In float32, this is 16 MB.
"""

_SHOWN = 20  # maximum number of problems that a message lists


class PlanError(ValueError):
    """The error for a merge that cannot be done; the message lists the first 20 reasons.

    Args:
        problems: Every reason that was found.
        what: The operation that cannot be done, for the message.
    """

    def __init__(self, problems: Sequence[str], what: str = "this merge"):
        self.problems = list(problems)
        plural = "s" if len(self.problems) > 1 else ""
        count = f"{len(self.problems)} problem{plural}"
        lines = [f"- {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"and {len(self.problems) - _SHOWN} more")
        super().__init__(f"{what} cannot be done ({count}):\n" + "\n".join(lines))


@dataclass(frozen=True)
class Input:
    """A tensor of a source, given by the index of the source and the name of the tensor."""

    source: int
    name: str


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one output tensor.

    ``work`` is the dtype of the computation, and ``dtype`` is the dtype of the result.

    If ``method`` is None, the tensor is a copy of the first input. This is for integer and boolean
    buffers, which are equal in all models. If there are ``parts``, such as the matrices of a stack
    of experts, the file holds these tensors one after the other instead of the output tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    work: DType
    inputs: tuple[Input, ...]
    base: Input | None
    method: MergeMethod | None
    parameters: Bound
    shard: int = 0
    offset: int = 0
    parts: tuple[TensorInfo, ...] = ()

    @property
    def everything(self) -> tuple[Input, ...]:
        """The inputs, and the base if there is one."""
        if self.base is None:
            return self.inputs
        return (*self.inputs, self.base)

    @property
    def info(self) -> TensorInfo:
        """The name, shape and dtype as a checkpoint would describe them."""
        return TensorInfo(self.name, self.shape, self.dtype)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors that the file holds: the parts or, without parts, the output tensor."""
        return self.parts or (self.info,)

    @property
    def nbytes(self) -> int:
        """The size on disk in bytes."""
        return self.info.nbytes

    @property
    def has_kernel(self) -> bool:
        """Return whether a compiled kernel can merge the tensor."""
        # kernels compute only in float32
        if self.method is None or self.work != FLOAT32:
            return False
        return has_kernel(self.method, self.parameters, self.shape)


@dataclass
class MergePlan(Report):
    """The plan of a merge that passed all checks, as ``mergekit-lite plan`` prints it.

    Attributes:
        recipe: The recipe of the merge.
        sources: The opened models, of which only headers are read.
        tensors: One entry per tensor of the output.
        shards: The names of the weight files.
        config: The output's ``config.json``.
        donor: The index of the source that provides config, tokenizer and other files.
        vocabulary: The output's vocabulary; None if the recipe names no tokenizer.
        notes: Notes on the merge, such as settings that have no effect.
        threads: The number of threads of the merge, for the estimate of its peak memory.
    """

    recipe: MergeRecipe
    sources: list[Source]
    tensors: list[TensorPlan]
    shards: list[str]
    config: Json
    donor: int
    vocabulary: Vocabulary | None
    notes: list[str] = field(default_factory=list)
    threads: int = 1

    @property
    def bytes_read(self) -> int:
        """The size of all inputs in bytes; some methods read inputs more than once."""
        return sum(self.input_bytes(t) for t in self.tensors)

    def input_bytes(self, t: TensorPlan) -> int:
        """Return the size of a tensor's inputs in bytes."""
        return sum(self.sources[i.source].tensors[i.name].nbytes for i in t.everything)

    @property
    def bytes_written(self) -> int:
        """The size of the output's tensors in bytes."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def parameters(self) -> int:
        """The number of elements in the output."""
        return sum(t.info.count for t in self.tensors)

    @property
    def peak_memory(self) -> int:
        """The estimated peak memory of the merge in bytes, without the imported libraries."""
        peak = 0
        for t in self.tensors:
            inputs = len(t.everything)
            if t.method is None or t.has_kernel:
                # a thread's block of each input, as stored and as numbers, and scratch memory
                block = min(t.info.count, CHUNK)
                peak = max(peak, self.threads * block * t.work.itemsize * (2 * inputs + 6))
            else:
                count = t.info.count
                if t.method.is_cut:
                    count = min(count, EAGER_STRETCH)
                # every input, and copies of the inputs, which are in float64 in the worst case
                peak = max(peak, count * (t.work.itemsize * inputs + 8 * (inputs + 3)))
        return peak

    def table(self) -> Table:
        """Return a table of what the merge reads, writes and holds in memory."""
        plural = "s" if len(self.shards) > 1 else ""
        labels = dict.fromkeys(model_label(entry.model) for entry in self.recipe.entries())
        base = self.recipe.base_model
        if base is not None:
            labels.pop(model_label(base), None)
        models = f"{self.recipe.merge_method} of {len(labels)}: {', '.join(labels)}"
        if base is not None:
            models += f"; base: {model_label(base)}"
        rows = {
            "tensors": (
                f"{len(self.tensors)}, {self.parameters:,} parameters, {_dtypes(self.tensors)}"
            ),
            "inputs": size_text(self.bytes_read),
            "writes": f"{size_text(self.bytes_written)} in {len(self.shards)} shard{plural}",
            "peak memory": (
                f"about {size_text(self.peak_memory)} plus imported libraries, threads: "
                f"{self.threads}"
            ),
            "config from": self.sources[self.donor].label,
        }
        return Table(("models", models), list(rows.items()), sentences=True)

    def remarks(self) -> list[str]:
        """Return the notes."""
        return [f"note: {text}" for text in self.notes]

    def to_dict(self) -> dict[str, object]:
        """Return the recipe, sources, sizes and notes, and the description of every tensor."""
        return {
            "recipe": self.recipe.to_dict(),
            "sources": [s.label for s in self.sources],
            "config_from": self.sources[self.donor].label,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "parameters": self.parameters,
            "peak_memory": self.peak_memory,
            "notes": list(self.notes),
            "tensors": self.described_tensors(),
        }

    def described_tensors(self) -> list[dict[str, object]]:
        """Return the name, shape, dtype, method and file of every tensor."""
        return [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype.name,
                "method": "copy" if t.method is None else t.method.name,
                "file": self.shards[t.shard],
            }
            for t in self.tensors
        ]


def _dtypes(tensors: Sequence[TensorPlan]) -> str:
    return ", ".join(sorted({t.dtype.name for t in tensors}))


def size_text(count: float) -> str:
    """Format a number of bytes with decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            if unit == "B":
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def shard_layout(
    tensors: Sequence[TensorPlan], limit: int, stem: str
) -> tuple[list[TensorPlan], list[str]]:
    """Assign a shard and an offset to each tensor, and return the tensors and the files' names.

    A shard is larger than ``limit`` bytes only if it holds a single tensor of that size.

    Args:
        tensors: The tensors, in the order of the output.
        limit: The largest size of a shard in bytes.
        stem: The beginning of the files' names.
    """
    placed = []
    shard = 0
    offset = 0
    for t in tensors:
        # at offset 0 the shard is empty, and takes a tensor of any size
        if offset and offset + t.nbytes > limit:
            shard = shard + 1
            offset = 0
        placed.append(replace(t, shard=shard, offset=offset))
        offset += t.nbytes
    count = shard + 1
    if count == 1:
        return placed, [f"{stem}.safetensors"]
    return placed, [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def shard_header(tensors: Sequence[TensorPlan]) -> bytes:
    """Return the header of a shard that holds the given tensors."""
    placed = []
    for t in tensors:
        offset = t.offset
        for info in t.stored:
            placed.append((info, offset))
            offset += info.nbytes
    return header_bytes(placed)
