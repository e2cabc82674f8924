"""Presets for GPT-2 124M: maps from names of layers to configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .config import Config, KroneckerConfig, PruneConfig


def _kronecker(a_shape: tuple[int, int], rank: int = 1) -> dict[str, Config]:
    config = KroneckerConfig(a_shape=a_shape, rank=rank)
    return {"*.mlp.c_fc": config, "*.mlp.c_proj": config.opposite()}


def _neurons(count: int) -> dict[str, Config]:
    return {"*.mlp.c_*": PruneConfig(keep=count / 3072)}


PRESETS: Mapping[str, Mapping[str, Config]] = {
    "gpt2-96m": _neurons(1536),
    "gpt2-96m-model-dim": _kronecker((3072, 384)),
    "gpt2-93m": _kronecker((1024, 256), 4),
    "gpt2-87m": _kronecker((1024, 256), 3),
    "gpt2-85m": _neurons(933),
    "gpt2-82m": _kronecker((768, 768)),
    "gpt2-82m-2x2": _kronecker((1536, 384)),
    "gpt2-80m": _kronecker((1024, 256), 2),
    "gpt2-74m": _kronecker((1024, 256)),
    "gpt2-69m": _kronecker((256, 64), 2),
    "gpt2-68m": _kronecker((256, 64)),
    "gpt2-68m-64x32": _kronecker((64, 32)),
}
"""For GPT-2 124M, by the size they leave: ``gpt2-96m`` and ``gpt2-85m`` drop hidden neurons, ``gpt2-96m-model-dim``
halves the model's width, the others are Kronecker sums of Krony-PT's shapes."""


def preset(name: str, *, init: str | None = None, scales: bool = False) -> dict[str, Config]:
    """A preset's map from layer names to configs.

    Args:
        name: One of `PRESETS`.
        init: Where Kronecker factors start, instead of ``"sequential"``.
        scales: A trainable number for each of their terms.

    Returns:
        What `convert_` takes, or `prune_` of a preset that drops neurons.

    Raises:
        ValueError: An unknown name, or a start or scales for one that drops neurons.

    >>> preset("gpt2-80m")["*.mlp.c_proj"].a_shape
    (256, 1024)
    """
    if name not in PRESETS:
        raise ValueError(f"kronecker: preset is {name!r}, needed one of {', '.join(PRESETS)}")
    configs: dict[str, Config] = {}
    for pattern, config in PRESETS[name].items():
        if isinstance(config, KroneckerConfig):
            config = replace(config, scales=scales, init=init or config.init)
        elif init not in (None, config.init) or scales:
            raise ValueError(f"kronecker: preset {name} drops neurons, which have no init {init!r} and no scales")
        configs[pattern] = config
    return configs
