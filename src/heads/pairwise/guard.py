"""`DeadRunGuard`: stops a training that cannot come to anything, and says why."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from .config import CLASSES
from .functional import log_probabilities

_SAMPLED, _EACH = 8, 4096  # weights that are watched, and how many numbers of each
_STEPS_TO_MOVE = 3
_LOOK = 5  # steps from one look at the numbers to the next
_CLEARLY = 0.01  # nats


class DeadRunError(RuntimeError):
    """A training was stopped because it cannot come to anything."""


class DeadRunGuard(TrainerCallback):
    """Stops a run that is dead, with the reason.

    Dead are logits that are not finite, weights that do not move, and, several windows running after warm-up, a
    log-loss no better than that of the labels' own shares, or hardly better with the same verdict for every pair.

    In float16 or bfloat16, and at small rates, an optimizer's step can be less than half of a weight's last bit; the
    weight then never moves, and the run looks like one that learns slowly.

    Args:
        window: Optimizer steps that are looked at together; default a tenth of the run, from 20 to 200.
        patience: Windows after warm-up that may be no better than the prior, one after the other.
        min_moved: Share of the weights that must have moved after a few steps.

    Raises:
        ValueError: A window or patience below 1.
    """

    def __init__(self, *, window: int | None = None, patience: int = 3, min_moved: float = 0.75):
        if (window is not None and window < 1) or patience < 1:
            raise ValueError(f"DeadRunGuard: window is {window} and patience {patience}, needed 1 or more")
        self.window, self.patience, self.min_moved = window, patience, min_moved
        self.trainer: Any = None  # `PairwiseTrainer` puts itself here
        self._seen: Tensor | None = None  # in this window: what was bad, the loss, verdicts and labels by class
        self._steps = self._poor = self._moving = 0
        self._start: list[tuple[nn.Parameter, Tensor]] | None = None

    @torch.no_grad()
    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """What a micro-batch of training came to: (P, C) logits and labels."""
        classes = logits.shape[-1]
        found = log_probabilities(logits.detach().float())
        wanted = labels.double() if labels.dim() == 2 else nn.functional.one_hot(labels, classes).double()
        bad = (~torch.isfinite(found)).any().double()
        said = nn.functional.one_hot(found.argmax(-1), classes).double().sum(0)
        loss = -(wanted * found.double().nan_to_num(0.0, 0.0, 0.0)).sum()
        seen = torch.cat([torch.stack([bad, loss]), said, wanted.sum(0)])
        self._seen = seen if self._seen is None else self._seen + seen

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Remembers some of the weights."""
        self._seen, self._steps = None, 0
        self._poor = self._moving = 0
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        weights = [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tables]
        chosen = weights[:: max(1, len(weights) // _SAMPLED)][:_SAMPLED]
        self._start = [(p, _sample(p).clone()) for p in chosen]

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **rest: Any) -> None:
        """Looks at what has been seen.

        Raises:
            DeadRunError: The run is dead; the message says of what.
        """
        self._check_motion(state, lr_scheduler)
        if self._seen is None:
            return
        self._steps += 1
        window = self.window or min(200, max(20, state.max_steps // 10))
        if self._steps % _LOOK and self._steps < window:  # to look is to wait for the device
            return
        seen = self.trainer.accelerator.reduce(self._seen, "sum").cpu()
        if seen[0]:
            raise DeadRunError(
                f"step {state.global_step}: logits are not finite; needed float32 weights, or bf16 instead of fp16"
            )
        if self._steps < window:
            return
        self._seen, self._steps = None, 0
        if state.global_step > args.get_warmup_steps(state.max_steps):
            self._check_window(state, seen, window)

    def _check_motion(self, state: Any, lr_scheduler: Any) -> None:
        """After a few steps with a rate above 0, most of the weights that were remembered must have changed."""
        if self._start is None or lr_scheduler is None:
            return
        self._moving += max(lr_scheduler.get_last_lr()) > 0
        if self._moving <= _STEPS_TO_MOVE:
            return
        watched, self._start = self._start, None
        moved = [float((_sample(p) != before).double().mean()) for p, before in watched]
        share = sum(moved) / max(1, len(moved))
        rate = max(lr_scheduler.get_last_lr())
        if watched and share < self.min_moved:
            dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p, _ in watched}))
            raise DeadRunError(
                f"step {state.global_step}: only {share:.0%} of the weights have moved; either {dtypes} is too coarse "
                f"for a learning rate of {rate:.2g}, or steps are skipped; needed float32 weights"
            )

    def _check_window(self, state: Any, total: Tensor, window: int) -> None:
        classes, step = (len(total) - 2) // 2, f"step {state.global_step}"
        said, labels = total[2 : 2 + classes], total[2 + classes :]
        shares = labels / labels.sum()
        fair = shares.clone()  # a head that is fair to A and B cannot know which of them wins more often
        fair[:2] = shares[:2].mean()
        prior = float(-(shares * fair.clamp(min=1e-12).log()).sum() + (classes - 1) / (2 * labels.sum()))
        loss = float(total[1] / labels.sum())
        one = int((said > 0).sum()) == 1 and float(shares.max()) < 0.9
        poor = loss >= prior or (one and loss > prior - _CLEARLY)
        self._poor = self._poor + 1 if poor else 0
        if self._poor < self.patience:
            return
        what = f"every verdict was {CLASSES[int(said.argmax())]}, and " if one else ""
        told = ", ".join(f"{share:.0%}" for share in shares)
        raise DeadRunError(
            f"{step}: {what}log-loss {loss:.4f} over {window} steps is no better than the {prior:.4f} of the labels' "
            f"own shares ({told}), {self._poor} times running; needed another learning rate, or other data"
        )


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().flatten()
    return flat[:: max(1, len(flat) // _EACH)]
