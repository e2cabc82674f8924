"""Cache a frozen encoder's features in a folder, so that heads can be trained in seconds.

Features are looked up by a hash of the sequence's tokens, and a hash of the encoder's config,
weights and active adapters. Therefore other pairs with the same prompt and answer can use them, and
an interrupted run continues where it stopped.

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

from model_components._devices import on_device, warn_if_slow
from model_components._modes import evaluating
from model_components._stages import Stage, hash_of

from ..judge import Judge
from ..packing import config_text
from .template import Tokens, sequence_batch

_TOKENS = 8192  # number of tokens in a batch
_BATCHES = 8  # number of batches in a file
# attributes of peft's layers that are not in the state dict
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


@torch.no_grad()
def encoded(
    model: Judge, sequences: Sequence[Tokens], cache: str | Path | None, progress: bool
) -> np.ndarray:
    """Return the float32 features of sequences, (S, W); equal sequences are encoded only once.

    Raises:
        ValueError: The encoder is not frozen.
    """
    if trained := [name for name, p in model.encoder.named_parameters() if p.requires_grad]:
        raise ValueError(
            f"encode_: expected a frozen encoder, got {len(trained)} trainable tensors, such as "
            f"{trained[0]}; call freeze_(model, 'all') first"
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
    # sequences of similar length share a batch; the key breaks ties, so that all runs write the
    # same files
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
            # stored separately, so that other combinations of poolings can use them
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
    """Encode batches of sequences; return features, (S, W), on the CPU."""
    features = []
    with evaluating(model), torch.autocast(model.device.type, enabled=False):
        for batch in batches:
            inputs = sequence_batch([sequences[key] for key in batch])
            features.append(model.features(**on_device(inputs, model.device)).cpu())
            bar.update(len(inputs["input_ids"]))
    return torch.cat(features)


def _store(stage: Stage, keys: Sequence[bytes], features: Tensor) -> None:
    joined = b"".join(keys)
    # bytearray, because tensors need writable memory
    table = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(keys), -1)
    # named by its keys, so that parallel runs never write different data to the same file
    name = hashlib.sha256(joined).hexdigest()[:32]
    stage.store(name, {"keys": table, "features": features})


def _key(tokens: Tokens) -> bytes:
    # the length shows where ids end and types begin; pooling depends on begin
    digest = hashlib.sha256(f"{len(tokens.ids)} {tokens.begin} ".encode())
    digest.update(tokens.ids.tobytes() + tokens.types.tobytes())
    return digest.digest()[:16]


def _chunks(order: Sequence[bytes], sequences: dict[bytes, Tokens]) -> Iterator[list[list[bytes]]]:
    """Yield, for each cache file, a list of batches, each of about `_TOKENS` tokens."""
    batches: list[list[bytes]] = []
    room = 0
    for key in order:
        size = len(sequences[key].ids)
        # a sequence longer than a batch gets a batch of its own
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
    """Return the features in complete files of earlier runs, by the keys of their sequences."""
    rows: dict[bytes, np.ndarray] = {}
    if stage is None or stage.folder is None:
        return rows
    for path in sorted(stage.folder.glob("*.safetensors")):
        part = stage.load(path.stem)
        # otherwise the file is truncated or damaged, and its features are computed again
        if part is not None:
            keys = map(np.ndarray.tobytes, part[0]["keys"].numpy())
            rows |= zip(keys, part[0]["features"].numpy(), strict=True)
    return rows


def _stages(model: Judge, cache: Path) -> dict[str, Stage]:
    """Return, for each kind of pooling, the `Stage` that stores its features."""
    key = hash_of(model.encoder.state_dict().items(), *_described(model))
    return {kind: Stage(cache / key / kind, key, "encode_") for kind in model.pool.pooling}


def _described(model: Judge) -> list[str]:
    """Return texts that describe the encoder's class and config, and the state of peft's layers."""
    described = [type(model.encoder).__name__, config_text(model.encoder.config)]
    for name, module in model.encoder.named_modules():
        # every peft layer has this attribute, whatever the kind of adapter
        if hasattr(module, "adapter_layer_names"):
            state = [getattr(module, part, None) for part in _ADAPTERS]
            described.append(repr((name, *state)))
    return described


def fingerprint(model: Judge) -> str:
    """Return a hash of a model's encoder, its config and adapters, and the model's pooling."""
    described = [*_described(model), repr(model.pool.pooling)]
    return hash_of(model.encoder.state_dict().items(), *described)
