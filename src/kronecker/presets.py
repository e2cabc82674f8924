"""Presets for GPT-2 124M, named by the number of parameters that they leave.

Each preset maps patterns of layer names to configs.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import Config, KroneckerConfig, PruneConfig


def _kronecker(a_shape: tuple[int, int], rank: int = 1) -> dict[str, Config]:
    config = KroneckerConfig(a_shape=a_shape, rank=rank)
    return {"*.mlp.c_fc": config, "*.mlp.c_proj": config.opposite()}


def _neurons(count: int) -> dict[str, Config]:
    return {"*.mlp.c_*": PruneConfig(keep=count / 3072)}


PRESETS: Mapping[str, Mapping[str, Config]] = {
    "gpt2-96m": _neurons(1536),
    "gpt2-96m-model-dim": _kronecker((3072, 384)),
    "gpt2-85m": _neurons(933),
    # for c_fc, a weight of (3072, 768), this is B (4, 1); c_proj has B (1, 4)
    "gpt2-82m": _kronecker((768, 768)),
    "gpt2-80m": _kronecker((1024, 256), 2),
    "gpt2-68m": _kronecker((256, 64)),
}
"""The first and third drop hidden neurons, the second halves the model's width, the others have
Krony-PT's shapes."""
