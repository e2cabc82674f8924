"""Features of a frozen encoder, made once and kept in a folder, so that heads train in seconds.

Features are looked up by a hash of the sequence's tokens and one of the encoder's config, weights
and active adapters: any other pairs can use them, and an interrupted run goes on where it stopped.

    cache/
      ENCODER/                a hash of the encoder's config, weights and adapters
        POOLING/              such as "mean"
          CHUNK.safetensors   keys (S, 16) and features (S, W)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from model_components._devices import warn_if_slow
from model_components._modes import evaluating
from model_components._stages import Stage, hash_of

from ..judge import Judge
from ..packing import config_text
from .template import Tokens, on_device, sequence_batch

_TOKENS = 8192  # of a batch
_BATCHES = 8  # of a file
# of peft's layers, in no state dict
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


@torch.no_grad()
def encoded(
    model: Judge, sequences: Sequence[Tokens], cache: str | Path | None, progress: bool
) -> np.ndarray:
    """Return float32 features of sequences, (S, W); equal sequences are encoded once.

    Raises:
        ValueError: An encoder that trains.
    """
    if trained := [name for name, p in model.encoder.named_parameters() if p.requires_grad]:
        raise ValueError(
            f"encode_: {len(trained)} of the encoder's tensors train, such as {trained[0]}; call "
            "freeze_(model, 'all') before"
        )
    warn_if_slow("encode_", model.encoder)
    kinds = model.pool.pooling
    if cache is None:
        stages: dict[str, Stage] = {}
    else:
        stages = _stages(model, Path(cache))
    keys = list(map(_key, sequences))
    rows = {kind: _stored(stages.get(kind)) for kind in kinds}
    missing = {}
    for key, one in zip(keys, sequences, strict=True):
        if not all(key in of_kind for of_kind in rows.values()):
            missing[key] = one
    # like lengths share a batch; the key breaks ties, so that every run makes the same files
    order = sorted(missing, key=lambda key: (len(missing[key].ids), key))
    bar = tqdm(
        total=sum(len(one.ids) for one in missing.values()),
        desc="encoding",
        unit="tok",
        unit_scale=True,
        disable=not progress,
        leave=False,
        delay=1,
    )
    with bar:
        for batches in _chunks(order, missing):
            features = _read(model, batches, missing, bar)
            chunk = list(chain.from_iterable(batches))
            # kept apart, so that another mix of poolings finds those that are there
            for kind, pooled in zip(kinds, features.chunk(len(kinds), 1), strict=True):
                rows[kind] |= zip(chunk, pooled.numpy(), strict=True)
                if kind in stages:
                    _store(stages[kind], chunk, pooled)
    if not keys:
        return np.zeros((0, 0), np.float32)
    columns = []
    for kind in kinds:
        columns.append(np.stack([rows[kind][key] for key in keys]))
    return np.concatenate(columns, 1)


def _read(
    model: Judge,
    batches: Sequence[Sequence[bytes]],
    sequences: Mapping[bytes, Tokens],
    bar: tqdm,
) -> Tensor:
    """Let the encoder read batches of sequences, and return features, (S, W), on the CPU."""
    features = []
    with evaluating(model), torch.autocast(model.device.type, enabled=False):
        for batch in batches:
            inputs = sequence_batch([sequences[key] for key in batch])
            features.append(model.features(**on_device(inputs, model.device)).cpu())
            bar.update(len(inputs["input_ids"]))
    return torch.cat(features)


def _store(stage: Stage, keys: Sequence[bytes], features: Tensor) -> None:
    joined = b"".join(keys)
    # bytearray, as tensors have to lie in memory that can be written
    table = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(keys), -1)
    # named by its keys: runs side by side never write different things under one name
    name = hashlib.sha256(joined).hexdigest()[:32]
    stage.store(name, {"keys": table, "features": features})


def _key(tokens: Tokens) -> bytes:
    # the length says where ids end and types begin; pooling depends on begin
    digest = hashlib.sha256(f"{len(tokens.ids)} {tokens.begin} ".encode())
    digest.update(tokens.ids.tobytes() + tokens.types.tobytes())
    return digest.digest()[:16]


def _chunks(order: Sequence[bytes], sequences: dict[bytes, Tokens]) -> Iterator[list[list[bytes]]]:
    """Yield what one file holds: batches of some `_TOKENS` tokens each."""
    batches: list[list[bytes]] = []
    room = 0
    for key in order:
        size = len(sequences[key].ids)
        # a sequence longer than a whole batch comes to be alone in one
        if size > room:
            if len(batches) == _BATCHES:
                yield batches
                batches = []
            batches.append([])
            room = _TOKENS
        batches[-1].append(key)
        room -= size
    if batches:
        yield batches


def _stored(stage: Stage | None) -> dict[bytes, np.ndarray]:
    """Return the features that earlier runs stored whole, by the keys of their sequences."""
    rows: dict[bytes, np.ndarray] = {}
    if stage is None or stage.folder is None:
        return rows
    for path in sorted(stage.folder.glob("*.safetensors")):
        part = stage.load(path.stem)
        # else it was cut short or changed on the disk, and is made again
        if part is not None:
            keys = map(np.ndarray.tobytes, part[0]["keys"].numpy())
            rows |= zip(keys, part[0]["features"].numpy(), strict=True)
    return rows


def _stages(model: Judge, cache: Path) -> dict[str, Stage]:
    """Return the stage of each kind of pooling's features."""
    key = hash_of(model.encoder.state_dict().items(), *_described(model))
    return {kind: Stage(cache / key / kind, key, "encode_") for kind in model.pool.pooling}


def _described(model: Judge) -> list[str]:
    """Describe the encoder's class, its config, and what peft's layers do with their weights."""
    described = [type(model.encoder).__name__, config_text(model.encoder.config)]
    for name, module in model.encoder.named_modules():
        # every layer of peft's has it, whatever kind of adapter
        if hasattr(module, "adapter_layer_names"):
            state = [getattr(module, part, None) for part in _ADAPTERS]
            described.append(repr((name, *state)))
    return described


def fingerprint(model: Judge) -> str:
    """Return a hash of an encoder, its config, its pooling and its adapters."""
    described = [*_described(model), repr(model.pool.pooling)]
    return hash_of(model.encoder.state_dict().items(), *described)
