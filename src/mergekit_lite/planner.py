"""make_plan: everything that can be wrong is looked for in headers and configs, and all of it is said at once.

Nothing but headers is read before a plan is sound, except integer and boolean buffers, which must agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from .checkpoint import CheckpointError, Source
from .configs import compare_configs, output_config
from .evaluate import Block, Evaluation, OneBlock
from .methods import get_method
from .methods.registry import block_shape
from .noise import Noise
from .plan import CHUNK, Input, MergePlan, PlanError, TensorPlan, shard_layout
from .recipe import FLOAT_DTYPES, MergeRecipe, ModelEntry, RecipeError, Slice, model_key, model_label, setting
from .sources import open_source
from .vocabulary import EMBEDDING, HEAD, AlignedSource, Vocabulary, plan_vocabulary

_SHOWN = 20
# Buffers that transformers computes; older checkpoints hold them and newer ones do not.
_COMPUTED = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer a tensor belongs to: the first number among the parts of its name.

    >>> layer_of("model.layers.12.mlp.experts.3.w1.weight"), layer_of("lm_head.weight")
    (12, None)
    """
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _with_layer(name: str, layer: int) -> str:
    match = _LAYER.search(name)
    assert match is not None
    return f"{name[: match.start(1)]}{layer}{name[match.end(1) :]}"


def _leaves(value: Any) -> Iterator[Any]:
    """The plain values in a setting: of gradients and filter entries, each."""
    if isinstance(value, Mapping):
        yield from _leaves(value.get("value"))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _some(items: Sequence[str], limit: int = _SHOWN) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


class _Planner:
    def __init__(self, recipe: MergeRecipe, allow_pickle: str | None):
        self.recipe, self.problems, self.notes = recipe, [], []
        self.sources: list[Source] = []
        self.index: dict[Any, int] = {}
        try:
            self.method = get_method(recipe.merge_method)
            self.check_parameters()
        except ValueError as error:
            self.problems.append(str(error))
        entries = [*recipe.entries(), *([ModelEntry(model=recipe.base_model)] if recipe.base_model is not None else [])]
        for entry in entries:
            key = model_key(entry.model)
            if key in self.index:
                continue
            try:
                source = open_source(entry.model, allow_pickle=allow_pickle)
            except (CheckpointError, OSError) as error:
                self.problems.append(str(error))
                continue
            self.index[key] = len(self.sources)
            self.sources.append(source)
        self.stop_if_unsound()
        self.base = self.index[model_key(recipe.base_model)] if recipe.base_model is not None else None
        self.donor = self.base if self.base is not None else 0
        self.vocabulary: Vocabulary | None = None
        self.originals = list(self.sources)
        self._passes: dict[str, int] = {}

    def stop_if_unsound(self) -> None:
        if self.problems:
            raise PlanError(list(dict.fromkeys(self.problems)))

    def align_vocabularies(self) -> None:
        spec = self.recipe.tokenizer
        if spec is None:
            return

        def index_of(name: str) -> int:
            return self.index[model_key(name)]

        try:
            vocabulary = plan_vocabulary(self.sources, spec, self.donor, index_of)
            placed, forced = {}, set()
            for token, rule in spec.tokens.items():
                row = vocabulary.tokens[token]
                if "source" not in rule or model_key(rule["source"]) not in self.index:
                    raise RecipeError(f"tokenizer tokens {token!r}: source must name one of the recipe's models")
                placed[row] = index_of(rule["source"])
                if vocabulary.row_of[placed[row]][row] < 0:
                    raise RecipeError(f"tokenizer tokens {token!r}: {rule['source']} has no such token")
                if rule.get("force"):
                    forced.add(row)
        except (CheckpointError, RecipeError, OSError) as error:
            self.problems.append(str(error))
            self.stop_if_unsound()
            raise AssertionError from error
        self.vocabulary = vocabulary
        self.sources = [
            AlignedSource(self.originals, i, vocabulary, self.donor, placed, frozenset(forced))
            for i in range(len(self.originals))
        ]

    def alias(self, source: int, name: str) -> str | None:
        """The tensor of ``source`` that stands for ``name``: itself, or a tied head's embedding."""
        tensors = self.sources[source].tensors
        if name in tensors:
            return name
        if HEAD.search(name) and self.sources[source].config.get("tie_word_embeddings", True):
            return next((n for n in tensors if EMBEDDING.search(n)), None)
        return None

    def levels(self, entry: ModelEntry | None, piece: Slice | None) -> list[Mapping[str, Any]]:
        levels = [entry.parameters] if entry else []
        levels += [piece.parameters] if piece else []
        return [*levels, self.recipe.parameters]

    def settings(
        self,
        name: str,
        depth: float,
        entries: Sequence[ModelEntry],
        everyone: Sequence[ModelEntry],
        piece: Slice | None,
    ) -> dict[str, Any]:
        """The method's arguments for one tensor; ``entries`` are the models without the base, ``everyone`` with it."""
        values: dict[str, Any] = {}
        for key, parameter in self.method.parameters.items():
            if parameter.per_model:
                values[key] = [setting(self.levels(e, piece), key, name, depth) for e in entries]
                if not parameter.required and all(v is None for v in values[key]):
                    del values[key]
            else:
                # A value for all may stand at a model (slerp's t often does); the first model that has one counts.
                found = [setting([e.parameters], key, name, depth) for e in everyone]
                value = next((v for v in found if v is not None), None)
                value = setting(self.levels(None, piece), key, name, depth) if value is None else value
                if value is not None:
                    values[key] = value
        return self.method.bind(len(entries), values)

    def check_parameters(self) -> None:
        """Every name, and every number wherever it stands, before any model is opened."""
        places = [("parameters", self.recipe.parameters)]
        places += [(f"parameters of {model_label(e.model)}", e.parameters) for e in self.recipe.entries()]
        places += [("parameters of a slice", s.parameters) for s in self.recipe.slices]
        for where, given in places:
            for key, value in given.items():
                name = "lambda" if key == "lambda_" else key
                if name in self.method.unused:
                    self.notes.append(f"{where}: {key} has no effect on {self.method.name}")
                    continue
                try:
                    parameter = self.method.parameter(name)
                    for leaf in _leaves(value):
                        parameter.check(leaf, self.method.name)
                except ValueError as error:
                    self.problems.append(f"{where}: {error}")

    def note_idle_filters(self, tensors: Sequence[TensorPlan]) -> None:
        """Say which filters are in no tensor's name."""
        places = [self.recipe.parameters, *(e.parameters for e in self.recipe.entries())]
        places += [s.parameters for s in self.recipe.slices]
        for given in places:
            for key, value in given.items():
                for entry in value if isinstance(value, (list, tuple)) else [value]:
                    wanted = entry.get("filter") if isinstance(entry, Mapping) else None
                    if wanted not in (None, "*") and not any(str(wanted) in t.name for t in tensors):
                        self.notes.append(f"{key}: filter {wanted!r} is in no tensor's name")

    def tensor(
        self,
        name: str,
        inputs: Sequence[tuple[int, str]],
        entries: Sequence[ModelEntry],
        piece: Slice | None,
        depth: float,
    ) -> TensorPlan | None:
        """Plan one output tensor from (source, name) of each entry, in the entries' order; the base is found here."""
        models = [(e, i) for e, i in zip(entries, inputs, strict=True) if i[0] != self.base]
        base: Input | None = None
        if self.base is not None:
            own = [i for i in inputs if i[0] == self.base]
            base_name = own[0][1] if own else self.alias(self.base, inputs[0][1] if inputs else name)
            if base_name is None:
                self.problems.append(f"{name}: the base model {self.sources[self.base].label} has no such tensor")
                return None
            base = Input(self.base, base_name)
        chosen = [Input(*i) for _, i in models]
        everything = [*chosen, *([base] if base else [])]
        infos = [self.sources[i.source].tensors[i.name] for i in everything]
        if len({i.shape for i in infos}) > 1:
            shown = ", ".join(
                f"{self.sources[i.source].label} {list(t.shape)}" for i, t in zip(everything, infos, strict=True)
            )
            hint = (
                ""
                if self.recipe.tokenizer or not (EMBEDDING.search(name) or HEAD.search(name))
                else (" (vocabularies differ; tokenizer_source: union or base would match them by token)")
            )
            self.problems.append(f"shapes differ: {name}: {shown}{hint}")
            return None
        shape = infos[0].shape
        if not all(i.dtype.is_floating_point for i in infos):
            if len({i.dtype for i in infos}) > 1:
                self.problems.append(f"dtypes differ: {name}: {', '.join(str(i.dtype) for i in infos)}")
                return None
            return TensorPlan(
                name, shape, infos[0].dtype, infos[0].dtype, tuple(everything), None, None, {}, "elements", 1
            )
        stored = reduce(torch.promote_types, (i.dtype for i in infos))
        asked = FLOAT_DTYPES[self.recipe.dtype] if self.recipe.dtype else None
        work = torch.float64 if torch.float64 in (stored, asked) else torch.float32
        dtype = FLOAT_DTYPES[self.recipe.out_dtype] if self.recipe.out_dtype else asked or stored
        try:
            self.method.check_inputs(len(chosen), base is not None)
            bound = self.settings(name, depth, [e for e, _ in models], entries, piece)
        except (ValueError, RecipeError) as error:
            self.problems.append(str(error))
            return None
        passes = self.passes(bound, len(chosen), base is not None)
        chunking = self.method.chunking_for(bound)
        return TensorPlan(name, shape, dtype, work, tuple(chosen), base, self.method, bound, chunking, passes)

    def passes(self, bound: dict[str, Any], models: int, has_base: bool) -> int:
        """How often the method reads a tensor: counted on a tiny one."""
        key = repr((sorted(bound.items()), models, has_base))
        if key not in self._passes:
            chunking = self.method.chunking_for(bound)
            made = [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(models + has_base)]
            made = [t.view(block_shape((4, 16), chunking)) for t in made]
            block = Block(made[:models], made[models] if has_base else None)
            noise = Noise() if self.method.noisy else None
            evaluation = Evaluation(self.method.function, bound, OneBlock(block, 64), noise)
            evaluation.measure()
            self._passes[key] = evaluation.passes + 1
        return self._passes[key]

    def whole_models(self) -> list[TensorPlan]:
        entries = list(self.recipe.models)
        members = [self.index[model_key(e.model)] for e in entries]
        everyone = list(dict.fromkeys([self.donor, *members]))
        names = list(dict.fromkeys(name for m in everyone for name in self.sources[m].tensors))
        missing: dict[int, list[str]] = {}
        planned = []
        layers = [layer for name in names if (layer := layer_of(name)) is not None]
        last = max(layers, default=0)
        for name in names:
            aliases = {m: self.alias(m, name) for m in everyone}
            lacking = [m for m, alias in aliases.items() if alias is None]
            if lacking and _COMPUTED.search(name):
                self.notes.append(f"{name} is computed, and not in every model: it is left out")
                continue
            for m in lacking:
                missing.setdefault(m, []).append(name)
            if lacking:
                continue
            inputs = [(m, alias) for m in members if (alias := aliases[m]) is not None]
            planned.append(self.tensor(name, inputs, entries, None, self.depth(name, last + 1)))
        for m, lost in missing.items():
            others = [self.sources[o].label for o in everyone if lost[0] in self.sources[o].tensors]
            self.problems.append(
                f"{self.sources[m].label} lacks {len(lost)} tensors that {_some(others)} have: {_some(lost)}"
            )
        return [t for t in planned if t is not None]

    @staticmethod
    def depth(name: str, layers: int, first: int = 0) -> float:
        layer = layer_of(name)
        if layer is None and HEAD.search(name):
            return 1.0
        if layer is None:
            return 0.0 if EMBEDDING.search(name) or "wpe" in name or "embed" in name else 1.0
        return (layer - first) / (layers - 1) if layers > 1 else 1.0

    def stacked_slices(self) -> list[TensorPlan]:
        planned: list[TensorPlan | None] = []
        first, out = self.recipe.slices[0], 0
        for number, piece in enumerate(self.recipe.slices):
            members = [self.index[model_key(s.model)] for s in piece.sources]
            ranges = [s.layer_range or (0, 0) for s in piece.sources]
            begin, end = ranges[0]
            for m, (_, stop) in zip(members, ranges, strict=True):
                count = 1 + max((layer_of(n) or 0 for n in self.sources[m].tensors), default=-1)
                if stop > count:
                    self.problems.append(
                        f"slice: layer_range ends at {stop}, {self.sources[m].label} has {count} layers"
                    )
            self.stop_if_unsound()
            everyone = [self.sources[m].tensors for m in members]
            outside = list(dict.fromkeys(n for names in everyone for n in names if layer_of(n) is None))
            if piece is first:
                planned += [self._outside(n, members, piece, 0.0) for n in outside if self.depth(n, 1) == 0.0]
            for step in range(end - begin):
                depth = step / (end - begin - 1) if end - begin > 1 else 1.0
                held = [
                    [_with_layer(n, out + step) for n in names if layer_of(n) == start + step]
                    for names, (start, _) in zip(everyone, ranges, strict=True)
                ]
                for name in dict.fromkeys(n for names in held for n in names):
                    inputs = []
                    for m, names, (start, _) in zip(members, held, ranges, strict=True):
                        if name not in names:
                            self.problems.append(f"{self.sources[m].label} has no {_with_layer(name, start + step)}")
                        inputs.append((m, _with_layer(name, start + step)))
                    self.stop_if_unsound()
                    planned.append(self.tensor(name, inputs, piece.sources, piece, depth))
            out += end - begin
            if number == len(self.recipe.slices) - 1:
                planned += [self._outside(n, members, piece, 1.0) for n in outside if self.depth(n, 1) == 1.0]
        return [t for t in planned if t is not None]

    def _outside(self, name: str, members: Sequence[int], piece: Slice, depth: float) -> TensorPlan | None:
        aliases = [(m, self.alias(m, name)) for m in members]
        for m, alias in aliases:
            if alias is None:
                self.problems.append(f"{self.sources[m].label} has no {name}")
                return None
        return self.tensor(name, [(m, a) for m, a in aliases if a], piece.sources, piece, depth)

    def check_copies(self, tensors: Sequence[TensorPlan]) -> None:
        """Integer and boolean buffers are copied when all models agree on them."""
        for t in tensors:
            if t.method is not None:
                continue
            first, *rest = t.inputs
            for begin in range(0, t.info.count, CHUNK):
                end = min(begin + CHUNK, t.info.count)
                own = self.sources[first.source].read(first.name, begin, end)
                for other in rest:
                    if not torch.equal(own, self.sources[other.source].read(other.name, begin, end)):
                        self.problems.append(f"{t.name}: is {t.dtype} and differs between models; it cannot be merged")
                        rest = [r for r in rest if r is not other]


def make_plan(
    recipe: MergeRecipe, *, max_shard_size: int = 5_000_000_000, threads: int = 1, allow_pickle: str | None = None
) -> MergePlan:
    """Check a recipe against its models' headers and lay out the output.

    Args:
        recipe: What to merge.
        max_shard_size: Bytes of tensors in a file.
        threads: For the estimate of memory.
        allow_pickle: ``"weights_only"`` admits pickled checkpoints.

    Raises:
        PlanError: With every problem found.
    """
    planner = _Planner(recipe, allow_pickle)
    problems, notes = compare_configs(planner.sources, planner.donor)
    planner.problems += problems
    planner.notes += notes
    distinct = {planner.index[model_key(e.model)] for e in recipe.entries()} - {planner.base}
    if not recipe.slices:
        try:
            planner.method.check_inputs(len(distinct), planner.base is not None)
        except ValueError as error:
            planner.problems.append(str(error))
    planner.stop_if_unsound()
    planner.align_vocabularies()
    tensors = planner.stacked_slices() if recipe.slices else planner.whole_models()
    names = [t.name for t in tensors]
    if len(set(names)) < len(names):
        planner.problems.append("the slices give one tensor twice")
    if recipe.slices and any(t.parameters.get("scope") == "global" for t in tensors):
        planner.problems.append("scope global ranks whole models; a recipe with slices can only use scope tensor")
    planner.stop_if_unsound()
    planner.check_copies(tensors)
    planner.note_idle_filters(tensors)
    planner.stop_if_unsound()
    placed, shards = shard_layout(tensors, max_shard_size)
    rows = planner.vocabulary.rows if planner.vocabulary else None
    return MergePlan(
        recipe,
        planner.sources,
        placed,
        shards,
        output_config(planner.sources, planner.donor, placed, rows, recipe.slices),
        planner.donor,
        planner.vocabulary,
        list(dict.fromkeys(planner.notes)),
        threads,
    )
