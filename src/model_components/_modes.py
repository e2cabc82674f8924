"""Context managers that put a model in evaluation or training mode.

On exit, each module of the model gets its previous mode back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode; on exit, restore the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            # not `module.train(mode)`, which would set the modules inside it, too
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; on exit, restore the mode of each module.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> model[0].training, model[1].training
    (True, False)
    """
    with in_mode(model, training=False):
        yield
