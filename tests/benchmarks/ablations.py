"""What ablations share: the settings that a config's grids stand for."""

from __future__ import annotations

import itertools
from typing import Any


def settings(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The base with each grid's combinations, each once."""
    found = []
    for grid in config["grids"]:
        for values in itertools.product(*grid.values()):
            made = config["base"] | dict(zip(grid, values, strict=True))
            if made not in found:
                found.append(made)
    return found
