"""`FreezePretrained`, a callback that schedules training."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .parameters import factor_parameters

_MARK = "_frozen_by_callback"  # name of an attribute that is set on parameters


def _model_in(arguments: Mapping[str, object]) -> nn.Module:
    """Return the model among the arguments that a trainer passes to its callbacks."""
    model = arguments["model"]
    assert isinstance(model, nn.Module)
    return model


class FreezePretrained(TrainerCallback):
    """A callback that trains only the factors for the first ``steps`` steps, then all parameters.

    With ``repeat``, the two phases alternate.

    Args:
        steps: Number of optimizer steps in each phase.
        repeat: Whether to freeze again after ``steps`` more steps, and so on.

    Raises:
        ValueError: ``steps`` is below 1.

    >>> [FreezePretrained(2, repeat=True).frozen_at(step) for step in range(6)]
    [True, True, False, False, True, True]
    """

    def __init__(self, steps: int, *, repeat: bool = False):
        if steps < 1:
            raise ValueError(f"FreezePretrained: steps is {steps}, expected 1 or more")
        self.steps = steps
        self.repeat = repeat
        self._kept: set[int] = set()  # ids of parameters that were frozen before and stay frozen

    def frozen_at(self, step: int) -> bool:
        """Return whether the pretrained parameters are frozen in a step, counted from 0."""
        phase = step // self.steps
        if self.repeat:
            return phase % 2 == 0
        return phase == 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Record which parameters are already frozen, so that they stay frozen."""
        model = _model_in(kwargs)
        if not factor_parameters(model):
            kind = type(model).__name__
            raise ValueError(
                f"FreezePretrained: expected a model with factors, got {kind}, in which nothing "
                "would be trained; remove the callback"
            )
        self._kept = set()
        for parameter in model.parameters():
            # marked parameters were frozen by an interrupted run, which could not unfreeze them
            if not parameter.requires_grad and not getattr(parameter, _MARK, False):
                self._kept.add(id(parameter))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Freeze or unfreeze the pretrained parameters."""
        # the phase depends on the global step, so that a resumed run is in the right phase
        self._set(_model_in(kwargs), self.frozen_at(state.global_step))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Unfreeze the parameters that this callback froze."""
        self._set(_model_in(kwargs), frozen=False)

    def _set(self, model: nn.Module, frozen: bool) -> None:
        left = factor_parameters(model) | self._kept
        for parameter in model.parameters():
            if id(parameter) not in left:
                parameter.requires_grad_(not frozen)
                setattr(parameter, _MARK, frozen)
