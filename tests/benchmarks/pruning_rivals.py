"""Ways of making a Llama smaller without training, written from their papers.

- `minitron`: neurons by their mean activation (arXiv 2407.14679);
- `modegpt`: neurons by ridge leverage scores, the last matrix by a Nyström approximation, and shares
  of the layers by their influence (arXiv 2408.09632);
- `shortgpt`: whole blocks by influence (arXiv 2403.03853);
- `fitted_depth`: the same blocks, with the matrix before each gap fitted to what is behind it.

Each takes a model, batches of token ids and the share of all parameters that stays. One pass over
the text collects what they need.

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

SMOOTHING = 0.1  # epsilon of MoDeGPT's shares
MOST_GONE = 0.8  # of a layer's neurons
DEPTH_RIDGE, NYSTROM_RIDGE, LEVERAGE_RIDGE = 3e-2, 1e-3, 1e-2  # shares of the mean second moment


@dataclass
class Seen:
    """What one layer sees of the calibration text, of N tokens.

    Attributes:
        states: What goes into the block, (N, H); the last element of a list of these is what comes
            out of the last block.
        neurons: Second moments of the MLP's hidden neurons.
        sizes: Mean absolute activations of the neurons.
    """

    states: list[Tensor]
    neurons: Tensor | float = 0.0
    sizes: Tensor | float = 0.0

    def joined(self) -> Tensor:
        """The states of all batches."""
        return torch.cat(self.states)


def see(model: Any, batches: Sequence[Tensor]) -> list[Seen]:
    """Run the text through a model; return what each block sees, and what leaves the last one."""
    blocks = model.model.layers
    seen = [Seen([]) for _ in range(len(blocks) + 1)]

    def into(index: int) -> Any:
        def hook(module: nn.Module, given: tuple, named: dict[str, Tensor]) -> None:
            states = given[0] if given else named["hidden_states"]
            seen[index].states.append(states.flatten(0, 1))

        return hook

    def neurons_of(index: int) -> Any:
        def hook(module: nn.Module, given: tuple) -> None:
            x = given[0].flatten(0, 1)
            seen[index].neurons += x.T @ x
            seen[index].sizes += x.abs().sum(0)

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
    return seen


def influences(seen: Sequence[Seen]) -> Tensor:
    """Return each block's influence: 1 less the mean cosine of what goes in and what comes out."""
    states = [one.joined() for one in seen]
    return torch.stack(
        [
            1 - F.cosine_similarity(before, after, dim=-1).mean()
            for before, after in pairwise(states)
        ]
    )


def gone_share(model: Any, size: float) -> float:
    """Return the share of all MLPs' neurons that goes, so that a share of all parameters stays."""
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
    """Keep the neurons with the largest mean activation, as many in each layer."""
    gone = gone_share(model, size)
    for block, seen in zip(model.model.layers, see(model, batches), strict=False):
        assert isinstance(seen.sizes, Tensor)
        count = round((1 - gone) * len(seen.sizes))
        keep_neurons(block.mlp, seen.sizes.topk(count).indices.sort().values)


def modegpt(model: Any, batches: Sequence[Tensor], size: float, *, uniform: bool = False) -> None:
    """Keep the neurons that explain the others best, and fit the last matrix to them."""
    blocks = model.model.layers
    all_seen = see(model, batches)
    shares = torch.full((len(blocks),), 1 / len(blocks))
    if not uniform:
        shares = (-influences(all_seen) / SMOOTHING).softmax(0)
    gone = (shares * gone_share(model, size) * len(blocks)).clamp(max=MOST_GONE)
    for block, seen, part in zip(blocks, all_seen, gone.tolist(), strict=False):
        assert isinstance(seen.neurons, Tensor)
        moments = seen.neurons.double()
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
    """As `modegpt`, with as many neurons in each layer."""
    modegpt(model, batches, size, uniform=True)


def least_influential(model: Any, seen: Sequence[Seen], size: float) -> set[int]:
    """Return the blocks that go: as few as leave no more than the share of all parameters."""
    total = sum(p.numel() for p in model.parameters())
    each = sum(p.numel() for p in model.model.layers[0].parameters())
    count = -int(-(1 - size) * total // each)
    return set(influences(seen).argsort()[:count].tolist())


def drop(model: Any, gone: set[int]) -> None:
    """Remove blocks."""
    left = [block for index, block in enumerate(model.model.layers) if index not in gone]
    for index, block in enumerate(left):
        block.self_attn.layer_idx = index
    model.model.layers = nn.ModuleList(left)
    model.config.num_hidden_layers = len(left)


def shortgpt(model: Any, batches: Sequence[Tensor], size: float) -> None:
    """Drop the blocks of least influence."""
    drop(model, least_influential(model, see(model, batches), size))


def fitted_depth(model: Any, batches: Sequence[Tensor], size: float) -> None:
    """Drop the blocks of least influence; fit the matrix before each gap to what is behind it."""
    seen = see(model, batches)
    gone = least_influential(model, seen, size)
    for index, block in enumerate(model.model.layers):
        if index in gone or index + 1 not in gone:
            continue
        after = index + 1
        while after in gone:
            after += 1
        given: list[Tensor] = []
        handle = block.mlp.down_proj.register_forward_pre_hook(
            lambda module, args, given=given: given.append(args[0].flatten(0, 1))
        )
        said: list[Tensor] = []
        other = block.mlp.register_forward_hook(
            lambda module, args, out, said=said: said.append(out.flatten(0, 1))
        )
        for batch in batches:  # as the original feeds it: nothing is dropped yet
            model.model(input_ids=batch, use_cache=False)
        handle.remove()
        other.remove()
        x = torch.cat(given)
        # the MLP gives what it gave, and what the blocks of the gap added
        wanted = torch.cat(said) + seen[after].joined() - seen[index + 1].joined()
        down = block.mlp.down_proj
        moments = (x.T @ x).double()
        ridge = DEPTH_RIDGE * moments.diagonal().mean()
        moments += ridge * torch.eye(len(moments), dtype=moments.dtype)
        target = (x.T @ wanted).double() + ridge * down.weight.double().T
        down.weight = nn.Parameter(torch.linalg.solve(moments, target).T.to(down.weight.dtype))
    drop(model, gone)
