"""A mixture's experts: each is an MLP of its own, fitted on the tokens that are routed to it in the smaller model.

Letters: E experts; I hidden neurons of each; H the block's width; N tokens, k experts of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..config import KroneckerConfig, PruneConfig
from ..layers.experts import KroneckerExperts
from ..layers.weights import start
from ..surgery.mlps import Mlp
from .factors import fit_factors
from .mlp import Matrix, Middle, MlpWeights, Seen
from .neurons import fit_neurons

_EXPERT = Mlp(("gate_up_proj",), "down_proj", "halves")
_NAMES = ("gate_up_proj", "down_proj")

Routed = Sequence[tuple[Tensor, Tensor]]  # for each batch the tokens (N, H) and the experts of each (N, k)


def experts_shapes(module: nn.Module, keep: int) -> dict[str, torch.Size]:
    """The shapes of a stack's parameters with ``keep`` hidden neurons in each expert."""
    count, _, width = _matrices(module)[0].shape
    return {"gate_up_proj": torch.Size((count, 2 * keep, width)), "down_proj": torch.Size((count, width, keep))}


def fit_expert_neurons(
    module: nn.Module, routed: Routed, keep: int, config: PruneConfig
) -> tuple[dict[str, Tensor], float]:
    """The best ``keep`` hidden neurons of each expert.

    Args:
        module: A stack of gated experts.
        routed: What it gets in the smaller model.
        keep: Number of hidden neurons that stay in each.
        config: As for an MLP.

    Returns:
        The stack's new parameters, and the relative error of all experts together, squared.
    """
    new: dict[str, list[Tensor]] = {name: [] for name in _NAMES}
    apart, energy = 0.0, 0.0
    for weights, seen in _experts(module, routed, keep_inputs=config.refit == "all"):
        small, error = fit_neurons(_EXPERT, weights, seen, keep, config)
        new["gate_up_proj"] += small.ups[0]
        new["down_proj"] += small.down
        apart, energy = apart + error * seen.energy, energy + seen.energy
    dtype = _matrices(module)[0].dtype
    return {n: torch.stack(parts).to(dtype) for n, parts in new.items()}, apart / max(1e-30, energy)


def fit_expert_factors(module: nn.Module, routed: Routed, config: KroneckerConfig) -> tuple[dict[str, Tensor], float]:
    """Each expert's matrices as Kronecker sums; an expert that no token is routed to starts by Van Loan.

    Args:
        module: A stack of gated experts.
        routed: What it gets in the smaller model.
        config: Of gate_up_proj; down_proj has the opposite shapes.

    Returns:
        The state of a `KroneckerExperts`, and the relative error of all experts together, squared.
    """
    layer = KroneckerExperts.like(module, config)
    configs = {"gate_up_proj": config, "down_proj": config.opposite()}
    apart, energy = 0.0, 0.0
    for expert, (weights, seen) in enumerate(_experts(module, routed, keep_inputs=True)):
        if seen.count:
            small, error, _ = fit_factors(_EXPERT, weights, seen, configs)
            pairs: list[Matrix] = [small.ups[0], small.down]
            apart, energy = apart + error * seen.energy, energy + seen.energy
        else:
            matrices = (*weights.ups[0], *weights.down)
            shapes = [c.shapes(*w.shape)[1] for c, w in zip(configs.values(), matrices, strict=True)]
            both = zip(matrices, shapes, configs.values(), strict=True)
            pairs = [start(w, shape, own, None, alone=True)[:2] for w, shape, own in both]
        for name, (a, b) in zip(("gate_up", "down"), pairs, strict=True):
            layer.get_parameter(f"{name}_a")[expert].copy_(a)
            layer.get_parameter(f"{name}_b")[expert].copy_(b)
    return layer.state_dict(), apart / max(1e-30, energy)


def _experts(module: nn.Module, routed: Routed, *, keep_inputs: bool) -> Iterator[tuple[MlpWeights, Seen]]:
    """Each expert's weights, and what it sees and should go on saying."""
    gate_up, down = _matrices(module)
    act_fn = cast("nn.Module", module.act_fn)

    def middle(said: Sequence[Tensor]) -> Tensor:
        gate, up = said[0].chunk(2, dim=-1)
        return act_fn(gate) * up

    for expert in range(len(gate_up)):
        one = (gate_up[expert].float(),), (down[expert].float(),)
        weights = MlpWeights([one[0]], [None], one[1], None, cast("Middle", middle))
        seen = Seen.nothing(down.shape[1], down.shape[2], down.device)
        for tokens, experts in routed:
            x = tokens[(experts == expert).any(-1)].float()
            seen.add(weights.hidden(x), weights(x), x if keep_inputs else None)
        yield weights, seen


def _matrices(module: nn.Module) -> tuple[Tensor, Tensor]:
    parameters = dict(module.named_parameters(recurse=False))
    return parameters["gate_up_proj"].detach(), parameters["down_proj"].detach()
