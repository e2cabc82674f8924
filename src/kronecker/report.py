"""`compare`: parameters, quality and speed of models, side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_components._devices import on_device
from model_components._report import Axes, Figure, Report, Table, axes_for

from .data.batches import check_vocabulary, positions_of, without_labels
from .discovery.finding import num_parameters

_PROMPT = 8  # tokens that generation starts from

Batches = Sequence[Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class ModelFigures:
    """One model's figures.

    Attributes:
        name: The name of the model.
        parameters: The number of parameters, tied ones once.
        perplexities: The perplexities of a language model, by text.
        cosines: For an encoder, by text: the mean cosine between its embeddings of rows and those
            of the first model.
        forward_tokens_per_second: The tokens per second of a forward pass.
        generated_tokens_per_second: The tokens per second that a language model generates.
    """

    name: str
    parameters: int
    perplexities: Mapping[str, float]
    cosines: Mapping[str, float]
    forward_tokens_per_second: float
    generated_tokens_per_second: float | None

    @property
    def perplexity(self) -> float:
        """Return the perplexity of the first text."""
        if not self.perplexities:
            raise ValueError(f"compare: {self.name} has no perplexity, since it is an encoder")
        return next(iter(self.perplexities.values()))


@dataclass(frozen=True)
class Comparison(Report):
    """Models side by side.

    Attributes:
        models: One entry a model, in the order given.
    """

    models: tuple[ModelFigures, ...]

    def table(self) -> Table:
        """Return a row for each model."""
        rows = []
        for m in self.models:
            quality = []
            for p in m.perplexities.values():
                # losses in nats can be subtracted, perplexities cannot
                quality += [f"{math.log(p):.3f}", f"{p:.2f}"]
            quality += [f"{cosine:.4f}" for cosine in m.cosines.values()]
            speeds = [f"{m.forward_tokens_per_second:,.0f}"]
            if m.generated_tokens_per_second is not None:
                speeds.append(f"{m.generated_tokens_per_second:,.1f}")
            rows.append((m.name, f"{m.parameters:,}", *quality, *speeds))
        first = self.models[0]
        names = []
        for text in first.perplexities:
            names += [f"loss {text}".strip(), f"perplexity {text}".strip()]
        names += [f"cosine {text}".strip() for text in first.cosines]
        speeds = ["forward tok/s"]
        if first.perplexities:
            speeds.append("generate tok/s")
        return Table(("model", "parameters", *names, *speeds), rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot perplexity, or an encoder's cosine, against parameters (extra ``plot``).

        It is drawn on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "Comparison.plot")
        for m in self.models:
            axes.scatter(
                m.parameters, next(iter((m.perplexities or m.cosines).values())), label=m.name
            )
        axes.set(
            xlabel="parameters",
            ylabel="perplexity" if self.models[0].perplexities else "cosine to the first's",
        )
        axes.legend()
        return figure


@torch.no_grad()
def perplexity(model: nn.Module, batches: Batches) -> float:
    """Return the perplexity: exp of the mean cross-entropy of the next tokens.

    Args:
        model: A causal language model in evaluation mode.
        batches: Token ids (B, T), or dicts of ``input_ids`` and ``labels``, -100 where a token does
            not count, as `strided` makes them.

    Returns:
        A number of at least 1; its logarithm is the loss in nats.

    Raises:
        ValueError: There is no token to predict, or a token is not in the model's vocabulary.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)).eval()
    >>> 8 < perplexity(model, [torch.tensor([[1, 2, 3]])]) < 10
    True
    """
    loss = 0.0
    count = 0
    device = next(model.parameters()).device
    for batch in batches:
        ids, labels = (
            (batch["input_ids"], batch["labels"]) if isinstance(batch, Mapping) else (batch, batch)
        )
        check_vocabulary("perplexity", ids, getattr(model, "config", None))
        # without labels: the model's own loss is a mean, and batches differ in size
        logits = model(input_ids=ids.to(device)).logits[:, :-1].float()
        labels = labels[:, 1:].reshape(-1).to(device)
        loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        count += int((labels != -100).sum())
    if not count:
        raise ValueError(
            "perplexity: there is no token to predict, expected rows of two or more tokens"
        )
    # above 709 nats the perplexity exceeds the largest float
    return math.inf if loss / count > 709 else math.exp(loss / count)


def embeddings(model: nn.Module, batches: Batches) -> Tensor:  # (rows, width)
    """Return the mean of each row's last hidden states without padding, float32 on the CPU."""
    parts = []
    device = next(model.parameters()).device
    for batch in batches:
        if isinstance(batch, Mapping):
            arguments = dict(batch)
        else:
            arguments = {"input_ids": batch}
        if isinstance(ids := arguments.get("input_ids"), Tensor):
            # torch would raise an IndexError that names no token
            check_vocabulary("compare", ids, getattr(model, "config", None))
        arguments = on_device(without_labels(arguments), device)
        states = getattr(model(**arguments), "last_hidden_state", None)
        if states is None:
            raise ValueError(
                f"compare: {type(model).__name__} returns no last_hidden_state, expected an "
                "encoder without a head"
            )
        states = states.float()
        mask = arguments.get("attention_mask", torch.ones(states.shape[:2], device=device))[
            ..., None
        ].float()
        parts.append(((states * mask).sum(1) / mask.sum(1).clamp(min=1)).cpu())
    return torch.cat(parts)


@torch.no_grad()
def compare(
    models: Mapping[str, Any],
    texts: Batches | Mapping[str, Batches],
    *,
    runs: int = 5,
    new: int = 32,
) -> Comparison:
    """Measure language models, or encoders, in turn within one process; times are medians.

    For a language model it computes the perplexity. For an encoder it computes the mean cosine
    between its embeddings (means of last hidden states) and those of the first model.

    Args:
        models: The models by name, in evaluation mode, on one device; if they are encoders, the
            original first.
        texts: Batches as for `perplexity`, or a mapping from names of texts to their batches. Speed
            is measured on the first batch of the first text.
        runs: Number of timed runs of each model, after one run that is not counted.
        new: Number of tokens to generate, at most as many as the models have positions for.

    Returns:
        A report with each model's parameters, perplexities or cosines, and tokens per second. It
        prints as a table and can be plotted.

    Raises:
        ValueError: No models or texts, language models together with other models, too few
            positions to generate, tokens that are not in a model's vocabulary, or models that are
            neither language models nor text encoders.
    """
    if not models or not texts:
        raise ValueError(
            f"compare: {len(models)} models and {len(texts)} texts, expected one or more of each"
        )
    generates = _all_generate(models)
    if runs < 1 or (generates and new < 1):
        raise ValueError(f"compare: runs is {runs} and new {new}, expected 1 or more")
    positions = [p for p in map(positions_of, models.values()) if p]
    # all models generate the same number of tokens, so that their speeds can be compared
    new = min([new, *(p - _PROMPT for p in positions)])
    if generates and new < 1:
        raise ValueError(
            f"compare: the models have {min(positions)} positions, expected over {_PROMPT}"
        )
    named = texts if isinstance(texts, Mapping) else {"": texts}
    first = next(iter(models.values()))
    ids = _first_ids(next(iter(named.values()))).to(next(first.parameters()).device)
    # before the timing, because these refuse what a model cannot read
    if generates:
        perplexities = _perplexities(models, named)
        cosines = {name: {} for name in models}
    else:
        perplexities = {name: {} for name in models}
        cosines = _cosines(models, named)
    times = _median_seconds(models, ids, new if generates else 0, runs)
    rows = []
    for name, model in models.items():
        forward, generate = times[name]
        speed = new / generate if generates else None
        rows.append(
            ModelFigures(
                name,
                num_parameters(model),
                perplexities[name],
                cosines[name],
                ids.numel() / forward,
                speed,
            )
        )
    return Comparison(tuple(rows))


def _perplexities(
    models: Mapping[str, Any], texts: Mapping[str, Batches]
) -> dict[str, dict[str, float]]:
    """Return the perplexity of each text under each model."""
    found = {}
    for name, model in models.items():
        found[name] = {text: perplexity(model, batches) for text, batches in texts.items()}
    return found


def _cosines(
    models: Mapping[str, Any], texts: Mapping[str, Batches]
) -> dict[str, dict[str, float]]:
    """Return, for each encoder and text, the mean cosine of its embeddings to the first's."""
    first = next(iter(models.values()))
    originals = {text: embeddings(first, batches) for text, batches in texts.items()}
    found = {}
    for name, model in models.items():
        found[name] = {
            text: _cosine(embeddings(model, texts[text]), original, name)
            for text, original in originals.items()
        }
    return found


def _median_seconds(
    models: Mapping[str, nn.Module], ids: Tensor, new: int, runs: int
) -> dict[str, tuple[float, float]]:
    """Return each model's median seconds of a forward pass and of generation, timed in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    # models take turns, so that a slow phase of the machine affects all of them
    for run in range(runs + 1):
        for name, model in models.items():
            seconds = _seconds(model, ids, new)
            if run:  # the first run warms up
                times[name].append(seconds)
    medians = {}
    for name, pairs in times.items():
        forward, generating = zip(*pairs, strict=True)
        medians[name] = statistics.median_high(forward), statistics.median_high(generating)
    return medians


def _all_generate(models: Mapping[str, nn.Module]) -> bool:
    """Return whether the models are language models; refuse a mixture of kinds."""
    others = []
    for name, model in models.items():
        if not getattr(model, "can_generate", lambda: False)():
            others.append(name)
    if others and len(others) < len(models):
        raise ValueError(
            f"compare: {others[0]} is a {type(models[others[0]]).__name__}, expected only "
            "language models or only encoders"
        )
    return not others


def _first_ids(batches: Sequence[object]) -> Tensor:
    """Return the token ids of the first batch."""
    ids: object = None
    if len(batches):
        ids = batches[0]
    if isinstance(ids, Mapping):
        ids = ids.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError("compare: the first text has no batch of token ids, expected one or more")
    return ids


def _cosine(ours: Tensor, original: Tensor, name: str) -> float:
    if ours.shape != original.shape:
        raise ValueError(
            f"compare: embeddings of {name} are {list(ours.shape)}, the first model's "
            f"{list(original.shape)}; expected the same width"
        )
    return float(nn.functional.cosine_similarity(ours, original).mean())


def _seconds(model: Any, ids: Tensor, new: int) -> tuple[float, float]:
    """Return the seconds of one forward pass, and of generating ``new`` tokens."""
    begin = time.perf_counter()
    model(input_ids=ids)
    # a GPU works on after the call has returned
    _finish(ids.device)
    middle = time.perf_counter()
    if new:
        prompt = ids[:1, :_PROMPT]
        # a model that ends early would look fast
        length = {"min_new_tokens": new, "max_new_tokens": new}
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            pad_token_id=0,
            **length,
        )
        _finish(ids.device)
    return middle - begin, time.perf_counter() - middle


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
