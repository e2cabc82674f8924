"""`compare`: parameters, perplexity and speed of models, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_components._report import Axes, Figure, Report, Table, axes_for

from .surgery.convert import num_parameters

_PROMPT = 8  # tokens that generation starts from


@dataclass(frozen=True)
class ModelFigures:
    """One model's figures."""

    name: str
    parameters: int
    perplexity: float
    forward_tokens_per_second: float
    generated_tokens_per_second: float

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token, in nats."""
        return math.log(self.perplexity)


@dataclass(frozen=True)
class Comparison(Report):
    """Models side by side."""

    models: tuple[ModelFigures, ...]

    def table(self) -> Table:
        """A row for each model."""
        rows = [
            (
                m.name,
                f"{m.parameters:,}",
                f"{m.loss:.3f}",
                f"{m.perplexity:.2f}",
                f"{m.forward_tokens_per_second:,.0f}",
                f"{m.generated_tokens_per_second:,.1f}",
            )
            for m in self.models
        ]
        return Table(("model", "parameters", "loss", "perplexity", "forward tok/s", "generate tok/s"), rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Perplexity against parameters, a point a model (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "Comparison.plot")
        for m in self.models:
            axes.scatter(m.parameters, m.perplexity, label=m.name)
        axes.set(xlabel="parameters", ylabel="perplexity")
        axes.legend()
        return figure


@torch.no_grad()
def perplexity(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Exp of the mean cross-entropy of next tokens over batches of token ids (B, T).

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)).eval()
    >>> 8 < perplexity(model, [torch.tensor([[1, 2, 3]])]) < 10
    True
    """
    loss, count, device = 0.0, 0, next(model.parameters()).device
    for ids in (batch.to(device) for batch in batches):
        logits = model(input_ids=ids).logits[:, :-1].float()
        labels = ids[:, 1:].reshape(-1)
        loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        count += labels.numel()
    if not count:
        raise ValueError("perplexity: there is no token to predict, needed batches of at least two")
    return math.exp(loss / count)


@torch.no_grad()
def compare(models: Mapping[str, Any], batches: Sequence[Tensor], *, runs: int = 5, new: int = 32) -> Comparison:
    """Measure language models in turn within one process; times are medians.

    Args:
        models: By name, in evaluation mode, on one device.
        batches: Token ids (B, T): perplexity is over all, speed over the first.
        runs: Times that each is timed, after one that is not counted.
        new: Tokens to generate, or as many as the models have positions for.
    """
    positions = [getattr(m.config, "max_position_embeddings", None) for m in models.values()]
    new = min([new, *(p - _PROMPT for p in positions if p)])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    ids = batches[0].to(next(next(iter(models.values())).parameters()).device)
    for run in range(runs + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model(input_ids=ids)
            _finish(ids.device)
            middle = time.perf_counter()
            prompt, length = ids[:1, :_PROMPT], {"min_new_tokens": new, "max_new_tokens": new}
            model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **length)
            _finish(ids.device)
            if run:
                times[name].append((middle - begin, time.perf_counter() - middle))
    rows = []
    for name, model in models.items():
        forward, generate = (sorted(t)[len(t) // 2] for t in zip(*times[name], strict=True))
        figures = (num_parameters(model), perplexity(model, batches), ids.numel() / forward, new / generate)
        rows.append(ModelFigures(name, *figures))
    return Comparison(tuple(rows))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
