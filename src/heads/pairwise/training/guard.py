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

# number of weights that are watched, and of sampled values from each
_SAMPLED = 8
_EACH = 4096
_STEPS_TO_MOVE = 10  # after warm-up: LoRA's A moves after B, and B after a new head
_PATIENT = 0.3  # share of a run before its log-loss is judged: a weak signal shows late
_MIN_MOVED = 0.75  # share of the watched weights that must have changed after _STEPS_TO_MOVE


class DeadRunGuard(TrainerCallback):
    """Stop a dead run by an error that gives the reason.

    A run is dead if most of its weights have not changed shortly after warm-up. After three tenths
    of the run, it is also dead if its log-loss is too high in several windows in a row: not below
    the log-loss of always giving the labels' shares by more than a standard error. Except with link
    ``"concat"``, the shares of A and B are averaged. A run that gives every pair the same verdict
    is dead in this second sense.

    In float16 or bfloat16, and at small rates, an optimizer's step can be less than half of a
    weight's last bit; the weight then never moves, and the run looks like one that learns slowly.

    Args:
        window: Number of optimizer steps in a window; default: a tenth of the run, but 20 to 200.
        patience: Number of windows in a row without a low enough log-loss that stop the run. A
            resumed run starts to count again.

    Raises:
        ValueError: ``window`` or ``patience`` is below 1.
    """

    def __init__(self, *, window: int | None = None, patience: int = 3):
        if (window is not None and window < 1) or patience < 1:
            raise ValueError(
                f"DeadRunGuard: window is {window} and patience {patience}, expected 1 or more"
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
        # only sums: their size does not grow, and they can be added over processes
        rows = [said.sum(0), wanted.sum(0), wanted.T @ lost, last]
        # for the variance of the gain, which needs products of classes for soft labels
        seen = torch.cat([torch.stack(rows), wanted.T @ wanted])
        # on the device: reading it for each micro-batch would wait for the GPU
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
        # a row of an embedding changes only if its token occurs
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
            DeadRunError: The run is dead; the message has the reason.
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
        # sums over all processes: if only some stopped, the others would wait forever
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
                f"step {state.global_step}: only {share:.0%} of the weights have moved; a learning "
                f"rate of {max(lr_scheduler.get_last_lr()):.2g} is too small for {dtypes}, or "
                "steps are skipped; use a larger learning rate, or float32 weights"
            )

    def _check_window(self, state: TrainerState, seen: Tensor, window: int) -> None:
        """Check that the log-loss is over one standard error below that of the labels' shares."""
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
        # the mean gain over the shares per pair; its variance follows
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
            f"step {state.global_step}: {same}log-loss {loss:.4f} over {window} steps is not below "
            f"{known:.4f}, that of always giving the labels' shares ({told}), by more than its "
            f"standard error, {error:.4f}, in {self._poor} windows in a row; try another learning "
            "rate, or other data"
        )


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().flatten()
    return flat[:: max(1, len(flat) // _EACH)]
