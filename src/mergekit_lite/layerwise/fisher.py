"""Fisher-weighted averages: each parameter of a model counts by how much the model's output hangs on it.

A backward pass needs the whole model: one model, its gradient and the sum of their squares are resident at a time. What
was computed for a model is kept in a file, so that an interrupted merge need not repeat it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from model_components._folders import new_file

from ..dtypes import to_torch
from ..files import Source
from .blocks import Batch, Skeleton

_FLOOR = 1e-8  # of a tensor's mean information, where no model has any


def fisher_information(
    model: PreTrainedModel, batches: Sequence[Batch], *, seed: int = 0, progress: bool = False
) -> dict[str, Tensor]:
    """The diagonal of a model's Fisher information: mean squares of the gradient of ``log p(y | x)``, y from the model.

    Args:
        model: With logits.
        batches: Token ids (B, L), perhaps with an attention mask; each example counts once.
        seed: Of y.
        progress: Show a bar.

    Returns:
        The information of each parameter, by name, in its shape.
    """
    parameters = {name: p.requires_grad_() for name, p in model.named_parameters()}
    totals = {name: torch.zeros_like(p) for name, p in parameters.items()}
    generator, count = torch.Generator().manual_seed(seed), 0
    for ids in tqdm(list(_examples(batches)), desc="fisher", unit="example", disable=not progress):
        logs = torch.log_softmax(model(input_ids=ids).logits.flatten(0, -2).float(), -1)
        drawn = torch.multinomial(logs.detach().exp(), 1, generator=generator)
        gradients = torch.autograd.grad(logs.gather(1, drawn).sum(), list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                totals[name].addcmul_(gradient, gradient)
        count += 1
    return {name: total / count for name, total in totals.items()}


def _examples(batches: Sequence[Batch]) -> Iterator[Tensor]:  # (1, L)
    """Each row without its padding."""
    for batch in batches:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        for row in range(len(ids)):
            yield ids[row : row + 1] if mask is None else ids[row][mask[row].bool()][None]


def merge_by_information(weights: Sequence[Tensor], information: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """``Σ_k s_k F_k * W_k / Σ_k s_k F_k``, place by place; the average by shares where no model has information.

    Args:
        weights: K tensors of one shape.
        information: For each the numbers that `fisher_information` gives.
        shares: How much each model counts.

    Source: Matena and Raffel, arXiv 2111.09832.

    >>> weights, information = torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    >>> merge_by_information(list(weights), list(information), [0.5, 0.5]).float()
    tensor([1.5000, 2.0000])
    """
    floor = _FLOOR * torch.stack([f.double().mean() for f in information]).mean().clamp_min(1e-30)
    parts = [s * (f.double() + floor) for s, f in zip(shares, information, strict=True)]
    total = torch.stack([p * w.double() for p, w in zip(parts, weights, strict=True)]).sum(0)
    return total / torch.stack(parts).sum(0)


def write_fisher_parts(
    skeleton: Skeleton,
    sources: Sequence[Source],
    data: Sequence[Sequence[Batch]],
    shares: Sequence[float],
    folder: Path,
    mark: str,
    *,
    progress: bool,
) -> None:
    """Look at one model after the other, then write the merged tensors, a part for each block and one for the rest.

    Args:
        skeleton: Of the models.
        sources: Theirs.
        data: For each its batches.
        shares: How much each counts.
        folder: Where parts are written.
        mark: A fingerprint of models and data; what an earlier merge with the same one computed is used.
        progress: Show bars.
    """
    files = [folder / f"information-{k:05d}.safetensors" for k in range(len(sources))]
    for file, source, batches in zip(files, sources, data, strict=True):
        if not _is_of(file, mark):
            information = fisher_information(skeleton.whole(source), batches, progress=progress)
            with new_file(file, "merge") as part:
                save_file({name: value.contiguous() for name, value in information.items()}, part, {"mark": mark})
    prefixes = [skeleton.prefix(number) for number in range(len(skeleton.blocks))]
    names = [name for name, _ in skeleton.model.named_parameters()]
    groups = [[n for n in names if n.startswith(prefix)] for prefix in prefixes]
    groups.append([n for n in names if not n.startswith(tuple(prefixes))])
    for number, group in enumerate(groups):
        merged: dict[str, Tensor] = {}
        for name in group:
            weights = [skeleton.parameter(source, name) for source in sources]
            value = merge_by_information(weights, [_read(file, name) for file in files], shares)
            stored = skeleton.stored_name(sources[0], name)
            merged[stored] = value.to(to_torch(sources[0].tensors[stored].dtype)).contiguous()
        with new_file(folder / f"part-{number:05d}.safetensors", "merge") as part:
            save_file(merged, part)


def _is_of(file: Path, mark: str) -> bool:
    if not file.is_file():
        return False
    with safe_open(file, "pt") as stored:
        return (stored.metadata() or {}).get("mark") == mark


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as stored:
        return stored.get_tensor(name)
