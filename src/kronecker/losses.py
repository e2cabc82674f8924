"""Distillation: the losses between a student and its teacher, and their weights.

Letters: N tokens; V vocabulary size; F features; *B any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._checks import CheckedConfig, Range

Weight = Annotated[float, Range(least=0)]


@dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedConfig):
    """Weights of the losses: labels * cross-entropy + logits * KL + hidden * error.

    Every loss is a mean over the tokens that have a label (shifted for language models) or, without
    labels, over all tokens that are not padding.

    Args:
        labels: Weight of the cross-entropy with the labels.
        logits: Weight of T² KL(teacher ‖ student) over the vocabulary.
        temperature: The temperature T of both distributions.
        hidden: Weight of the relative squared error of hidden states. For the student's state s and
            the teacher's t, it is ‖s - t‖² / ‖t‖² for each token, averaged over layers.

    Raises:
        ValueError: A weight is negative, all weights are 0, or the temperature is not positive.

    >>> DistillConfig(logits=1.0, labels=0.5).temperature
    2.0
    """

    labels: Weight = 0.0
    logits: Weight = 1.0
    temperature: Annotated[float, Range(above=0)] = 2.0
    hidden: Weight = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a problem if the weights of all losses are 0."""
        if not any((self.labels, self.logits, self.hidden)):
            yield "all weights are 0, expected at least one above 0"


def targets_of(
    shape: tuple[int, int],
    labels: Tensor | None,
    mask: Tensor | None,
    *,
    shifted: bool,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return a mask of the tokens that count in the losses, and the labels of these tokens.

    Args:
        shape: The shape (B, T) of the tokens.
        labels: Labels of the same shape, with -100 for tokens without a label. Labels of another
            shape, such as one for each sequence, are returned unchanged.
        mask: Attention mask, used if there is no label for each token.
        shifted: Whether the label at t + 1 belongs to token t.
        device: The device of the returned mask if there are neither labels nor an attention mask of
            the shape ``shape``.

    >>> keep, labels = targets_of((1, 3), torch.tensor([[-100, 5, 6]]), None, shifted=True)
    >>> keep, labels
    (tensor([[ True,  True, False]]), tensor([5, 6]))
    """
    if labels is not None and tuple(labels.shape) == shape:
        if shifted:
            # the last token has no next token to predict, so its label is -100
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        keep = labels != -100
        return keep, labels[keep]
    if mask is not None and tuple(mask.shape) == shape:
        return mask.bool(), labels
    # labels of another shape belong to whole sequences, so every token counts for hidden states
    return torch.ones(shape, dtype=torch.bool, device=device), labels


def token_loss(
    config: DistillConfig, student: Tensor, teacher: Tensor, labels: Tensor | None
) -> Tensor:
    """Return the weighted sum of T² KL and cross-entropy for logits (N, V), averaged over tokens.

    T is ``config.temperature``.
    """
    # a micro-batch of only prompts has no token that counts
    student, count = student.float(), max(1, len(student))
    total = torch.zeros((), device=student.device)
    if config.logits:
        _check_width("logits", student, teacher)
        t = config.temperature
        log_p = F.log_softmax(teacher.float() / t, -1)
        log_q = F.log_softmax(student / t, -1)
        # the gradients of softened logits shrink as 1 / T², and the factor T² undoes this
        total = total + config.logits * t * t * F.kl_div(
            log_q, log_p, log_target=True, reduction="sum"
        )
    if config.labels:
        if labels is None:
            raise ValueError(
                "KroneckerTrainer: expected labels in the batch, since DistillConfig.labels is "
                "above 0, got none"
            )
        total = total + config.labels * F.cross_entropy(
            student, labels.reshape(-1), reduction="sum"
        )
    return total / count


def token_errors(student: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """Return the mean of ‖s - t‖² / ‖t‖² over the tokens in ``keep``, for activations (*B, F)."""
    _check_width("hidden states", student, teacher)
    rows = keep.reshape(-1)
    s = student.reshape(-1, student.shape[-1])[rows].float()
    t = teacher.reshape(-1, teacher.shape[-1])[rows].float()
    # relative to each token's norm, because a few tokens have much larger states than the others
    errors = (s - t).square().sum(-1) / t.square().sum(-1).clamp_min(1e-12)
    return errors.sum() / max(1, len(errors))


def _check_width(kind: str, student: Tensor, teacher: Tensor) -> None:
    """Check that the student and the teacher have the same number of values per token."""
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"KroneckerTrainer: the student's {kind} have {student.shape[-1]} values per token and "
            f"the teacher's have {teacher.shape[-1]}; expected the same number"
        )
