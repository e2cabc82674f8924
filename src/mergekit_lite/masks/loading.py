"""Load components from disk, and fold in LoRA adapters as `merge_models` does.

Configs and tokenizers are compared first. Then each model is loaded once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoConfig, PreTrainedModel

from model_components._formats import reading

from ..dtypes import tensor_of
from ..files import CheckpointError, find_folder, open_source
from ..files.adapter import Adapter, AdapterSource, more_than_lora
from ..vocabulary import has_tokenizer, read_vocabulary
from .components import refuse_different, say_or_refuse
from .low_rank import with_adapter

# options of from_pretrained that locate a model
_WHERE = ("trust_remote_code", "revision", "token", "subfolder", "cache_dir", "local_files_only")
_TOKENS = 0.01  # fraction of tokens that may have other names: fine-tunes rename reserved tokens


def load_components(
    paths: Sequence[str | os.PathLike[str]],
    auto_class: Any,
    dtype: str | torch.dtype,
    options: Mapping[str, object],
    *,
    base: str | os.PathLike[str] | None = None,
    low_rank: bool = False,
    strict: bool,
) -> tuple[list[PreTrainedModel], list[str]]:
    """Compare configs and tokenizers without reading weights, then load each model once.

    Args:
        paths: Folders, hub ids, ``"base+adapter"``, or folders of LoRA adapters whose config names
            their base.
        auto_class: The transformers class that loads the models.
        dtype: ``"auto"`` or a dtype.
        options: Arguments of ``auto_class.from_pretrained``. Arguments that are fields of the
            config replace the config's values.
        base: Path of the base, which is the last of the returned models.
        low_rank: Whether adapters of the base's linear layers are kept as factors, which share the
            base's weights, instead of being folded in.
        strict: Whether different settings are an error; otherwise warn.

    Returns:
        The models, and the name by which `merge_models` would load each of them.

    Raises:
        ValueError: There are fewer than two models (fewer than one with a base), or masks cannot
            merge them.
    """
    if isinstance(paths, (str, os.PathLike)) or len(paths) < (2 if base is None else 1):
        raise ValueError(
            f"Merger: got {paths!r}, expected a list of two or more models, or one and a base"
        )
    given = [os.fspath(path) for path in paths]
    if base is not None:
        given.append(os.fspath(base))
    named = [_Checkpoint.of(path, options) for path in given]
    making = _making(dtype, options)
    labels = [name.label for name in named]
    configs = [name.config for name in named]
    folders = [name.path for name in named]
    refuse_unlike(configs, folders, labels, auto_class, making, strict=strict)
    models: list[PreTrainedModel] = []
    # the base first, because other models may share its weights
    for name in reversed(named):
        model = None
        if low_rank and models:
            model = _adapted(name, named[-1], models[-1])
        if model is None:
            model = _load_model(auto_class, name, dtype)
        models.insert(0, model)
    return models, labels


def _making(dtype: object, options: Mapping[str, object]) -> dict[str, object]:
    """Return ``dtype`` and those loading options that ``from_config`` also takes."""
    making: dict[str, object] = {}
    if dtype != "auto":
        making["dtype"] = dtype
    if options.get("trust_remote_code"):
        making["trust_remote_code"] = True
    return making


def _adapted(
    name: _Checkpoint, base: _Checkpoint, model: PreTrainedModel
) -> PreTrainedModel | None:
    """Return the base with an adapter's factors, or None if the adapter has to be folded in.

    Also return None if ``name`` is not the base with an adapter.
    """
    # adapters were not trained for a base that has another adapter folded in
    if base.adapter is not None or name.adapter is None or not _are_one(name.path, base.path):
        return None
    folder = find_folder(name.adapter)
    # DoRA and similar adapters are not a product of two factors, so they are folded in
    if more_than_lora(folder) is not None:
        return None
    return with_adapter(model, Adapter(folder))


@dataclass(frozen=True)
class _Checkpoint:
    """A model to load: its path, its adapter's path, its config, and its loading options."""

    path: str
    adapter: str | None
    config: object
    options: Mapping[str, object]

    @classmethod
    def of(cls, given: str, options: Mapping[str, object]) -> Self:
        """Read the config of a model, and apply the options that are config fields."""
        path, adapter = _with_base(given)
        config, rest = _config(path, options)
        # reading the config consumes these options, but loading the weights needs them, too
        where = {name: value for name, value in options.items() if name in _WHERE}
        return cls(path, adapter, config, where | rest)

    @property
    def label(self) -> str:
        """The name of the model in messages and merges."""
        return self.path if self.adapter is None else f"{self.path}+{self.adapter}"


def _load_model(auto_class: Any, name: _Checkpoint, dtype: object) -> PreTrainedModel:
    """Load a model and fold its adapter in."""
    model = _load_complete_model(auto_class, name.path, name.config, dtype, name.options)
    if name.adapter is not None:
        _fold_in(model, name.label)
    return model


def _load_complete_model(
    auto_class: Any, path: str, config: object, dtype: object, options: Mapping[str, object]
) -> PreTrainedModel:
    """Load a model; raise an error if its checkpoint lacks weights."""
    model, loading_info = auto_class.from_pretrained(
        path, config=config, dtype=dtype, output_loading_info=True, **options
    )
    model.eval()
    lost = sorted(loading_info["missing_keys"])
    if lost:
        raise ValueError(
            f"Merger: {path} lacks {lost[0]} ({len(lost)} such parameters), which "
            f"{type(model).__name__} would initialize at random; expected a complete checkpoint"
        )
    return model


def refuse_unlike(
    configs: Sequence[object],
    folders: Sequence[str | os.PathLike[str]],
    labels: Sequence[str],
    auto_class: Any,
    making: Mapping[str, object],
    *,
    strict: bool,
) -> None:
    """Raise an error if models' configs or tokenizers differ, before any weight is read.

    Args:
        configs: The models' configs.
        folders: The models' folders or hub ids.
        labels: The models' names in messages.
        auto_class: The transformers class that loads the models.
        making: Further arguments of ``auto_class.from_config``.
        strict: Whether different settings and tokenizers are an error; otherwise warn.
    """
    described = []
    for config, label in zip(configs, labels, strict=True):
        with reading(f"config.json of {label}", "Merger"), torch.device("meta"):
            described.append(auto_class.from_config(config, **making))
    refuse_different(described, labels, values=False, strict=strict)
    say_or_refuse(_vocabularies(folders, labels), strict=strict)


def _are_one(one: str, other: str) -> bool:
    """Return whether two names refer to the same folder."""
    try:
        # a relative and an absolute path, or a hub id and its cached folder, may be one model
        return one == other or find_folder(one).resolve() == find_folder(other).resolve()
    except CheckpointError:
        return False


def _with_base(path: str) -> tuple[str, str | None]:
    """Return the path of the full model, and the path of its adapter (None if it has none)."""
    folder = Path(path)
    if not folder.is_dir() and "+" in path:
        base, _, adapter = path.rpartition("+")
        return base, adapter
    settings = folder / "adapter_config.json"
    # a folder with a complete model is loaded as a model, even if it has an adapter's config
    if not settings.is_file() or (folder / "config.json").is_file():
        return path, None
    with reading(settings, "Merger"):
        base = json.loads(settings.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError(
            f"Merger: expected a model, got {path}, a LoRA adapter whose config names no base; "
            f"pass it as MODEL+{path}"
        )
    return base, path


def _config(path: str, options: Mapping[str, object]) -> tuple[object, dict[str, object]]:
    """Apply the options that are config fields; return the config and the remaining options."""
    try:
        # pyrefly: ignore[bad-return]: return_unused_kwargs gives a pair
        return AutoConfig.from_pretrained(path, return_unused_kwargs=True, **options)
    except OSError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"Merger: expected a model's folder or hub id, got {path}, which is not a folder "
            f"and cannot be loaded from the hub ({reason})"
        ) from error


def _vocabularies(bases: Sequence[str | os.PathLike[str]], labels: Sequence[str]) -> list[str]:
    """Return messages about differences between the tokenizers in the folders that have one."""
    try:
        known = {}
        for base, label in zip(bases, labels, strict=True):
            folder = find_folder(os.fspath(base))
            if has_tokenizer(folder):
                # by folder, so that adapters of one base are read and compared once
                known[folder.resolve()] = (label, read_vocabulary(folder, label))
    except CheckpointError:
        # a folder is missing, or its kind of tokenizer is unsupported; sizes are compared elsewhere
        return []
    if len(known) < 2:
        return []
    (first, first_ids), *others = known.values()
    differences = []
    for label, ids in others:
        both = first_ids.keys() & ids.keys()
        moved = next((token for token in both if first_ids[token] != ids[token]), None)
        if moved is not None:
            differences.append(
                f"their tokenizers differ: the id of {moved!r} is {first_ids[moved]} ({first}) and "
                f"{ids[moved]} ({label}); align the vocabularies first: merge_models([a, b], "
                "weight=[1, 0], tokenizer_source='union') writes a with the tokens of both"
            )
        elif len(first_ids.keys() ^ ids.keys()) > 2 * _TOKENS * max(len(first_ids), len(ids)):
            # factor 2, because a renamed token is missing on both sides
            differences.append(f"their tokenizers differ: {label} has other tokens than {first}")
    return differences


@torch.no_grad()
def _fold_in(model: PreTrainedModel, name: str) -> None:
    """Set a model's weights that its adapter changes to the values that `merge_models` reads."""
    source = open_source(name)
    assert isinstance(source, AdapterSource)
    state = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    for tensor in source.changed:
        # files may add or leave out the prefix of the model below the head
        names = (tensor, f"{prefix}{tensor}", tensor.removeprefix(prefix))
        target = next((name for name in names if name in state), None)
        if target is None:
            raise ValueError(
                f"Merger: {name}: the adapter changes {tensor}, which {type(model).__name__} does "
                "not have"
            )
        values = tensor_of(source.read(tensor, 0, source.tensors[tensor].count))
        state[target].copy_(values.view(state[target].shape))
