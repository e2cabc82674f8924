"""The hidden neurons of a mixture's experts: each expert is an MLP of its own, on the tokens that are routed to it.

Letters: E experts; I hidden neurons of each; H the block's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..surgery.mlps import Mlp
from .neurons import Middle, MlpWeights, Seen, fit_neurons

_EXPERT = Mlp(("gate_up_proj",), "down_proj", "halves")
NAMES = ("gate_up_proj", "down_proj")


def experts_shapes(module: nn.Module, keep: int) -> dict[str, torch.Size]:
    """The shapes of a stack's parameters with ``keep`` hidden neurons in each expert."""
    count, _, width = _matrices(module)[0].shape
    return {"gate_up_proj": torch.Size((count, 2 * keep, width)), "down_proj": torch.Size((count, width, keep))}


def fit_experts(
    module: nn.Module, calls: Sequence[tuple[Tensor, Tensor]], keep: int, config: PruneConfig
) -> tuple[dict[str, Tensor], float]:
    """The best ``keep`` hidden neurons of each expert, fitted towards what it said on the tokens that it gets now.

    Args:
        module: A stack of gated experts.
        calls: For each batch the tokens (N, H) and the experts of each (N, k), in the smaller model.
        keep: Number of hidden neurons that stay in each.
        config: As for an MLP.

    Returns:
        The stack's new parameters, and the relative error of all experts together, squared.
    """
    gate_up, down = _matrices(module)
    act_fn = cast("nn.Module", module.act_fn)

    def middle(said: Sequence[Tensor]) -> Tensor:
        gate, up = said[0].chunk(2, dim=-1)
        return act_fn(gate) * up

    new: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    apart, energy = 0.0, 0.0
    for expert in range(len(gate_up)):
        weights = MlpWeights([gate_up[expert].float()], [None], down[expert].float(), None, cast("Middle", middle))
        seen = Seen.nothing(down.shape[1], down.shape[2], down.device)
        for tokens, routed in calls:
            x = tokens[(routed == expert).any(-1)].float()
            seen.add(weights.hidden(x), weights(x), x if config.refit == "all" else None)
        small, error = fit_neurons(_EXPERT, weights, seen, keep, config)
        new["gate_up_proj"].append(small.ups[0])
        new["down_proj"].append(small.down)
        apart, energy = apart + error * seen.energy, energy + seen.energy
    return {n: torch.stack(parts).to(gate_up.dtype) for n, parts in new.items()}, apart / max(1e-30, energy)


def _matrices(module: nn.Module) -> tuple[Tensor, Tensor]:
    parameters = dict(module.named_parameters(recurse=False))
    return parameters["gate_up_proj"].detach(), parameters["down_proj"].detach()
