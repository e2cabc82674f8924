"""Compute one batch's loss.

Which positions count, which teachers run on what, and what the student is compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_components._modes import evaluating

from ._eager.evidence import evidence, label_log_probs
from ._eager.teachers import Teachers
from .config import KLConfig
from .losses import check_labels, chunk_size, mask_penalty, masked_kl
from .model import MaskedModel


def distill(
    merger: Any,
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
        kl: The settings of the loss.
        labels: (B, L); where -100, a position never counts. The label at t + 1 belongs to the
            logits at t (not shifted for encoders; (B,) for classifiers). Default: every token that
            is not padding.
        task: (B,) or (B, L): the component that each example, or token, follows.
        teacher_hidden: (N, k, H) from `cache_teachers`: final hidden states at the N supervised
            positions, so that no teacher runs.
        normalizer: The divisor of the sum over positions; default: N.
        **inputs: Of the model: ``input_ids``, ``attention_mask``, ...

    Returns:
        A scalar. A batch without a supervised position gives zero with a graph, and a warning.

    Raises:
        ValueError: An empty batch; labels or tasks that do not fit it; a task that is no component;
            none where ``kl`` needs it; a cache that does not fit.
    """
    ids = _main_input(inputs)
    _refuse_leaks(merger, inputs)
    where, targets = positions(merger, ids, labels, inputs.get("attention_mask"))
    # row by row, the order that cached states of teachers have, too
    places = where.nonzero(as_tuple=True)
    count = places[0].numel()
    if count == 0:  # shown once, as warnings are
        warnings.warn(
            "Merger.distill: a batch has no supervised position; its loss is 0", stacklevel=2
        )
    if kl.cross_entropy and targets is None:
        raise ValueError(
            f"Merger.distill: cross_entropy is {kl.cross_entropy:g}, expected labels in the batch"
        )
    answers = None if targets is None else targets[places]
    head_options = merger.head_options()
    shares = _shares(merger, kl, task, where, places)
    if teacher_hidden is None:
        teachers = _run_teachers(merger, shares, places, head_options is not None, inputs)
    else:
        teachers = _cached(merger, kl, count, teacher_hidden)
    if kl.coefficients == "evidence" and shares is None:
        # a classifier has one position a row: there each row is an example
        examples = places[0]
        if where.dim() > 1:
            examples = _examples(ids, inputs.get("position_ids"))[places]
        shares = _evidence(teachers, head_options or {}, answers, examples)
    student = _outputs(merger, head_options is not None, inputs)[places]
    loss = masked_kl(
        student,
        teachers,
        coefficients=kl.coefficients if shares is None else shares,
        confidence_temperature=kl.confidence_temperature,
        temperature=kl.temperature,
        direction=kl.direction,
        labels=answers if kl.cross_entropy else None,
        cross_entropy=kl.cross_entropy if answers is not None else 0.0,
        normalizer=normalizer,
        **(head_options or {}),
    )
    if count and kl.penalizes:
        part = 1.0 if normalizer is None else count / normalizer  # this batch's share of the step
        loss = loss + part * mask_penalty(merger.trained_masks(), kl)
    return loss


def _main_input(inputs: Mapping[str, object]) -> Tensor:
    """Token ids, or the first tensor of a model that has none."""
    tensors = [v for v in (inputs.get("input_ids"), *inputs.values()) if isinstance(v, Tensor)]
    if not tensors or not tensors[0].numel():
        came = {
            name: list(v.shape) if isinstance(v, Tensor) else type(v).__name__
            for name, v in inputs.items()
        }
        raise ValueError(
            f"Merger.distill: the batch holds {came or 'no inputs'}; expected input_ids of (B, L), "
            "neither 0"
        )
    return tensors[0]


def positions(
    merger: MaskedModel, ids: Tensor, labels: Tensor | None, attention: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return where outputs are supervised, as a mask over them, and the label of each."""
    if getattr(merger.model.config, "is_encoder_decoder", False):
        raise ValueError(
            "Merger.distill: encoder-decoder models are not supported; expected a decoder or an "
            "encoder"
        )
    causal = merger.model.can_generate()
    if labels is None and causal:
        if attention is None:
            labels = ids
        else:
            labels = ids.masked_fill(attention == 0, -100)
    # these have one output a row, not one a token
    if labels is None and type(merger.model).__name__.endswith("ForSequenceClassification"):
        return torch.ones(ids.shape[:1], dtype=torch.bool, device=ids.device), None
    if labels is None:  # an encoder's every token
        return torch.ones_like(
            ids, dtype=torch.bool
        ) if attention is None else attention.bool(), None
    if labels.shape != ids.shape[: labels.dim()] or not labels.dim() or labels.is_floating_point():
        raise ValueError(
            f"Merger.distill: expected integer labels, one per token {list(ids.shape)} or one per "
            f"row, got {list(labels.shape)} {labels.dtype}"
        )
    if labels.dim() > 1 and causal:
        # -100 stays at the last position, which predicts nothing that the row holds
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        return shifted != -100, shifted
    return labels != -100, labels


def _refuse_leaks(merger: MaskedModel, inputs: Mapping[str, Any]) -> None:
    """Refuse packed rows where attention would look across examples.

    Only ``position_ids`` keep those apart.
    """
    position_ids = inputs.get("position_ids")
    if position_ids is None or not bool((position_ids[:, 1:] <= position_ids[:, :-1]).any()):
        return
    attention = str(getattr(merger.model.config, "_attn_implementation", ""))
    # transformers keeps packed examples apart under causal masks; with flash attention it does so
    # only in a batch of one row
    if not merger.model.can_generate() or ("flash" in attention and position_ids.shape[0] > 1):
        raise ValueError(
            f"Merger.distill: packed rows, but {type(merger.model).__name__} with "
            f"{attention or 'its'} attention would look across examples; expected a decoder (one "
            "row a batch with flash attention), or MaskCollator(pack=False)"
        )


def _shares(
    merger: MaskedModel,
    kl: KLConfig,
    task: Tensor | None,
    where: Tensor,
    places: tuple[Tensor, ...],
) -> Tensor | None:
    """The teachers' coefficients (N, K); None if they depend on the teachers' outputs."""
    count = merger.count
    if not places[0].numel():  # no teacher runs
        return torch.zeros(0, count, device=where.device)
    if kl.coefficients in ("evidence", "confidence"):
        return None
    if kl.shares is not None:
        if len(kl.shares) != count:
            raise ValueError(
                f"Merger.distill: expected {count} shares, one a component, got {len(kl.shares)}"
            )
        fixed = torch.tensor([s / sum(kl.shares) for s in kl.shares], device=where.device)
        return fixed.expand(places[0].numel(), -1)
    if task is None:
        raise ValueError(
            "Merger.distill: coefficients 'task' need a task for each example (see "
            "TaskMixture), and none came; 'evidence' needs none"
        )
    if (
        task.is_floating_point()
        or task.dtype == torch.bool
        or task.shape not in (where.shape[:1], where.shape)
    ):
        raise ValueError(
            f"Merger.distill: task is {list(task.shape)} {task.dtype}; expected whole numbers of "
            f"shape {list(where.shape[:1])} or {list(where.shape)}"
        )
    if task.numel() and not (int(task.min()) >= 0 and int(task.max()) < count):
        span = f"{int(task.min())} to {int(task.max())}"
        raise ValueError(f"Merger.distill: task labels span {span}, expected 0 to {count - 1}")
    if task.dim() == 1:
        task_of_place = task.view(-1, *[1] * (where.dim() - 1)).expand(where.shape)
    else:
        task_of_place = task
    return nn.functional.one_hot(task_of_place[places].long(), count).float()


def _examples(ids: Tensor, position_ids: Tensor | None) -> Tensor:  # (B, L)
    """Return for each token the number of its example.

    A row, or in packed rows what ``position_ids`` count anew.
    """
    starts = torch.zeros_like(ids)
    starts[:, 0] = 1
    if position_ids is not None:
        # padding, with position 0 everywhere, is an example of its own at each token
        starts[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    # counted on from row to row: evidence needs numbers that ascend
    return (starts.flatten().cumsum(0) - 1).view_as(ids)


@torch.no_grad()
def _evidence(
    teachers: Sequence[Tensor | None],
    head_options: Mapping[str, Any],
    answers: Tensor | None,
    examples: Tensor,
) -> Tensor:  # (N, K)
    """Return shares in proportion to how probable each teacher finds an example."""
    if answers is None:
        raise ValueError(
            "Merger.distill: coefficients by evidence need labels, and this model's inputs are none"
        )
    # without a plain head, teachers came as logits already
    heads = head_options.get("heads")
    first = next(t for t in teachers if t is not None)
    check_labels("Merger.distill", answers, first.shape[1] if heads is None else heads[0].shape[0])
    biases = head_options.get("teacher_biases") or [None] * len(teachers)
    distributions = Teachers(states=teachers, heads=heads, biases=biases)
    size = chunk_size(first, heads, len(teachers))
    # an example's log probability is a sum of hundreds, which half precision would move by nats
    with torch.autocast(first.device.type, enabled=False):
        log_probs = [
            label_log_probs(distributions, k, answers, size)
            for k, t in enumerate(teachers)
            if t is not None
        ]
    return evidence(torch.stack(log_probs, 1), examples)


def _outputs(merger: MaskedModel, hidden: bool, inputs: Mapping[str, object]) -> Tensor:
    if hidden:
        return merger.final_hidden(**inputs)
    return merger.model(**merger.uncached(inputs)).logits


def _cached(merger: MaskedModel, kl: KLConfig, count: int, cached: Tensor) -> list[Tensor | None]:
    # by task, each position keeps its own teacher's alone
    needed = 1 if kl.coefficients == "task" else merger.count
    teachers = cached.shape[1] if cached.dim() == 3 else 0
    if cached.shape[0] != count or teachers not in (needed, merger.count):
        raise ValueError(
            f"Merger.distill: teacher_hidden is {list(cached.shape)}, expected ({count}, {needed}, "
            f"H) for this batch and coefficients {kl.coefficients!r}; the cache was made from "
            "other batches or settings (its kl)"
        )
    # where one state is kept, it belongs to the teacher with the share, whichever it is
    return [cached[:, min(k, teachers - 1)] for k in range(merger.count)]


@torch.no_grad()
def _run_teachers(
    merger: MaskedModel,
    shares: Tensor | None,
    places: tuple[Tensor, ...],
    hidden: bool,
    inputs: Mapping[str, object],
) -> list[Tensor | None]:
    """Return each component's outputs (N, H) at the supervised positions.

    It runs on the rows that it has a share in.
    """
    rows = places[0]
    device = places[0].device
    count = rows.numel()
    batch = next(v.shape[0] for v in inputs.values() if isinstance(v, Tensor))
    logits_of_teachers: list[Tensor | None] = []
    with evaluating(merger):  # teachers drop nothing out
        for k in range(merger.count):
            if shares is None:
                used = torch.arange(count, device=device)
            else:
                used = shares[:, k].nonzero()[:, 0]
            if used.numel() == 0:
                logits_of_teachers.append(None)
                continue
            # rows of the batch, and of what is left of it
            kept, row = rows[used].unique(return_inverse=True)
            part = {
                n: v[kept] if isinstance(v, Tensor) and v.shape[:1] == (batch,) else v
                for n, v in inputs.items()
            }
            with merger.component(k):
                outputs = _outputs(merger, hidden, part)
            chosen = outputs[(row, *(p[used] for p in places[1:]))]
            # positions without a share stay 0 and are never read
            full = chosen.new_zeros(count, chosen.shape[-1])
            full[used] = chosen
            logits_of_teachers.append(full)
    return logits_of_teachers
