"""Features of a frozen encoder, made once and kept in a folder, so that heads train in seconds.

A sequence is known by a hash of its tokens, an encoder by one of its weights: what is found is right, whichever pairs
it was made for, and an interrupted run goes on where it stopped.

    cache/
      ENCODER/              a hash of the encoder and the pooling
        CHUNK.safetensors   keys (S, 16) and features (S, W)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from model_components._folders import new_file
from model_components._modes import evaluating

from .template import Tokens, sequence_batch

_TOKENS = 8192  # of a batch
_BATCHES = 8  # of a file


@torch.no_grad()
def encoded(model: Any, sequences: Sequence[Tokens], cache: str | Path | None, progress: bool) -> np.ndarray:
    """(S, W) float32 features of sequences, of which equal ones are encoded once.

    Raises:
        ValueError: An encoder or a pooling that trains.
    """
    parts = {"encoder": model.encoder, "pool": model.pool}
    trained = [name for part, module in parts.items() for name, p in module.named_parameters(part) if p.requires_grad]
    if trained:
        raise ValueError(
            f"encode_: {len(trained)} tensors train that answers go through, such as {trained[0]}; needed "
            "freeze_(model, 'all') before, and a pooling without weights"
        )
    folder = None if cache is None else Path(cache) / _fingerprint(model)
    keys = [_key(one) for one in sequences]
    rows = _found(folder)
    missing = {key: one for key, one in zip(keys, sequences, strict=True) if key not in rows}
    order = sorted(missing, key=lambda key: (len(missing[key].ids), key))
    bar = tqdm(total=sum(len(one.ids) for one in missing.values()), desc="encoding", unit="tok", unit_scale=True,
               disable=not progress, leave=False, delay=1)  # fmt: skip
    with evaluating(model), bar:
        for batches in _chunks(order, missing):
            made = []
            for batch in batches:
                given = sequence_batch([missing[key] for key in batch])
                made.append(model.features(**{name: value.to(model.device) for name, value in given.items()}).cpu())
                bar.update(len(given["input_ids"]))
            chunk, features = [key for batch in batches for key in batch], torch.cat(made)
            rows |= zip(chunk, features.numpy(), strict=True)
            if folder is not None:
                table = torch.frombuffer(bytearray(b"".join(chunk)), dtype=torch.uint8).view(len(chunk), -1)
                name = hashlib.sha256(b"".join(chunk)).hexdigest()[:32]
                with new_file(folder / f"{name}.safetensors", "encode_") as part:
                    save_file({"keys": table, "features": features}, part)
    return np.stack([rows[key] for key in keys]) if keys else np.zeros((0, 0), np.float32)


def _key(tokens: Tokens) -> bytes:
    made = hashlib.sha256(f"{len(tokens.ids)} {tokens.begin} ".encode())
    made.update(tokens.ids.tobytes() + tokens.types.tobytes())
    return made.digest()[:16]


def _chunks(order: Sequence[bytes], sequences: dict[bytes, Tokens]) -> Iterator[list[list[bytes]]]:
    """Sequences in batches of so many tokens, and these in files."""
    batches: list[list[bytes]] = []
    room = 0
    for key in order:
        size = len(sequences[key].ids)
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


def _found(folder: Path | None) -> dict[bytes, np.ndarray]:
    """What earlier runs left; a file that cannot be read is passed over."""
    rows: dict[bytes, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None and folder.is_dir() else ():
        try:
            held = load_file(path)
            keys, features = held["keys"].numpy(), held["features"].numpy()
        except (SafetensorError, KeyError, OSError):
            continue
        rows |= zip((key.tobytes() for key in keys), features, strict=False)
    return rows


def _fingerprint(model: Any) -> str:
    """A hash of what features depend on but the tokens."""
    made = hashlib.sha256(repr((type(model.encoder).__name__, model.config.pooling)).encode())
    for name, tensor in sorted(model.encoder.state_dict().items()):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return made.hexdigest()[:32]
