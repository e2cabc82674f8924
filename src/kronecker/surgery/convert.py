"""`convert_` and `revert_`: a model's layers become Kronecker sums, and dense layers again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from model_components._modes import evaluating
from model_components._report import Axes, Figure, Report, Table, bars

from .._eager import scaled
from ..config import NEEDS_CALIBRATION, KroneckerConfig
from ..data import batches
from ..fitting.sequential import fit_
from ..init import relative_error
from ..layers.embedding import KroneckerEmbedding
from ..layers.experts import KroneckerExperts, is_experts
from ..layers.linear import KroneckerLinear, dense
from ..storage import own_saving_
from .finding import COMPRESSED, convertible, is_linear, put, resolve


@dataclass(frozen=True)
class LayerReport:
    """One layer that was converted."""

    name: str
    shapes: str
    before: int
    after: int
    init: str  # the start it got: Van Loan's where a fit is not possible
    error: float  # of its weight or, for inits that look at inputs, of its outputs; relative


@dataclass(frozen=True)
class ConversionReport(Report):
    """What `convert_` touched, and what it left alone and why."""

    layers: tuple[LayerReport, ...]
    skipped: Mapping[str, str]
    before: int
    after: int

    def summary(self) -> list[str]:
        """Parameters before and after."""
        share = f"{self.after / self.before:.1%}"
        return [f"{self.before:,} to {self.after:,} parameters ({share}), {len(self.layers)} layers"]

    def table(self) -> Table:
        """A row for each layer."""
        rows = [(r.name, r.shapes, f"{r.after / r.before:.1%}", r.init, f"{r.error:.3f}") for r in self.layers]
        return Table(("layer", "terms", "size", "start", "error"), rows)

    def remarks(self) -> list[str]:
        """What was left alone."""
        return [f"left alone, {why}: {n}" for why, n in Counter(self.skipped.values()).items()]

    def plot(self, ax: Axes | None = None) -> Figure:
        """Each layer's relative error as a bar (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(ax, "ConversionReport.plot", {r.name: r.error for r in self.layers}, "relative error")


def num_parameters(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def convert_(
    model: nn.Module,
    config: KroneckerConfig | Mapping[str, KroneckerConfig],
    *,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    calibration: Iterable[Any] | None = None,
    fade_in: bool = False,
    cache: str | Path | None = None,
    progress: bool = True,
) -> ConversionReport:
    """Replace layers of any Hugging Face model by Kronecker sums, in place; all of them or, on any error, none.

    A single config compresses the MLPs (and stacks of experts), with opposite shapes for the layer that writes the
    block's width; attention, embeddings and head are left alone. With ``filter_fn`` it compresses whatever that
    accepts. A map from name patterns (``"*.mlp.c_fc"``) to configs says it layer by layer; `preset` gives such maps.
    Tied weights stay tied. ``model.save_pretrained`` writes the factors from then on, for `kronecker.from_pretrained`.

    Args:
        model: Changed in place.
        config: One config, or a map from patterns to configs.
        filter_fn: (name, module) to whether to convert it.
        calibration: Batches for ``init="sequential"`` and ``"als"``: dicts of the model's arguments, or tensors of
            token ids (B, T). A few thousand tokens of the text it is for; 12,000 are plenty.
        fade_in: Keep each original linear layer beside its factors and run it alone at first, for `FadeIn`.
        cache: A folder that keeps each fitted block, so that an interrupted fit goes on; not with ``fade_in``.
        progress: Show a progress bar.

    Returns:
        What was touched, with errors, and what was skipped and why.

    Raises:
        ValueError: A pattern or filter that fits nothing, shapes that do not divide, a rank out of range, missing
            calibration data, weights that are zero, not finite, quantised or on the meta device, a layer that is
            compressed already. Nothing has changed then.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1))
    >>> report = convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"))
    >>> model.transformer.h[0].mlp.c_proj
    KroneckerLinear(16 to 4, 1 x (4, 8) ⊗ (1, 2), 53.1% of the dense weight)
    """
    data = None if calibration is None else batches(calibration, model, "convert_")
    configs = resolve(model, config, filter_fn, None if data is None else data[0])
    modules = {name: model.get_submodule(name) for name in configs}
    tied = _tied(model)
    for name, module in modules.items():
        check_layer("convert_", name, module)
        _check_shapes(name, module, configs[name])
    linears = {n: c for n, c in configs.items() if is_linear(modules[n]) and n not in tied}
    fitted = {n: c for n, c in linears.items() if c.init in NEEDS_CALIBRATION}
    if fitted and data is None:
        raise ValueError(
            f"convert_: init {next(iter(fitted.values())).init!r} looks at what layers see, needed calibration data "
            f"(batches of token ids), or init='van_loan'"
        )
    before = num_parameters(model)
    original = {n: m for n, m in model.named_modules() if n in {*configs, *(t for ts in tied.values() for t in ts)}}
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in original.items()}
    gradients = [(p, p.requires_grad) for p in model.parameters()]  # fading in freezes originals
    errors: dict[str, float] = {}
    try:
        with evaluating(model):
            for name in configs:
                if name not in fitted:
                    errors[name] = _convert_alone(model, name, configs[name], tied)
                    if fade_in and name in linears:
                        model.get_submodule(name).fade_in_(modules[name])  # pyrefly: ignore
            if fitted and data is not None:
                with tqdm(total=len(fitted), desc="fitting", unit="layer", disable=not progress) as bar:

                    def done(name: str) -> None:
                        bar.update(1)

                    path = None if cache is None else Path(cache)
                    errors |= fit_(model, fitted, data, keep_originals=fade_in, cache=path, progress=done)
        for name, module in original.items():
            model.get_submodule(name).train(module.training)
    except BaseException:
        for name, module in original.items():
            put(model, name, module)
        for parameter, wanted in gradients:
            parameter.requires_grad_(wanted)
        raise
    own_saving_(model)
    rows = []
    for name in configs:
        made = model.get_submodule(name)
        shapes = f"{configs[name].rank} x {made.a_shape} ⊗ {made.b_shape}" if hasattr(made, "a_shape") else "experts"
        after = sum(p.numel() for p in made.parameters())
        used = configs[name].init if name in linears or configs[name].init not in NEEDS_CALIBRATION else "van_loan"
        rows.append(LayerReport(name, shapes, sizes[name], after, used, errors[name]))
    why = "not part of an MLP" if isinstance(config, KroneckerConfig) and filter_fn is None else "not asked for"
    skipped = {n: why for n, m in model.named_modules() if n not in configs and convertible(m)}
    return ConversionReport(tuple(rows), skipped, before, num_parameters(model))


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Modules that share a weight, by the name of the embedding among them."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    made: dict[str, list[str]] = {}
    for names in holders.values():
        if len(names) > 1:
            for name in names:
                made[name] = [n for n in names if n != name]
    return made


def check_layer(operation: str, name: str, module: nn.Module) -> None:
    """Refuse a layer that cannot be converted."""
    if isinstance(module, COMPRESSED):
        raise ValueError(f"{operation}: {name} is compressed already; revert_(model) first, or leave it out")
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters):
        raise ValueError(f"{operation}: {name} is on the meta device, needed loaded weights")
    if (
        not all(p.is_floating_point() for p in parameters)
        or hasattr(module, "quant_state")
        or "quant" in type(module).__module__
        or "bnb" in type(module).__module__
    ):
        raise ValueError(f"{operation}: {name} is a quantised {type(module).__name__}, needed float weights")
    for p in parameters:
        if not torch.isfinite(p).all() or (p.dim() > 1 and not p.any()):
            raise ValueError(f"{operation}: {name} has a weight that is zero or not finite, needed numbers")


def _check_shapes(name: str, module: nn.Module, config: KroneckerConfig) -> None:
    if is_experts(module):
        KroneckerExperts.like(module, config)
        return
    shape = dense(module).shape
    config.shapes(*shape, operation=f"convert_: {name}")


def _convert_alone(model: nn.Module, name: str, config: KroneckerConfig, tied: Mapping[str, list[str]]) -> float:
    """Convert one layer by its weights alone; whatever shares its weight shares its factors. Returns the error."""
    module = model.get_submodule(name)
    if isinstance(module, COMPRESSED):
        return float("nan")  # came along with the one it is tied to
    if is_experts(module):
        made = KroneckerExperts.from_experts(module, config)
        weights = dict(module.named_parameters(recurse=False))
        parts = [(w - made.dense_weights()[n]).square().sum() for n, w in weights.items()]
        put(model, name, made)
        energies = [w.square().sum() for w in weights.values()]
        return float((torch.stack(parts).sum() / torch.stack(energies).sum()).detach().sqrt())
    weight = dense(module)
    others = tied.get(name, [])
    if others and config.init in NEEDS_CALIBRATION:
        config = replace(config, init="van_loan")
    if isinstance(module, nn.Embedding):
        layer: Any = KroneckerEmbedding.from_embedding(module, config)
    else:
        layer = KroneckerLinear.from_linear(module, config)
    put(model, name, layer)
    for other in others:
        twin = model.get_submodule(other)
        if isinstance(twin, nn.Embedding):
            shared: Any = KroneckerEmbedding.like(twin, config)
        else:
            shared = KroneckerLinear.like(twin, config)
            shared.bias = twin.bias  # pyrefly: ignore
        shared.a, shared.b, shared.scales = layer.a, layer.b, layer.scales
        put(model, other, shared)
    a, b = layer.a.detach(), scaled(layer.b, layer.scales).detach()
    return relative_error(weight, a, b)


@torch.no_grad()
def revert_(model: nn.Module) -> list[str]:
    """Replace compressed layers by dense ones of the stock kind, with the same function, in place.

    What compression lost stays lost: the originals are gone. Tied layers stay tied.

    Returns:
        The names of the layers.

    Raises:
        ValueError: There is nothing to revert.

    >>> model = nn.Sequential(nn.Linear(4, 6))
    >>> config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
    >>> _ = convert_(model, config, filter_fn=lambda name, module: True)
    >>> revert_(model), model[0]
    (['0'], Linear(in_features=4, out_features=6, bias=True))
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, COMPRESSED)}
    if not found:
        raise ValueError(f"revert_: {type(model).__name__} has no compressed layer")
    if any(isinstance(m, KroneckerLinear) and m.original is not None for m in found.values()):
        raise ValueError("revert_: a layer still runs its original; train on, or end it with fade_in_(None)")
    weights: dict[int, nn.Parameter] = {}
    for name, module in found.items():
        if isinstance(module, KroneckerExperts):
            put(model, name, module.to_experts())
            continue
        made: Any = module.to_linear() if isinstance(module, KroneckerLinear) else module.to_embedding()
        made.weight = weights.setdefault(id(module.a), made.weight)
        put(model, name, made)
    own_saving_(model)
    return list(found)
