"""`merge_lora`: write a checkpoint with merged adapters, and report what rounding lost."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from model_components._checks import Range, check_value
from model_components._folders import NewFolder, check_new
from model_components._model_folders import (
    card_of,
    complete_folder,
    shown_name,
    source_of,
)
from model_components._report import Axes, Figure, Report, Table, bars

from ..layers import lora_layers

_SHOWN = 5  # layers in a printed report


@dataclass(frozen=True)
class MergedLayer:
    """Figures of one merged layer: the parts of its update dW that were kept and lost.

    Let C be the change of the stored weight. Then the fraction <C, dW> / |dW|² of the update was
    kept. The rest of C is rounding noise, which has no direction and hardly changes the outputs.

    Attributes:
        name: Name of the layer.
        update: |dW| / |W|, in Frobenius norms.
        lost: The share of the update that rounding took away, 1 - <C, dW> / |dW|².
        noise: |C - (1 - lost) dW| / |dW|.
    """

    name: str
    update: float
    lost: float
    noise: float


@dataclass(frozen=True)
class MergeReport(Report):
    """The checkpoint that `merge_lora` wrote, and what its dtype kept of the adapters.

    Attributes:
        path: The folder.
        dtype: The dtype of its weights.
        layers: One entry per adapted layer.
    """

    path: Path
    dtype: str
    layers: tuple[MergedLayer, ...]

    def summary(self) -> list[str]:
        """Return the number of layers, the folder and the dtype."""
        return [f"{len(self.layers)} layers merged into {self.path} in {self.dtype}"]

    def table(self) -> Table:
        """Return the layers that lost most to rounding."""
        changed = [layer for layer in self.layers if layer.update]
        rows = []
        for one in sorted(changed, key=lambda layer: -layer.lost)[:_SHOWN]:
            rows.append((one.name, f"{one.update:.2e}", f"{one.lost:.2%}", f"{one.noise:.2%}"))
        return Table(("layer", "|dW| / |W|", "dW lost", "noise"), rows)

    def remarks(self) -> list[str]:
        """Count the layers that the table leaves out."""
        idle = sum(not layer.update for layer in self.layers)
        more = len(self.layers) - idle - _SHOWN
        lines = []
        if more > 0:
            lines.append(f"and {more} more, which lost less")
        if idle:
            lines.append(
                f"{idle} layers did not change: B is zero, or they have none of the merged adapters"
            )
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the share of each layer's update that rounding lost (extra ``plot``).

        It is drawn on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        lost = {layer.name: layer.lost for layer in self.layers}
        return bars(ax, "MergeReport.plot", lost, "share of dW lost")


def merge_lora(
    model: PeftModel,
    out: str | Path,
    *,
    adapters: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    max_lost: float | None = 0.25,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: int | str = "5GB",
    progress: bool = True,
) -> MergeReport:
    """Write an ordinary checkpoint with merged adapters; the model itself does not change.

    Every update is added in float32 (float64 if the model is float64) and rounded once. bfloat16
    has 8 significant bits, so rounding may erase most of an update that is a thousandth of the
    weight. The report gives, per layer, the fraction that was lost. A merge that loses more than
    ``max_lost`` of all updates together is rejected. A head that was adapted without its tied
    embedding is untied. During the merge, the weights of adapted layers are in memory twice.

    Args:
        model: A peft model with LoRA adapters of any kind that peft can merge.
        out: The folder to write; it must be empty or not exist.
        adapters: Names of the adapters to merge; default: the active ones.
        dtype: The dtype of the floating tensors written; default: the model's own.
        max_lost: The largest fraction of the updates that may be lost, with layers weighted by
            |dW|²; None allows any.
        tokenizer: The tokenizer to write; default: the base's, if it is on this machine.
        max_shard_size: The largest size of a file, in bytes or as text such as ``"5GB"``.
        progress: Show a progress bar.

    Returns:
        The folder and dtype of the checkpoint, and the fraction of each update that was lost.

    Raises:
        ValueError: The model does not have an adapter, its base is quantized or has layers of
            another tuner, a number is not finite (or not in ``dtype``), ``out`` is not empty, or
            more is lost than allowed. In these cases, nothing has been written.

    >>> import tempfile
    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = merge_lora(model, f"{folder}/merged", progress=False)
    >>> [layer.name for layer in report.layers], report.dtype
    (['0'], 'float32')
    """
    operation = "merge_lora"
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"{operation}: the model is a {type(model).__name__}, expected a peft.PeftModel"
        )
    check_value(operation, "max_lost", max_lost, Annotated[float | None, Range(least=0)])
    chosen = _resolve_dtype(dtype, operation)
    names = _adapter_names(model, adapters, operation)
    # before the work: NewFolder checks only after all layers are merged
    check_new(out, operation)
    base = model.get_base_model()
    stored = chosen or next(base.parameters()).dtype
    adapted = lora_layers(base)
    for name, wrapper in base.named_modules():
        saved = isinstance(wrapper, ModulesToSaveWrapper)
        if isinstance(wrapper, AuxiliaryTrainingWrapper) and not saved:
            raise ValueError(
                f"{operation}: {name} is a {type(wrapper).__name__}, which merge_lora does not "
                "support; use peft's own merge_and_unload"
            )
    for name, layer in adapted.items():
        _check_layer(operation, name, layer)
    layers: list[MergedLayer] = []
    sizes: list[float] = []
    merged = {}
    for name, layer in tqdm(adapted.items(), "merging", disable=not progress, leave=False):
        parts = _parts_of(layer, names)
        measured, size = _measured(operation, name, layer, parts["weight"], chosen)
        layers.append(measured)
        sizes.append(size)
        for which, part in parts.items():
            kind = chosen or layer.base_layer.get_parameter(which).dtype
            merged[f"{name}.{which}"] = part.to(kind)
    lost = _lost_of_all(layers, sizes)
    if max_lost is not None and lost > max_lost:
        worst = max(layers, key=lambda one: one.lost)
        raise ValueError(
            f"{operation}: rounding to {stored} loses {lost:.1%} of the updates, expected at most "
            f"{max_lost:.1%} ({worst.lost:.1%} of {worst.name}'s): use dtype=torch.float32 "
            "(--dtype float32), or max_lost=None to accept it (--max-lost 1)"
        )
    state = _state(base, merged, names, chosen)
    with NewFolder(out, operation) as new:
        _write(new.folder, base, state, max_shard_size)
        call = f"merge_lora(model, out, adapters={names}, dtype={stored!s})"
        card = _card(model, call)
        complete_folder(new.folder, card, source=source_of(base), tokenizer=tokenizer)
    return MergeReport(new.out, str(stored).removeprefix("torch."), tuple(layers))


def _resolve_dtype(dtype: object, operation: str) -> torch.dtype | None:
    """Return a floating-point dtype that was given as a dtype or by name; None for None."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"{operation}: dtype is {dtype!r}, expected a floating-point dtype such as "
            "torch.float32"
        )
    return found


def _adapter_names(
    model: PeftModel, adapters: str | Sequence[str] | None, operation: str
) -> list[str]:
    """Return the names of the adapters to merge: the active ones if ``adapters`` is None."""
    if isinstance(adapters, str):
        names = [adapters]
    else:
        names = list(model.active_adapters if adapters is None else adapters)
    names = list(dict.fromkeys(names))  # a name given twice would add its update twice
    if not names or any(name not in model.peft_config for name in names):
        raise ValueError(
            f"{operation}: adapters are {names}, expected some of the model's "
            f"adapters, {sorted(model.peft_config)}"
        )
    return names


def _check_layer(operation: str, name: str, layer: LoraLayer) -> None:
    """Raise for a layer that only peft can merge."""
    if isinstance(layer.base_layer, BaseTunerLayer):
        kind = type(layer.base_layer).__name__
        raise ValueError(
            f"{operation}: expected a base layer without another adapter, got {name} on a {kind}; "
            "merge both with peft's merge_and_unload"
        )
    weight = getattr(layer.base_layer, "weight", None)
    if isinstance(layer, lora.layer.ParamWrapper) or weight is None:
        raise ValueError(
            f"{operation}: expected a layer with a single weight, got {name}, a "
            f"lora.{type(layer).__name__}; use peft's merge_and_unload"
        )
    if "weight" not in layer.base_layer._parameters:
        raise ValueError(
            f"{operation}: expected the weight of {name} to be a parameter, got one that is "
            "computed from others; remove its parametrization first"
        )
    if layer.base_layer._parameters.get("bias") is None and any(layer.lora_bias.values()):
        raise ValueError(
            f"{operation}: expected a base layer with a bias for the adapter's bias, got {name} "
            "without one"
        )
    if layer.merged:
        raise ValueError(
            f"{operation}: {name} is merged already; call the model's unmerge_adapter() first"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"{operation}: {name} is quantized ({weight.dtype}); expected a float base model"
        )


def _parts_of(layer: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return weight and bias of one layer with its adapters merged, in float32 or better."""
    # peft merges in place, so a copy is merged, and only one layer is copied at a time
    copied = copy.deepcopy(layer).to(_wide(layer.base_layer.weight).dtype)
    copied.merge(adapter_names=[name for name in names if name in layer.r])
    own = copied.base_layer.named_parameters(recurse=False)
    return {which: parameter.detach() for which, parameter in own}


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in its own dtype if that is wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _measured(
    operation: str, name: str, layer: Any, exact: Tensor, dtype: torch.dtype | None
) -> tuple[MergedLayer, float]:
    """Return the figures of a layer's update dW, and |dW|²."""
    weight = layer.base_layer.weight.detach()
    rounded = exact.to(dtype or weight.dtype)
    for merged_weight, where in ((exact, ""), (rounded, f" in {rounded.dtype}")):
        if not torch.isfinite(merged_weight).all():
            raise ValueError(
                f"{operation}: the merged weight of {name} has numbers that are not finite{where}"
            )
    update = exact - _wide(weight)
    size = float(update.norm())
    if not size:
        return MergedLayer(name, 0.0, 0.0, 0.0), 0.0
    before = float(weight.float().norm())
    # against the rounded W: the rounding of W itself is not a loss of the update
    change = rounded.to(exact.dtype) - weight.to(rounded.dtype).to(exact.dtype)
    kept = float((change * update).sum(dtype=torch.float64)) / size**2
    noise = float((change - kept * update).norm()) / size
    ratio = size / before if before else math.inf  # a new head may be all zeros
    return MergedLayer(name, ratio, 1 - kept, noise), size**2


def _lost_of_all(layers: Sequence[MergedLayer], sizes: Sequence[float]) -> float:
    total = sum(sizes)
    if not total:
        return 0.0
    return sum(one.lost * size for one, size in zip(layers, sizes, strict=True)) / total


def _state(
    base: nn.Module, merged: dict[str, Tensor], names: Sequence[str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint, under the base model's own names."""
    wrappers = {}
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            wrappers[name] = module
    state: dict[str, Tensor] = {}
    cast: dict[tuple, Tensor] = {}
    adapted = lora_layers(base)
    for key, tensor in base.state_dict(keep_vars=True).items():
        name, _, last = key.rpartition(".")
        place = key
        value = tensor.detach()
        wrapper = next((w for w in wrappers if key.startswith(f"{w}.")), None)
        if f"{name.removesuffix('.base_layer')}.{last}" in merged:
            place = f"{name.removesuffix('.base_layer')}.{last}"
            value = merged[place]
        elif wrapper is not None:
            saved = wrappers[wrapper].modules_to_save
            active = next((n for n in names if n in saved), None)
            inside = "original_module." if active is None else f"modules_to_save.{active}."
            rest = key.removeprefix(f"{wrapper}.")
            if not rest.startswith(inside):
                # other adapters' copies, or the original that a trained copy replaces
                continue
            place = f"{wrapper}.{rest.removeprefix(inside)}"
        elif key.partition(".lora_")[0] in adapted:
            # factors of an adapter; a user's own module may have .lora_ in its name, too
            continue
        if dtype is not None and value.is_floating_point():
            # tied tensors stay tied
            value = cast.setdefault((value.data_ptr(), value.shape), value.to(dtype))
        state[place] = value
    return state


def _write(
    folder: Path,
    base: object,
    state: dict[str, Tensor],
    max_shard_size: int | str,
) -> None:
    """Write a checkpoint by transformers' own function, or by the hub's for other models."""
    if isinstance(base, PreTrainedModel):
        stock = _stock(base, state)
        stock.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        # if several names share one tensor, the hub's function writes only one of the names
        alone = {name: tensor.cpu().clone() for name, tensor in state.items()}
        save_torch_state_dict(alone, folder, max_shard_size=max_shard_size)


def _card(model: PeftModel, call: str) -> str:
    base = source_of(model.get_base_model())
    parts = [
        f"{shown_name(base)} with its LoRA adapters merged into the weights.",
        f"Made by `heads.lora` with\n\n```python\n{call}\n```",
    ]
    title = f"{shown_name(base)}, tuned"
    return card_of(title, parts, bases=[base], tags=["lora"], relation="finetune")


def _stock(base: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """Return a model of the base's class with this state.

    Its head stays tied to its embedding if both are one tensor.
    """
    config = copy.deepcopy(base.config)
    # a head that was trained separately is a separate tensor
    if getattr(config, "tie_word_embeddings", False):
        pairs = [
            (state.get(one), state.get(other)) for one, other in base.all_tied_weights_keys.items()
        ]
        tied = all(a is None or b is None or a.data_ptr() == b.data_ptr() for a, b in pairs)
        # Switch Transformers scale the hidden states if head and embedding are tied
        if not tied and "tie_word_embeddings" in inspect.getsource(type(base).forward):
            raise ValueError(
                "merge_lora: expected an adapter that keeps head and embedding tied, got one that "
                f"unties them; the forward of {type(base).__name__} reads tie_word_embeddings and "
                "would return other outputs"
            )
        config.tie_word_embeddings = tied
    with no_init_weights(), torch.device("meta"):
        stock = type(base)._from_config(config)
    seen: set[int] = set()
    for name, tensor in state.items():  # shared without a declared tie: each name gets its own
        if tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    stock.config.dtype = next(stock.parameters()).dtype
    if base.can_generate() and base.generation_config is not None:
        stock.generation_config = base.generation_config
    return stock
