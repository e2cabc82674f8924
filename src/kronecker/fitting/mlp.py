"""An MLP outside its model: its weights, its statistics and the function between its matrices.

Letters: N tokens; H the model's width; I hidden neurons; O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..discovery.mlps import Mlp
from ..layers.weights import bias_of, dense
from ..moments import Moments

_CHUNK = 2048  # number of tokens at a time
_ACTIVATIONS = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "dense_act_fn",
)

Middle = Callable[[Sequence[Tensor]], Tensor]  # from the up layers' outputs to hidden neurons
Matrix = tuple[Tensor, ...]  # a dense weight, or the factors that it is built from


def _itself(weight: Tensor) -> Tensor:
    return weight


@dataclass
class MlpWeights:
    """An MLP's weights (out, in) in float32, during a fit.

    A weight is stored as its factors or as a dense matrix.
    """

    ups: list[Matrix]
    up_biases: list[Tensor | None]
    down: Matrix
    down_bias: Tensor | None
    middle: Middle | None  # None if unknown: the MLP then cannot be run outside its block
    build: Callable[..., Tensor] = _itself  # returns the dense weight, given a `Matrix`

    @classmethod
    def of(cls, modules: Sequence[nn.Module], middle: Middle | None) -> MlpWeights:
        """Return the weights of an MLP's modules, the last of which is the down projection."""
        matrices = [(dense(m).float().contiguous(),) for m in modules]
        biases = [None if (b := bias_of(m)) is None else b.float() for m in modules]
        # pyrefly: ignore[bad-argument-type]: lists are not changed
        return cls(matrices[:-1], biases[:-1], matrices[-1], biases[-1], middle)

    @property
    def down_weight(self) -> Tensor:
        """The dense weight of the MLP's last layer (the down projection), (O, I)."""
        return self.build(*self.down)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the values of the hidden neurons, (N, I), for inputs (N, H)."""
        assert self.middle is not None
        said = []
        for matrix, bias in zip(self.ups, self.up_biases, strict=True):
            said.append(F.linear(x, self.build(*matrix), bias))
        return self.middle(said)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (N, O) of inputs (N, H)."""
        return F.linear(self.hidden(x), self.down_weight, self.down_bias)

    def on(self, mlp: Mlp, neurons: Tensor) -> MlpWeights:
        """Return the dense weights with only the given hidden neurons, in the given order."""
        rows = mlp.rows(neurons, self.down_weight.shape[1])
        ups = [(w[rows],) for (w,) in self.ups]
        biases = [None if b is None else b[rows] for b in self.up_biases]
        return replace(self, ups=ups, up_biases=biases, down=(self.down_weight[:, neurons],))

    def parameters(self) -> list[Tensor]:
        """Return the tensors from which the weights are built: matrices or factors, and biases."""
        biases = [b for b in (*self.up_biases, self.down_bias) if b is not None]
        return [*chain.from_iterable((*self.ups, self.down)), *biases]

    def with_parameters(self, parameters: Sequence[Tensor]) -> MlpWeights:
        """Return a copy with other parameters, in the order of `parameters`."""
        rest = iter(parameters)
        *ups, down = (tuple(next(rest) for _ in m) for m in (*self.ups, self.down))
        *biases, bias = (
            None if b is None else next(rest) for b in (*self.up_biases, self.down_bias)
        )
        return replace(self, ups=ups, up_biases=biases, down=down, down_bias=bias)

    def sizes(self, x: Tensor) -> list[float]:
        """Return a standard deviation for each of `parameters`, which sets its step size.

        For a bias, this is the standard deviation of the outputs to which the bias is added.
        """
        said = [F.linear(x, self.build(*m)) for m in self.ups]
        biases = [y for y, b in zip(said, self.up_biases, strict=True) if b is not None]
        if self.down_bias is not None:
            biases.append(F.linear(self.hidden(x), self.down_weight))
        tensors = (*chain.from_iterable((*self.ups, self.down)), *biases)
        # correction=0, since a factor may be a single number; at least 1e-8, so that a tensor of
        # zeros changes, too
        return [float(t.std(correction=0).clamp_min(1e-8)) for t in tensors]

    def error(self, x: Tensor, target: Tensor) -> float:
        """Return the squared relative error of the outputs: Σ |t - y|² / Σ |t|²."""
        # float32 sums are precise enough to compare two errors; computed in pieces, because the
        # hidden neurons of all tokens take many times the memory of the inputs
        apart = 0.0
        for rows, wanted in zip(x.split(_CHUNK), target.split(_CHUNK), strict=True):
            apart += float((wanted - self(rows)).float().square().sum())
        return apart / max(1e-30, float(target.float().square().sum()))


@dataclass
class Seen:
    """Statistics of an MLP on calibration tokens: its hidden neurons, targets and inputs."""

    moments: Moments  # of hidden neurons (N, I) and target outputs (N, O)
    # inputs (N, H) and targets (N, O) of each call of `add`, stored only if the up layers are
    # fitted, too
    inputs: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)

    def add(self, hidden: Tensor, target: Tensor, inputs: Tensor | None = None) -> None:
        """Add the hidden neurons (N, I), target outputs (N, O) and inputs (N, H) of N tokens.

        If inputs are given, the inputs and targets are also stored.
        """
        self.moments.add(hidden, target)
        if inputs is not None:
            self.inputs.append(inputs.float())
            self.targets.append(target.float())


def middle_of(
    mlp: Mlp, config: object, near: Sequence[nn.Module], said: Sequence[Tensor], hidden: Tensor
) -> Middle | None:
    """Find the function that an MLP computes between its matrices, by trying activations.

    Return None if no known activation gives the same numbers.

    Args:
        mlp: The MLP's layers.
        config: The model's config, which may name an activation.
        near: Modules around the MLP, one of which may be the activation.
        said: The outputs of the MLP's up layers for some tokens, each (N, I) or (N, 2 I).
        hidden: The inputs of the MLP's last layer for the same tokens, (N, I).
    """
    activations: list[Any] = []
    # the config's activation first, because the test below cannot tell variants of GELU apart
    for field_name in _ACTIVATIONS:
        name = getattr(config, field_name, None)
        if isinstance(name, str) and name in ACT2FN:
            activations.append(ACT2FN[name])
    for module in near:
        is_leaf = not list(module.children()) and not list(module.parameters())
        if is_leaf and "Dropout" not in type(module).__name__:
            activations.append(module)
    for activation in (*activations, F.silu, F.gelu, F.relu):
        for middle in _middles(mlp, activation, len(said)):
            try:
                # a nearby module may not be an activation at all, and may raise an error
                apart = (middle(said).float() - hidden.float()).abs().mean()
            except (TypeError, RuntimeError, ValueError):
                continue
            if apart <= 2e-3 * hidden.float().abs().mean():
                return middle
    return None


def _middles(mlp: Mlp, activation: Callable[[Tensor], Tensor], ups: int) -> list[Middle]:
    if mlp.layout == "plain" and ups == 1:
        return [lambda said: activation(said[0])]

    def pair(said: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if mlp.layout == "halves":
            first, second = said[0].chunk(2, dim=-1)
        elif mlp.layout == "interleaved":
            first = said[0][..., ::2]
            second = said[0][..., 1::2]
        else:
            first, second = said
        return first, second

    def first_gates(said: Sequence[Tensor]) -> Tensor:
        first, second = pair(said)
        return activation(first) * second

    def second_gates(said: Sequence[Tensor]) -> Tensor:
        first, second = pair(said)
        return first * activation(second)

    # model families differ in which of the two goes through the activation, so both are tried
    return [first_gates, second_gates]
