"""Fit the experts of a mixture.

Each expert is an MLP, and is fitted on the tokens that are routed to it in the smaller model.

Letters: E experts; I hidden neurons per expert; H the model's width; N tokens; k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..discovery.mlps import Mlp
from ..layers.experts import ExpertsLayout, between, canonical_parameters, layout_of
from ..moments import Moments
from .mlp import MlpWeights, Seen
from .neurons import fit_neurons

# for each batch, the tokens (N, H) and the indices of each token's experts (N, k)
Routed = Sequence[tuple[Tensor, Tensor]]


def experts_shapes(module: nn.Module, keep: int) -> dict[str, torch.Size]:
    """Return the shapes of a stack's parameters with ``keep`` hidden neurons in each expert."""
    layout = layout_of(module)
    shapes = {n: list(p.shape) for n, p in module.named_parameters(recurse=False)}
    count = layout.neurons(torch.Size(shapes["down_proj"]))
    for name, dim in layout.neuron_dims.items():
        # a matrix that holds gate and up has two rows for each neuron
        shapes[name][dim] = shapes[name][dim] // count * keep
    return {n: torch.Size(shape) for n, shape in shapes.items()}


def fit_expert_neurons(
    module: nn.Module, routed: Routed, keep: int, config: PruneConfig
) -> tuple[dict[str, Tensor], float, bool]:
    """Choose the best ``keep`` hidden neurons of each expert, and fit their weights.

    Args:
        module: A stack of experts.
        routed: The tokens that the stack gets in the smaller model, with their experts.
        keep: Number of hidden neurons to keep in each expert.
        config: The settings, as for an MLP.

    Returns:
        The stack's new parameters by name, the squared relative error of all experts together, and
        whether, for some expert, a few tokens make up most of the sum of squared outputs by which
        the error is divided.
    """
    layout = layout_of(module)
    new: dict[str, list[Tensor]] = {name: [] for name in (*layout.matrices, *layout.biases)}
    apart = 0.0
    energy = 0.0
    is_of_few = False
    for weights, seen in _experts(module, routed, keep_inputs=config.descends):
        small, error = fit_neurons(_mlp(layout), weights, seen, keep, config)
        for name, tensor in zip(
            new, (small.ups[0][0], small.down[0], *_biases(small)), strict=True
        ):
            new[name].append(tensor)
        is_of_few |= seen.moments.is_of_few_tokens()
        size = float(seen.moments.energy)
        apart = apart + error * size
        energy = energy + size
    dtype = module.get_parameter("down_proj").dtype
    stacks = {n: layout.stock(n, torch.stack(t).to(dtype)) for n, t in new.items()}
    return stacks, apart / max(1e-30, energy), is_of_few


def _mlp(layout: ExpertsLayout) -> Mlp:
    """Return an `Mlp` that describes one expert of a stack with this layout."""
    return Mlp((layout.up,), "down_proj", layout.canonical_rows)


def _biases(weights: MlpWeights) -> list[Tensor]:
    return [b for b in (*weights.up_biases, weights.down_bias) if b is not None]


def _experts(
    module: nn.Module, routed: Routed, *, keep_inputs: bool
) -> Iterator[tuple[MlpWeights, Seen]]:
    """Yield each expert's weights, and statistics of its inputs and target outputs."""
    layout = layout_of(module)
    stack = canonical_parameters(module)

    def middle(said: Sequence[Tensor]) -> Tensor:
        return between(module, layout, said[0])

    for expert in range(len(stack["down_proj"])):
        up, down, *biases = (
            stack[name][expert].float() for name in (*layout.matrices, *layout.biases)
        )
        up_bias, down_bias = biases or (None, None)
        weights = MlpWeights([(up,)], [up_bias], (down,), down_bias, middle)
        seen = Seen(Moments.zeros(*down.shape, device=down.device))
        for tokens, experts in routed:
            # the router's weights are ignored, so that a token counts once for each of its experts
            x = tokens[(experts == expert).any(-1)].float()
            seen.add(weights.hidden(x), weights(x), x if keep_inputs else None)
        yield weights, seen
