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
"""Elements that one thread holds of each input at a time."""

EAGER_STRETCH = 1 << 22
"""Elements of a tensor that torch functions get at a time if it may be cut: 16 MB in float32."""

_SHOWN = 20  # problems that a message lists


class PlanError(ValueError):
    """A merge that cannot be done; the message lists the first 20 reasons.

    Args:
        problems: Every reason that was found.
        what: The operation that is not possible, for the message.
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
    """A tensor of a source, by the source's index."""

    source: int
    name: str


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor.

    If ``method`` is None, the first input is copied; all others are equal to it (integer buffers).
    ``parts`` are the tensors that the file holds instead, one after the other, such as the matrices
    of a stack of experts.
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
        """The inputs and the base."""
        if self.base is None:
            return self.inputs
        return (*self.inputs, self.base)

    @property
    def info(self) -> TensorInfo:
        """The name, shape and dtype as a checkpoint would describe them."""
        return TensorInfo(self.name, self.shape, self.dtype)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors that the file holds."""
        return self.parts or (self.info,)

    @property
    def nbytes(self) -> int:
        """The size on disk in bytes."""
        return self.info.nbytes

    @property
    def has_kernel(self) -> bool:
        """Return whether a compiled kernel can merge it."""
        # kernels compute in float32 alone
        if self.method is None or self.work != FLOAT32:
            return False
        return has_kernel(self.method, self.parameters, self.shape)


@dataclass
class MergePlan(Report):
    """A merge that passed all checks; printed by ``mergekit-lite plan``.

    Attributes:
        recipe: The recipe of the merge.
        sources: The opened models; only headers are read.
        tensors: One entry per tensor of the output.
        shards: Names of the files.
        config: The output's ``config.json``.
        donor: The index of the source that provides config, tokenizer and other files.
        vocabulary: The output's vocabulary; None if the recipe asks for no tokenizer.
        notes: Notes for the user.
        threads: The number of threads that will merge, for the estimate of memory.
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
        """The bytes of all inputs; some methods read them twice or more."""
        return sum(self.input_bytes(t) for t in self.tensors)

    def input_bytes(self, t: TensorPlan) -> int:
        """Return the size of a tensor's inputs in bytes."""
        return sum(self.sources[i.source].tensors[i.name].nbytes for i in t.everything)

    @property
    def bytes_written(self) -> int:
        """The bytes of tensors in the output."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def parameters(self) -> int:
        """The number of elements in the output."""
        return sum(t.info.count for t in self.tensors)

    @property
    def peak_memory(self) -> int:
        """The estimated peak memory in bytes, without that of imported libraries."""
        peak = 0
        for t in self.tensors:
            inputs = len(t.everything)
            if t.method is None or t.has_kernel:
                # a thread's stretch of each input, as stored and as numbers, and scratch memory
                block = min(t.info.count, CHUNK)
                peak = max(peak, self.threads * block * t.work.itemsize * (2 * inputs + 6))
            else:
                count = t.info.count
                if t.method.is_cut:
                    count = min(count, EAGER_STRETCH)
                # every input, and copies of them in the worst case in float64
                peak = max(peak, count * (t.work.itemsize * inputs + 8 * (inputs + 3)))
        return peak

    def table(self) -> Table:
        """Tabulate what will be read, written and held."""
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
                f"about {size_text(self.peak_memory)} beyond what is imported, threads: "
                f"{self.threads}"
            ),
            "config from": self.sources[self.donor].label,
        }
        return Table(("models", models), list(rows.items()), sentences=True)

    def remarks(self) -> list[str]:
        """Return the notes."""
        return [f"note: {text}" for text in self.notes]

    def to_dict(self) -> dict[str, object]:
        """Return the recipe, sources, sizes and every tensor's shape, dtype, method and shard."""
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
        """Return every tensor's shape, dtype, method and file."""
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
    """Give each tensor a shard and an offset, in order.

    No shard is above ``limit`` bytes unless one tensor is.

    Args:
        tensors: The tensors in order.
        limit: The largest size of a shard in bytes.
        stem: The beginning of the files' names.
    """
    placed = []
    shard = 0
    offset = 0
    for t in tensors:
        # offset 0 is an empty shard, which takes any tensor
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
    """Return the header of a shard that holds these tensors."""
    placed = []
    for t in tensors:
        offset = t.offset
        for info in t.stored:
            placed.append((info, offset))
            offset += info.nbytes
    return header_bytes(placed)
