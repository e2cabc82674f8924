"""Moments of what a layer sees and should say, summed over calibration tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

RIDGE = 3e-2
"""Added to the diagonal of inputs' second moments, as a share of its mean: keeps what was never
seen where it was."""


@dataclass
class Moments:
    """A layer's inputs x and wanted outputs y, summed over tokens in float64.

    It is all that least squares needs.
    """

    inputs: Tensor  # Σ x xᵀ, (I, I)
    cross: Tensor  # Σ y xᵀ, (O, I)
    energy: Tensor  # Σ |y|²
    sum_x: Tensor  # Σ x, (I,)
    sum_y: Tensor  # Σ y, (O,)
    count: int = 0
    # one token, or tokens that are all alike, have no variance: the ridge needs a size then
    size: float = 0.0  # of the inputs before they were centered: the mean of Σ x²
    sizes: list[Tensor] = field(default_factory=list)  # |y|² of each token, (N,) a call of `add`

    @classmethod
    def zeros(
        cls, out_features: int, in_features: int, device: torch.device | str | None = None
    ) -> Moments:
        """Return the moments of no tokens yet."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        square = zeros(in_features, in_features)
        cross = zeros(out_features, in_features)
        return cls(square, cross, zeros(), zeros(in_features), zeros(out_features))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count tokens: inputs (N, I) and wanted outputs (N, O)."""
        if len(x) != len(y):
            raise ValueError(
                f"Moments: expected an output for each input, got {len(x)} inputs and {len(y)} "
                "outputs"
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
        """Return the moments of inputs (N, I), with the layer's own outputs as the wanted ones."""
        moments = cls.zeros(*weight.shape, device=weight.device)
        moments.add(x, torch.nn.functional.linear(x, weight, bias))
        return moments

    def centered(self) -> Moments:
        """Around the means: what is left for a weight when a bias takes care of them."""
        n = max(1, self.count)
        energy = self.energy - self.sum_y.square().sum() / n
        return Moments(
            self.inputs - torch.outer(self.sum_x, self.sum_x) / n,
            self.cross - torch.outer(self.sum_y, self.sum_x) / n,
            # what is left of equal outputs is rounding, and an error relative to it means nothing
            energy if energy > 1e-12 * self.energy else torch.zeros_like(energy),
            torch.zeros_like(self.sum_x),
            torch.zeros_like(self.sum_y),
            self.count,
            float(self.inputs.diagonal().mean()),
        )

    def damped(self) -> Tensor:
        """The inputs' second moments with the ridge; never nothing, however few the tokens."""
        ridge = RIDGE * (max(float(self.inputs.diagonal().mean()), 1e-4 * self.size) or 1.0)
        return self.inputs + ridge * torch.eye(
            len(self.inputs), dtype=self.inputs.dtype, device=self.inputs.device
        )

    def is_of_few_tokens(self) -> bool:
        """Return whether a hundredth of the tokens has over half of what errors are relative to.

        Such tokens are attention sinks, whose hidden states are hundreds of times as large.
        """
        # of a few tokens any one may be the largest by chance
        if self.count < 16:
            return False
        sizes = torch.cat(self.sizes)
        largest = sizes.topk(max(1, len(sizes) // 100)).values.sum()
        return bool(largest > 0.5 * sizes.sum())

    def of_inputs(self, index: Tensor) -> Moments:
        """Return the moments of some of the inputs, or of all in another order."""
        inputs = self.inputs[index][:, index]
        cross = self.cross[:, index]
        return replace(self, inputs=inputs, cross=cross, sum_x=self.sum_x[index])

    def error(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Σ |W x + b - y|² over Σ |y|², its square root.

        0 where there is nothing to say but a mean.
        """
        if not float(self.energy):
            return 0.0
        w = weight.double()
        # |W x - y|² multiplied out; it may come out below 0 by rounding where the fit is exact
        left = ((w @ self.inputs) * w).sum() - 2 * (w * self.cross).sum() + self.energy
        if bias is not None:
            b = bias.double()
            left += b @ (2 * (w @ self.sum_x - self.sum_y) + self.count * b)
        return float((left.clamp_min(0) / self.energy).sqrt())


def positive(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return a second moment, made positive definite, and its Cholesky factor.

    A ridge is added only if the factorization fails. It starts at 1e-8 of the mean diagonal and
    grows tenfold, since rounding errors of centered moments can be larger than a small ridge.

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
                "kronecker: second moments are not finite, expected calibration without inf or nan"
            )
        ridge = max(1e-8, 10 * ridge)
