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

_SHOWN = 5  # number of layers in a printed report


class RoundingError(ValueError):
    """Raised if rounding would lose too much of the updates."""


@dataclass(frozen=True)
class MergedLayer:
    """Metrics of one merged layer: how much of its update was kept and lost.

    Let dW be the exact update, and C the change of the stored weight, which is rounded. Then the
    fraction <C, dW> / |dW|² of the update was kept. The rest of C is rounding noise, which has no
    preferred direction and hardly changes the outputs.

    Attributes:
        name: Name of the layer.
        update: Size of the update relative to the weight, |dW| / |W|, in Frobenius norms.
        lost: Fraction of the update that was lost to rounding, 1 - <C, dW> / |dW|².
        noise: Size of the noise relative to the update, |C - (1 - lost) dW| / |dW|.
    """

    name: str
    update: float
    lost: float
    noise: float


@dataclass(frozen=True)
class MergeReport(Report):
    """The checkpoint that `merge_lora` wrote, and how much of each update rounding lost.

    Attributes:
        path: The folder of the checkpoint.
        dtype: The dtype of the checkpoint's weights.
        layers: One entry per adapted layer.
    """

    path: Path
    dtype: str
    layers: tuple[MergedLayer, ...]

    def summary(self) -> list[str]:
        """Return the number of layers, the folder and the dtype."""
        return [f"{len(self.layers)} layers merged into {self.path} in {self.dtype}"]

    def table(self) -> Table:
        """Return a table of the layers that lost the most to rounding."""
        changed = [layer for layer in self.layers if layer.update]
        rows = []
        for one in sorted(changed, key=lambda layer: -layer.lost)[:_SHOWN]:
            rows.append((one.name, f"{one.update:.2e}", f"{one.lost:.2%}", f"{one.noise:.2%}"))
        return Table(("layer", "|dW| / |W|", "dW lost", "noise"), rows)

    def remarks(self) -> list[str]:
        """Return how many layers the table leaves out, and why."""
        idle = sum(not layer.update for layer in self.layers)
        more = len(self.layers) - idle - _SHOWN
        lines = []
        if more > 0:
            lines.append(f"and {more} more layers, which lost less")
        if idle:
            lines.append(
                f"{idle} layers did not change: B is zero, or no merged adapter targets the layer"
            )
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the fraction of each layer's update that rounding lost.

        The plot is drawn on ``ax`` or in a new figure. Plotting requires the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        lost = {layer.name: layer.lost for layer in self.layers}
        return bars(ax, "MergeReport.plot", lost, "fraction of dW lost")


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

    Every update is added in float32 (float64 if the model is in float64), and the sum is rounded
    once, to the dtype of the checkpoint. bfloat16 has 8 significant bits, so rounding may erase
    most of an update that is a thousandth of the weight. The report gives the fraction of each
    layer's update that was lost. If a larger fraction than ``max_lost`` of all updates together
    would be lost, the merge is rejected. A head that was adapted without its tied embedding is
    untied. During the merge, the weights of adapted layers are in memory twice.

    Args:
        model: A peft model with LoRA adapters of any kind that peft can merge.
        out: The folder to write; it must be empty or not exist.
        adapters: Names of the adapters to merge; default: the active ones.
        dtype: The dtype of the floating-point tensors to write; default: the model's own.
        max_lost: The largest fraction of the updates that may be lost, with layers weighted by
            |dW|²; None sets no limit.
        tokenizer: The tokenizer to write; default: the base model's tokenizer, if it is stored on
            this machine.
        max_shard_size: The maximum size of a weight file, in bytes or as text such as ``"5GB"``.
        progress: Show a progress bar.

    Returns:
        The folder and dtype of the checkpoint, and the fraction of each update that was lost.

    Raises:
        ValueError: The model lacks one of the adapters, several of them have a trained copy of one
            module, the base is quantized or has layers of another tuner, a merged weight is not
            finite (or would not be in ``dtype``), ``out`` is not empty, or more than ``max_lost``
            is lost. In these cases, nothing has been written.

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
    # check the folder early: NewFolder does so only after all layers are merged
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
        copies = [one for one in names if saved and one in wrapper.modules_to_save]
        if len(copies) > 1:
            raise ValueError(
                f"{operation}: expected one adapter with a trained copy of {name}, got "
                f"{', '.join(copies)}; copies cannot be added, so merge one of these adapters"
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
        rounded = chosen or adapted[worst.name].base_layer.weight.dtype
        raise RoundingError(
            f"{operation}: rounding to {rounded} loses {lost:.1%} of the updates, expected at most "
            f"{max_lost:.1%} (the worst layer loses {worst.lost:.1%}: {worst.name}). Use "
            "dtype=torch.float32 (--dtype float32), or accept the loss with max_lost=None "
            "(--max-lost 1)"
        )
    state = _state(base, merged, names, chosen)
    with NewFolder(out, operation) as new:
        _write(new.folder, base, state, max_shard_size)
        call = f"merge_lora(model, out, adapters={names}, dtype={stored!s})"
        card = _card(model, call)
        complete_folder(new.folder, card, source=source_of(base), tokenizer=tokenizer)
    return MergeReport(new.out, str(stored).removeprefix("torch."), tuple(layers))


def _resolve_dtype(dtype: object, operation: str) -> torch.dtype | None:
    """Convert a floating-point dtype, or its name, to a `torch.dtype`; return None for None."""
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
            f"{operation}: adapters are {names}, expected one or more of the model's adapters, "
            f"which are {sorted(model.peft_config)}"
        )
    return names


def _check_layer(operation: str, name: str, layer: LoraLayer) -> None:
    """Raise ValueError for a layer that `merge_lora` cannot merge."""
    if isinstance(layer.base_layer, BaseTunerLayer):
        kind = type(layer.base_layer).__name__
        raise ValueError(
            f"{operation}: expected a base layer without another adapter, but the base layer of "
            f"{name} is a {kind}; merge both adapters with peft's merge_and_unload"
        )
    weight = getattr(layer.base_layer, "weight", None)
    if isinstance(layer, lora.layer.ParamWrapper) or weight is None:
        raise ValueError(
            f"{operation}: expected a layer with a single weight, got {name}, a "
            f"lora.{type(layer).__name__}; use peft's merge_and_unload"
        )
    if "weight" not in layer.base_layer._parameters:
        raise ValueError(
            f"{operation}: expected the weight of {name} to be a parameter, got a weight that is "
            "computed from other tensors; remove its parametrization first"
        )
    if layer.base_layer._parameters.get("bias") is None and any(layer.lora_bias.values()):
        raise ValueError(
            f"{operation}: {name} has no bias to which the bias of its adapter could be added; "
            "expected a base layer with a bias"
        )
    if layer.merged:
        raise ValueError(
            f"{operation}: the adapters of {name} are already merged into its weight; call the "
            "model's unmerge_adapter() first"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"{operation}: the weight of {name} is quantized ({weight.dtype}); expected a base "
            "model in a floating-point dtype of 16 bits or more"
        )


def _parts_of(layer: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the merged weight and bias of one layer, in float32 or a wider dtype."""
    # peft merges in place, so each layer is copied, one at a time, and the copy is merged
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
    """Return the metrics of a merged layer, and |dW|² of its update dW."""
    weight = layer.base_layer.weight.detach()
    rounded = exact.to(dtype or weight.dtype)
    for merged_weight, where in ((exact, ""), (rounded, f" in {rounded.dtype}")):
        if not torch.isfinite(merged_weight).all():
            raise ValueError(
                f"{operation}: expected finite numbers in the merged weight of {name}, got NaN or "
                f"infinity{where}"
            )
    update = exact - _wide(weight)
    size = float(update.norm())
    if not size:
        return MergedLayer(name, 0.0, 0.0, 0.0), 0.0
    before = float(weight.float().norm())
    # compared with the rounded W, because rounding W itself loses nothing of the update
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
                # a copy of another adapter, or the original that a trained copy replaces
                continue
            place = f"{wrapper}.{rest.removeprefix(inside)}"
        elif key.partition(".lora_")[0] in adapted:
            # factors of an adapter; names of other modules may contain .lora_, too
            continue
        if dtype is not None and value.is_floating_point():
            # a tied tensor is cast only once, so that it stays tied
            value = cast.setdefault((value.data_ptr(), value.shape), value.to(dtype))
        state[place] = value
    return state


def _write(
    folder: Path,
    base: object,
    state: dict[str, Tensor],
    max_shard_size: int | str,
) -> None:
    """Write a checkpoint with transformers, or with huggingface_hub for models of other kinds."""
    if isinstance(base, PreTrainedModel):
        stock = _stock(base, state)
        stock.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        # copies, because huggingface_hub saves a tensor with several names under only one of them
        alone = {name: tensor.cpu().clone() for name, tensor in state.items()}
        save_torch_state_dict(alone, folder, max_shard_size=max_shard_size)


def _card(model: PeftModel, call: str) -> str:
    base = source_of(model.get_base_model())
    parts = [
        f"{shown_name(base)} with its LoRA adapters merged into the weights.",
        f"Made by `heads.lora` with this call:\n\n```python\n{call}\n```",
    ]
    title = f"{shown_name(base)}, tuned"
    return card_of(title, parts, bases=[base], tags=["lora"], relation="finetune")


def _stock(base: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """Return a model of the base model's class with the tensors in ``state``.

    The head stays tied to the embedding if both are one tensor.
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
                f"unties them; the forward of {type(base).__name__} reads tie_word_embeddings, so "
                "the merged model would return different outputs"
            )
        config.tie_word_embeddings = tied
    with no_init_weights(), torch.device("meta"):
        stock = type(base)._from_config(config)
    seen: set[int] = set()
    # copy a tensor that has several names but is not declared as tied
    for name, tensor in state.items():
        if tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    stock.config.dtype = next(stock.parameters()).dtype
    if base.can_generate() and base.generation_config is not None:
        stock.generation_config = base.generation_config
    return stock
