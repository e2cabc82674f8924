"""`DeadRunGuard`: stop a training run that learns nothing, and report why."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from model_components._trainer import DeadRunError

from ..choices import CLASSES
from ..functional import log_probabilities
from ..report.metrics import alike

# number of weight tensors to watch, and number of values to sample from each
_SAMPLED = 8
_EACH = 4096
_STEPS_TO_MOVE = 10  # after warm-up: LoRA's A changes only after its B, and B only after a new head
_PATIENT = 0.3  # fraction of a run before the first check of its log-loss, which may fall late
_MIN_MOVED = 0.75  # fraction of the sampled values that must have changed after _STEPS_TO_MOVE


class DeadRunGuard(TrainerCallback):
    """A callback that stops a run that learns nothing, with an error that gives the reason.

    A run is dead if more than a quarter of its sampled weights have not changed shortly after
    warm-up. After three tenths of the run, it is also dead if its log-loss is too high in several
    windows of steps in a row. A log-loss is too high if it is not more than a standard error below
    the log-loss of always predicting the class frequencies of the window's labels. Except with link
    ``"concat"``, the frequencies of A and B are averaged. For example, a run that gives every pair
    the same probabilities is dead.

    In float16 or bfloat16, and at small learning rates, an optimizer step can be less than half of
    a weight's last bit. The weight then never changes, and the run looks as if it learned slowly.

    Args:
        window: Number of optimizer steps in a window; default: a tenth of the run, at least 20 and
            at most 200.
        patience: Number of windows in a row with too high a log-loss after which the run stops. A
            resumed run starts counting again.

    Raises:
        ValueError: ``window`` or ``patience`` is below 1.
    """

    def __init__(self, *, window: int | None = None, patience: int = 3):
        if (window is not None and window < 1) or patience < 1:
            raise ValueError(
                "DeadRunGuard: expected window and patience of 1 or more, got "
                f"window={window} and patience={patience}"
            )
        self.window = window
        self.patience = patience
        self.trainer: Any = None  # set by `PairwiseTrainer`
        self._seen: Tensor | None = None  # the sums of this window, from `observe`
        self._steps = self._poor = self._first = 0
        self._fair = True
        self._start: list[tuple[nn.Parameter, Tensor]] | None = None

    @torch.no_grad()
    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Add a micro-batch's (P, C) logits, and its labels, to the sums of this window."""
        classes = logits.shape[-1]
        log_probs = log_probabilities(logits.detach().float())
        if labels.dim() == 2:
            wanted = labels.float()
        else:
            wanted = nn.functional.one_hot(labels, classes).float()
        said = nn.functional.one_hot(log_probs.argmax(-1), classes).float()
        lost = (wanted * -log_probs).sum(1)
        # one number, padded to the width of the other rows
        last = torch.stack([lost.square().sum(), *lost.new_zeros(classes - 1)])
        # only sums, whose size does not grow and which can be added up over processes
        rows = [said.sum(0), wanted.sum(0), wanted.T @ lost, last]
        # for the variance of the gain, which needs products of classes for soft labels
        seen = torch.cat([torch.stack(rows), wanted.T @ wanted])
        # kept on the device: reading the sums after each micro-batch would wait for the GPU
        self._seen = seen if self._seen is None else self._seen + seen

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **rest: object,
    ) -> None:
        """Store a sample of the weights."""
        self._seen = None
        self._steps = 0
        self._poor = 0
        self._first = state.global_step
        self._fair = model.config.link != "concat"
        # embeddings are not watched, because a row changes only if its token occurs
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        weights = [
            p
            for p in model.parameters()
            if p.requires_grad and p.dim() == 2 and id(p) not in tables
        ]
        chosen = weights[:: max(1, len(weights) // _SAMPLED)][:_SAMPLED]
        self._start = [(p, _sample(p).clone()) for p in chosen]

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: object = None,
        **rest: object,
    ) -> None:
        """Check the weights once after warm-up, and the log-loss after each window.

        Raises:
            DeadRunError: The run is dead; the message gives the reason.
        """
        warm = args.get_warmup_steps(state.max_steps)
        if self._start is not None and state.global_step >= max(warm, self._first) + _STEPS_TO_MOVE:
            self._check_motion(state, lr_scheduler)
        if self._seen is None:
            return
        self._steps += 1
        window = self.window or min(200, max(20, state.max_steps // 10))
        if self._steps < window:
            return
        # sums over all processes: if only some processes stopped, the rest would wait forever
        seen = self.trainer.accelerator.reduce(self._seen, "sum").cpu().double()
        self._seen = None
        self._steps = 0
        if state.global_step > max(warm, _PATIENT * state.max_steps):
            self._check_window(state, seen, window)

    def _check_motion(self, state: TrainerState, lr_scheduler: Any) -> None:
        """Check that most of the stored weights have changed since the start of the run."""
        watched = self._start or []
        self._start = None
        moved = [float((_sample(p) != before).float().mean()) for p, before in watched]
        share = sum(moved) / max(1, len(moved))
        if watched and share < _MIN_MOVED:
            dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p, _ in watched}))
            raise DeadRunError(
                f"step {state.global_step}: only {share:.0%} of the sampled weights have changed. "
                f"The learning rate {max(lr_scheduler.get_last_lr()):.2g} is too small for "
                f"{dtypes}, or steps are skipped. Use a larger learning rate, or float32 weights"
            )

    def _check_window(self, state: TrainerState, seen: Tensor, window: int) -> None:
        """Check that the log-loss of a window is low enough; see `DeadRunGuard`."""
        said = seen[0]
        labels = seen[1]
        lost = seen[2]
        moments = seen[4:]
        count = float(labels.sum())
        shares = labels / labels.sum()
        if self._fair:  # such a head cannot learn which of A and B wins more often
            shares = alike(shares)
        # the loss of a class without labels would be infinite, and infinity times 0 is nan
        prior = -shares.clamp(min=1e-12).log()  # of each class
        # how much lower the log-loss is than that of always predicting the shares, on average
        gain = float((labels * prior - lost).sum()) / count
        # E[(prior - loss)²] - E[prior - loss]², from the sums of the window
        spread = float(seen[3, 0] - 2 * prior @ lost + prior @ moments @ prior) / count - gain**2
        error = (max(spread, 0.0) / count) ** 0.5
        if gain <= error:
            self._poor = self._poor + 1
        else:
            self._poor = 0
        if self._poor < self.patience:
            return
        if int((said > 0).sum()) == 1:
            same = f"every verdict was {CLASSES[int(said.argmax())]}, and "
        else:
            same = ""
        told = ", ".join(f"{share:.0%}" for share in shares)
        loss = float(lost.sum()) / count
        known = float((labels * prior).sum()) / count
        raise DeadRunError(
            f"step {state.global_step}: {same}the log-loss was too high in {self._poor} windows in "
            f"a row. Over the last {window} steps it was {loss:.4f}. Always predicting the labels' "
            f"class frequencies ({told}) gives {known:.4f}, which is not higher by more than the "
            f"standard error, {error:.4f}. Try another learning rate, or other data"
        )


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().flatten()
    return flat[:: max(1, len(flat) // _EACH)]
