"""Callbacks that schedule training: `FreezePretrained` and `FadeIn`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..layers.linear import SmallerLinear
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


class FadeIn(TrainerCallback):
    """A callback that fades in the factors while the original layers fade out.

    While it fades in, a layer computes ``(1 - α) W x + α Ŵ x`` from the original weight W and the
    smaller weight Ŵ, with α from 0 to 1.

    The model must be converted with ``convert_(..., fade_in=True)``. Layers begin to fade in one
    after another, ``every`` steps apart, or all together with ``every=0``. The original layers are
    not saved: to resume, convert the original model again, then load the checkpoint.

    Args:
        every: Number of steps after which the next layer begins to fade in.
        over: Number of steps in which a layer's α rises evenly between 0 and 1. With 0, α changes
            from 0 to 1 at once.
        order: ``"low_to_high"`` begins with the first layer of the model, and ``"high_to_low"``
            with the last.

    Raises:
        ValueError: ``every`` or ``over`` is negative, or ``order`` is unknown.

    >>> fade = FadeIn(every=10, over=5)
    >>> [fade.share(layer, step=12) for layer in (0, 1, 2)]
    [1.0, 0.5, 0.0]
    """

    def __init__(self, *, every: int = 0, over: int = 0, order: str = "low_to_high"):
        if every < 0 or over < 0 or order not in ("low_to_high", "high_to_low"):
            raise ValueError(
                "FadeIn: expected every >= 0, over >= 0 and order='low_to_high' or "
                f"'high_to_low', got every={every}, over={over}, order={order!r}"
            )
        self.every = every
        self.over = over
        self.order = order

    def share(self, layer: int, step: int) -> float:
        """Return α at a step, for the layer at index ``layer`` in the order of fading in."""
        since = step - layer * self.every
        if since < 0:
            return 0.0
        if since >= self.over:
            return 1.0
        # never 0 or 1, so that both layers run in each of the `over` steps
        return (since + 1) / (self.over + 1)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Check that the original layers are there; in a resumed run, set every layer's α.

        Raises:
            ValueError: The original layers are missing, and not all layers have faded in.
        """
        layers = [m for m in _model_in(kwargs).modules() if isinstance(m, SmallerLinear)]
        # a run that is resumed at its end takes no step, so the last step sets α
        step = state.global_step
        if step == state.max_steps:
            step -= 1
        # a run that is resumed after all layers have faded in no longer needs the originals
        over = all(self.share(i, step) == 1.0 for i in range(len(layers)))
        if not any(layer.original is not None for layer in layers) and (
            not state.global_step or not over
        ):
            raise ValueError(
                "FadeIn: no layer has its original beside it; convert the model with "
                "convert_(..., fade_in=True)"
            )
        if state.global_step:
            self._set_shares(layers, step)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Set every layer's α, and drop the original of a layer whose α reaches 1."""
        layers = [m for m in _model_in(kwargs).modules() if isinstance(m, SmallerLinear)]
        self._set_shares(layers, state.global_step)

    def _set_shares(self, layers: list[SmallerLinear], step: int) -> None:
        # layers that have faded in keep their place, so that the others' schedule does not change
        for place, layer in enumerate(layers if self.order == "low_to_high" else reversed(layers)):
            if layer.original is not None:
                layer.share = self.share(place, step)
                if layer.share == 1.0:
                    layer.fade_in_(None)
