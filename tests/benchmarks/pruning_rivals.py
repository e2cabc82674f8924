"""Ways of making a Llama smaller without training, written from their papers.

- `minitron`: neurons by their mean activation (arXiv 2407.14679);
- `modegpt`: neurons by ridge leverage scores, the last matrix by a Nyström approximation, and shares
  of the layers by their influence (arXiv 2408.09632);
- `shortgpt`: whole blocks by influence (arXiv 2403.03853);
- `fitted_depth`: the same blocks, with the down projection before each gap refitted.

Each takes a model, batches of token ids and ``size``, the fraction of all parameters to keep. One
pass over the text collects the statistics; `fitted_depth` makes one more for each gap.

SliceGPT (arXiv 2401.15024) is not here: it unties SmolLM2's embeddings, which are a fifth of its
parameters, and adds two square matrices a block, so that with a quarter of its width cut away the
model has as many parameters as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMOOTHING = 0.1  # temperature of the softmax that spreads MoDeGPT's cuts over layers (epsilon)
MOST_GONE = 0.8  # at most this fraction of a layer's neurons is removed
# fractions of the mean second moment
DEPTH_RIDGE, NYSTROM_RIDGE, LEVERAGE_RIDGE = 3e-2, 1e-3, 1e-2


@dataclass
class Statistics:
    """Calibration statistics of one block.

    Attributes:
        states: The block's inputs, one (n, H) tensor for each batch.
        moments: Sum over tokens of the outer products of the MLP's hidden activations.
        sizes: Sum over tokens of their absolute values.
    """

    states: list[Tensor]
    moments: Tensor | float = 0.0
    sizes: Tensor | float = 0.0

    def joined(self) -> Tensor:
        """Return the inputs of all batches, (N, H)."""
        return torch.cat(self.states)


def collect_statistics(model: Any, batches: Sequence[Tensor]) -> list[Statistics]:
    """Return the statistics of each block, then one more entry with the last block's outputs."""
    blocks = model.model.layers
    stats = [Statistics([]) for _ in range(len(blocks) + 1)]

    def into(index: int) -> Any:
        def hook(module: nn.Module, given: tuple, named: dict[str, Tensor]) -> None:
            states = given[0] if given else named["hidden_states"]
            stats[index].states.append(states.flatten(0, 1))

        return hook

    def neurons_of(index: int) -> Any:
        def hook(module: nn.Module, given: tuple) -> None:
            x = given[0].flatten(0, 1)
            stats[index].moments += x.T @ x
            stats[index].sizes += x.abs().sum(0)

        return hook

    modules = [*blocks, model.model.norm]
    handles = [
        module.register_forward_pre_hook(into(index), with_kwargs=True)
        for index, module in enumerate(modules)
    ]
    handles += [
        block.mlp.down_proj.register_forward_pre_hook(neurons_of(index))
        for index, block in enumerate(blocks)
    ]
    for batch in batches:
        model.model(input_ids=batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return stats


def influences(stats: Sequence[Statistics]) -> Tensor:
    """Return each block's influence: 1 less the mean cosine of what goes in and what comes out."""
    states = [one.joined() for one in stats]
    return torch.stack(
        [
            1 - F.cosine_similarity(before, after, dim=-1).mean()
            for before, after in pairwise(states)
        ]
    )


def gone_share(model: Any, size: float) -> float:
    """Return the fraction of MLP neurons to remove so that ``size`` of all parameters remains."""
    total = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for block in model.model.layers for p in block.mlp.parameters())
    return (1 - size) * total / inside


def keep_neurons(mlp: Any, kept: Tensor, down: Tensor | None = None) -> None:
    """Shrink an MLP to some neurons, with another last matrix if one is given."""
    mlp.gate_proj.weight = nn.Parameter(mlp.gate_proj.weight[kept])
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight[kept])
    if down is None:
        down = mlp.down_proj.weight[:, kept]
    mlp.down_proj.weight = nn.Parameter(down.to(mlp.gate_proj.weight.dtype).contiguous())


def minitron(model: Any, batches: Sequence[Tensor], size: float) -> None:
    """Keep the neurons of largest mean absolute activation, the same number in each layer."""
    gone = gone_share(model, size)
    for block, stats in zip(model.model.layers, collect_statistics(model, batches), strict=False):
        assert isinstance(stats.sizes, Tensor)
        count = round((1 - gone) * len(stats.sizes))
        keep_neurons(block.mlp, stats.sizes.topk(count).indices.sort().values)


def modegpt(model: Any, batches: Sequence[Tensor], size: float, *, uniform: bool = False) -> None:
    """Keep the neurons that explain the others best, and fit the last matrix to them."""
    blocks = model.model.layers
    all_stats = collect_statistics(model, batches)
    shares = torch.full((len(blocks),), 1 / len(blocks))
    if not uniform:
        shares = (-influences(all_stats) / SMOOTHING).softmax(0)
    gone = (shares * gone_share(model, size) * len(blocks)).clamp(max=MOST_GONE)
    for block, stats, part in zip(blocks, all_stats, gone.tolist(), strict=False):
        assert isinstance(stats.moments, Tensor)
        moments = stats.moments.double()
        mean = moments.diagonal().mean()
        one = torch.eye(len(moments), dtype=moments.dtype)
        ridge = LEVERAGE_RIDGE * mean
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments + ridge * one))
        scores = 1 - ridge * inverse.diagonal()
        kept = scores.topk(round((1 - part) * len(moments))).indices.sort().values
        own = moments[kept][:, kept] + NYSTROM_RIDGE * mean * one[: len(kept), : len(kept)]
        weight = block.mlp.down_proj.weight.double()
        keep_neurons(block.mlp, kept, torch.linalg.solve(own, moments[kept] @ weight.T).T)


def modegpt_uniform(model: Any, batches: Sequence[Tensor], size: float) -> None:
    """Prune as `modegpt`, with the same number of neurons in each layer."""
    modegpt(model, batches, size, uniform=True)


def least_influential(model: Any, stats: Sequence[Statistics], size: float) -> set[int]:
    """Return the fewest blocks of least influence whose removal leaves ``size`` or less."""
    total = sum(p.numel() for p in model.parameters())
    each = sum(p.numel() for p in model.model.layers[0].parameters())
    count = -int(-(1 - size) * total // each)  # rounded up
    return set(influences(stats).argsort()[:count].tolist())


def drop(model: Any, gone: set[int]) -> None:
    """Remove blocks."""
    left = [block for index, block in enumerate(model.model.layers) if index not in gone]
    for index, block in enumerate(left):
        block.self_attn.layer_idx = index
    model.model.layers = nn.ModuleList(left)
    model.config.num_hidden_layers = len(left)


def shortgpt(model: Any, batches: Sequence[Tensor], size: float) -> None:
    """Drop the blocks of least influence."""
    drop(model, least_influential(model, collect_statistics(model, batches), size))


def fitted_depth(model: Any, batches: Sequence[Tensor], size: float) -> None:
    """Drop the blocks of least influence.

    The down projection of the MLP before each gap is refitted, so that its block gives what the
    last block of the gap gave.
    """
    stats = collect_statistics(model, batches)
    gone = least_influential(model, stats, size)
    refitted: dict[int, Tensor] = {}
    for index, block in enumerate(model.model.layers):
        if index in gone or index + 1 not in gone:
            continue
        after = index + 1
        while after in gone:
            after += 1
        inputs, outputs = inputs_and_outputs(model, block.mlp, batches)
        # the original output, and the change that the removed blocks made
        wanted = outputs + stats[after].joined() - stats[index + 1].joined()
        weight = block.mlp.down_proj.weight
        moments = (inputs.T @ inputs).double()
        ridge = DEPTH_RIDGE * moments.diagonal().mean()
        moments += ridge * torch.eye(len(moments), dtype=moments.dtype)
        target = (inputs.T @ wanted).double() + ridge * weight.double().T
        refitted[index] = torch.linalg.solve(moments, target).T.to(weight.dtype)
    # after the loop: a refitted matrix before blocks that are still there would count them twice
    for index, weight in refitted.items():
        model.model.layers[index].mlp.down_proj.weight = nn.Parameter(weight)
    drop(model, gone)


def inputs_and_outputs(model: Any, mlp: Any, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the inputs of an MLP's down projection, (N, neurons), and the MLP's outputs, (N, H)."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    handles = [
        mlp.down_proj.register_forward_pre_hook(
            lambda module, given: inputs.append(given[0].flatten(0, 1))
        ),
        mlp.register_forward_hook(
            lambda module, given, output: outputs.append(output.flatten(0, 1))
        ),
    ]
    for batch in batches:
        model.model(input_ids=batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.cat(inputs), torch.cat(outputs)
