"""Presets for GPT-2 124M: maps from names of layers to configs."""

from __future__ import annotations

from dataclasses import replace

from .config import KroneckerConfig


def _gpt2(a_shape: tuple[int, int], rank: int = 1, scales: bool = False) -> dict[str, KroneckerConfig]:
    config = KroneckerConfig(a_shape=a_shape, rank=rank, scales=scales)
    return {"*.mlp.c_fc": config, "*.mlp.c_proj": config.opposite()}


PRESETS: dict[str, dict[str, KroneckerConfig]] = {
    "gpt2-96m": _gpt2((1536, 768)),
    "gpt2-96m-model-dim": _gpt2((3072, 384)),
    "gpt2-93m": _gpt2((1024, 256), 4),
    "gpt2-87m": _gpt2((1024, 256), 3),
    "gpt2-82m": _gpt2((768, 768)),
    "gpt2-82m-2x2": _gpt2((1536, 384)),
    "gpt2-80m": _gpt2((1024, 256), 2),
    "gpt2-74m": _gpt2((1024, 256)),
    "gpt2-69m": _gpt2((256, 64), 2),
    "gpt2-68m": _gpt2((256, 64)),
    "gpt2-68m-64x32": _gpt2((64, 32)),
}
"""For GPT-2 124M, by the size they leave; ``gpt2-96m`` halves hidden neurons, ``-model-dim`` the model's width."""


def preset(name: str, *, init: str | None = None, scales: bool = False) -> dict[str, KroneckerConfig]:
    """A preset's map from layer names to configs.

    >>> preset("gpt2-80m")["*.mlp.c_proj"].a_shape
    (256, 1024)
    """
    if name not in PRESETS:
        raise ValueError(f"kronecker: preset is {name!r}, needed one of {', '.join(PRESETS)}")
    return {p: replace(c, scales=scales, init=init or c.init) for p, c in PRESETS[name].items()}
