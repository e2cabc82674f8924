"""Presets for GPT-2 124M, each named after the number of parameters of the resulting model.

Each preset maps patterns of layer names to configs.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import Config, KroneckerConfig


def _kronecker(a_shape: tuple[int, int], rank: int = 1) -> dict[str, Config]:
    config = KroneckerConfig(a_shape=a_shape, rank=rank)
    return {"*.mlp.c_fc": config, "*.mlp.c_proj": config.opposite()}


PRESETS: Mapping[str, Mapping[str, Config]] = {
    "gpt2-96m-model-dim": _kronecker((3072, 384)),
    # c_fc's weight is (3072, 768), so its B is (4, 1), and c_proj's is (1, 4)
    "gpt2-82m": _kronecker((768, 768)),
    "gpt2-80m": _kronecker((1024, 256), 2),
    "gpt2-68m": _kronecker((256, 64)),
}
"""``"gpt2-96m-model-dim"`` has factors A of half the model's width. The other presets have the
shapes of Krony-PT (arXiv 2412.12351)."""
