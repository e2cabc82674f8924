"""Save and load masks, and write merged models as checkpoints (`bake`).

A file of masks holds hashes of the components that the masks belong to. `bake` passes the masked
components to `merge_models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_components._folders import check_new, new_file
from model_components._formats import check_format, reading, stamp

from ..dtypes import tensor_of
from ..files import CheckpointError, DictSource, LoraSource, Source, open_source
from ..functional import merge_models
from ..report import MergeReport
from .config import MaskConfig
from .layers import MaskedLayer
from .low_rank import LowRankLinear, LowRankMaskedLinear
from .masked_source import MaskedSource
from .model import MaskedModel, StoredAs

_FORMAT = "mergekit_lite masks"
_OPTIONS = ("max_shard_size", "dtype", "threads", "fresh", "progress")
MASKS = "masks.safetensors"


def save_masks(merger: MaskedModel, path: Path) -> Path:
    """Write the masks to a temporary file, and rename the file when it is complete."""
    metadata = {
        "format": _FORMAT,
        **{key: str(value) for key, value in stamp(1).items()},
        "config": merger.mask_config.to_json(),
        "components": json.dumps(merger.labels),
        "sha256": json.dumps(merger.hashes()),
        "dtype": str(merger.model.dtype),
        "over_base": json.dumps(merger.over_base),
    }
    masks = {name: mask.detach().cpu().contiguous() for name, mask in merger.masks().items()}
    with new_file(path, "save_masks") as part:
        save_file(masks, part, metadata)
    return path


def _metadata(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"load_masks: expected a file from save_masks, but {path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # safetensors raises its own class for every malformed file
        raise ValueError(
            f"load_masks: {path} is not a complete safetensors file ({error})"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"load_masks: {path} holds no masks: its format is {metadata.get('format')!r}, "
            f"expected {_FORMAT!r}"
        )
    check_format(metadata, 1, f"load_masks: {path}")
    return metadata


def read_config(path: Path) -> MaskConfig:
    """Return the config that the masks in a file were made with."""
    with reading(path, "load_masks"):
        return MaskConfig.from_json(_metadata(path)["config"])


def _check_made_for(merger: MaskedModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Raise an error if masks belong to other components, or have another config."""
    dtype = str(merger.model.dtype)
    theirs = json.loads(metadata["sha256"])
    names = json.loads(metadata["components"])
    if json.loads(metadata["over_base"]) != merger.over_base or len(theirs) != len(merger.labels):
        of = [" without a base", ", of which the last is the base (base=...)"]
        raise ValueError(
            f"load_masks: {path} is for {len(theirs)} "
            f"models{of[json.loads(metadata['over_base'])]}; this merger has "
            f"{len(merger.labels)} models{of[merger.over_base]}"
        )
    # checked before the hashes, which depend on the dtype and take long to compute
    if metadata["dtype"] != dtype:
        raise ValueError(
            f"load_masks: expected components of dtype {metadata['dtype']}, for which {path} was "
            f"made, got components of dtype {dtype}; load them in the expected dtype"
        )
    for k, (own, other) in enumerate(zip(merger.hashes(), theirs, strict=True)):
        if own != other:
            raise ValueError(
                f"load_masks: {path} was made for other components: expected component {k} to be "
                f"{names[k]} with SHA-256 {other[:12]}…, got {merger.labels[k]} with {own[:12]}…"
            )
    saved = MaskConfig.from_json(metadata["config"])
    config = merger.mask_config
    # mode, modules and initial do not change the meaning of stored values
    if (saved.granularity, saved.constraint) != (config.granularity, config.constraint):
        raise ValueError(
            f"load_masks: expected granularity {config.granularity!r} and constraint "
            f"{config.constraint!r}, got {saved.granularity!r} and {saved.constraint!r} in {path}"
        )


def load_masks(merger: MaskedModel, path: Path) -> dict[str, Tensor]:
    """Return the masks that a file holds.

    Raise an error if they do not belong to the merger's components and config.
    """
    with reading(path, "load_masks"):
        _check_made_for(merger, path, _metadata(path))
    masks = merger.masks()
    loaded = load_file(path)
    if odd := sorted(loaded.keys() ^ masks.keys()):
        raise ValueError(
            f"load_masks: expected the same masks in {path} and in the merger, but {odd[0]} is "
            f"only in the {'file' if odd[0] in loaded else 'merger'} ({len(odd)} differences)"
        )
    for name, values in loaded.items():
        if values.shape != masks[name].shape or not values.is_floating_point():
            raise ValueError(
                f"load_masks: {name} in {path} has shape {list(values.shape)} and dtype "
                f"{values.dtype}, expected shape {list(masks[name].shape)} and a "
                "floating-point dtype"
            )
        if not torch.isfinite(values).all():
            raise ValueError(f"load_masks: {name} in {path} contains NaN or infinity")
    return loaded


def bake(merger: MaskedModel, out: Path, options: Mapping[str, Any]) -> MergeReport:
    """Write the merged model as a checkpoint; see `Merger.bake`.

    If the files of all components hold tensors with the model's names and shapes, components are
    read from these files, otherwise from memory.
    """
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(f"bake: unknown option {unknown[0]!r}; options are {', '.join(_OPTIONS)}")
    check_new(out, "bake")
    masks = {name: mask.detach().cpu() for name, mask in merger.effective_masks().items()}
    if bad := [name for name, mask in masks.items() if not torch.isfinite(mask).all()]:
        raise ValueError(
            f"bake: the mask of {bad[0]} is not finite ({len(bad)} such masks); training has "
            "diverged, so train again with a lower learning rate"
        )
    count = len(merger.labels)
    sources = [source for k in range(count) if (source := _stored(merger, k)) is not None]
    if len(sources) < count:
        sources = [_resident(merger, k) for k in range(count)]
    dtypes = {name: value.dtype for name, value in merger.state(0).items()}
    # these layers sum changes before rounding, so the changes must not be rounded here, either
    factored = {
        name
        for name, (layer, _) in merger.places().items()
        if isinstance(layer, LowRankMaskedLinear)
    }
    # the index of the model whose config the result has: the base, or the first component
    plain = count - 1 if merger.over_base else 0
    models = [
        MaskedSource(
            source, k, masks, dtypes, rounds=lambda name: name not in factored, lone=k == plain
        )
        for k, source in enumerate(sources)
    ]
    # `merge_models` takes the config of its first model, but the base is last here
    models[0].config = sources[plain].config
    # the weights are 1, because every source is multiplied by its mask already
    report = merge_models(
        models, "linear", weight=[1.0] * len(models), normalize=False, out=out, **options
    )
    assert isinstance(report, MergeReport)
    return report


def stored_as(name: str) -> StoredAs:
    """Return the given name of a component, and a fingerprint of its files (None if unreadable)."""
    try:
        return StoredAs(name, open_source(name).fingerprint())
    except CheckpointError:  # for example, a pickled checkpoint
        return StoredAs(name, None)


def _stored(merger: MaskedModel, k: int) -> Source | None:
    """Return a component's files as a source, or None if its weights in memory must be used.

    Files are used if they are known to be the component's, and if they hold all of its tensors with
    the same names and shapes.

    Raises:
        ValueError: The files have changed since they were loaded.
    """
    if merger.sources is None or merger.sources[k].fingerprint is None:
        return None  # models that were passed in memory may differ from all files
    source = open_source(merger.sources[k].name)
    state = merger.state(k)
    if not all(
        n in source.tensors and source.tensors[n].shape == tuple(v.shape) for n, v in state.items()
    ):
        return None
    # a file that was touched, or copied back, may still hold the same values
    if source.fingerprint() != merger.sources[k].fingerprint:
        for name, value in state.items():
            if not _is_stored(source, name, merger.places().get(name), k, value):
                raise ValueError(
                    f"bake: {source.label} has changed since it was loaded ({name}); expected the "
                    "files with which the masks were trained"
                )
    return source


def _is_stored(
    source: Source, name: str, place: tuple[MaskedLayer, str] | None, k: int, value: Tensor
) -> bool:
    """Return whether files still hold a tensor's values, or a layer's factors, as loaded."""
    module = None if place is None else place[0].components[k]
    if isinstance(module, LowRankLinear) and name.endswith("weight"):
        pair = source.pair(name) if isinstance(source, LoraSource) else None
        return (
            pair is not None
            # alpha is in the adapter's config, and can change while the factors stay the same
            and pair.scale == module.scale
            and all(
                torch.equal(torch.from_numpy(factor).to(own), own)
                for factor, own in ((pair.down, module.down), (pair.up, module.up))
            )
        )
    stored = (
        tensor_of(source.read(name, 0, source.tensors[name].count))
        .to(value.dtype)
        .view(value.shape)
    )
    return torch.equal(stored, value.cpu())


def _resident(merger: MaskedModel, k: int) -> Source:
    """Return a source of a component's weights in memory, with its folder's tokenizer files."""
    # a model that was created from a config has no ``architectures`` in its config
    config = {**merger.model.config.to_dict(), "architectures": [type(merger.model).__name__]}
    source = DictSource(merger.state(k), merger.labels[k], config)
    if Path(merger.labels[k]).is_dir():
        source.folder = Path(merger.labels[k])
    else:
        source.folder = None
    return source
