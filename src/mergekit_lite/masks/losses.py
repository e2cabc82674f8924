"""Losses that train masks.

`masked_kl` distills from the components, and `mask_penalty` regularizes the masks.

Letters: N positions, H hidden size, V vocabulary, K components.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._checks import check_choice
from model_components._head_loss import chunk_rows, chunked_loss

from ._eager.blend import work_dtype
from ._eager.teachers import Teachers, forward_kl, reverse_kl
from .config import Direction, KLConfig
from .functional import masked_linear

# With two components a chunk has 1/32 of all positions, with K components 1/(16 K). Its (n, V)
# buffers, some of which exist once per component, then take about a third of one (N, V) tensor.
# Products of fewer than 16 rows are slow; products of more than 512 rows are no faster.
_SHARE, _FEWEST, _MOST = 16, 16, 512


def masked_kl(
    student: Tensor,  # (N, H), or (N, V) logits if there are no heads
    teachers: Sequence[Tensor | None],  # K of the same
    heads: Sequence[Tensor] | None = None,  # K or more of (V, H)
    masks: Tensor | None = None,  # (number of heads, broadcasts over a head)
    *,
    head: Tensor | None = None,  # (V, H)
    coefficients: Tensor | str = "confidence",  # (N, K) or (K,)
    confidence_temperature: float = 1.0,
    temperature: float = 1.0,
    direction: str = "forward",
    labels: Tensor | None = None,  # (N,)
    cross_entropy: float = 0.0,
    bias: Tensor | None = None,  # (V,)
    teacher_biases: Sequence[Tensor] | None = None,  # K of (V,)
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Return the distillation loss from final hidden states.

    ``T² Σ_n D(Σ_k c_nk softmax(teacher_k / T), softmax(student / T)) / normalizer``.

    With ``heads``, logits exist for one chunk of positions at a time, so no tensor of shape
    (positions, vocabulary) is built. For two components, a chunk has 1/32 of all positions, but at
    least 16 and at most 512. On a GPU, a chunk has about 34 million logits or more. If the head has
    element masks, the merged head is built for each chunk. With other masks, it is never built. The
    gradients of ``student``, ``masks``, ``head`` and ``bias`` are computed in forward and kept
    until backward.

    Args:
        student: The merged model's final hidden states at supervised positions, (N, H), or its
            logits, (N, V), when ``heads`` is None.
        teachers: The components' final hidden states (or logits) at the same positions, (N, H)
            each; None for a teacher whose coefficients are all zero.
        heads: The components' frozen output heads, (V, H) each, in the order of the teachers.
            Further heads, such as a base's, are used for the student alone.
        masks: Masks of the student's head, in shapes that broadcast over a stack of the heads,
            (number of heads, V, H).
        head: The student's own head, (V, H), instead of masks. If neither is given, the student has
            the first of ``heads``.
        coefficients: Shares c of the teachers, (N, K) or (K,): numbers of 0 or more that sum to 1
            over the teachers. With ``"confidence"``, the shares at each position are the softmax
            over k of -entropy_k / ``confidence_temperature``.
        confidence_temperature: See ``coefficients``. At 0, only the most confident teacher counts.
        temperature: T, above 0.
        direction: ``"forward"`` D = KL(target, student) or ``"reverse"`` D = KL(student, target).
        labels: Token ids for ``cross_entropy``, (N,).
        cross_entropy: Weight of the cross-entropy (at temperature 1) towards ``labels``.
        bias: The bias of the student's head, (V,).
        teacher_biases: The biases of the components' heads, (V,) each.
        normalizer: The divisor of the sum, a scalar; default: N.

    Returns:
        A scalar in float32, or in float64 for float64 inputs. It is NaN if a logit is NaN. If N is
        0, the loss is 0 and can still be differentiated.

    Raises:
        ValueError: Shapes do not match. A head is given together with masks or without heads. A
            teacher with a share is missing. Shares, temperatures or the direction are invalid.
            Labels are missing or outside the vocabulary.

    Source: Hinton et al., arXiv 1503.02531; gradients computed in forward after Hsu et al., arXiv
    2410.10989.

    >>> hidden, head = torch.ones(3, 2), torch.eye(2)
    >>> masked_kl(
    ...     hidden,
    ...     [hidden, None],
    ...     [head, head],
    ...     torch.ones(2, 1, 2) / 2,
    ...     coefficients=torch.tensor([1.0, 0.0]),
    ... )
    tensor(0.)
    """
    positions = student.shape[0]
    _check_states(student, teachers, heads, masks)
    _check_head(heads, masks, head)
    _check_biases(teachers, heads, bias, teacher_biases)
    _check_numbers(direction, temperature, confidence_temperature)
    coefficients = _checked_coefficients(coefficients, student, teachers)
    if cross_entropy:
        _check_cross_entropy_labels(labels, student, heads)
    if positions == 0:
        return _zero(student, masks, head, bias)
    if heads is not None:
        heads = [each.detach() for each in heads]  # the components are frozen
        # under autocast, hidden states have another dtype than the heads
        student = student.to(heads[0].dtype)
    fixed = Teachers(
        states=[None if t is None else t.detach().to(student.dtype) for t in teachers],
        heads=heads,
        biases=teacher_biases or [None] * len(teachers),
        shares=coefficients if isinstance(coefficients, Tensor) else None,
        temperature=temperature,
        confidence_temperature=confidence_temperature,
    )
    loss_of = _ChunkLoss(fixed, direction, labels, cross_entropy)
    trained = [t for t in (masks, head, bias) if t is not None and t.requires_grad]
    own = [None if t is None else _leaf(t) for t in (masks, head, bias)]
    leaves = [t for t in own if t is not None and t.requires_grad]
    logits_of = _student_head(student, heads, *own)
    size = chunk_size(student, heads, max(len(teachers), len(heads or ())))
    # dtypes were chosen above, and autocast would cast once more
    with torch.autocast(student.device.type, enabled=False):
        total = chunked_loss(student, logits_of, trained, loss_of, size, leaves)
    # a normalizer may have dtype float64, or one dimension
    return (total / (positions if normalizer is None else normalizer)).to(total.dtype).reshape(())


def _leaf(tensor: Tensor) -> Tensor:
    """Return a detached view of a tensor, which requires grad if the tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def chunk_size(states: Tensor, heads: Sequence[Tensor] | None, count: int) -> int:
    """Return the number of positions in a chunk.

    Args:
        states: Hidden states, (N, H), or logits if there are no heads.
        heads: The output heads, (V, H) each, or None.
        count: The number of components, K.
    """
    size = min(_MOST, max(_FEWEST, len(states) // (_SHARE * max(2, count))))
    if states.device.type == "cpu":
        return size
    # on a GPU, a small chunk takes as long as a larger one
    return max(size, chunk_rows(states.device, states.shape[1] if heads is None else len(heads[0])))


@dataclass(frozen=True)
class _ChunkLoss:
    """The function that `chunked_loss` calls for the loss of a chunk.

    Args:
        teachers: The teachers' distributions.
        direction: ``"forward"`` or ``"reverse"``.
        labels: The labels for the cross-entropy, (N,).
        cross_entropy: The weight of the cross-entropy.
    """

    teachers: Teachers
    direction: str
    labels: Tensor | None
    cross_entropy: float

    def __call__(
        self, logits: Tensor, rows: slice, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss, and the gradient of the logits, (n, V), or None if it is not needed."""
        divergence = forward_kl if self.direction == "forward" else reverse_kl
        temperature = self.teachers.temperature
        logs = logits / temperature if temperature != 1 else logits
        loss, gradient = divergence(self.teachers.mixture(rows), logs.log_softmax(-1))
        if temperature != 1:
            loss = temperature**2 * loss
            # the factor T² of the loss times the derivative 1 / T of logits / T
            gradient *= temperature
        if self.cross_entropy:
            loss = loss + self._add_cross_entropy(logits, rows, gradient)
        return loss, gradient if needs_gradient else None

    def _add_cross_entropy(self, logits: Tensor, rows: slice, gradient: Tensor) -> Tensor:
        """Return the weighted cross-entropy of the labels; add its gradient to ``gradient``."""
        assert self.labels is not None
        weight = self.cross_entropy
        chosen = self.labels[rows, None]
        log_probs = logits.log_softmax(-1)
        loss = -weight * log_probs.gather(1, chosen).sum(dtype=torch.float64)
        # the gradient is the softmax, minus 1 at the label
        gradient.add_(log_probs.exp_(), alpha=weight)
        gradient.scatter_add_(1, chosen, gradient.new_full(chosen.shape, -weight))
        return loss


def _student_head(
    student: Tensor,
    heads: Sequence[Tensor] | None,
    masks: Tensor | None,
    head: Tensor | None,
    bias: Tensor | None,
) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states, (n, H), to the student's logits, (n, V)."""
    if heads is None:
        # a copy, because a loss may overwrite logits, and these are the caller's tensor
        return torch.clone
    if masks is None:
        weight = heads[0] if head is None else head

        def logits_of(states: Tensor) -> Tensor:
            # cast here, so that the gradients have the dtypes of the parameters
            own_bias = None if bias is None else bias.to(student.dtype)
            return F.linear(states, weight.to(student.dtype), own_bias)

        return logits_of
    if masks.shape[1] > 1 and masks.shape[2] > 1:
        return partial(masked_linear, weights=heads, masks=masks, bias=bias)
    return partial(_masked_logits, heads=heads, masks=masks, bias=bias)


def _masked_logits(
    states: Tensor,  # (n, H)
    heads: Sequence[Tensor],
    masks: Tensor,  # (number of heads, 1 or V, 1 or H)
    bias: Tensor | None,
) -> Tensor:  # (n, V)
    """Return the logits of a head whose masks multiply its inputs or its outputs.

    No merged head is built. For one chunk, several products take less time than a blend.
    """
    work = work_dtype(states.dtype)
    total: Tensor | None = None
    for head, mask in zip(heads, masks, strict=True):
        # multiply by masks and add in float32, because rounding to the states' dtype loses digits
        wide = mask.to(work)
        if mask.shape[1] > 1:
            term = F.linear((states * wide).to(states.dtype), head).to(work)
        else:
            term = F.linear(states, head) * wide.T
        total = term if total is None else total + term
    assert total is not None
    return total if bias is None else total + bias


def check_labels(operation: str, labels: Tensor, vocabulary: int) -> None:
    """Raise an error if labels are outside the vocabulary."""
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        span = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"{operation}: labels are from {span}, expected 0 to {vocabulary - 1}")


def _check_cross_entropy_labels(
    labels: Tensor | None, student: Tensor, heads: Sequence[Tensor] | None
) -> None:
    """Check that every position has a label within the vocabulary."""
    if labels is None:
        raise ValueError("masked_kl: expected labels of shape (N,) for cross_entropy, got None")
    if labels.shape != student.shape[:1]:
        raise ValueError(
            f"masked_kl: labels have shape {list(labels.shape)}, expected {list(student.shape[:1])}"
        )
    # on a GPU, a label out of range would make all further CUDA calls of the process fail
    check_labels("masked_kl", labels, student.shape[1] if heads is None else heads[0].shape[0])


def _zero(student: Tensor, *others: Tensor | None) -> Tensor:
    """Return a loss of 0, which depends on all trained tensors, for a batch without positions."""
    total = student.sum(dtype=torch.promote_types(student.dtype, torch.float32))
    for other in others:
        if other is not None:
            total = total + 0 * other.sum()
    return total


def _check_biases(
    teachers: Sequence[Tensor | None],
    heads: Sequence[Tensor] | None,
    bias: Tensor | None,
    teacher_biases: Sequence[Tensor | None] | None,
) -> None:
    """Raise an error for a bias without heads, and for fewer biases than teachers."""
    if heads is None and bias is not None:
        raise ValueError(
            "masked_kl: expected heads, since bias is given, got None; without heads, add the bias "
            "to the logits"
        )
    # there may be one more bias than teachers, because a base has a bias but is not a teacher
    if teacher_biases and len(teacher_biases) < len(teachers):
        raise ValueError(
            f"masked_kl: got {len(teacher_biases)} teacher_biases for {len(teachers)} teachers, "
            "expected one per teacher"
        )


def _check_head(heads: Sequence[Tensor] | None, masks: Tensor | None, head: Tensor | None) -> None:
    """Raise an error if ``head`` does not match ``heads``, or is combined with ``masks``."""
    if head is None:
        return
    if heads is None:
        raise ValueError("masked_kl: expected heads, since head is given, got None")
    if masks is not None:
        raise ValueError("masked_kl: expected either head or masks, got both")
    if head.shape != heads[0].shape:
        raise ValueError(
            f"masked_kl: head has shape {list(head.shape)}, expected the shape of heads, "
            f"{list(heads[0].shape)}"
        )


def _checked_coefficients(
    coefficients: Tensor | str, student: Tensor, teachers: Sequence[Tensor | None]
) -> Tensor | str:
    """Return the checked shares, or ``"confidence"``; raise an error for anything else."""
    if isinstance(coefficients, Tensor):
        return _checked_shares(coefficients, student, teachers)
    if coefficients != "confidence":
        raise ValueError(
            f"masked_kl: expected coefficients to be a tensor or 'confidence', got {coefficients!r}"
        )
    absent = [k for k, teacher in enumerate(teachers) if teacher is None]
    if len(student) and absent:
        raise ValueError(
            f"masked_kl: expected a tensor for every teacher, as coefficients={coefficients!r} "
            f"requires, got None for teacher {absent[0]}"
        )
    return coefficients


def _check_states(
    student: Tensor,
    teachers: Sequence[Tensor | None],
    heads: Sequence[Tensor] | None,
    masks: Tensor | None,
) -> None:
    """Raise an error if the shapes of hidden states, heads and masks do not match."""
    shapes = [list(teacher.shape) for teacher in teachers if teacher is not None]
    if not teachers:
        raise ValueError("masked_kl: expected one or more teachers, got none")
    if student.dim() != 2 or any(shape != list(student.shape) for shape in shapes):
        raise ValueError(
            "masked_kl: expected student and teachers of one shape (N, H), got student "
            f"of shape {list(student.shape)} and teachers of shapes {shapes}"
        )
    count = 0
    if heads is not None:
        count = len(heads)
        sizes = [list(head.shape) for head in heads]
        alike = all(size == sizes[0] for size in sizes)
        if count < len(teachers) or not alike or sizes[0][1] != student.shape[1]:
            raise ValueError(
                f"masked_kl: heads have shapes {sizes}, expected {len(teachers)} or more heads of "
                f"one shape (V, {student.shape[1]})"
            )
    if masks is not None and (masks.dim() != 3 or masks.shape[0] != count):
        raise ValueError(
            f"masked_kl: masks have shape {list(masks.shape)} with {count} heads, expected three "
            "dimensions, the first of them the number of heads"
        )


def _check_numbers(direction: str, temperature: float, confidence_temperature: float) -> None:
    check_choice("masked_kl", "direction", direction, get_args(Direction))
    if not 0 < temperature < float("inf"):
        raise ValueError(f"masked_kl: temperature is {temperature}, expected a number above 0")
    # entropies are divided by this number, and float32 overflows above 3e38
    if confidence_temperature and not 1e-30 <= confidence_temperature < float("inf"):
        raise ValueError(
            f"masked_kl: confidence_temperature is {confidence_temperature}, expected 0 or at "
            "least 1e-30"
        )


def _checked_shares(
    coefficients: Tensor, student: Tensor, teachers: Sequence[Tensor | None]
) -> Tensor:  # (N, K)
    positions = student.shape[0]
    count = len(teachers)
    if coefficients.shape not in ((count,), (positions, count)):
        raise ValueError(
            f"masked_kl: coefficients have shape {list(coefficients.shape)}, expected "
            f"({positions}, {count}) or ({count},)"
        )
    coefficients = coefficients.to(work_dtype(student.dtype)).expand(positions, count)
    if not positions:
        return coefficients
    low = coefficients.amin()
    sums = coefficients.sum(1)
    # negated, so that NaN also raises the error
    if not (bool(low >= 0) and bool(((sums - 1).abs() <= 1e-2).all())):
        raise ValueError(
            f"masked_kl: the lowest of the coefficients is {float(low):.3g}, and their sums over "
            f"teachers are {float(sums.min()):.4g} to {float(sums.max()):.4g}; expected "
            "coefficients of 0 or more that sum to 1"
        )
    used = (coefficients > 0).any(0).tolist()
    if lost := [k for k in range(count) if used[k] and teachers[k] is None]:
        raise ValueError(
            f"masked_kl: expected a tensor for teacher {lost[0]}, which has coefficients above 0, "
            "got None"
        )
    return coefficients


def mask_penalty(masks: Sequence[Tensor], config: KLConfig) -> Tensor:
    """Return the penalty that `KLConfig`'s regularizers add to the loss.

    Each mask tensor is weighted by its number of elements.

    Args:
        masks: The masks after the constraint, (K, ...) each.
        config: The weights ``l1``, ``l2`` and ``similarity``.

    Returns:
        A scalar, differentiable in the masks.

    >>> mask_penalty([torch.tensor([[1.0], [0.5]])], KLConfig(l1=1.0))
    tensor(0.7500)
    """
    total = masks[0].new_zeros(())
    if not config.penalizes:
        return total
    count = masks[0].shape[0]
    places = sum(m[0].numel() for m in masks)
    # sums over all tensors, so that the tensors need not be concatenated
    products = torch.stack([torch.mm(m.flatten(1), m.flatten(1).T) for m in masks]).sum(0)
    energy = products.diagonal()
    if config.l1:
        total = total + config.l1 * sum(m.abs().sum() for m in masks) / (count * places)
    if config.l2:
        total = total + config.l2 * energy.sum() / (count * places)
    # above the diagonal: each pair of different components once
    pairs = torch.triu_indices(count, count, 1, device=energy.device)
    own = energy[pairs[0]]
    other = energy[pairs[1]]
    both = products[pairs[0], pairs[1]]
    if config.similarity and count > 1:
        # clamp, because all masks may be 0, and the derivative of the root at 0 is infinite
        sizes = (own * other).clamp_min(1e-24).sqrt()
        total = total + config.similarity * (both / sizes).mean()
    return total
