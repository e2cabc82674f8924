"""What others would use for the tasks of `examples/think_longer.py`, written from their papers, on
the same data.

A GRU; Deep Thinking with recall and the progressive loss (Bansal et al. 2022: convolutions, the
input again in every iteration); a looped transformer (Fan et al. 2025: one block without positions,
the input added in every loop, as many loops as symbols, supervised at the last). All are small
(width 64), train on the example's batches for the same number of iterations with the optimizer that
suits them, and are tested on its samples.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinker as th

WIDTH = 64


class Gru(nn.Module):
    """An embedding, a GRU, a linear head."""

    rate, extra = 3e-3, 0

    def __init__(self, vocabulary: int, symbols: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, symbols)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor, steps: int) -> Tensor:
        """Logits at every token; a GRU has as many steps as tokens."""
        return self.head(self.gru(self.embedding(tokens))[0])

    def loss(self, tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self(tokens, steps).flatten(0, 1), labels.flatten())


class DeepThinking(nn.Module):
    """Convolutions of width 3: a recurrent block that sees the input again, two residual blocks in
    it, and a head.

    Args:
        vocabulary: Ids.
        symbols: Answers.
        width: Channels.
        axes: 1 for sequences, 2 for grids, which are squares.
        alpha: Share of the progressive loss; the rest is of all iterations.
    """

    rate, extra = 1e-3, 6

    def __init__(
        self,
        vocabulary: int,
        symbols: int,
        *,
        width: int = WIDTH,
        axes: int = 1,
        alpha: float = 1.0,
    ):
        super().__init__()

        def conv(i: int, o: int) -> nn.Module:
            return (nn.Conv1d, nn.Conv2d)[axes - 1](i, o, 3, padding=1, bias=False)

        d, self.axes, self.alpha = width, axes, alpha
        self.embedding = nn.Embedding(vocabulary, d)
        self.project, self.recall = conv(d, d), conv(2 * d, d)
        self.blocks = nn.ModuleList(nn.ModuleList((conv(d, d), conv(d, d))) for _ in range(2))
        self.head = nn.Sequential(
            conv(d, d), nn.ReLU(), conv(d, d // 2), nn.ReLU(), conv(d // 2, symbols)
        )

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The input as channels, and the first thought of it."""
        x = self.embedding(tokens).mT
        if self.axes == 2:
            x = x.unflatten(2, (math.isqrt(tokens.shape[1]), -1))
        return x, F.relu(self.project(x))

    def iterate(self, x: Tensor, thought: Tensor, steps: int) -> Tensor:
        """So many iterations."""
        for _ in range(steps):
            thought = self.recall(torch.cat([thought, x], 1))
            for first, second in self.blocks:  # pyrefly: ignore
                thought = F.relu(thought + second(F.relu(first(thought))))
        return thought

    def read(self, thought: Tensor) -> Tensor:
        """Logits at every token."""
        return self.head(thought).flatten(2).mT

    def forward(self, tokens: Tensor, steps: int) -> Tensor:
        """Logits at every token after so many iterations."""
        x, thought = self.begin(tokens)
        return self.read(self.iterate(x, thought, steps))

    def loss(self, tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
        """All iterations, and the progressive loss: some without gradients, then some with."""
        x, thought = self.begin(tokens)
        before = random.randrange(steps)
        with torch.no_grad():
            later = self.iterate(x, thought, before)
        losses = [(self.alpha, self.iterate(x, later, random.randint(1, steps - before)))]
        if self.alpha < 1:
            losses.append((1 - self.alpha, self.iterate(x, thought, steps)))
        return sum(
            (
                share * F.cross_entropy(self.read(end).flatten(0, 1), labels.flatten())
                for share, end in losses
            ),
            torch.zeros(()),
        )


class Looped(nn.Module):
    """One causal transformer block without positions, the input added in every loop; as many loops
    as symbols."""

    rate, extra = 1e-3, 0

    def __init__(self, vocabulary: int, symbols: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, symbols)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, steps: int) -> Tensor:
        """Logits at every token."""
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        thought = torch.zeros_like(x)
        for _ in range(steps):
            thought = self.block(thought + x, src_mask=mask, is_causal=True)
        return self.head(self.norm(thought))

    def loss(self, tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Cross-entropy at the last loop."""
        return F.cross_entropy(self(tokens, steps).flatten(0, 1), labels.flatten())


ANCHORS: dict[str, Any] = {"GRU": Gru, "Deep Thinking": DeepThinking, "looped transformer": Looped}


def run(
    name: str, task: th.Task, *, trained: int, iterations: int, lengths: list[int], seed: int
) -> dict[str, Any]:
    """Train one of them on batches of one length each, half of them the longest; accuracy at each
    length."""
    torch.manual_seed(seed)
    random.seed(seed)
    generator, started = torch.Generator().manual_seed(seed), time.process_time()
    model = ANCHORS[name](task.vocab_size, task.output_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=model.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, model.rate, total_steps=iterations, pct_start=0.1
    )
    for _ in range(iterations):
        length = trained if random.random() < 0.5 else random.randint(1, trained)
        sample = task.sample(generator, 64, length)
        loss = model.loss(sample.tokens, sample.targets, length + model.extra)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - started
    data = th.CurriculumDataset(
        task, th.Frontier(max_length=trained, min_length=task.min_length), holdout=0.0
    )
    points = []
    for length in lengths:
        batch = data.held_out(64, length)
        steps = [length] if name == "GRU" else sorted({length, length + 8, 2 * length})
        for step in steps:
            with torch.no_grad():
                found = model(batch["input_ids"], step).argmax(-1)
            counted = batch["labels"] != -100
            right = (found == batch["labels"]) & counted
            points.append(
                {
                    "length": length,
                    "steps": step,
                    "symbols": float(right.sum() / counted.sum()),
                    "rows": float((right | ~counted).all(1).float().mean()),
                }
            )
    size = sum(p.numel() for p in model.parameters())
    return {"seed": seed, "cpu_seconds": round(seconds, 1), "parameters": size, "points": points}
