"""Test whether a decoder keeps packed examples apart."""

from __future__ import annotations

from typing import Any

import torch

from ._modes import evaluating

_LENGTH = 8  # tokens of each of the two examples


@torch.no_grad()
def change_of_second(operation: str, model: Any) -> float:
    """Return how much a packed example's logits change if the example before it is replaced.

    The result is 0 if the change is at most rounding error, because the model separates packed
    examples by their position ids.

    Raises:
        ValueError: The model does not return logits for every token.
    """
    embedding = model.get_input_embeddings().weight
    vocabulary = embedding.shape[0]
    first = torch.arange(2 * _LENGTH, device=embedding.device).remainder(vocabulary)[None]
    other = first.clone()
    other[:, :_LENGTH] = (other[:, :_LENGTH] + vocabulary // 2).remainder(vocabulary)
    # only the position 0 in the middle marks the start of the second example
    positions = torch.arange(_LENGTH, device=embedding.device).repeat(2)[None]
    with evaluating(model):
        runs = [
            model(input_ids=ids, position_ids=positions, use_cache=False)[0]
            for ids in (first, other)
        ]
    if runs[0].dim() != 3 or runs[0].shape[1] != 2 * _LENGTH:
        raise ValueError(
            f"{operation}: {type(model).__name__} returns a tensor of shape "
            f"{list(runs[0].shape)} for {2 * _LENGTH} tokens; expected a causal language model, "
            "which returns logits for every token"
        )
    before, after = (run[:, _LENGTH:].float() for run in runs)
    change = float((before - after).abs().max())
    # kernels may round in another order, so a change this small does not count
    rounding = 4 * torch.finfo(runs[0].dtype).eps * float(before.abs().max())
    return change if change > rounding else 0.0
