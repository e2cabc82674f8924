"""Distillation: what a student learns from, and each part's loss.

Letters: N tokens; V vocabulary; F features; *B any leading shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_components._checks import CheckedConfig, Range

from .discovery.mlps import Mlp, find_mlps, watched

Weight = Annotated[float, Range(least=0)]


@dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedConfig):
    """Weights of the losses: labels * cross-entropy + logits * KL + hidden and layers * error.

    Every part is a mean over the tokens that have a label (shifted for language models), or else
    are not padding.

    Args:
        labels: Weight of the model's own loss.
        logits: Weight of T² KL(teacher ‖ student) over the vocabulary.
        temperature: T of both distributions.
        hidden: Weight of the squared error of hidden states, ‖s - t‖² / ‖t‖² of each token, a mean
            over layers.
        layers: Weight of the same error for each MLP's output on the teacher's input to it; all
            MLPs learn in parallel.

    Raises:
        ValueError: A negative weight, all of them zero, a temperature that is not positive.

    >>> DistillConfig(logits=1.0, labels=0.5).temperature
    2.0
    """

    labels: Weight = 0.0
    logits: Weight = 1.0
    temperature: Annotated[float, Range(above=0)] = 2.0
    hidden: Weight = 0.0
    layers: Weight = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a problem if no loss has a weight."""
        if not any((self.labels, self.logits, self.hidden, self.layers)):
            yield "all weights are 0, expected one above 0"


def targets_of(
    shape: tuple[int, int],
    labels: Tensor | None,
    mask: Tensor | None,
    *,
    shifted: bool,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Which tokens count, a mask of ``shape``, and their labels.

    Args:
        shape: (B, T) of the tokens.
        labels: Of the same shape, with -100 where there is none; of another shape (one a row) they
            are handed through.
        mask: Attention mask.
        shifted: The label at t + 1 belongs to token t.
        device: Of the mask that is made.

    >>> keep, labels = targets_of((1, 3), torch.tensor([[-100, 5, 6]]), None, shifted=True)
    >>> keep, labels
    (tensor([[ True,  True, False]]), tensor([5, 6]))
    """
    if labels is not None and tuple(labels.shape) == shape:
        if shifted:
            # the last token predicts nothing, so it gets -100
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        keep = labels != -100
        return keep, labels[keep]
    if mask is not None and tuple(mask.shape) == shape:
        return mask.bool(), labels
    # labels of another shape are answers of whole rows: every token counts for hidden states
    return torch.ones(shape, dtype=torch.bool, device=device), labels


def token_loss(
    config: DistillConfig, student: Tensor, teacher: Tensor, labels: Tensor | None
) -> Tensor:
    """Mean over rows of logits * T² KL + labels * cross-entropy, for logits (N, V)."""
    # a micro-batch of prompts alone has no token that counts
    student, count = student.float(), max(1, len(student))
    total = torch.zeros((), device=student.device)
    if config.logits:
        t = config.temperature
        log_p = F.log_softmax(teacher.float() / t, -1)
        log_q = F.log_softmax(student / t, -1)
        # gradients of softened logits shrink as 1 / T²; the factor keeps their size
        total = total + config.logits * t * t * F.kl_div(
            log_q, log_p, log_target=True, reduction="sum"
        )
    if config.labels:
        if labels is None:
            raise ValueError(
                "KroneckerTrainer: DistillConfig has labels > 0, but the batch has none"
            )
        total = total + config.labels * F.cross_entropy(
            student, labels.reshape(-1), reduction="sum"
        )
    return total / count


def token_errors(student: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """Mean over kept tokens of ‖s - t‖² / ‖t‖², for activations (*B, F)."""
    rows = keep.reshape(-1)
    s, t = (x.reshape(-1, x.shape[-1])[rows].float() for x in (student, teacher))
    # each token by its own size: a few tokens have states many times as large as the others
    errors = (s - t).square().sum(-1) / t.square().sum(-1).clamp_min(1e-12)
    return errors.sum() / max(1, len(errors))


class TeacherMlps:
    """Compares each MLP of the student with the teacher's on the teacher's inputs.

    Args:
        teacher: The original model.
        student: Its compressed copy.

    Raises:
        ValueError: An architecture whose MLPs are not modules of their own.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module):
        self.teacher = teacher
        self.student = student
        self.mlps = find_mlps(teacher)
        if not self.mlps:
            raise ValueError(
                f"KroneckerTrainer: no MLP is found in {type(teacher).__name__}; expected layers=0"
            )
        for mlp in self.mlps:
            parent = mlp.ups[0].rpartition(".")[0]
            if not _two_modules(mlp) and not (
                _takes_one_tensor(teacher.get_submodule(parent)) and _is_alone(teacher, parent, mlp)
            ):
                raise ValueError(
                    f"KroneckerTrainer: {parent} is more than an MLP and cannot run alone; "
                    "expected layers=0"
                )

    @contextmanager
    def watched(self) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """Yield each MLP's input and its last layer's output, by name, while the teacher runs."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        inputs: dict[str, Tensor] = {}
        downs = {mlp.ups[0]: mlp.down for mlp in self.mlps}

        def see(name: str, x: Tensor, y: Tensor) -> None:
            if name in downs:
                inputs[downs[name]] = x
            else:
                seen[name] = inputs[name], y

        with watched(
            {n: self.teacher.get_submodule(n) for pair in downs.items() for n in pair}, see
        ):
            yield seen

    def loss(self, seen: Mapping[str, tuple[Tensor, Tensor]], keep: Tensor) -> Tensor:
        """Mean over MLPs of the student's error on the teacher's inputs."""
        pairs = [(self._run(mlp, seen[mlp.down][0]), seen[mlp.down][1]) for mlp in self.mlps]
        return torch.stack([token_errors(ours, theirs, keep) for ours, theirs in pairs]).mean()

    def _run(self, mlp: Mlp, x: Tensor) -> Tensor:
        said = self.student.get_submodule(mlp.ups[0].rpartition(".")[0])(x)
        if _two_modules(mlp):
            return self.student.get_submodule(mlp.down)(said)
        return said


def _two_modules(mlp: Mlp) -> bool:
    """Return whether it is BERT's pair.

    A module up to the activation, and a linear layer within another.
    """
    return mlp.ups[0].endswith("intermediate.dense")


def _is_alone(model: nn.Module, parent: str, mlp: Mlp) -> bool:
    """Return whether a module has no parameters but an MLP's; OPT's decoder layer has more."""
    own = tuple(f"{name}." for name in (*mlp.ups, mlp.down))
    names = (f"{parent}.{n}" for n, _ in model.get_submodule(parent).named_parameters())
    return all(name.startswith(own) for name in names)


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = list(inspect.signature(module.forward).parameters.values())
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return len(needed) == 1
