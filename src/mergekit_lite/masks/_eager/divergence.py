"""Distillation towards several teachers without a (positions, vocabulary) tensor.

Positions are worked on in chunks. In a chunk the teachers' logits become one buffer of log target
probabilities, the student's logits another, which then turns into the gradient. So the gradient is
made in forward, and backward only scales it. The student's head is blended by blocks of the
vocabulary, and so is the gradient of its masks: no second head exists either.

Letters: N positions, H hidden size, V vocabulary, K components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model_components._autograd import Context

from .blend import part_of, reduce_any, work_dtype
from .confidence import ByConfidence
from .logits import Heads, chunks, entropies, log_softmax_, logaddexp_, stretches, sum_of


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Settings that `Distillation` compares by, besides tensors.

    Args:
        coefficients: (N, K), or None for shares by confidence.
        direction: ``"forward"`` or ``"reverse"``.
        temperature: T.
        confidence_temperature: Of ``"confidence"``.
        cross_entropy: Weight of the cross-entropy towards labels.
    """

    coefficients: Tensor | None
    direction: str
    temperature: float
    confidence_temperature: float
    cross_entropy: float


class _Work:
    """Work of one call: the loss, and with ``gradients`` those of student, masks and bias."""

    def __init__(
        self,
        student: Tensor,
        teachers: Sequence[Tensor | None],
        heads: Heads,
        bias: Tensor | None,
        labels: Tensor | None,
        normalizer: float | Tensor,
        objective: Objective,
        gradients: Sequence[bool],
    ):
        self.student = student
        self.teachers = teachers
        self.heads = heads
        self.bias = bias
        self.labels = labels
        self.normalizer = normalizer
        self.objective = objective
        work = self.work = work_dtype(student.dtype)
        # of many small terms
        self.loss = torch.zeros((), dtype=torch.float64, device=student.device)
        # float32, and divided by the normalizer last: in float16 the quotient would vanish before a
        # scaler sees it
        if gradients[0]:
            self.d_student = torch.empty_like(student, dtype=work)
        else:
            self.d_student = None
        masks = heads.masks if gradients[1] else None
        if masks is None:
            self.d_masks = None
        else:
            self.d_masks = torch.zeros_like(masks, dtype=work)
        if gradients[2] and bias is not None:
            self.d_bias = torch.zeros_like(bias, dtype=work)
        else:
            self.d_bias = None
        self.wants_gradient = any(gradients)

    def run(self) -> None:
        """All chunks."""
        shares = self.objective.coefficients
        # one copy from the device for all chunks
        used = None if shares is None else (shares > 0).cumsum(0).tolist()
        for chunk, (target, logits) in chunks(self.student, self.heads, self.work, buffers=2):
            self.mix(chunk, None if used is None else _between(used, chunk), target, logits)
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

    def mix(
        self, chunk: slice, counts: Sequence[int] | None, target: Tensor, scratch: Tensor
    ) -> None:
        """Fill ``target`` with the teachers' mixture, as log probabilities.

        ``scratch`` holds one teacher at a time.
        """
        shares = self.objective.coefficients
        mixture = None
        if shares is None:
            mixture = ByConfidence(target, self.objective.confidence_temperature)
        else:
            target.fill_(-math.inf)
        for k, teacher in enumerate(self.teachers):
            rows: Tensor | slice = slice(None)
            if shares is not None:
                assert counts is not None
                if not counts[k]:
                    continue
                # `nonzero` waits for the device, so it is not called where all rows count
                if counts[k] < target.shape[0]:
                    rows = (shares[chunk, k] > 0).nonzero()[:, 0]
            assert teacher is not None
            hidden = teacher[chunk][rows]
            logs = self.heads.teacher(k, hidden, scratch[: hidden.shape[0]])
            if self.objective.temperature != 1:
                logs /= self.objective.temperature
            log_softmax_(logs)
            if shares is not None:
                logaddexp_(target, logs.add_(shares[chunk][rows, k, None].log()), rows)
            else:
                assert mixture is not None
                mixture.add(logs, entropies(logs))
        if mixture is not None:
            mixture.finish()

    def compare(self, target: Tensor, logits: Tensor, labels: Tensor | None) -> None:
        """Add the rows' loss; turn their ``logits`` into its gradient."""
        t = self.objective.temperature
        weight = self.objective.cross_entropy
        extra: Tensor | None = None
        if weight and labels is not None:
            log_probs = torch.log_softmax(logits, -1)
            chosen = log_probs.gather(1, labels[:, None])
            self.loss -= weight * chosen.sum(dtype=torch.float64)
            if self.wants_gradient:
                # the gradient of a cross-entropy: softmax, less 1 at the label
                extra = log_probs.exp_().mul_(weight)
                extra.scatter_add_(1, labels[:, None], torch.full_like(chosen, -weight))
        if t != 1:
            logits /= t
        log_softmax_(logits)
        self.loss += t * t * _DIVERGENCES[self.objective.direction](target, logits)
        if self.wants_gradient:
            # T² of the loss, times 1 / T of logits / T
            logits *= t
            if extra is not None:
                logits += extra

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
                # addmm_ spares a temporary, but mixes no dtypes
                if self.work == hidden.dtype:
                    total.addmm_(g, weight)
                else:
                    total += torch.mm(g, weight)
            if self.d_masks is not None:
                # a view: blocks add up in masks that broadcast over rows
                part = part_of(self.d_masks, rows, 1)
                weights = [h[rows] for h in self.heads.heads]
                part += reduce_any(torch.mm(g.T, hidden), weights, part.shape, False)
        if self.d_student is not None:
            self.d_student[chunk] = total


# Each takes log probabilities of target and student; gives the rows' sum, and turns the student's
# into its gradient with respect to the student's logits. A term of probability 0 is 0, one of
# probability NaN is NaN.


def _forward(target: Tensor, logs: Tensor) -> Tensor:
    p = target.exp()
    loss = sum_of(torch.where(p == 0, 0, p * (target - logs)))
    # softmax less target is the gradient of forward KL
    logs.exp_().sub_(p)
    return loss


def _reverse(target: Tensor, logs: Tensor) -> Tensor:
    p = logs.exp()
    difference = torch.where(p == 0, 0, logs - target)
    rows = (p * difference).sum(-1, keepdim=True)
    # the gradient through softmax: each difference, less its mean under p
    torch.mul(p, difference - rows, out=logs)
    return rows.sum(dtype=torch.float64)


_DIVERGENCES = {"forward": _forward, "reverse": _reverse}


def _between(cumulative: list[list[int]], chunk: slice) -> list[int]:
    """Count the positions of a chunk that each teacher has a share in."""
    if chunk.start:
        before = cumulative[chunk.start - 1]
    else:
        before = [0] * len(cumulative[0])
    return [b - a for a, b in zip(before, cumulative[chunk.stop - 1], strict=True)]


class _DistillationContext(Context, Protocol):
    dtypes: list[torch.dtype | None]


class Distillation(torch.autograd.Function):
    """Saves the gradients that forward made: (N, H), the head masks' and the bias's.

    Backward scales them.
    """

    @staticmethod
    def forward(
        ctx: _DistillationContext,
        student: Tensor,
        masks: Tensor | None,
        bias: Tensor | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        heads = Heads(arguments["heads"], masks, arguments["biases"])
        work = _Work(
            student,
            arguments["teachers"],
            heads,
            bias,
            arguments["labels"],
            arguments["normalizer"],
            arguments["objective"],
            ctx.needs_input_grad[:3],
        )
        work.run()
        ctx.save_for_backward(work.d_student, work.d_masks, work.d_bias)
        ctx.dtypes = [None if t is None else t.dtype for t in (student, masks, bias)]
        return work.loss.to(work.work)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _DistillationContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # a scaler's factor first: in float16 small gradients would round to 0
        return *(None if d is None else (d * grad).to(dtype) for d, dtype in gradients), None
