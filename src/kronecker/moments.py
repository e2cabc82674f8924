"""Moments of a layer's inputs and target outputs, summed over calibration tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

RIDGE = 3e-2
"""The ridge added to the diagonal of the inputs' second moments, as a fraction of the diagonal's
mean. In directions in which the inputs do not vary, the ridge keeps the weight as it was."""


@dataclass
class Moments:
    """Sums over tokens of a layer's inputs x and target outputs y, accumulated in float64.

    Least-squares fits need no other statistics.
    """

    inputs: Tensor  # Σ x xᵀ, (I, I)
    cross: Tensor  # Σ y xᵀ, (O, I)
    energy: Tensor  # Σ |y|²
    sum_x: Tensor  # Σ x, (I,)
    sum_y: Tensor  # Σ y, (O,)
    count: int = 0
    # the mean of Σ x² before centering; the ridge is relative to it if the inputs have no variance,
    # as with a single token or with equal tokens
    size: float = 0.0
    sizes: list[Tensor] = field(default_factory=list)  # |y|² of each token, (N,) per call of `add`

    @classmethod
    def zeros(
        cls, out_features: int, in_features: int, device: torch.device | str | None = None
    ) -> Moments:
        """Return empty moments, to which `add` adds tokens."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        square = zeros(in_features, in_features)
        cross = zeros(out_features, in_features)
        return cls(square, cross, zeros(), zeros(in_features), zeros(out_features))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the inputs (N, I) and target outputs (N, O) of N tokens."""
        if len(x) != len(y):
            raise ValueError(
                f"Moments: expected one output per input, got {len(x)} inputs and {len(y)} outputs"
            )
        x = x.detach().float()
        y = y.detach().float()
        # bfloat16 is too coarse for second moments
        with torch.autocast(x.device.type, enabled=False):
            self.inputs += x.T @ x
            self.cross += y.T @ x
        sizes = y.double().square().sum(-1)
        self.sizes.append(sizes.float())
        self.energy += sizes.sum()
        self.sum_x += x.double().sum(0)
        self.sum_y += y.double().sum(0)
        self.count += len(x)

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Moments:
        """Return the moments of inputs (N, I), with the layer's own outputs as targets."""
        moments = cls.zeros(*weight.shape, device=weight.device)
        moments.add(x, torch.nn.functional.linear(x, weight, bias))
        return moments

    def centered(self) -> Moments:
        """Return the moments around the means, for a weight that is fitted together with a bias."""
        n = max(1, self.count)
        energy = self.energy - self.sum_y.square().sum() / n
        return Moments(
            self.inputs - torch.outer(self.sum_x, self.sum_x) / n,
            self.cross - torch.outer(self.sum_y, self.sum_x) / n,
            # if all outputs are equal, only rounding errors are left, and an error relative to them
            # would be meaningless
            energy if energy > 1e-12 * self.energy else torch.zeros_like(energy),
            torch.zeros_like(self.sum_x),
            torch.zeros_like(self.sum_y),
            self.count,
            float(self.inputs.diagonal().mean()),
        )

    def damped(self) -> Tensor:
        """Return the inputs' second moments plus a ridge, always above 0, on the diagonal."""
        ridge = RIDGE * (max(float(self.inputs.diagonal().mean()), 1e-4 * self.size) or 1.0)
        return self.inputs + ridge * torch.eye(
            len(self.inputs), dtype=self.inputs.dtype, device=self.inputs.device
        )

    def is_of_few_tokens(self) -> bool:
        """Return whether the 1% of tokens with the largest |y|² make up more than half of Σ |y|².

        Relative errors, which are divided by this sum, then say little about the other tokens.
        Attention sinks, whose hidden states are hundreds of times as large, are such tokens.
        """
        # among few tokens, a single one may dominate by chance
        if self.count < 16:
            return False
        sizes = torch.cat(self.sizes)
        largest = sizes.topk(max(1, len(sizes) // 100)).values.sum()
        return bool(largest > 0.5 * sizes.sum())

    def of_inputs(self, index: Tensor) -> Moments:
        """Return the moments of a subset or a permutation of the inputs."""
        inputs = self.inputs[index][:, index]
        cross = self.cross[:, index]
        return replace(self, inputs=inputs, cross=cross, sum_x=self.sum_x[index])

    def error(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Return the relative error: the square root of Σ |W x + b - y|² / Σ |y|².

        The error is 0 if Σ |y|² is 0, as for centered moments of equal outputs.
        """
        if not float(self.energy):
            return 0.0
        w = weight.double()
        # the expanded form of |W x - y|²; if the fit is exact, rounding may make it negative
        left = ((w @ self.inputs) * w).sum() - 2 * (w * self.cross).sum() + self.energy
        if bias is not None:
            b = bias.double()
            left += b @ (2 * (w @ self.sum_x - self.sum_y) + self.count * b)
        return float((left.clamp_min(0) / self.energy).sqrt())


def positive(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return a second moment, made positive definite, and its Cholesky factor.

    A ridge is added only if the factorization fails. The ridge starts at 1e-8 of the diagonal's
    mean and grows tenfold until the factorization succeeds, since rounding errors of centered
    moments can be larger than a small ridge.

    Raises:
        ValueError: The moment is not finite.
    """
    ridge = 0.0
    eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    size = max(float(moment.diagonal().abs().mean()), 1e-300)
    while True:
        damped = moment + ridge * size * eye
        root, wrong = torch.linalg.cholesky_ex(damped)
        if not int(wrong):
            return damped, root
        if ridge > 1:
            raise ValueError(
                "kronecker: expected calibration data with finite activations, got second moments "
                "with inf or NaN"
            )
        ridge = max(1e-8, 10 * ridge)
