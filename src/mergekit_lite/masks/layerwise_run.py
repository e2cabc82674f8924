"""`LayerwiseRun`: where layerwise training is, and each of its steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model_components._folders import new_file

from ..dtypes import tensor_of, to_torch
from ..files import LoraSource, Source
from ..files.adapter import Pair
from ..layerwise.blocks import Batch, Call, Skeleton
from .components import component_hashes, refuse_not_finite, share_frozen
from .config import MaskConfig
from .constraints import acting_masks
from .layers import Selection
from .low_rank import adapted_layers
from .storage import bake_sources, mask_metadata, mask_parts
from .surgery import Surgeon


@dataclass(frozen=True, kw_only=True)
class LayerwiseTraining:
    """How blocks learn.

    Args:
        steps: Of each block; each takes a batch of every task.
        learning_rate: Of Adam; it falls to nothing in a straight line.
        batch_size: Examples of a batch.
        max_length: Tokens of an example.
        seed: Of the order of batches.

    Raises:
        ValueError: Values that are no such numbers.
    """

    steps: int = 60
    learning_rate: float = 3e-2
    batch_size: int = 8
    max_length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "max_length": 2, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"train_layerwise: {name} is {value!r}, needed a whole number of at least {low}")
        if not isinstance(self.learning_rate, (int, float)) or not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"train_layerwise: learning_rate is {self.learning_rate!r}, needed a number above 0")


class LayerwiseRun:
    """States of each task on their way through its own component, and through the merged model."""

    def __init__(
        self,
        skeleton: Skeleton,
        sources: Sequence[Source],
        batches: Sequence[Sequence[Batch]],
        config: MaskConfig,
        training: LayerwiseTraining,
        mark: str,
        *,
        over_base: bool,
    ):
        self.skeleton, self.sources, self.batches, self.config = skeleton, sources, batches, config
        self.training, self.mark, self.over_base = training, mark, over_base
        self.folder = Path()  # where parts of masks are written
        self.factored: set[str] = set()  # weights of which a Merger holds factors
        self.calls: list[list[list[Call]]] = []  # of each task, block and batch
        self.own: list[list[Tensor]] = []  # states in the task's component
        self.merged: list[list[Tensor]] = []
        labels = [source.label for source in sources]
        self.told = mask_metadata(config, labels, self._hashes(), self.dtype, over_base=over_base) | {"mark": mark}

    @property
    def dtype(self) -> torch.dtype:
        """In which a `Merger` loads the components."""
        return self.skeleton.model.dtype

    def _hashes(self) -> list[str]:
        """The components' hashes, equal to those of `MaskedModel.hashes`."""
        model = self.skeleton.model
        pairs = [self._pairs(source) for source in self.sources]
        if all(own is not None for own in pairs[:-1]):
            self.factored = {f"{name}.weight" for own in pairs for name in own or {}}

        def parts(source: Source, own: Mapping[str, Pair]) -> Iterator[tuple[str, Tensor]]:
            for name in sorted(name for name, _ in model.named_parameters()):
                pair = own.get(name.removesuffix(".weight"))
                if pair is None:
                    yield name, self.skeleton.parameter(source, name).to(self.dtype)
                else:
                    yield f"{name} down", torch.from_numpy(pair.down).to(self.dtype)
                    yield f"{name} up {pair.scale}", torch.from_numpy(pair.up).to(self.dtype)
            for name in sorted(self.skeleton.stored_buffers()):
                stored = self.skeleton.stored_name(source, name)
                buffer = model.get_buffer(name)
                value = tensor_of(source.read(stored, 0, source.tensors[stored].count)).view(buffer.shape)
                yield name, value.to(self.dtype) if buffer.is_floating_point() else value

        return component_hashes(parts(s, own or {}) for s, own in zip(self.sources, pairs, strict=True))

    def _pairs(self, source: Source) -> dict[str, Pair] | None:
        """The factors that a `Merger` holds of a component; None where it holds whole weights."""
        base = self.sources[-1]
        thin = self.over_base and self.config.granularity != "element" and isinstance(source, LoraSource)
        if not thin or isinstance(base, LoraSource) or source.folder is None or base.folder is None:
            return None
        same = source.folder.resolve() == base.folder.resolve()
        return adapted_layers(self.skeleton.model, source.adapter) if same else None

    def is_done(self, folder: Path) -> bool:
        """Whether a folder has all masks of an earlier run of the same settings."""
        parts = mask_parts(folder) if folder.is_dir() else []
        if len(parts) != len(self.skeleton.blocks) + 1:
            return False
        with safe_open(parts[0], "pt") as file:
            return (file.metadata() or {}).get("mark") == self.mark

    def begin(self, states: Mapping[str, Tensor]) -> None:
        """Make the calls of all blocks, and the states before the first one or, from ``states``, the current one."""
        outside = [self.skeleton.without_blocks(source) for source in self.sources]
        surgeon, _ = self._masked(outside, 0)
        merged = {name: layer.merged(own).detach() for name, (layer, own) in surgeon.layers.items()}
        for k, batches in enumerate(self.batches):
            self.skeleton.load_outside(self.sources[k])
            calls, own = self.skeleton.calls(batches)
            self.skeleton.load_outside(merged)
            self.calls.append(calls)
            self.own.append([states.get(f"own.{k}.{i}", s) for i, s in enumerate(own)])
            first = self.skeleton.calls(batches)[1]
            self.merged.append([states.get(f"merged.{k}.{i}", s) for i, s in enumerate(first)])
        if not states:
            self._write(0, surgeon, (), ())

    def states(self) -> dict[str, Tensor]:
        """What the next block reads."""
        kinds = {"own": self.own, "merged": self.merged}
        return {
            f"{kind}.{k}.{i}": s for kind, tasks in kinds.items() for k, t in enumerate(tasks) for i, s in enumerate(t)
        }

    def train_block(self, number: int) -> None:
        """Learn a block's masks, write them, and pass on the states."""
        prefix = self.skeleton.prefix(number)
        surgeon, block = self._masked([self.skeleton.block(number, s) for s in self.sources], number + 1, prefix)
        calls = [self.calls[k][number] for k in range(len(self.batches))]
        with torch.no_grad():
            for k, own in enumerate(self.own):
                surgeon.selection.component = k
                self.own[k] = [call.run(block, s) for call, s in zip(calls[k], own, strict=True)]
            surgeon.selection.component = None
            before = [self._error(block, calls[k], k) for k in range(len(calls))]
        if trained := [mask for mask in surgeon.raw.values() if mask.requires_grad]:
            self._learn(block, trained, calls, number)
        with torch.no_grad():
            for layer in {id(layer): layer for layer, _ in surgeon.layers.values()}.values():
                layer.fold_()
            after = []
            for k, merged in enumerate(self.merged):
                passed = [call.run(block, s) for call, s in zip(calls[k], merged, strict=True)]
                errors = zip(calls[k], passed, self.own[k], strict=True)
                after.append(float(torch.stack([relative_error(*triple) for triple in errors]).mean()))
                self.merged[k] = passed
        self._write(number + 1, surgeon, before, after)

    def _masked(self, models: Sequence[nn.Module], part: int, prefix: str = "") -> tuple[Surgeon, nn.Module]:
        """Modules with the components' weights under masks."""
        refuse_not_finite(models, [f"{prefix or 'what is outside the blocks'} of {s.label}" for s in self.sources])
        shared = share_frozen(models, over_base=self.over_base)
        first, others = (shared[-1], shared[:-1]) if self.over_base else (shared[0], shared[1:])
        config = replace(self.config, seed=self.config.seed + 7919 * part)  # random masks of their own for each part
        surgeon = Surgeon(config, Selection(), over_base=self.over_base)
        surgeon.replace(first, others, prefix)
        return surgeon, first

    def _error(self, block: nn.Module, calls: Sequence[Call], k: int) -> float:
        errors = [
            relative_error(call, call.run(block, state), own)
            for call, state, own in zip(calls, self.merged[k], self.own[k], strict=True)
        ]
        return float(torch.stack(errors).mean())

    def _learn(
        self, block: nn.Module, masks: Sequence[nn.Parameter], calls: Sequence[Sequence[Call]], number: int
    ) -> None:
        training, order = self.training, random.Random(self.training.seed * 1_000_003 + number)
        optimizer = torch.optim.Adam(masks, lr=training.learning_rate)
        queues: list[list[int]] = [[] for _ in calls]
        for step in range(training.steps):
            optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - step / training.steps)
            optimizer.zero_grad()
            for k, queue in enumerate(queues):
                if not queue:
                    queue.extend(order.sample(range(len(calls[k])), len(calls[k])))
                i = queue.pop()
                call = calls[k][i]
                relative_error(call, call.run(block, self.merged[k][i]), self.own[k][i]).backward()
            optimizer.step()

    def _write(self, number: int, surgeon: Surgeon, before: Sequence[float], after: Sequence[float]) -> None:
        same = [name for name, (layer, own) in surgeon.layers.items() if layer.is_same(own)]
        told = self.told | {"same": json.dumps(same), "errors": json.dumps([before, after])}
        with new_file(self.folder / f"part-{number:05d}.safetensors", "train_layerwise") as part:
            save_file({name: mask.detach().contiguous() for name, mask in surgeon.raw.items()}, part, told)

    def errors(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Of each block and task, before and after its masks learnt."""
        pairs_of_stages = []
        for part in mask_parts(self.folder)[1:]:
            with safe_open(part, "pt") as file:
                pairs_of_stages.append(json.loads(file.metadata()["errors"]))
        return tuple(tuple(tuple(pair[when]) for pair in pairs_of_stages) for when in (0, 1))

    def bake(self, out: Path, options: Mapping[str, object]) -> None:
        """Write the merged model, from the components' files and the parts of masks."""
        masks = _Acting(mask_parts(self.folder), self.config, over_base=self.over_base, rename=self._stored_name)
        tensors = self.sources[0].tensors
        buffers = [self._stored_name(name) for name in self.skeleton.stored_buffers()]
        dtypes = {name: to_torch(tensors[name].dtype) for name in (*masks, *buffers)}
        factored = {self._stored_name(name) for name in self.factored}
        bake_sources(
            self.sources, masks, dtypes, out, options, over_base=self.over_base, rounds=lambda n: n not in factored
        )

    def _stored_name(self, name: str) -> str:
        return self.skeleton.stored_name(self.sources[0], name)


class _Acting(Mapping[str, Tensor]):
    """The constrained masks by name, each read from its file when it is asked for."""

    def __init__(self, parts: Sequence[Path], config: MaskConfig, *, over_base: bool, rename: Callable[[str], str]):
        self.config, self.over_base = config, over_base
        self.places: dict[str, tuple[Path, str, bool]] = {}
        for part in parts:
            with safe_open(part, "pt") as file:
                same = json.loads(file.metadata()["same"])
                self.places |= {rename(name): (part, name, name in same) for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        part, own, same = self.places[name]
        with safe_open(part, "pt") as file:
            raw = file.get_tensor(own)
        return acting_masks(raw, "none" if same else self.config.constraint, over_base=self.over_base)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def relative_error(call: Call, found: Tensor, expected: Tensor) -> Tensor:
    """The mean over tokens of ``|found - expected|^2 / |expected|^2``; tokens of large states count as others do.

    Args:
        call: Which says what is padding.
        found: (B, L, H).
        expected: The same.
    """
    one, other = call.tokens(found), call.tokens(expected)
    return ((one - other).square().sum(-1) / other.square().sum(-1).clamp_min(1e-12)).mean()
