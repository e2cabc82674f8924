"""`distill`: the distillation loss of one batch.

`distill` selects the supervised positions, runs each teacher on the rows that need this teacher,
and computes the student's divergence from the teachers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_components._modes import evaluating
from model_components._packing import change_of_second

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
    """Return the distillation loss of one batch, plus the penalties on masks.

    Args:
        merger: The student with its teachers: a `Merger`, or a `Student` of `learn_merge`.
        kl: The settings of the loss.
        labels: The labels, (B, L), or (B,) for classifiers. Positions with -100 are ignored. In
            decoders, the logits at position t predict the label at t + 1. For encoders, labels are
            not shifted. Default: all tokens except padding are supervised.
        task: The index of the component that each example, (B,), or token, (B, L), learns from.
        teacher_hidden: The teachers' final hidden states at the N supervised positions, as
            `cache_teachers` stores them: (N, K, H), or (N, 1, H) with coefficients ``"task"``. If
            they are given, no teacher runs.
        normalizer: The divisor of the sum over positions; default: N.
        **inputs: Inputs of the model: ``input_ids``, ``attention_mask``, ...

    Returns:
        A scalar. If the batch has no supervised position, the loss is 0, can still be
        differentiated, and a warning is shown.

    Raises:
        ValueError: The batch is empty, or it is packed and the model cannot separate its examples.
            Labels, tasks or cached states have the wrong shape. A task is not the index of a
            component. ``kl`` requires labels or tasks, and there are none.
    """
    ids = _main_input(inputs)
    _refuse_leaks(merger, inputs)
    where, targets = positions(merger, ids, labels, inputs.get("attention_mask"))
    # row by row, in the order in which the teachers' states are cached
    places = where.nonzero(as_tuple=True)
    count = places[0].numel()
    if count == 0:  # by default, Python shows a repeated warning only once
        warnings.warn(
            "Merger.distill: the batch has no supervised positions (for example, all labels are "
            "-100); its loss is 0",
            stacklevel=2,
        )
    if kl.cross_entropy and targets is None:
        raise ValueError(
            "Merger.distill: expected labels in the batch, which cross_entropy="
            f"{kl.cross_entropy:g} requires, got none"
        )
    answers = None if targets is None else targets[places]
    head_options = merger.head_options()
    shares = _shares(merger, kl, task, where, places)
    if teacher_hidden is None:
        teachers = _run_teachers(merger, shares, places, head_options is not None, inputs)
    else:
        teachers = _cached(merger, kl, count, teacher_hidden)
    if kl.coefficients == "evidence" and shares is None:
        examples = _examples(places, ids, inputs.get("position_ids"))
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
        cross_entropy=kl.cross_entropy,
        normalizer=normalizer,
        **(head_options or {}),
    )
    if count and kl.penalizes:
        part = 1.0 if normalizer is None else count / normalizer  # this batch's share of the step
        loss = loss + part * mask_penalty(merger.trained_masks(), kl)
    return loss


def _main_input(inputs: Mapping[str, object]) -> Tensor:
    """Return the token ids, or the first tensor if there are no token ids."""
    tensors = [v for v in (inputs.get("input_ids"), *inputs.values()) if isinstance(v, Tensor)]
    if not tensors or not tensors[0].numel():
        came = {
            name: list(v.shape) if isinstance(v, Tensor) else type(v).__name__
            for name, v in inputs.items()
        }
        raise ValueError(
            "Merger.distill: expected input_ids of shape (B, L) with at least one token, got "
            f"{came or 'no inputs'}"
        )
    return tensors[0]


def positions(
    merger: MaskedModel, ids: Tensor, labels: Tensor | None, attention: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a mask of the supervised outputs, and the label of each output.

    There is one output for each token, or for each row in sequence classifiers. The labels are None
    if none are given and the inputs cannot serve as labels.
    """
    if getattr(merger.model.config, "is_encoder_decoder", False):
        raise ValueError(
            "Merger.distill: expected a decoder or an encoder, got an encoder-decoder model, which "
            "is not supported"
        )
    causal = merger.model.can_generate()
    if labels is None and causal:
        if attention is None:
            labels = ids
        else:
            labels = ids.masked_fill(attention == 0, -100)
    # sequence classifiers have one output per row, not one per token
    if labels is None and type(merger.model).__name__.endswith("ForSequenceClassification"):
        return torch.ones(ids.shape[:1], dtype=torch.bool, device=ids.device), None
    if labels is None:  # for an encoder, every token is supervised
        if attention is None:
            attention = torch.ones_like(ids)
        return attention.bool(), None
    if labels.shape != ids.shape[: labels.dim()] or not labels.dim() or labels.is_floating_point():
        raise ValueError(
            f"Merger.distill: expected integer labels of shape {list(ids.shape)}, or one per row, "
            f"got labels of shape {list(labels.shape)} and dtype {labels.dtype}"
        )
    if labels.dim() > 1 and causal:
        # the last position keeps -100, because the row does not hold the token that it predicts
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        return shifted != -100, shifted
    return labels != -100, labels


def _refuse_leaks(merger: MaskedModel, inputs: Mapping[str, Any]) -> None:
    """Raise an error for packed rows in which one example would attend to another.

    Packed examples are separated by ``position_ids`` alone.
    """
    position_ids = inputs.get("position_ids")
    if position_ids is None or not bool((position_ids[:, 1:] <= position_ids[:, :-1]).any()):
        return
    attention = str(getattr(merger.model.config, "_attn_implementation", ""))
    # transformers keeps packed examples apart under causal masks; with flash attention it does so
    # only in a batch of one row
    if not merger.model.can_generate() or ("flash" in attention and position_ids.shape[0] > 1):
        raise ValueError(
            f"Merger.distill: got packed rows, whose examples would attend to each other in "
            f"{type(merger.model).__name__} with {attention or 'default'} attention; expected a "
            "decoder (with flash attention, one row per batch), or MaskCollator(pack=False)"
        )
    if merger.packed_change is None:
        merger.packed_change = change_of_second("Merger.distill", merger.model)
    if merger.packed_change:
        raise ValueError(
            "Merger.distill: got packed rows, but in "
            f"{type(merger.model).__name__} the logits of an example change by up to "
            f"{merger.packed_change:.2g} if the example before it is replaced; expected "
            "MaskCollator(pack=False)"
        )


def _shares(
    merger: MaskedModel,
    kl: KLConfig,
    task: Tensor | None,
    where: Tensor,
    places: tuple[Tensor, ...],
) -> Tensor | None:
    """Return the teachers' coefficients, (N, K), or None if they depend on teachers' outputs."""
    count = merger.count
    if not places[0].numel():  # no teacher runs
        return torch.zeros(0, count, device=where.device)
    if kl.coefficients in ("evidence", "confidence"):
        return None
    if kl.shares is not None:
        if len(kl.shares) != count:
            raise ValueError(
                f"Merger.distill: expected {count} shares, one per component, got {len(kl.shares)}"
            )
        fixed = torch.tensor([s / sum(kl.shares) for s in kl.shares], device=where.device)
        return fixed.expand(places[0].numel(), -1)
    if task is None:
        raise ValueError(
            "Merger.distill: expected a task for each example, which coefficients 'task' require, "
            "got none; add tasks with TaskMixture, or use coefficients 'evidence'"
        )
    if (
        task.is_floating_point()
        or task.dtype == torch.bool
        or task.shape not in (where.shape[:1], where.shape)
    ):
        raise ValueError(
            f"Merger.distill: task has shape {list(task.shape)} and dtype {task.dtype}; expected "
            f"integers of shape {list(where.shape[:1])} or {list(where.shape)}"
        )
    if task.numel() and not (int(task.min()) >= 0 and int(task.max()) < count):
        span = f"{int(task.min())} to {int(task.max())}"
        raise ValueError(f"Merger.distill: tasks are from {span}, expected 0 to {count - 1}")
    if task.dim() == 1:
        task_of_place = task.view(-1, *[1] * (where.dim() - 1)).expand(where.shape)
    else:
        task_of_place = task
    return nn.functional.one_hot(task_of_place[places].long(), count).float()


def _examples(
    places: tuple[Tensor, ...], ids: Tensor, position_ids: Tensor | None
) -> Tensor:  # (N,)
    """Return the index of the example that each supervised position belongs to.

    Without packing, each row is one example. In packed rows, a new example begins wherever
    ``position_ids`` do not increase.
    """
    if len(places) == 1:  # a classifier has one position per row
        return places[0]
    starts = torch.zeros_like(ids)
    starts[:, 0] = 1
    if position_ids is not None:
        # every padding token has position 0, so each becomes a separate example
        starts[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    # indices continue from row to row, because `evidence` needs them in ascending order
    return (starts.flatten().cumsum(0) - 1).view_as(ids)[places]


@torch.no_grad()
def _evidence(
    teachers: Sequence[Tensor | None],
    head_options: Mapping[str, Any],
    answers: Tensor | None,
    examples: Tensor,
) -> Tensor:  # (N, K)
    """Return each teacher's share, in proportion to its probability of an example's labels."""
    if answers is None:
        raise ValueError(
            "Merger.distill: expected labels for coefficients 'evidence', got none; this model's "
            "inputs cannot serve as labels"
        )
    # without heads, the teachers' outputs are logits already
    heads = head_options.get("heads")
    first = next(t for t in teachers if t is not None)
    check_labels("Merger.distill", answers, first.shape[1] if heads is None else heads[0].shape[0])
    biases = head_options.get("teacher_biases") or [None] * len(teachers)
    distributions = Teachers(states=teachers, heads=heads, biases=biases)
    size = chunk_size(first, heads, len(teachers))
    # an example's log probability is a sum of hundreds of terms, in which half precision would
    # make errors of whole nats
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
    # with coefficients "task", the cache has the state of one teacher for each position
    needed = 1 if kl.coefficients == "task" else merger.count
    teachers = cached.shape[1] if cached.dim() == 3 else 0
    if cached.shape[0] != count or teachers not in (needed, merger.count):
        raise ValueError(
            f"Merger.distill: teacher_hidden has shape {list(cached.shape)}, expected ({count}, "
            f"{needed}, H) for this batch and coefficients {kl.coefficients!r}; the cache was made "
            "from other examples, or with other settings (kl)"
        )
    # a single state belongs to the only teacher with a share; no other teacher's state is read
    return [cached[:, min(k, teachers - 1)] for k in range(merger.count)]


@torch.no_grad()
def _run_teachers(
    merger: MaskedModel,
    shares: Tensor | None,
    places: tuple[Tensor, ...],
    hidden: bool,
    inputs: Mapping[str, object],
) -> list[Tensor | None]:
    """Return each component's hidden states (N, H), or logits (N, V), at supervised positions.

    A component runs only on the rows in which it has a share. Without a share, its result is None.
    """
    rows = places[0]
    device = places[0].device
    count = rows.numel()
    batch = next(v.shape[0] for v in inputs.values() if isinstance(v, Tensor))
    logits_of_teachers: list[Tensor | None] = []
    with evaluating(merger):  # teachers use no dropout
        for k in range(merger.count):
            if shares is None:
                used = torch.arange(count, device=device)
            else:
                used = shares[:, k].nonzero()[:, 0]
            if used.numel() == 0:
                logits_of_teachers.append(None)
                continue
            # the rows that this teacher runs on, and the index of each position's row among them
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
