"""Checkpoints of any size that hold no weights: true headers over sparse files, for what reads
headers only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]


def llama_shapes(
    hidden: int, mlp: int, layers: int, vocabulary: int, keys: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama with an untied head; ``keys``: width of all keys of a token."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    shapes |= {"lm_head.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {p + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {p + f"self_attn.{n}_proj.weight": (keys, hidden) for n in "kv"}
        shapes |= {p + f"mlp.{n}_proj.weight": (mlp, hidden) for n in ("gate", "up")}
        shapes |= {p + "mlp.down_proj.weight": (hidden, mlp)}
        shapes |= {p + f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return shapes


def write_headers(folder: Path, shapes: Shapes, tensors_a_file: int = 40) -> Path:
    """A folder with a config, an index and files of bfloat16 tensors that take no space on disk."""
    folder.mkdir(parents=True)
    names, weight_map = list(shapes), {}
    for begin in range(0, len(names), tensors_a_file):
        file, header, end = f"model-{begin:05d}.safetensors", {}, 0
        for name in names[begin : begin + tensors_a_file]:
            size = 2 * math.prod(shapes[name])
            header[name] = {
                "dtype": "BF16",
                "shape": list(shapes[name]),
                "data_offsets": [end, end + size],
            }
            weight_map[name], end = file, end + size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": False})
    )
    return folder
