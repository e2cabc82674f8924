"""`masked_kl`: distillation towards several teachers without a (positions, vocabulary) tensor.

Positions are worked on in chunks. In a chunk the teachers' logits become one buffer of log target probabilities, the
student's logits another, which then turns into the gradient. So the gradient is made in forward, and backward only
scales it. The student's head is blended by blocks of the vocabulary, and so is the gradient of its masks: no second
head exists either.

Letters: N positions, H hidden size, V vocabulary, K components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference
from .blending import part_of, pieces, reduce_any, work_dtype
from .config import DIRECTIONS
from .logits import Heads, log_softmax_, logaddexp_, stretches, sum_of

_SMALLEST, _SHARE, _LARGEST = 16, 16, 512  # positions in a chunk: a sixteenth of all, between these


class _Work:
    """What one call of `masked_kl` computes: the loss, and with ``gradients`` those of student, masks and bias."""

    def __init__(
        self,
        student: Tensor,
        teachers: Sequence[Tensor | None],
        heads: Heads,
        bias: Tensor | None,
        coefficients: Tensor | None,
        labels: Tensor | None,
        normalizer: float | Tensor,
        options: dict[str, Any],
        gradients: tuple[bool, bool, bool],
    ):
        self.student, self.teachers, self.heads, self.bias = student, teachers, heads, bias
        self.coefficients, self.labels, self.options = coefficients, labels, options
        self.temperature, self.cross_entropy = options["temperature"], options["cross_entropy"]
        self.normalizer = normalizer
        work = self.work = work_dtype(student.dtype)
        self.loss = torch.zeros((), dtype=torch.float64, device=student.device)  # of many small terms
        # float32, and divided by the normalizer last: in float16 the quotient would vanish before a scaler sees it
        self.d_student = torch.empty_like(student, dtype=work) if gradients[0] else None
        masks = heads.masks if gradients[1] else None
        self.d_masks = None if masks is None else torch.zeros_like(masks, dtype=work)
        self.d_bias = torch.zeros_like(bias, dtype=work) if gradients[2] and bias is not None else None
        self.wants_gradient = any(gradients)

    def run(self) -> None:
        """All chunks."""
        positions = self.student.shape[0]
        vocabulary = self.student.shape[1] if self.heads.heads is None else self.heads.heads[0].shape[0]
        size = min(positions, max(_SMALLEST, min(_LARGEST, positions // _SHARE)))
        buffers = [torch.empty(size, vocabulary, dtype=self.work, device=self.student.device) for _ in range(2)]
        used = None if self.coefficients is None else (self.coefficients > 0).cumsum(0).tolist()  # looked at once
        for chunk in pieces(positions, size):
            target, logits = (b[: chunk.stop - chunk.start] for b in buffers)
            counts = None if used is None else _between(used, chunk)
            self.mix(chunk, counts, target, logits)
            hidden = self.student[chunk]
            self.heads.student(hidden, self.bias, logits)
            for rows in stretches(logits):
                labels = None if self.labels is None else self.labels[chunk][rows]
                self.compare(target[rows], logits[rows], labels)
            if self.wants_gradient:
                self.give_back(chunk, hidden, logits)
        for total in (self.loss, self.d_student, self.d_masks, self.d_bias):
            if total is not None:
                total /= self.normalizer

    def mix(self, chunk: slice, counts: Sequence[int] | None, target: Tensor, scratch: Tensor) -> None:
        """Fill ``target`` with the log of Σ_k c_k softmax(teacher_k / T); ``scratch`` holds one teacher at a time."""
        shares = None if self.coefficients is None else self.coefficients[chunk]
        sharpness = self.options["confidence_temperature"]
        target.fill_(-math.inf)
        total = torch.full((target.shape[0], 1), -math.inf, dtype=self.work, device=target.device)
        for k, teacher in enumerate(self.teachers):
            rows: Tensor | slice = slice(None)
            if shares is not None:
                assert counts is not None
                if not counts[k]:
                    continue
                if counts[k] < shares.shape[0]:
                    rows = (shares[:, k] > 0).nonzero()[:, 0]
            assert teacher is not None
            hidden = teacher[chunk][rows]
            logs = self.heads.teacher(k, hidden, scratch[: hidden.shape[0]])
            if self.temperature != 1:
                logs /= self.temperature
            entropy = log_softmax_(logs, entropy=shares is None)
            if shares is not None:
                logaddexp_(target, logs.add_(shares[rows, k, None].log()), rows)
            elif sharpness:
                weight = -entropy / sharpness
                total = torch.logaddexp(total, weight)
                logaddexp_(target, logs.add_(weight), rows)
            else:  # the surest teacher so far
                better = (-entropy > total)[:, 0].nonzero()[:, 0]
                total = torch.maximum(total, -entropy)
                for piece in stretches(target[: better.numel()]):
                    target[better[piece]] = logs[better[piece]]
        if shares is None and sharpness:
            target -= total

    def compare(self, target: Tensor, logits: Tensor, labels: Tensor | None) -> None:
        """Add the rows' loss; turn their ``logits`` into its gradient."""
        t = self.temperature
        extra: Tensor | None = None
        if self.cross_entropy and labels is not None:
            own = torch.log_softmax(logits, -1)
            chosen = own.gather(1, labels[:, None])
            self.loss -= self.cross_entropy * chosen.sum(dtype=torch.float64)
            if self.wants_gradient:
                extra = own.exp_().mul_(self.cross_entropy)
                extra.scatter_add_(1, labels[:, None], torch.full_like(chosen, -self.cross_entropy))
        if t != 1:
            logits /= t
        log_softmax_(logits)
        if self.options["direction"] == "forward":
            p = target.exp()
            # where the target is exactly 0 its log is -inf, and the term is 0
            self.loss += t * t * sum_of(torch.where(p > 0, p * (target - logits), 0))
            gradient = logits.exp_().sub_(p) if self.wants_gradient else None
        elif self.options["direction"] == "reverse":
            p = logits.exp()
            difference = torch.where(p > 0, logits - target, 0)
            rows = (p * difference).sum(-1, keepdim=True)
            self.loss += t * t * rows.sum(dtype=torch.float64)
            gradient = torch.mul(p, difference - rows, out=logits)
        else:
            p, q = logits.exp(), target.exp()
            middle = torch.logaddexp(logits, target).sub_(math.log(2))
            difference = logits - middle
            rows = (p * difference).sum(-1, keepdim=True)
            other = sum_of(torch.where(q > 0, q * (target - middle), 0))
            self.loss += t * t * (rows.sum(dtype=torch.float64) + other) / 2
            gradient = torch.mul(p, difference - rows, out=logits).div_(2)
        if gradient is not None and self.wants_gradient:
            gradient *= t
            if extra is not None:
                gradient += extra

    def give_back(self, chunk: slice, hidden: Tensor, gradient: Tensor) -> None:
        """From the gradient of a chunk's logits to those of hidden states, masks and bias."""
        if self.d_bias is not None:
            self.d_bias += gradient.sum(0)
        if self.heads.heads is None:
            if self.d_student is not None:
                self.d_student[chunk] = gradient
            return
        total = torch.zeros(hidden.shape, dtype=self.work, device=hidden.device)
        for rows, weight in self.heads.blocks():
            g = gradient[:, rows].to(hidden.dtype)
            if self.d_student is not None:
                if self.work == hidden.dtype:
                    total.addmm_(g, weight)
                else:
                    total += torch.mm(g, weight)
            if self.d_masks is not None:
                part = part_of(self.d_masks, rows, 1)
                held = [h[rows] for h in self.heads.heads]
                part += reduce_any(torch.mm(g.T, hidden), held, part.shape, False)
        if self.d_student is not None:
            self.d_student[chunk] = total


def _between(cumulative: list[list[int]], chunk: slice) -> list[int]:
    """How many positions of a chunk each teacher has a share in."""
    before = cumulative[chunk.start - 1] if chunk.start else [0] * len(cumulative[0])
    return [b - a for a, b in zip(before, cumulative[chunk.stop - 1], strict=True)]


class _MaskedKL(torch.autograd.Function):
    """Saves the gradients that forward made: (N, H), the head masks' and the bias's; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, masks: Tensor | None, bias: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        gradients = tuple(ctx.needs_input_grad[:3])
        heads = Heads(arguments["heads"], masks, arguments["biases"])
        work = _Work(
            student, arguments["teachers"], heads, bias, arguments["coefficients"], arguments["labels"],
            arguments["normalizer"], arguments["options"], gradients,
        )  # fmt: skip
        work.run()
        ctx.save_for_backward(work.d_student, work.d_masks, work.d_bias)
        ctx.dtypes = [None if t is None else t.dtype for t in (student, masks, bias)]
        return work.loss.to(work.work)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if d is None else (d * grad).to(dtype) for d, dtype in made), None


def masked_kl(
    student: Tensor,  # (N, H), or (N, V) logits where there are no heads
    teachers: Sequence[Tensor | None],  # K of the same
    heads: Sequence[Tensor] | None = None,  # K of (V, H)
    masks: Tensor | None = None,  # (K, broadcasts over a head)
    *,
    coefficients: Tensor | None = None,  # (N, K) or (K,)
    confidence_temperature: float = 1.0,
    temperature: float = 1.0,
    direction: str = "forward",
    labels: Tensor | None = None,  # (N,)
    cross_entropy: float = 0.0,
    bias: Tensor | None = None,  # (V,)
    teacher_biases: Sequence[Tensor] | None = None,  # K of (V,)
    normalizer: float | Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """``T² Σ_n D(Σ_k c_nk softmax(teacher_k / T), softmax(student / T)) / normalizer``, from final hidden states.

    There is never a (positions, vocabulary) tensor: two buffers of a chunk of positions take its place, at most an
    eighth of one such tensor together (and never fewer than 16 positions each). Until backward the gradients of
    ``student`` and ``masks`` are kept.

    Args:
        student: The merged model's final hidden states at supervised positions, (N, H); its logits when ``heads`` is
            None.
        teachers: The components' final hidden states (or logits) at the same positions; None for one whose
            coefficients are all zero.
        heads: The components' frozen output heads, (V, H) each.
        masks: Masks of the head; None: the student's head is the first one, unmasked.
        coefficients: Shares c of the teachers, rows that sum to one. None: by confidence: per position the softmax
            over k of -entropy_k / ``confidence_temperature`` (0: the surest teacher alone).
        confidence_temperature: See above.
        temperature: T.
        direction: ``"forward"`` D = KL(target, student); ``"reverse"``; ``"jensen_shannon"``.
        labels: Token ids for ``cross_entropy``, (N,).
        cross_entropy: Weight of the cross-entropy (at temperature 1) towards ``labels``.
        bias: The merged head's bias.
        teacher_biases: The components' own.
        normalizer: What the sum is divided by; default N.
        impl: ``"eager"`` (also ``"auto"``), or ``"reference"`` without biases and normalizer.

    Returns:
        A scalar, float32 (float64 for float64 inputs). With N = 0 a zero that has a graph.

    Raises:
        ValueError: Shapes that do not fit, a missing teacher that has a share, an unknown direction.

    Source: Hinton et al., arXiv 1503.02531; gradients made in forward after Hsu et al., arXiv 2410.10989.

    >>> hidden, head = torch.ones(3, 2), torch.eye(2)
    >>> masked_kl(hidden, [hidden, None], [head, head], torch.ones(2, 1, 2) / 2, coefficients=torch.tensor([1.0, 0.0]))
    tensor(0.)
    """
    count, positions = len(teachers), student.shape[0]
    if direction not in DIRECTIONS:
        raise ValueError(f"masked_kl: direction is {direction!r}, needed one of {', '.join(DIRECTIONS)}")
    if impl not in ("auto", "eager", "reference"):
        raise ValueError(f"masked_kl: impl is {impl!r}, needed auto, eager or reference")
    if student.dim() != 2 or any(t is not None and t.shape != student.shape for t in teachers):
        shapes = [None if t is None else list(t.shape) for t in teachers]
        raise ValueError(f"masked_kl: student is {list(student.shape)}, teachers {shapes}; needed one (N, H)")
    if heads is not None and (len(heads) != count or any(h.shape[1] != student.shape[1] for h in heads)):
        raise ValueError(
            f"masked_kl: heads are {[list(h.shape) for h in heads]}, needed {count} of (V, {student.shape[1]})"
        )
    if masks is not None and (heads is None or masks.dim() != 3 or masks.shape[0] != count):
        raise ValueError(f"masked_kl: masks are {list(masks.shape)}, needed heads and ({count}, ., .)")
    if coefficients is not None:
        if coefficients.shape not in ((count,), (positions, count)):
            raise ValueError(
                f"masked_kl: coefficients are {list(coefficients.shape)}, needed ({positions}, {count}) or ({count},)"
            )
        coefficients = coefficients.to(work_dtype(student.dtype)).expand(positions, count)
    used = [coefficients is None or bool((coefficients[:, k] > 0).any()) for k in range(count)]
    if lost := [k for k in range(count) if used[k] and teachers[k] is None and positions]:
        raise ValueError(f"masked_kl: teacher {lost[0]} has coefficients above 0 and was not given")
    if cross_entropy and labels is None:
        raise ValueError("masked_kl: cross_entropy needs labels")
    options = {
        "confidence_temperature": confidence_temperature,
        "temperature": temperature,
        "direction": direction,
        "cross_entropy": cross_entropy,
    }
    if positions == 0:
        return student.float().sum() + sum(0 * t.sum() for t in (masks, bias) if t is not None)
    if impl == "reference":
        if any(t is None for t in teachers) or bias is not None or normalizer is not None:
            raise ValueError("masked_kl: impl 'reference' takes every teacher, no bias and no normalizer")
        plain = [t for t in teachers if t is not None]
        return reference.masked_kl(student, plain, heads, masks, coefficients=coefficients, labels=labels, **options)
    arguments = {
        "teachers": [None if t is None else t.detach() for t in teachers],
        "heads": heads,
        "biases": teacher_biases or [None] * count,
        "coefficients": coefficients,
        "labels": labels,
        "normalizer": positions if normalizer is None else normalizer,
        "options": options,
    }
    if heads is not None and student.dtype != heads[0].dtype:  # autocast's
        student = student.to(heads[0].dtype)
        arguments["teachers"] = [None if t is None else t.to(heads[0].dtype) for t in arguments["teachers"]]
    with torch.autocast(student.device.type, enabled=False):
        return _MaskedKL.apply(student, masks, bias, arguments)
