"""The structures by name, and their configs as JSON has them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .config import Config, KroneckerConfig, LowRankConfig, PruneConfig

STRUCTURES: dict[str, type[Config]] = {"kronecker": KroneckerConfig, "low_rank": LowRankConfig, "prune": PruneConfig}


def structure_of(config: Config) -> str:
    """``"kronecker"``, ``"low_rank"`` or ``"prune"``."""
    return next(name for name, cls in STRUCTURES.items() if isinstance(config, cls))


def to_dict(config: Config) -> dict:
    """A config and its structure, as JSON has them."""
    return {"structure": structure_of(config)} | config.to_dict()


def from_dict(values: Mapping) -> Config:
    """The config of `to_dict`."""
    rest = dict(values)
    name = rest.pop("structure", "kronecker")
    if name not in STRUCTURES:
        raise ValueError(f"kronecker: structure is {name!r}, needed one of {', '.join(STRUCTURES)}")
    return STRUCTURES[name].from_dict(rest)


def to_json(configs: Mapping[str, Config]) -> str:
    """A map from names to configs as text."""
    return json.dumps({name: to_dict(config) for name, config in configs.items()}, indent=1)


def from_json(text: str) -> dict[str, Config]:
    """The map of `to_json`."""
    stored = json.loads(text)
    if not isinstance(stored, dict) or not all(isinstance(values, dict) for values in stored.values()):
        raise ValueError("kronecker: a plan's file is no map from names of layers to configs")
    return {name: from_dict(values) for name, values in stored.items()}
