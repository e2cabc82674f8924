"""The hidden neurons of one MLP: which stay, and the weights that make up for the others.

Letters: N tokens; H the block's width; I hidden neurons; O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ..config import PruneConfig
from ..layers.linear import bias_of, dense
from ..surgery.mlps import Mlp
from .elimination import eliminate, refitted

_CHUNK = 2048  # tokens at a time
_BATCH = 512  # tokens of a step of descent
_STEP = 0.015  # of a step, as a share of a matrix's standard deviation
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")

Middle = Callable[[Sequence[Tensor]], Tensor]  # what the up layers say, to hidden neurons


@dataclass
class MlpWeights:
    """An MLP's weights as (out, in) matrices, in float32 while they are fitted."""

    ups: list[Tensor]
    up_biases: list[Tensor | None]
    down: Tensor
    down_bias: Tensor | None
    middle: Middle | None  # None: not known, so that the MLP cannot be run apart from its block

    @classmethod
    def of(cls, modules: Sequence[nn.Module], middle: Middle | None) -> MlpWeights:
        """Those of its modules, the last one last."""
        matrices = [dense(m).float().contiguous() for m in modules]
        biases = [None if (b := bias_of(m)) is None else b.float() for m in modules]
        return cls(matrices[:-1], biases[:-1], matrices[-1], biases[-1], middle)

    def hidden(self, x: Tensor) -> Tensor:
        """(N, H) to (N, I)."""
        assert self.middle is not None
        return self.middle([F.linear(x, w, b) for w, b in zip(self.ups, self.up_biases, strict=True)])

    def __call__(self, x: Tensor) -> Tensor:
        """(N, H) to (N, O)."""
        return F.linear(self.hidden(x), self.down, self.down_bias)

    def on(self, mlp: Mlp, neurons: Tensor) -> MlpWeights:
        """Those of some of the hidden neurons."""
        rows = mlp.rows(neurons, self.down.shape[1])
        ups, biases = [w[rows] for w in self.ups], [None if b is None else b[rows] for b in self.up_biases]
        return replace(self, ups=ups, up_biases=biases, down=self.down[:, neurons])

    def state(self, mlp: Mlp, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
        """The parameters of its modules, by name, in their dtypes and layouts."""
        state: dict[str, Tensor] = {}
        matrices, biases = (*self.ups, self.down), (*self.up_biases, self.down_bias)
        for name, module, matrix, bias in zip((*mlp.ups, mlp.down), modules, matrices, biases, strict=True):
            dtype = dense(module).dtype
            state[f"{name}.weight"] = (matrix.T if isinstance(module, Conv1D) else matrix).to(dtype)
            if bias is not None:
                state[f"{name}.bias"] = bias.to(dtype)
        return state

    def parameters(self) -> list[Tensor]:
        """All of them."""
        return [t for t in (*self.ups, *self.up_biases, self.down, self.down_bias) if t is not None]

    def sizes(self, x: Tensor) -> list[float]:
        """For each of `parameters` the standard deviation of a matrix, or of what a bias is added to."""
        said = [F.linear(x, w) for w in self.ups]
        spread = {id(b): s for b, s in zip(self.up_biases, said, strict=True) if b is not None}
        if self.down_bias is not None:
            spread[id(self.down_bias)] = F.linear(self.hidden(x), self.down)
        return [float(spread.get(id(t), t).std(correction=0).clamp_min(1e-8)) for t in self.parameters()]


@dataclass
class Seen:
    """What an MLP sees in the smaller model, and what it should give, over calibration tokens. Sums in float64."""

    moment: Tensor  # Σ h hᵀ, (I, I)
    cross: Tensor  # Σ t hᵀ, (O, I)
    sum_h: Tensor  # (I,)
    sum_t: Tensor  # (O,)
    inputs: list[Tensor] = field(default_factory=list)  # (N, H), where the matrices before are fitted too
    targets: list[Tensor] = field(default_factory=list)  # (N, O)
    energy: float = 0.0  # Σ |t|²
    count: int = 0

    @classmethod
    def nothing(cls, outputs: int, neurons: int, device: torch.device) -> Seen:
        """No tokens yet."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(zeros(neurons, neurons), zeros(outputs, neurons), zeros(neurons), zeros(outputs))

    def add(self, hidden: Tensor, target: Tensor, inputs: Tensor | None = None) -> None:
        """Tokens: hidden neurons (N, I), wanted outputs (N, O) and, to keep them, the MLP's inputs (N, H)."""
        hidden, target = hidden.float(), target.float()
        self.moment += hidden.T @ hidden
        self.cross += target.T @ hidden
        self.sum_h += hidden.double().sum(0)
        self.sum_t += target.double().sum(0)
        self.energy += float(target.double().square().sum())
        self.count += len(hidden)
        if inputs is not None:
            self.inputs.append(inputs.float())
            self.targets.append(target)


def fit_neurons(mlp: Mlp, weights: MlpWeights, seen: Seen, keep: int, config: PruneConfig) -> tuple[MlpWeights, float]:
    """The best ``keep`` hidden neurons and their weights; and the relative error that they leave, squared.

    Args:
        mlp: Its layers.
        weights: Before.
        seen: Over calibration tokens.
        keep: Number of hidden neurons that stay.
        config: ``refit``, ``epochs`` and ``ridge``.
    """
    count, n = weights.down.shape[1], max(1, seen.count)
    moment, cross = seen.moment / n, seen.cross / n
    mean_h, mean_t = seen.sum_h / n, seen.sum_t / n
    ridge = config.ridge * (float(moment.diagonal().mean()) or 1.0)
    if weights.down_bias is not None:  # it takes care of means
        moment = moment - mean_h.outer(mean_h)
        cross = cross - mean_t.outer(mean_h)
    moment = moment + ridge * torch.eye(count, dtype=moment.dtype, device=moment.device)
    cross = cross + ridge * weights.down.double()  # towards the weight as it was
    everything = refitted(cross, moment, torch.arange(count, device=moment.device))
    kept = eliminate(everything, moment, keep, step=max(1, count // 48)).kept
    small = weights.on(mlp, kept)
    if config.refit != "none":
        small.down = refitted(cross, moment, kept).float()
        if small.down_bias is not None:
            small.down_bias = (mean_t - small.down.double() @ mean_h[kept]).float()
    if config.refit == "all" and seen.count and small.middle is not None:
        x, target = torch.cat(seen.inputs), torch.cat(seen.targets)
        descended = _descended(small, x, target, config.epochs)
        before, after = _error(small, x, target), _error(descended, x, target)
        return (descended, after) if after < before else (small, before)
    fit = seen.moment[kept][:, kept], seen.cross[:, kept]
    return small, _quadratic_error(small, seen, *fit, mean_h[kept] * n)


def _error(weights: MlpWeights, x: Tensor, target: Tensor) -> float:
    parts = zip(x.split(_CHUNK), target.split(_CHUNK), strict=True)
    apart = sum(float((t - weights(rows)).double().square().sum()) for rows, t in parts)
    return apart / max(1e-30, float(target.double().square().sum()))


def _quadratic_error(weights: MlpWeights, seen: Seen, moment: Tensor, cross: Tensor, sum_h: Tensor) -> float:
    """The error from moments alone: Σ |t - W h - b|²."""
    w = weights.down.double()
    b = torch.zeros_like(seen.sum_t) if weights.down_bias is None else weights.down_bias.double()
    square = (w @ moment * w).sum() + 2 * b @ (w @ sum_h) + seen.count * b @ b
    apart = seen.energy - 2 * float((w * cross).sum() + b @ seen.sum_t) + float(square)
    return max(0.0, apart) / max(1e-30, seen.energy)


@torch.enable_grad()
def _descended(weights: MlpWeights, x: Tensor, target: Tensor, epochs: int) -> MlpWeights:
    """All of an MLP's weights after descent (Adam, a rate that falls to nothing) on |target - y|².

    A step moves a matrix by a share of its own size and a bias by one of what it is added to, so that no rate has to be
    chosen for a model. The order of tokens is drawn by a generator of its own: the same calls give the same weights.
    """
    weights = replace(weights, ups=list(weights.ups), up_biases=list(weights.up_biases))
    sizes = weights.sizes(x[:_CHUNK])
    moved = [t.clone().requires_grad_() for t in weights.parameters()]
    rest = iter(moved)
    weights.ups = [next(rest) for _ in weights.ups]
    weights.up_biases = [None if b is None else next(rest) for b in weights.up_biases]
    weights.down = next(rest)
    weights.down_bias = None if weights.down_bias is None else next(rest)
    groups = [{"params": [t], "lr": 0.0, "size": s} for t, s in zip(moved, sizes, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    generator, batch = torch.Generator().manual_seed(0), min(_BATCH, len(x))
    orders = [torch.randperm(len(x), generator=generator) for _ in range(epochs)]
    chunks = [rows.to(x.device) for order in orders for rows in order.split(batch) if len(rows) == batch]
    for step, rows in enumerate(chunks):
        loss = (weights(x[rows]) - target[rows]).square().mean()
        for group in optimizer.param_groups:
            group["lr"] = _STEP * group["size"] * 0.5 * (1 + math.cos(math.pi * step / len(chunks)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for t in moved:
        t.requires_grad_(False)
    return weights


def middle_of(
    mlp: Mlp, config: object, near: Sequence[nn.Module], said: Sequence[Tensor], hidden: Tensor
) -> Middle | None:
    """What an MLP does between its matrices, found by trying; None where nothing known gives the same numbers.

    Args:
        mlp: Its layers.
        config: The model's, which may name an activation.
        near: Modules around it, among which the activation may be.
        said: What its up layers said of some tokens, each (N, I) or (N, 2 I).
        hidden: (N, I), what its last layer then read.
    """
    names = [getattr(config, n, None) for n in _ACTIVATIONS]
    named = [ACT2FN[n] for n in names if isinstance(n, str) and n in ACT2FN]
    around = [
        m for m in near if not list(m.children()) and not list(m.parameters()) and "Dropout" not in type(m).__name__
    ]
    for activation in (*named, *around, F.silu, F.gelu, F.relu):
        for middle in _middles(mlp, activation, len(said)):
            try:
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
            first, second = said[0][..., ::2], said[0][..., 1::2]
        else:
            first, second = said
        return first, second

    def first_gates(said: Sequence[Tensor]) -> Tensor:
        first, second = pair(said)
        return activation(first) * second

    def second_gates(said: Sequence[Tensor]) -> Tensor:
        first, second = pair(said)
        return first * activation(second)

    return [first_gates, second_gates]


def set_parameters_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put parameters of other sizes into a model's layers, by name; what was frozen stays so."""
    for name, tensor in state.items():
        owner, _, key = name.rpartition(".")
        module, old = model.get_submodule(owner), model.get_parameter(name)
        new = nn.Parameter(tensor.to(old.device).contiguous(), requires_grad=old.requires_grad)
        module.register_parameter(key, new)
        if key == "weight" and isinstance(module, (nn.Linear, Conv1D)):
            names = ("nx", "nf") if isinstance(module, Conv1D) else ("out_features", "in_features")
            for attribute, size in zip(names, new.shape, strict=True):
                setattr(module, attribute, size)
