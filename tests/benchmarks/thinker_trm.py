"""TRM (Jolicoeur-Martineau 2025, arXiv 2510.04871) in compact form, for grids of one size.

Two states are refined in turn by one small network, whose token mixing is an MLP: a draft of the
answer, and a scratch state that sees the input and the draft. Of all cycles only the last has
gradients. A batch is supervised several times, each time going on from where it was. Its moving
average of weights and its halting head are left out.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64
CYCLES = 2  # of the answer, and of the scratch state in each
SUPERVISIONS = 4  # of a batch
# in batches of 16; at 4e-3, in batches of 16 or of 32, seed 11 solves a fifth fewer with 30 clues
RATE = 2e-3

State = tuple[Tensor, Tensor]


class SwiGLU(nn.Module):
    """down(silu(gate) up) of inner width 8/3, without a norm."""

    def __init__(self, width: int):
        super().__init__()
        inner = -(-width // 3) * 8
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Token mixing and an MLP, each normed after the sum."""

    def __init__(self, width: int, cells: int):
        super().__init__()
        self.mix = SwiGLU(cells)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d)
        """One layer."""
        x = x + self.mix(x.mT).mT
        x = F.rms_norm(x, x.shape[-1:])
        return F.rms_norm(x + self.mlp(x), x.shape[-1:])


class Trm(nn.Module):
    """The model: `forward` is one supervision."""

    def __init__(self, vocabulary: int, symbols: int, cells: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.Sequential(Layer(WIDTH, cells), Layer(WIDTH, cells))
        self.head = nn.Linear(WIDTH, symbols, bias=False)
        self.register_buffer("draft", torch.randn(WIDTH))
        self.register_buffer("scratch", torch.randn(WIDTH))

    def cycle(self, x: Tensor, state: State) -> State:
        """Refine the scratch state so many times, and then the draft."""
        draft, scratch = state
        for _ in range(CYCLES):
            scratch = self.layers(scratch + draft + x)
        return self.layers(draft + scratch), scratch

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits at every cell, and the state to go on from."""
        x = self.embedding(tokens)
        if state is None:
            state = self.draft.expand_as(x), self.scratch.expand_as(x)
        with torch.no_grad():
            for _ in range(CYCLES - 1):
                state = self.cycle(x, state)
        draft, scratch = self.cycle(x, state)
        return self.head(draft), (draft.detach(), scratch.detach())


def run(puzzle: Any, seed: int, seconds: float, *, samples: int, rate: float = RATE) -> dict:
    """Train for so many CPU seconds on the puzzle's rows, and test after some supervisions."""
    torch.manual_seed(seed)
    data = puzzle.train
    made = Trm(data.task.vocab_size, data.task.output_size, data.task.input_length(1))
    optimizer = torch.optim.AdamW(made.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    started, iterations, loss = time.process_time(), 0, torch.zeros(())
    while (done := (time.process_time() - started) / seconds) < 1:
        batch = data.batch(iterations // SUPERVISIONS)
        state = None
        for _ in range(SUPERVISIONS):
            cosine = 0.525 + 0.475 * math.cos(math.pi * done)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (iterations + 1) / 50) * cosine
            logits, state = made(batch["input_ids"], state)
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            iterations += 1
    points = []
    for number, test in puzzle.tests.items():
        batch = test.held_out(samples, 1)
        looks, state = puzzle.steps(number), None
        for supervision in range(1, max(looks) + 1):
            with torch.no_grad():
                logits, state = made(batch["input_ids"], state)
            right = logits.argmax(-1) == batch["labels"]
            if supervision in looks:
                shares = {
                    "symbols": float(right.float().mean()),
                    "rows": float(right.all(1).float().mean()),
                }
                points.append({"length": number, "steps": supervision, **shares})
    return {
        "seed": seed,
        "cpu_seconds": seconds,
        "iterations": iterations,
        "parameters": sum(p.numel() for p in made.parameters()),
        "training_loss": round(float(loss.detach()), 4),
        "points": points,
    }
