"""Combine all six modules in one model: a judge of two sequences, trained in a plain loop.

    python examples/modules.py

A row is a sequence of eight vectors. The better of two rows is the one with the larger sum of the
vectors' first numbers. The data are made up: the script shows how to combine the modules, not how
good they are.
"""

import argparse

import torch
from torch import nn

from heads.lora import LoraLinear
from heads.pairwise import PairwiseHead, pairwise_loss
from kronecker import KroneckerLinear
from mergekit_lite import AccurateMaskedLinear, EfficientMaskedLinear
from thinker import LatentThinker

WIDTH = 16  # numbers in a vector
LENGTH = 8  # vectors in a row
HIDDEN = 32  # width of the hidden layers
FEATURES = 8  # features of a row that the head compares


class Judge(nn.Module):
    """A model that compares two rows, (B, LENGTH, WIDTH), and returns (B, 3) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            KroneckerLinear.from_linear(nn.Linear(WIDTH, HIDDEN), rank=0.5),
            AccurateMaskedLinear([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]),
            EfficientMaskedLinear([nn.Linear(HIDDEN, HIDDEN)], base=nn.Linear(HIDDEN, HIDDEN)),
            LoraLinear.from_linear(nn.Linear(HIDDEN, HIDDEN), r=4),
        )
        self.thinker = LatentThinker(
            hidden_size=HIDDEN,
            num_heads=2,
            output_size=FEATURES,
            max_input_length=LENGTH,
            max_output_length=1,
        )
        self.head = PairwiseHead(FEATURES)

    def features(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the features of rows, (B, FEATURES)."""
        return self.thinker(inputs_embeds=self.layers(rows), n_step=2).logits[:, 0]

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the logits of the three verdicts: a, b and tie."""
        return self.head(self.features(a), self.features(b))

    def fold_(self) -> None:
        """Replace the layers that only training needs with ordinary linear layers."""
        for number, layer in enumerate(self.layers):
            self.layers[number] = layer.to_linear()


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random pairs of rows, and the better row of each pair: 0 (first) or 1 (second)."""
    a, b = torch.randn(2, count, LENGTH, WIDTH)
    return a, b, (a[..., 0].sum(1) < b[..., 0].sum(1)).long()


def main() -> None:
    """Train the judge, fold its layers, and print how much the logits change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    judge = Judge()
    trained = [parameter for parameter in judge.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for step in range(1, steps + 1):
        a, b, better = draw(64)
        loss = pairwise_loss(judge(a, b), better)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    judge.eval()
    a, b, better = draw(1000)
    with torch.no_grad():
        logits = judge(a, b)
        print(f"right: {(logits[:, :2].argmax(1) == better).float().mean():.1%} of new pairs")
        judge.fold_()
        print(f"folding moved a logit by {(judge(a, b) - logits).abs().max():.1e} at most")
    print(judge.layers)


if __name__ == "__main__":
    main()
