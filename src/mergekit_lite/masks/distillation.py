"""One batch's loss: which positions count, which teachers run on what, and what the student is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model_components._modes import evaluating

from .config import KLConfig
from .losses import masked_kl
from .model import MaskedModel
from .penalties import mask_penalty


def distill(
    merger: MaskedModel,
    kl: KLConfig,
    *,
    labels: Tensor | None = None,
    task: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    **inputs: Any,
) -> Tensor:
    """The components' distributions against the merged model's, plus mask penalties.

    Args:
        merger: Student and teachers.
        kl: What to learn from.
        labels: (B, L); where -100, a position never counts. The label at t + 1 belongs to the logits at t (not
            shifted for encoders; (B,) for classifiers). Default: every token that is not padding.
        task: (B,) or (B, L): the component that each example, or token, follows.
        teacher_hidden: (N, k, H) from `cache_teachers`: final hidden states at the N supervised positions, so that
            no teacher runs.
        normalizer: What the sum over positions is divided by; default N.
        **inputs: Of the model: ``input_ids``, ``attention_mask``, ...

    Returns:
        A scalar. A batch without a supervised position gives zero with a graph, and a warning.

    Raises:
        ValueError: A task that is no component; none where ``kl`` needs it; a cache that does not fit.
    """
    _refuse_leaks(merger, inputs)
    first = next(v for v in inputs.values() if isinstance(v, Tensor))
    where, targets = positions(merger, first, labels, inputs.get("attention_mask"))
    places = where.nonzero(as_tuple=True)
    count = places[0].numel()
    if count == 0:  # shown once, as warnings are
        warnings.warn("Merger.distill: a batch has no supervised position; its loss is 0", stacklevel=2)
    head = merger.output_head()
    shares = _shares(merger, kl, task, where, places)
    if teacher_hidden is None:
        teachers = _run_teachers(merger, shares, places, head is not None, inputs)
    else:
        teachers = _cached(merger, kl, count, teacher_hidden)
    student = _outputs(merger, head is not None, inputs)[places]
    options: dict[str, Any] = {}
    if head is not None:
        options = {"heads": head.frozen("weight"), "masks": head.mask("weight"), "bias": head.bias}
        if head.bias is not None:
            options["teacher_biases"] = head.frozen("bias")
    loss = masked_kl(
        student,
        teachers,
        coefficients=shares,
        confidence_temperature=kl.confidence_temperature,
        temperature=kl.temperature,
        direction=kl.direction,
        labels=targets[places] if targets is not None and kl.cross_entropy else None,
        cross_entropy=kl.cross_entropy if targets is not None else 0.0,
        normalizer=normalizer,
        **options,
    )
    if count and kl.penalises:
        part = 1.0 if normalizer is None else count / normalizer  # this batch's share of the step
        loss = loss + part * mask_penalty(list(merger.effective_masks().values()), kl)
    return loss


def positions(
    merger: MaskedModel, ids: Tensor, labels: Tensor | None, attention: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Where outputs are supervised, as a mask over them, and the label of each."""
    if getattr(merger.model.config, "is_encoder_decoder", False):
        raise ValueError("Merger.distill: encoder-decoder models are not supported; needed a decoder or an encoder")
    causal = merger.model.can_generate()
    if labels is None and causal:
        labels = ids if attention is None else ids.masked_fill(attention == 0, -100)
    if labels is None and type(merger.model).__name__.endswith("ForSequenceClassification"):
        return torch.ones(ids.shape[:1], dtype=torch.bool, device=ids.device), None
    if labels is None:  # an encoder's every token
        return torch.ones_like(ids, dtype=torch.bool) if attention is None else attention.bool(), None
    if labels.dim() > 1 and causal:
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        return shifted != -100, shifted
    return labels != -100, labels


def _refuse_leaks(merger: MaskedModel, inputs: Mapping[str, Any]) -> None:
    """Examples packed into a row are kept apart by their positions, which not every attention looks at."""
    places = inputs.get("position_ids")
    if places is None or not bool((places[:, 1:] <= places[:, :-1]).any()):
        return
    attention = str(getattr(merger.model.config, "_attn_implementation", ""))
    if not merger.model.can_generate() or ("flash" in attention and places.shape[0] > 1):
        raise ValueError(
            f"Merger.distill: packed rows, but {type(merger.model).__name__} with {attention or 'its'} attention would "
            "look across examples; needed a decoder (one row a batch with flash attention), or MaskCollator(pack=False)"
        )


def _shares(
    merger: MaskedModel, kl: KLConfig, task: Tensor | None, where: Tensor, places: tuple[Tensor, ...]
) -> Tensor | None:
    """The teachers' coefficients (N, K); None: by confidence."""
    count = merger.count
    if kl.coefficients == "confidence":
        return None
    if kl.coefficients != "task":
        shares = kl.shares or (1.0,) * count
        if len(shares) != count:
            raise ValueError(f"Merger.distill: {len(shares)} shares, needed one for each of {count} components")
        fixed = torch.tensor([s / sum(shares) for s in shares], device=where.device)
        return fixed.expand(places[0].numel(), -1)
    if task is None:
        raise ValueError("Merger.distill: coefficients 'task' need a task for each example; none came")
    if task.numel() and not (int(task.min()) >= 0 and int(task.max()) < count):
        span = f"{int(task.min())} to {int(task.max())}"
        raise ValueError(f"Merger.distill: task labels span {span}, needed 0 to {count - 1}")
    own = task.view(-1, *[1] * (where.dim() - 1)).expand(where.shape) if task.dim() == 1 else task
    return nn.functional.one_hot(own[places], count).float()


def _outputs(merger: MaskedModel, hidden: bool, inputs: Mapping[str, Any]) -> Tensor:
    return merger.final_hidden(**inputs) if hidden else merger.model(**merger.uncached(inputs)).logits


def _cached(merger: MaskedModel, kl: KLConfig, count: int, cached: Tensor) -> list[Tensor | None]:
    needed = 1 if kl.coefficients == "task" else merger.count  # by task, each position keeps its own teacher's alone
    kept = cached.shape[1] if cached.dim() == 3 else 0
    if cached.shape[0] != count or kept not in (needed, merger.count):
        raise ValueError(
            f"Merger.distill: teacher_hidden is {list(cached.shape)}, needed ({count}, {needed}, H) for this batch "
            f"and coefficients {kl.coefficients!r}; the cache was made from other batches or settings (its kl)"
        )
    return [cached[:, min(k, kept - 1)] for k in range(merger.count)]


@torch.no_grad()
def _run_teachers(
    merger: MaskedModel, shares: Tensor | None, places: tuple[Tensor, ...], hidden: bool, inputs: Mapping[str, Any]
) -> list[Tensor | None]:
    """Each component's outputs (N, H) at the supervised positions; it runs on the rows that it has a share in."""
    rows, device = places[0], places[0].device
    count = rows.numel()
    batch = next(v.shape[0] for v in inputs.values() if isinstance(v, Tensor))
    found: list[Tensor | None] = []
    with evaluating(merger):  # teachers drop nothing out
        for k in range(merger.count):
            used = torch.arange(count, device=device) if shares is None else shares[:, k].nonzero()[:, 0]
            if used.numel() == 0:
                found.append(None)
                continue
            own, place = rows[used].unique(return_inverse=True)
            part = {n: v[own] if isinstance(v, Tensor) and v.shape[:1] == (batch,) else v for n, v in inputs.items()}
            with merger.component(k):
                made = _outputs(merger, hidden, part)
            chosen = made[(place, *(p[used] for p in places[1:]))]
            full = chosen.new_zeros(count, chosen.shape[-1])
            full[used] = chosen
            found.append(full)
    return found
