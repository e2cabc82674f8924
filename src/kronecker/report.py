"""`compare`: measure parameters, quality and speed of models, side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from model_components._devices import on_device
from model_components._report import Axes, Figure, Report, Table, axes_for

from .data.batches import check_vocabulary, positions_of, without_labels
from .discovery.finding import num_parameters

_PROMPT = 8  # number of prompt tokens when generation is timed

Batches = Sequence[Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class ModelFigures:
    """One model's metrics.

    Attributes:
        name: The name of the model.
        parameters: The number of parameters, with tied parameters counted once.
        perplexities: A language model's perplexity on each text, by the text's name; empty for an
            encoder.
        cosines: The mean cosine similarity between an encoder's embeddings and the first model's
            embeddings on each text, by the text's name; empty for a language model.
        forward_tokens_per_second: The tokens per second of a forward pass.
        generated_tokens_per_second: The tokens per second that a language model generates; None for
            an encoder.
    """

    name: str
    parameters: int
    perplexities: Mapping[str, float]
    cosines: Mapping[str, float]
    forward_tokens_per_second: float
    generated_tokens_per_second: float | None

    @property
    def perplexity(self) -> float:
        """The perplexity on the first text."""
        if not self.perplexities:
            raise ValueError(f"compare: {self.name} has no perplexity, since it is an encoder")
        return next(iter(self.perplexities.values()))


@dataclass(frozen=True)
class Comparison(Report):
    """A comparison of models, side by side.

    Attributes:
        models: One entry per model, in the order given.
    """

    models: tuple[ModelFigures, ...]

    def table(self) -> Table:
        """Return a table with a row for each model."""
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
        """Plot perplexity, or an encoder's cosine similarity, against the number of parameters.

        The plot is drawn on ``ax`` or in a new figure. It needs the extra ``plot``.

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
            ylabel="perplexity" if self.models[0].perplexities else "cosine to the first model",
        )
        axes.legend()
        return figure


@torch.no_grad()
def perplexity(model: nn.Module, batches: Batches) -> float:
    """Return the perplexity: the exponential of the mean cross-entropy of the next tokens.

    Args:
        model: A causal language model in evaluation mode.
        batches: Tensors of token ids (B, T), or dicts of the model's arguments. The default
            ``labels`` are the token ids. Tokens with the label -100 do not count, as in batches
            from `strided`. Padding (tokens with an ``attention_mask`` of 0) never counts.

    Returns:
        A number of at least 1, whose logarithm is the loss in nats.

    Raises:
        ValueError: There is no token to predict, token ids do not have shape (B, T), or a token is
            not in the model's vocabulary.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)).eval()
    >>> 8 < perplexity(model, [torch.tensor([[1, 2, 3]])]) < 10
    True
    """
    loss = 0.0
    count = 0
    device = next(model.parameters()).device
    for batch in batches:
        arguments = _arguments_of(batch)
        ids = arguments["input_ids"]
        if ids.dim() != 2:
            raise ValueError(f"perplexity: token ids have shape {list(ids.shape)}, expected (B, T)")
        check_vocabulary("perplexity", ids, getattr(model, "config", None))
        labels = arguments.get("labels", ids)
        mask = arguments.get("attention_mask")
        if mask is not None:
            labels = labels.masked_fill(mask == 0, -100)
        # computed here, since the model's own loss is a mean over a batch, and batches differ in
        # size
        arguments = on_device(without_labels(arguments), device)
        logits = model(**arguments).logits[:, :-1].float()
        labels = labels[:, 1:].reshape(-1).to(device)
        loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        count += int((labels != -100).sum())
    if not count:
        raise ValueError(
            "perplexity: expected sequences of two or more tokens, got no token to predict"
        )
    # above 709 nats the perplexity exceeds the largest float
    return math.inf if loss / count > 709 else math.exp(loss / count)


def _arguments_of(batch: Any) -> dict[str, Any]:
    """Return a batch as the model's arguments; a tensor holds token ids."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return {"input_ids": batch}


def embeddings(model: nn.Module, batches: Batches) -> Tensor:  # (rows, width)
    """Return the mean of each sequence's last hidden states, without padding.

    The result is in float32, on the CPU.
    """
    parts = []
    device = next(model.parameters()).device
    for batch in batches:
        arguments = _arguments_of(batch)
        if isinstance(ids := arguments.get("input_ids"), Tensor):
            # checked here, since torch's IndexError would not name the token
            check_vocabulary("compare", ids, getattr(model, "config", None))
        arguments = on_device(without_labels(arguments), device)
        states = getattr(model(**arguments), "last_hidden_state", None)
        if states is None:
            raise ValueError(
                f"compare: expected an encoder without a head, got {type(model).__name__}, which "
                "returns no last_hidden_state"
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
    progress: bool = True,
) -> Comparison:
    """Measure language models, or encoders, side by side: parameters, quality and speed.

    The quality of a language model is its perplexity. The quality of an encoder is the mean cosine
    similarity between its embeddings (means of last hidden states) and the first model's. The
    models are timed alternately in one process, and times are medians.

    Args:
        models: The models by name, in evaluation mode, on one device. With encoders, the original
            comes first.
        texts: Batches as for `perplexity`, or a mapping from names of texts to their batches. Speed
            is measured on the first batch of the first text.
        runs: Number of timed runs of each model, after one warm-up run.
        new: Number of tokens to generate. It is reduced if a model has fewer positions left after
            the prompt.
        progress: Show a progress bar.

    Returns:
        A report with each model's parameters, perplexities or cosine similarities, and tokens per
        second. It prints as a table and can be plotted.

    Raises:
        ValueError: There are no models or no texts, ``runs`` or ``new`` is below 1, language models
            are mixed with other models, the models have too few positions to generate, a token is
            not in a model's vocabulary, or models are neither language models nor text encoders.
    """
    _check_compared(models, texts, runs)
    generates = _all_generate(models)
    new = _tokens_to_generate(models, new) if generates else 0
    named = texts if isinstance(texts, Mapping) else {"": texts}
    first = next(iter(models.values()))
    ids = _first_ids(next(iter(named.values()))).to(next(first.parameters()).device)
    # quality is measured before speed, since it raises an error for batches that a model cannot
    # read
    total = len(models) * (len(named) + runs + 1)
    with tqdm(total=total, desc="comparing", disable=not progress, leave=False) as bar:
        if generates:
            perplexities = _perplexities(models, named, bar)
            cosines = {name: {} for name in models}
        else:
            perplexities = {name: {} for name in models}
            cosines = _cosines(models, named, bar)
        times = _median_seconds(models, ids, new, runs, bar)
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


def _check_compared(models: object, texts: Any, runs: int) -> None:
    if not isinstance(models, Mapping):
        raise ValueError(
            f"compare: models is a {type(models).__name__}, expected a dict of models by name"
        )
    if not models or not texts:
        raise ValueError(
            f"compare: got {len(models)} models and {len(texts)} texts, expected one or more of "
            "each"
        )
    if runs < 1:
        raise ValueError(f"compare: runs is {runs}, expected 1 or more")


def _tokens_to_generate(models: Mapping[str, nn.Module], new: int) -> int:
    """Return ``new``, limited to the positions that every model has left after the prompt."""
    if new < 1:
        raise ValueError(f"compare: new is {new}, expected 1 or more")
    # all models generate the same number of tokens, so that their speeds can be compared
    positions = [p for p in map(positions_of, models.values()) if p]
    new = min([new, *(p - _PROMPT for p in positions)])
    if new < 1:
        raise ValueError(
            f"compare: a model accepts only {min(positions)} tokens, expected more than {_PROMPT}, "
            "the length of the prompt"
        )
    return new


def _perplexities(
    models: Mapping[str, Any], texts: Mapping[str, Batches], bar: tqdm
) -> dict[str, dict[str, float]]:
    """Return each model's perplexity on each text."""
    found: dict[str, dict[str, float]] = {name: {} for name in models}
    for name, model in models.items():
        for text, batches in texts.items():
            found[name][text] = perplexity(model, batches)
            bar.update()
    return found


def _cosines(
    models: Mapping[str, Any], texts: Mapping[str, Batches], bar: tqdm
) -> dict[str, dict[str, float]]:
    """Return each model's mean cosine similarity to the first model's embeddings, per text."""
    first = next(iter(models.values()))
    originals = {text: embeddings(first, batches) for text, batches in texts.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in models}
    for name, model in models.items():
        for text, original in originals.items():
            found[name][text] = _cosine(embeddings(model, texts[text]), original, name)
            bar.update()
    return found


def _median_seconds(
    models: Mapping[str, nn.Module], ids: Tensor, new: int, runs: int, bar: tqdm
) -> dict[str, tuple[float, float]]:
    """Return each model's median seconds for a forward pass and for generation."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    # the models alternate, so that a slow phase of the machine affects all of them
    for run in range(runs + 1):
        for name, model in models.items():
            seconds = _seconds(model, ids, new)
            if run:  # the first run warms up
                times[name].append(seconds)
            bar.update()
    medians = {}
    for name, pairs in times.items():
        forward, generating = zip(*pairs, strict=True)
        medians[name] = statistics.median_high(forward), statistics.median_high(generating)
    return medians


def _all_generate(models: Mapping[str, nn.Module]) -> bool:
    """Return whether the models are language models; raise a ValueError if only some are."""
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
        raise ValueError(
            "compare: the first text has no batch of token ids, expected one or more; text_batches "
            "makes batches from text"
        )
    return ids


def _cosine(ours: Tensor, original: Tensor, name: str) -> float:
    if ours.shape != original.shape:
        raise ValueError(
            f"compare: expected embeddings of the same shape, got {list(ours.shape)} from {name} "
            f"and {list(original.shape)} from the first model"
        )
    return float(nn.functional.cosine_similarity(ours, original).mean())


def _seconds(model: Any, ids: Tensor, new: int) -> tuple[float, float]:
    """Return the seconds of one forward pass, and of generating ``new`` tokens."""
    begin = time.perf_counter()
    model(input_ids=ids)
    # a GPU may still be computing after the call has returned
    _finish(ids.device)
    middle = time.perf_counter()
    if new:
        prompt = ids[:1, :_PROMPT]
        # a fixed length, since a model that stops early would look fast
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
