"""`answer_loss`: a held-out loss that does not depend on the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from model_components._modes import evaluating

_IGNORED = -100  # a label that is not trained


@torch.no_grad()
def answer_loss(
    model: nn.Module,
    dataset: Any,
    collator: Callable[[Sequence[object]], Mapping[str, object]],
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> tuple[float, float]:
    """Mean loss of all trained tokens, and its perplexity; the batch size changes neither.

    A trainer's own ``eval_loss`` is a mean of the batches' means, which depends on the batch size.

    Args:
        model: A causal language model.
        dataset: Examples with ``input_ids`` and ``labels``, such as ``trainer.eval_dataset``.
        collator: Examples to a batch of tensors, such as ``trainer.data_collator``.
        batch_size: Examples at once.
        progress: Show a bar.

    Returns:
        Loss in nats a token, and e to that.

    Raises:
        ValueError: No token is trained.
    """
    device = next(model.parameters()).device
    total = 0.0
    count = 0
    with evaluating(model):
        for start in tqdm(
            range(0, len(dataset), batch_size), "evaluating", disable=not progress, leave=False
        ):
            batch = collator(
                [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
            )
            batch = {k: v.to(device) for k, v in batch.items() if isinstance(v, torch.Tensor)}
            labels = batch.pop("labels")[:, 1:].flatten()
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            total += float(
                nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
            )
            count += int((labels != _IGNORED).sum())
    if not count:
        raise ValueError("answer_loss: no token of the data set is trained")
    loss = total / count
    return loss, math.exp(min(loss, 700.0))
