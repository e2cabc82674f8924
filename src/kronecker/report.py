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

from .data.batches import positions_of
from .surgery.convert import num_parameters

_PROMPT = 8  # tokens that generation starts from

Batches = Sequence[Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class ModelFigures:
    """One model's figures."""

    name: str
    parameters: int
    perplexities: Mapping[str, float]  # by text
    forward_tokens_per_second: float
    generated_tokens_per_second: float

    @property
    def perplexity(self) -> float:
        """Of the first text."""
        return next(iter(self.perplexities.values()))

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token of the first text, in nats."""
        return math.log(self.perplexity)


@dataclass(frozen=True)
class Comparison(Report):
    """Models side by side.

    Attributes:
        models: One entry a model, in the order given.
    """

    models: tuple[ModelFigures, ...]

    def table(self) -> Table:
        """A row for each model."""
        rows = [
            (
                m.name,
                f"{m.parameters:,}",
                *(
                    f"{value:.{digits}f}"
                    for p in m.perplexities.values()
                    for value, digits in ((math.log(p), 3), (p, 2))
                ),
                f"{m.forward_tokens_per_second:,.0f}",
                f"{m.generated_tokens_per_second:,.1f}",
            )
            for m in self.models
        ]
        texts = [
            f"{figure} {text}".strip() for text in self.models[0].perplexities for figure in ("loss", "perplexity")
        ]
        return Table(("model", "parameters", *texts, "forward tok/s", "generate tok/s"), rows)

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
def perplexity(model: nn.Module, batches: Batches) -> float:
    """Exp of the mean cross-entropy of next tokens.

    Args:
        model: A causal language model in evaluation mode.
        batches: Token ids (B, T), or dicts of ``input_ids`` and ``labels``, -100 where a token does not count, as
            `strided` makes them.

    Returns:
        A number of at least 1; its logarithm is the loss in nats.

    Raises:
        ValueError: There is no token to predict.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)).eval()
    >>> 8 < perplexity(model, [torch.tensor([[1, 2, 3]])]) < 10
    True
    """
    loss, count, device = 0.0, 0, next(model.parameters()).device
    for batch in batches:
        ids, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, Mapping) else (batch, batch)
        logits = model(input_ids=ids.to(device)).logits[:, :-1].float()
        labels = labels[:, 1:].reshape(-1).to(device)
        loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        count += int((labels != -100).sum())
    if not count:
        raise ValueError("perplexity: there is no token to predict, needed batches of at least two")
    return math.exp(loss / count)


@torch.no_grad()
def compare(
    models: Mapping[str, Any], texts: Batches | Mapping[str, Batches], *, runs: int = 5, new: int = 32
) -> Comparison:
    """Measure language models in turn within one process; times are medians.

    Args:
        models: By name, in evaluation mode, on one device.
        texts: Batches as for `perplexity`, or several texts' by name. Speed is over the first batch of the first.
        runs: Times that each is timed, after one that is not counted.
        new: Tokens to generate, or as many as the models have positions for.

    Returns:
        Parameters, perplexities and tokens a second of each; it prints as a table and can be drawn.

    Raises:
        ValueError: A model that is no language model.
    """
    if not models or not texts:
        raise ValueError(f"compare: {len(models)} models and {len(texts)} texts, needed one or more of both")
    for name, model in models.items():
        if not getattr(model, "can_generate", lambda: False)():
            raise ValueError(f"compare: {name} is a {type(model).__name__}, needed a language model that generates")
    positions = [positions_of(m) for m in models.values()]
    new = min([new, *(p - _PROMPT for p in positions if p)])
    if new < 1:
        raise ValueError(f"compare: the models have {min(filter(None, positions))} positions, needed over {_PROMPT}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    named = texts if isinstance(texts, Mapping) else {"": texts}
    first = next(iter(named.values()))[0]
    ids = first["input_ids"] if isinstance(first, Mapping) else first
    ids = ids.to(next(next(iter(models.values())).parameters()).device)
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
        perplexities = {text: perplexity(model, batches) for text, batches in named.items()}
        rows.append(ModelFigures(name, num_parameters(model), perplexities, ids.numel() / forward, new / generate))
    return Comparison(tuple(rows))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
