"""`convert_`: replace layers of a model by smaller layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from model_components._modes import evaluating
from model_components._walk import Batch

from ..config import STRUCTURES, Config, LowRankConfig, structure_of
from ..data.batches import batches, check_float64, check_model, tokens_seen
from ..discovery.finding import (
    COMPRESSED,
    all_or_nothing,
    convertible,
    is_embedding,
    mlps_if_any,
    num_parameters,
    put,
    resolve,
    submodules,
)
from ..fitting.cache import fit_stage
from ..fitting.fit import Part, fit_, remarks_of
from ..fitting.tables import TableUse, low_rank_table, uses_of
from ..init import Factors, low_rank, relative_error
from ..layers import empty_layer
from ..layers.experts import is_experts
from ..layers.linear import SmallerLinear
from ..layers.weights import LowRankLayer, dense, is_linear
from ..storage.checkpoints import own_saving_, resized
from .checks import check_config, check_layer, tied_modules
from .reports import ConversionReport, LayerReport


def convert_(
    model: nn.Module,
    config: Config | Mapping[str, Config],
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    calibration: Iterable[object] | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
) -> ConversionReport:
    """Replace layers of any Hugging Face model by smaller layers, in place.

    If an error occurs, the model is left unchanged.

    The type of the config sets the replacement: `KroneckerConfig` gives sums of Kronecker products,
    and `LowRankConfig` gives two thin matrices. To drop hidden neurons, use `prune_`. A single
    config applies to the MLPs. The last layer of each MLP gets the transposed shapes. Attention,
    embeddings, head and the experts of a mixture are not converted. With ``filter_fn``, the
    config applies to the layers that the function accepts. A map from name patterns, such as
    ``"*.mlp.c_fc"``, to configs chooses a config for each layer; `PRESETS` has such maps. Tied
    weights stay tied. Afterwards ``model.save_pretrained`` writes the smaller weights, which
    `kronecker.from_pretrained` loads.

    The matrices of an MLP are fitted together, block by block, on their inputs in the smaller
    model. The fit of a low-rank embedding table weights each row by how often it is looked up. If a
    head is tied to the table, the fit also uses the inputs of the head.

    Args:
        model: The model, which is changed in place.
        config: One config, or a map from patterns to configs.
        filter_fn: Function of (module, name) that returns whether to convert the module.
        calibration: Batches for ``init="sequential"``. A batch is a dict of the model's arguments,
            such as a row of a tokenized `datasets.Dataset`, or a tensor of token ids (B, T). Use
            12,000 to 50,000 tokens of the kind of text that the model is for.
        cache: A folder that stores each fitted part. Repeat an interrupted call to continue from
            these parts.
        progress: Show a progress bar.

    Returns:
        A report of the converted layers, with errors, and of the skipped layers, with reasons.

    Raises:
        ValueError: A pattern or filter matches nothing, shapes do not divide a weight's shape, a
            rank is out of range, calibration data is missing or invalid, a layer is already
            compressed, or weights are all zeros, not finite, quantized or on the meta device.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from kronecker import KroneckerConfig
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1))
    >>> report = convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"))
    >>> model.transformer.h[0].mlp.c_proj
    KroneckerLinear(16 to 4, 1 x (4, 8) ⊗ (1, 2), 53.1% of the dense weight)
    """
    _check_convertible(model)
    _check_types(config)
    data = [] if calibration is None else batches(calibration, model, "convert_")
    configs = resolve(model, config, filter_fn, data[0] if data else None)
    tied = tied_modules(model)
    _check_each(model, configs, tied)
    parts = _parts(model, configs, tied, data)
    tables = _fitted_tables(model, configs, tied)
    if not data:
        _check_nothing_needs_data(parts, map(configs.__getitem__, tables))
    before = num_parameters(model)
    converted = {*configs, *chain.from_iterable(tied.values())}
    original = {n: m for n, m in model.named_modules() if n in converted}
    # parameters that a user has frozen stay frozen
    trains: dict[str, dict[str, bool]] = {}
    for name, module in original.items():
        parameters = module.named_parameters(recurse=False)
        trains[name] = {key: parameter.requires_grad for key, parameter in parameters}
    with all_or_nothing(model, original):
        with evaluating(model):
            # before any layer is replaced, since a head is fitted to its inputs in the original
            # model
            uses = uses_of(model, tables, data, "convert_") if tables else {}
            errors, notes = _fit_parts(model, parts, configs, data, cache, progress)
            fitted = set(errors)
            for name, use in uses.items():
                looked_up = f"{use.looked_up:,} of {len(use.counts):,} rows"
                notes.append(
                    f"{name}: the calibration tokens look up {looked_up}; the error says nothing "
                    "about the other rows"
                )
            # last, because the fit above reads the original layers
            for name in configs:
                if name in fitted:
                    continue
                errors[name] = _convert_alone(model, name, configs[name], tied, uses.get(name))
        for name, module in original.items():
            _set_training(model.get_submodule(name), module.training, trains[name])
    own_saving_(model)
    rows = []
    for name, layer_config in configs.items():
        layer: Any = model.get_submodule(name)
        sizes = num_parameters(original[name]), num_parameters(layer)
        rows.append(LayerReport(name, layer.structure, *sizes, layer_config.init, errors[name]))
    one_for_mlps = isinstance(config, Config) and filter_fn is None
    skipped = _skipped_layers(
        model, configs, "not part of an MLP" if one_for_mlps else "not selected"
    )
    return ConversionReport(tuple(rows), skipped, before, num_parameters(model), tuple(notes))


def _check_convertible(model: nn.Module) -> None:
    """Raise a ValueError in inference mode, or for a model whose layers cannot be replaced."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "convert_: expected a call outside torch.inference_mode, since weights that are "
            "created in it cannot be trained later"
        )
    check_model("convert_", model)
    check_float64("convert_", model)
    if convertible(model) or isinstance(model, COMPRESSED):
        raise ValueError(
            f"convert_: the model is a single {type(model).__name__}, expected a model that "
            "contains the layer; for one layer, use from_linear or from_embedding"
        )


def _check_types(config: object) -> None:
    """Raise a ValueError unless ``config`` is a config of factors, or a map to such configs."""
    known = " or ".join(kind.__name__ for kind in STRUCTURES.values())
    for one in config.values() if isinstance(config, Mapping) else [config]:
        if not isinstance(one, tuple(STRUCTURES.values())):
            raise ValueError(
                f"convert_: config is a {type(one).__name__}, expected a {known}, or a map from "
                "patterns to them; to drop neurons, call prune_"
            )


def _set_training(layer: nn.Module, training: bool, trains: Mapping[str, bool]) -> None:
    """Set a new layer's training mode and ``requires_grad`` as in the original layer.

    Args:
        layer: The new layer.
        training: The original's mode: a user may have called eval() on individual modules.
        trains: Whether each of the original's parameters requires a gradient, by name.
    """
    layer.train(training)
    for name, parameter in layer.named_parameters(recurse=False):
        source = "bias" if name == "bias" else "weight"
        parameter.requires_grad_(trains.get(source, True))


def _skipped_layers(model: nn.Module, converted: Iterable[str], why: str) -> dict[str, str]:
    """Return the reason ``why`` for each layer or stack of experts that was not converted."""
    skipped = {}
    for name, module in model.named_modules():
        if (convertible(module) or is_experts(module)) and name not in converted:
            skipped[name] = why
    return skipped


def _check_nothing_needs_data(parts: Sequence[Part], of_tables: Iterable[Config]) -> None:
    """Raise a ValueError if a layer or table has to be fitted, which needs calibration data."""
    of_parts = chain.from_iterable(part.configs.values() for part in parts)
    fitted = next(chain(of_parts, of_tables), None)
    if fitted is not None:
        raise ValueError(
            f"convert_: expected calibration= with batches of token ids for {fitted}, got None; "
            "give batches, or choose an init that needs no data"
        )


def _fit_parts(
    model: nn.Module,
    parts: Sequence[Part],
    configs: Mapping[str, Config],
    data: Sequence[Batch],
    cache: str | Path | None,
    progress: bool,
) -> tuple[dict[str, float], list[str]]:
    """Fit MLPs and layers block by block; return relative errors by layer, and notes."""
    if not parts:
        return {}, []
    modules = submodules(model, chain.from_iterable(part.configs for part in parts))
    settings = {n: [structure_of(c), asdict(c)] for n, c in configs.items()}
    fits = fit_stage(cache, model, settings, data, "convert_")
    with tqdm(total=len(parts), desc="fitting", unit="part", disable=not progress) as bar:
        done = fit_(model, parts, data, operation="convert_", cache=fits, progress=bar)
    errors: dict[str, float] = {}
    for part in parts:
        errors |= dict.fromkeys(part.configs, done[part.name].error ** 0.5)
    # least squares needs as many tokens as the widest layer has inputs
    widths = [dense(module).shape[1] for module in modules.values()]
    return errors, [*tokens_seen(data, max(widths, default=0)), *remarks_of(done)]


def _check_each(model: nn.Module, configs: Mapping[str, Config], tied: Iterable[str]) -> None:
    """Check that each layer can be converted with its config."""
    # if such a layer got factors, `resized` could no longer find that it has lost neurons, and a
    # checkpoint would not record its size
    other_sizes = {n.rpartition(".")[0] for n in resized(model)}
    for name, config in configs.items():
        module = model.get_submodule(name)
        check_layer("convert_", name, module)
        check_config(name, module, config, name in tied)
        if name in other_sizes:
            raise ValueError(
                f"convert_: {name} was already pruned by an earlier call; load the original "
                "model again and use that"
            )


def _fitted_tables(
    model: nn.Module, configs: Mapping[str, Config], tied: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """Return the names of the low-rank tables to fit, and of the layers tied to each.

    Raises:
        ValueError: Tied layers have no embedding among them, so that no rows are looked up.
    """
    found: dict[str, list[str]] = {}
    for name, config in configs.items():
        others = tied.get(name, [])
        module = model.get_submodule(name)
        if (
            not isinstance(config, LowRankConfig)
            or config.init == "svd"
            or (is_linear(module) and not others)
        ):
            continue
        if not any(is_embedding(model.get_submodule(n)) for n in (name, *others)):
            raise ValueError(
                f"convert_: expected init='svd' for {name}, which is tied to {others[0]} and to no "
                "embedding"
            )
        # patterns may match both a table and its head, which share one weight that is fitted once
        if not any(n in found for n in others):
            found[name] = others
    return found


def _is_fitted(module: nn.Module, config: Config) -> bool:
    """Return whether a linear layer is fitted to calibration data."""
    return config.init == "sequential" and is_linear(module)


def _parts(
    model: nn.Module, configs: Mapping[str, Config], tied: Iterable[str], data: Sequence[Batch]
) -> list[Part]:
    """Return the parts to fit.

    A part is an MLP whose layers all have configs of one type, or a single layer.
    """
    left = {}
    for name, config in configs.items():
        if name not in tied and _is_fitted(model.get_submodule(name), config):
            left[name] = config
    parts = []
    # finding MLPs runs the model, so it is skipped if nothing is fitted
    for mlp in mlps_if_any(model, data[0] if data else None) if left else ():
        names = (*mlp.ups, mlp.down)
        chosen = {name: left[name] for name in names if name in left}
        kinds = set(map(type, chosen.values()))
        # if the configs differ in type, the layers of the MLP are fitted one by one
        if len(chosen) < len(names) or len(kinds) > 1 or not all(kind.fits_mlps for kind in kinds):
            continue
        parts.append(Part(mlp.down, mlp, chosen))
        for name in names:
            del left[name]
    for name, config in left.items():
        parts.append(Part(name, None, {name: config}))
    return parts


def _convert_alone(
    model: nn.Module, name: str, config: Config, tied: Mapping[str, list[str]], use: TableUse | None
) -> float:
    """Convert one layer by itself, and return the relative error.

    Layers tied to it get the same factors.
    """
    module = model.get_submodule(name)
    if isinstance(module, COMPRESSED):
        return float("nan")  # already converted, together with a layer that it is tied to
    others = tied.get(name, [])
    layer, error = _converted(module, config, use)
    if isinstance(layer, SmallerLinear):
        # the bias itself and not a copy, since BERT ties its decoder's bias to another module's
        layer.register_parameter("bias", module._parameters.get("bias"))
    put(model, name, layer)
    for other in others:
        twin = model.get_submodule(other)
        shared = empty_layer(twin, config)
        if isinstance(shared, SmallerLinear):
            shared.register_parameter("bias", twin._parameters.get("bias"))
        shared._parameters.update({n: p for n, p in layer._parameters.items() if n != "bias"})
        put(model, other, shared)
    return error


@torch.no_grad()
def _converted(module: nn.Module, config: Config, use: TableUse | None) -> tuple[nn.Module, float]:
    """Return the smaller layer that replaces a single layer, and its relative error.

    The factors are computed from the weight and, for a fitted table, from how tokens use the table.
    """
    weight = dense(module)
    layer = empty_layer(module, config)
    if isinstance(layer, LowRankLayer) and use is not None:
        a, b, share = low_rank_table(weight, len(layer.a), use)
        layer.set_factors_(Factors(a, b, share**0.5))
        return layer, share**0.5
    if isinstance(layer, SmallerLinear):
        layer = type(layer).from_config(module, config)
    else:
        assert isinstance(layer, LowRankLayer)
        layer.set_factors_(Factors(*low_rank(weight, len(layer.a)), 0.0))
    # the error of the factors as they are stored, since half precision rounds them
    return layer, relative_error(weight, copy.deepcopy(layer).double().dense_weight())
