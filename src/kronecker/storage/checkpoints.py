"""Save and load compressed models.

Factors are saved in a safetensors file next to the stock config. `fold` writes dense stock
checkpoints.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from model_components._folders import NewFolder, check_new, make_folder
from model_components._formats import check_format, reading, stamp
from model_components._hub import find_folder
from model_components._loading import read_config
from model_components._model_folders import (
    card_of,
    complete_folder,
    shown_name,
    source_of,
)

from ..config import from_dict, to_dict
from ..discovery.finding import (
    COMPRESSED,
    mlps_if_any,
    num_parameters,
    prefixed,
    put,
    set_parameters_,
)
from ..discovery.stock import empty, parameter_shapes
from ..discovery.unread import smallest_stock
from ..layers import empty_layer
from ..layers.linear import SmallerLinear

MARK = "kronecker.json"
WEIGHTS = "model.safetensors"


def compressed(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's compressed layers by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, COMPRESSED)}


def resized(model: nn.Module) -> dict[str, list[int]]:
    """Return, by name, the shapes of stock parameters whose shape differs from the model's config.

    There are such shapes if MLPs have lost different numbers of neurons.
    """
    if not isinstance(model, PreTrainedModel):
        return {}  # other models have no config to differ from
    try:
        # a copy, because building a model may write into its config
        shapes = parameter_shapes(empty(type(model), copy.deepcopy(model.config)))
    # the constructor of a part of a model may need more than a config, such as PatchTST's encoder
    except TypeError:
        return {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {n: list(p.shape) for n, p in parameters if n in shapes and p.shape != shapes[n]}


def has_smaller_layers(model: nn.Module) -> bool:
    """Return whether a model has layers that its config does not describe."""
    return bool(compressed(model) or resized(model))


def is_compressed(folder: str | Path) -> bool:
    """Return whether a folder holds a compressed model."""
    return (Path(folder) / MARK).is_file()


def save_pretrained(model: nn.Module, out: str | Path) -> None:
    """Write a compressed model: ``config.json``, ``kronecker.json`` and ``model.safetensors``.

    The folder can be loaded without the original model. It also gets a model card, the generation
    config, and the tokenizer from the folder that the model was loaded from.

    Args:
        model: A transformers model with compressed layers.
        out: A folder that does not exist or is empty.

    Raises:
        ValueError: The model is not a transformers model or has no compressed layers, its class is
            not part of transformers, or the folder is not empty.

    >>> save_pretrained(nn.Linear(2, 2), "out")
    Traceback (most recent call last):
    ValueError: save_pretrained: the model is a Linear, expected a transformers model
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"save_pretrained: the model is a {type(model).__name__}, expected a transformers model"
        )
    if not has_smaller_layers(model):
        raise ValueError(
            "save_pretrained: expected a model with compressed layers, got none; call "
            "model.save_pretrained instead"
        )
    # a user's own class could be written, but from_pretrained would not find it
    model_class(type(model).__name__, "save_pretrained")
    with NewFolder(out, "save_pretrained") as new:
        write_files(model, new.folder)
        card = compressed_card(model, "save_pretrained(model, out)")
        complete_folder(new.folder, card, source=source_of(model))


def compressed_card(model: nn.Module, call: str, notes: Sequence[str] = ()) -> str:
    """Return the model card of a compressed model, which transformers alone cannot load."""
    load = 'Load it with `kronecker.from_pretrained("this folder")`; transformers alone cannot.'
    notes = [load, *notes]
    return smaller_card(source_of(model), model, call, notes, library_name="model-components")


def smaller_card(
    base: str, model: nn.Module, call: str, notes: Sequence[str] = (), **header: Any
) -> str:
    """Return the model card of a smaller model.

    Args:
        base: Folder or hub id of the original model.
        model: The smaller model.
        call: The Python call that made the smaller model.
        notes: Other paragraphs of the card.
        **header: Other fields of the card's header.
    """
    parts = [
        f"A smaller {shown_name(base)}: {num_parameters(model):,} parameters.",
        *notes,
        f"Made by `kronecker` with\n\n```python\n{call}\n```",
    ]
    title = f"{shown_name(base)}, smaller"
    return card_of(title, parts, bases=[base], tags=["compressed"], **header)


def own_saving_(model: nn.Module) -> None:
    """Override ``save_pretrained`` of each transformers model in ``model`` that has smaller layers.

    Models without smaller layers get their original method back.
    """
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    # all models are checked before any is changed, so that an interrupted check changes none
    for module, is_smaller in zip(models, list(map(has_smaller_layers, models)), strict=True):
        if is_smaller:
            module.save_pretrained = partial(_save_compressed, module)
            # a second convert_ on the same model must not add the hooks again
            if _add_markers not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(_add_markers)
                module.register_load_state_dict_pre_hook(_drop_markers)
        elif getattr(vars(module).get("save_pretrained"), "func", None) is _save_compressed:
            del module.save_pretrained


def _add_markers(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Add an empty ``weight`` for each compressed layer to a state dict.

    A model that contains ``module`` may write its state dict with transformers' own
    ``save_pretrained``. If weights are missing when transformers loads such a state dict, it draws
    random values. For weights of another shape, it raises an error.
    """
    for name in compressed(module):
        state[f"{prefix}{name}.weight"] = torch.empty(0)


def _drop_markers(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Remove the weights that `_add_markers` added, before a state dict is loaded."""
    for name in compressed(module):
        state.pop(f"{prefix}{name}.weight", None)


def _save_compressed(
    model: PreTrainedModel, save_directory: str | Path, is_main_process: bool = True, **options: Any
) -> None:
    """Save a model with compressed layers; this replaces ``model.save_pretrained``.

    Like the original method, it also writes into a folder that is not empty.
    """
    if options.get("push_to_hub"):
        raise ValueError(
            "save_pretrained: push_to_hub is not supported for compressed models; call "
            "model.push_to_hub(repo_id) instead"
        )
    if is_main_process:
        write_files(
            model, make_folder(save_directory, "save_pretrained"), options.get("state_dict")
        )


def write_files(
    model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write the files of `save_pretrained` into an existing folder.

    ``state``, such as one gathered from several ranks, replaces the model's own tensors.
    """
    layers = compressed(model)
    # empty tensors, so that transformers alone raises an error instead of drawing random values
    markers = {f"{name}.weight": torch.empty(0) for name in layers}
    tensors = {}
    aliases = {}
    first: dict[int, str] = {}
    # keep_vars gives the parameters themselves, so that tied parameters are one object
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in markers:
            continue
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            # a sharded model holds only parts of its weights, which a trainer gathers in `state`
            tensors[name] = (tensor if state is None else state[name]).detach().contiguous()
    # pyrefly: ignore[bad-argument-type]: a layer's config, though nn.Module says Module
    configs = {name: to_dict(layer.config) for name, layer in layers.items()}
    mark = {
        **stamp(1),
        "class": type(model).__name__,
        "layers": configs,
        "shapes": resized(model),
        "aliases": aliases,
    }
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_file(tensors | markers, folder / WEIGHTS, metadata={"format": "pt"})
    # written last: this file marks a folder as a complete compressed model
    (folder / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")


def read_files(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Read the files that `write_files` wrote.

    Return the contents of ``kronecker.json``, and all tensors by name. Tied tensors are returned
    under each of their names.
    """
    with reading(f"{WEIGHTS} or {MARK} of {folder}", "from_pretrained"):
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        check_format(mark, 1, f"from_pretrained: {folder}")
        tensors = load_file(folder / WEIGHTS)
        for name in mark["layers"]:
            tensors.pop(f"{name}.weight", None)
        return mark, tensors | {name: tensors[first] for name, first in mark["aliases"].items()}


def model_class(name: str, operation: str) -> type[PreTrainedModel]:
    """Return the model class of transformers that has a given name."""
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(
            f"{operation}: expected the name of a transformers model class, got {name!r}"
        )
    return cls


def _stock(
    cls: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a dense model with initialized buffers and uninitialized weights."""
    with no_init_weights():
        return cls._from_config(config, dtype=dtype).eval()


def from_pretrained(folder: str | Path, *, device: Any = "cpu") -> PreTrainedModel:
    """Load a compressed model that `save_pretrained` wrote, and set it to evaluation mode.

    The original model is not needed.

    Args:
        folder: A folder that `save_pretrained` wrote, or a hub id of such a model, ``owner/name``
            or ``owner/name@revision``.
        device: The device of the loaded model.

    Returns:
        The model.

    Raises:
        ValueError: The folder does not hold a compressed model, a file is truncated, or tensors do
            not match the layers that the folder lists.

    >>> from_pretrained("./nowhere")
    Traceback (most recent call last):
    ValueError: from_pretrained: ./nowhere: there is no such folder
    """
    folder = find_folder(folder, operation="from_pretrained")
    if not is_compressed(folder):
        raise ValueError(
            f"from_pretrained: {folder} has no {MARK}, expected a compressed model; load a dense "
            "checkpoint with transformers"
        )
    mark, tensors = read_files(folder)
    config = read_config(folder, "from_pretrained")
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    with reading(f"config.json or {MARK} of {folder}", "from_pretrained"):
        model = _stock(model_class(mark["class"], "from_pretrained"), config, dtype)
        _make_smaller_(model, mark, dtype)
    state = model.state_dict()
    for name, tensor in state.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            stored = list(tensors[name].shape) if name in tensors else "no such tensor"
            raise ValueError(
                f"from_pretrained: the shape of {name} does not fit the model, expected "
                f"{list(tensor.shape)}, got {stored} in {folder}"
            )
        if tensors[name].is_floating_point() != tensor.is_floating_point():
            raise ValueError(
                f"from_pretrained: {name} has dtype {tensors[name].dtype} in {folder}, expected "
                f"{tensor.dtype}"
            )
        if not tensors[name].isfinite().all():
            raise ValueError(
                f"from_pretrained: {name} has NaN or infinity in {folder}, expected finite numbers"
            )
    if unknown := sorted(set(tensors) - set(state)):
        raise ValueError(
            f"from_pretrained: expected only tensors of the model, got others in {folder}, such as "
            f"{', '.join(unknown[:3])}"
        )
    model.load_state_dict(tensors, assign=True)
    # load_state_dict(assign=True) gave each name a separate parameter, which untied the weights
    for name, first in mark["aliases"].items():
        place, _, key = name.rpartition(".")
        model.get_submodule(place)._parameters[key] = model.get_parameter(first)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    own_saving_(model)
    return model.to(device)


def _make_smaller_(model: PreTrainedModel, mark: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Replace layers and parameters of a stock model as ``kronecker.json`` lists them, in place."""
    for name, values in mark["layers"].items():
        put(model, name, empty_layer(model.get_submodule(name), from_dict(values)))
    empty_tensors = {}
    for name, shape in mark["shapes"].items():
        empty_tensors[name] = torch.empty(shape, dtype=dtype)
    set_parameters_(model, empty_tensors)


@torch.no_grad()
def dense_again(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each compressed layer, and a dense layer that computes the same function.

    Tied layers share their dense weight.
    """
    weights: dict[int, nn.Parameter] = {}
    for name, layer in layers.items():
        if isinstance(layer, SmallerLinear):
            dense: Any = layer.to_linear()
        else:
            # pyrefly: ignore[not-callable]: a method, though nn.Module says Tensor
            dense = layer.to_embedding()
        dense.weight = weights.setdefault(id(layer.a), dense.weight)
        yield name, dense


@torch.no_grad()
def fold(
    model: nn.Module,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch: Mapping[str, object] | None = None,
) -> None:
    """Write the smallest stock dense checkpoint that computes the same function as a model.

    Transformers loads the checkpoint without this library.

    If all MLPs have hidden neurons that no weight reads, as with a B of ``[1, 0]``, such neurons
    are dropped. If MLPs have lost different shares of their neurons, the smaller MLPs are padded
    with zeros to the size of the largest.

    Args:
        model: A compressed transformers model, which is not changed.
        out: A folder that does not exist or is empty.
        tokenizer: A tokenizer to write with the weights; default: the one in the folder that the
            model was loaded from.
        batch: Arguments to run the model with, needed if neurons were dropped and the model reads
            neither tokens nor images.

    Raises:
        ValueError: As for `save_pretrained`, or neurons were dropped and the MLPs cannot be found
            without ``batch``.
    """
    check_new(out, "fold")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"fold: the model is a {type(model).__name__}, expected a transformers model"
        )
    layers = compressed(model)
    if not layers and not resized(model):
        raise ValueError(
            "fold: expected a model with compressed layers, got none; call model.save_pretrained "
            "instead"
        )
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[0] not in layers:
            state[name] = tensor.detach()
    for name, layer in dense_again(layers):
        state |= prefixed(name, layer.named_parameters(recurse=False))
    state, config = smallest_stock(model, mlps_if_any(model, batch), state)
    stock = _stock(type(model), config, next(model.parameters()).dtype)
    stock.load_state_dict(state, assign=True)
    # assign=True gave every name a separate parameter, which untied the weights
    stock.tie_weights()
    if model.can_generate() and model.generation_config is not None:
        stock.generation_config = model.generation_config
    with NewFolder(out, "fold") as new:
        stock.save_pretrained(new.folder)
        source = source_of(model)
        card = smaller_card(source, stock, "fold(model, out)")
        complete_folder(new.folder, card, source=source, tokenizer=tokenizer)
