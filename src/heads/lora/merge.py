"""`merge_lora`: a full checkpoint of a model with its adapters, one shard in memory, and what rounding lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.pytorch_utils import Conv1D

from model_components._folders import NewFolder, check_new
from model_components._report import Axes, Figure, Report, Table, bars

from .linear import LoraLinear
from .split import PARTS, SplitQKV

_SHOWN = 5  # layers of a printed report


@dataclass(frozen=True)
class MergedLayer:
    """What became of one layer's update dW: its size, |dW| / |W|, and the share of it that rounding lost."""

    name: str
    update: float
    lost: float


@dataclass(frozen=True)
class MergeReport(Report):
    """The checkpoint that `merge_lora` wrote, and what its dtype kept of the adapters."""

    path: Path
    dtype: str
    layers: tuple[MergedLayer, ...]

    def summary(self) -> list[str]:
        """Where it is, and in which dtype."""
        return [f"{len(self.layers)} layers merged into {self.path} in {self.dtype}"]

    def table(self) -> Table:
        """The layers that lost most to rounding."""
        worst = sorted((one for one in self.layers if one.update), key=lambda one: -one.lost)[:_SHOWN]
        rows = [(one.name, f"{one.update:.2e}", f"{one.lost:.2%}") for one in worst]
        return Table(("layer", "|dW| / |W|", "dW lost"), rows)

    def remarks(self) -> list[str]:
        """What the table leaves out."""
        idle = sum(not layer.update for layer in self.layers)
        more = len(self.layers) - idle - _SHOWN
        lines = [f"and {more} more, which lost no more"] if more > 0 else []
        return lines + ([f"{idle} of them were not changed: their B is zero, untrained"] if idle else [])

    def plot(self, ax: Axes | None = None) -> Figure:
        """The share of each layer's update that rounding lost (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(ax, "MergeReport.plot", {one.name: one.lost for one in self.layers}, "share of dW lost")


def merge_lora(
    model: PeftModel,
    out: str | Path,
    *,
    adapters: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    max_lost: float | None = 0.25,
    tokenizer: Any = None,
    max_shard_bytes: int = 1 << 30,
    progress: bool = True,
) -> MergeReport:
    """Write the model with its adapters as an ordinary checkpoint; the model itself stays as it is.

    Every update is added in float32 and rounded once. A weight of bfloat16 has 8 bits, so that an update of a
    thousandth of it is mostly lost: that share, ``|stored - W - dW| / |dW|``, is reported for every layer, and refused
    above ``max_lost``. Layers that were split are joined; a head adapted apart from its tied embedding is untied.

    Args:
        model: A peft model with LoRA adapters of any kind that peft can merge.
        out: The folder to write; it must not exist, or be empty.
        adapters: Which adapters; the active ones by default.
        dtype: Of the floating tensors written; the model's own by default.
        max_lost: The largest share of a layer's update that may be lost; None for any.
        tokenizer: Written beside the weights.
        max_shard_bytes: Shards are about so large; one is in memory at a time.
        progress: Show a bar.

    Raises:
        ValueError: An adapter that the model does not have, a quantised base, numbers that are not finite, a folder
            with something in it, or more lost than allowed. Nothing has been written then.

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
        raise ValueError(f"{operation}: the model is a {type(model).__name__}, needed a peft.PeftModel")
    named, dtype = dtype, getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{operation}: dtype is {named!r}, needed a floating one such as torch.float32")
    names = [adapters] if isinstance(adapters, str) else list(model.active_adapters if adapters is None else adapters)
    unknown = [name for name in names if name not in model.peft_config]
    if unknown or not names:
        raise ValueError(f"{operation}: adapters are {names}, the model has {sorted(model.peft_config)}")
    check_new(out, operation)
    base: Any = model.get_base_model()
    stored = dtype or next(base.parameters()).dtype
    merged = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    for name, wrapper in base.named_modules():
        if isinstance(wrapper, AuxiliaryTrainingWrapper) and not isinstance(wrapper, ModulesToSaveWrapper):
            raise ValueError(f"{operation}: {name} is a {type(wrapper).__name__}; needed peft's own merge_and_unload")
    layers = []
    for name, layer in tqdm(merged.items(), "measuring", disable=not progress, leave=False):
        weight: Any = getattr(layer.get_base_layer(), "weight", None)
        if isinstance(layer, lora.layer.ParamWrapper) or weight is None:
            raise ValueError(f"{operation}: {name} is a lora.{type(layer).__name__}, whose merge peft alone can do")
        if layer.merged:
            raise ValueError(f"{operation}: {name} is merged already; needed unmerge_adapter() before")
        if not weight.is_floating_point():
            raise ValueError(f"{operation}: {name} is quantised ({weight.dtype}); needed a float base model")
        layers.append(_measured(operation, name, layer, names, dtype or weight.dtype))
    lossy = [one for one in layers if max_lost is not None and one.lost > max_lost]
    if lossy:
        worst = max(lossy, key=lambda one: one.lost)
        raise ValueError(
            f"{operation}: rounding to {stored} loses more than {max_lost:.0%} of the update of "
            f"{len(lossy)} of {len(layers)} layers, {worst.lost:.0%} of {worst.name}'s; needed dtype=torch.float32, or "
            "max_lost=None to have it so"
        )
    makers = _makers(base, names)
    with NewFolder(out, operation) as new:
        _write(new.folder, makers, dtype, max_shard_bytes, progress)
        _write_configs(new.folder, base, makers, dtype, tokenizer)
    return MergeReport(new.out, str(stored).removeprefix("torch."), tuple(layers))


def _part_of(layer: Any, names: Sequence[str], which: str) -> Tensor:
    """Weight or bias of one layer with its adapters, in float32."""
    own = [name for name in names if name in layer.r]
    plain = type(layer) in (lora.Linear, LoraLinear)
    if plain and not any(name in layer.lora_variant or layer.lora_bias.get(name) for name in own):
        total = getattr(layer.get_base_layer(), which).detach().float()
        if which == "bias":
            return total
        for name in own:
            update = layer.lora_B[name].weight.detach().float() @ layer.lora_A[name].weight.detach().float()
            update = update.T if isinstance(layer.get_base_layer(), Conv1D) else update
            total = total + layer.scaling[name] * update
        return total
    shared = layer.__dict__.pop("shared", None)  # a copy of one layer is not to be a copy of all
    copied = copy.deepcopy(layer).float()
    if shared is not None:
        layer.shared = shared
    copied.merge(adapter_names=own)
    return getattr(copied.get_base_layer(), which).detach()


def _measured(operation: str, name: str, layer: Any, names: Sequence[str], dtype: torch.dtype) -> MergedLayer:
    weight = layer.get_base_layer().weight.detach()
    exact = _part_of(layer, names, "weight")
    if not torch.isfinite(exact).all():
        raise ValueError(f"{operation}: the merged weight of {name} has numbers that are not finite")
    update = exact - weight.float()
    size = float(update.norm())
    lost = exact.to(dtype).float() - weight.to(dtype).float() - update
    share = float(lost.norm()) / size if size else 0.0
    return MergedLayer(name, size / float(weight.float().norm()) if size else 0.0, share)


class _Maker(NamedTuple):
    """A tensor of the checkpoint that is made when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], Tensor]
    parameter: int  # id of what it is made of, equal for tied tensors; 0 where it is made of several


def _makers(base: nn.Module, names: Sequence[str]) -> dict[str, _Maker]:
    """What the checkpoint will hold, under the base model's own names, tied tensors once."""
    layers = {n: m for n, m in base.named_modules() if isinstance(m, LoraLayer)}
    wrappers = {n: m for n, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    found: dict[str, _Maker] = {}
    for key, tensor in base.state_dict(keep_vars=True).items():
        name, _, last = key.rpartition(".")
        layer = layers.get(name.removesuffix(".base_layer"))
        wrapper = next((w for w in wrappers if key.startswith(f"{w}.")), None)
        if layer is not None and name.endswith(".base_layer"):
            make = partial(_part_of, layer, names, last)
            found[f"{name.removesuffix('.base_layer')}.{last}"] = _Maker(tensor.shape, tensor.dtype, make, 0)
        elif wrapper is not None:
            saved: Any = wrappers[wrapper].modules_to_save
            active = next((n for n in names if n in saved), None)
            inside = "original_module." if active is None else f"modules_to_save.{active}."
            rest = key.removeprefix(f"{wrapper}.")
            if rest.startswith(inside):
                place = f"{wrapper}.{rest.removeprefix(inside)}"
                found[place] = _Maker(tensor.shape, tensor.dtype, tensor.detach, id(tensor))
        elif ".lora_" not in key:
            found[key] = _Maker(tensor.shape, tensor.dtype, tensor.detach, id(tensor))
    for name, module in base.named_modules():
        if isinstance(module, SplitQKV):
            for last, dim in (("weight", 1), ("bias", 0)):
                if f"{name}.{last}" in found:  # no part carries an adapter: they are fused already
                    continue
                parts = [found.pop(f"{name}.{part}.{last}") for part in PARTS]
                shape = list(parts[0].shape)
                shape[dim] = sum(p.shape[dim] for p in parts)
                make = partial(_joined, parts, dim)
                found[f"{name}.{last}"] = _Maker(torch.Size(shape), parts[0].dtype, make, 0)
    first: dict[int, str] = {}
    for name, maker in found.items():
        if maker.parameter:
            first.setdefault(maker.parameter, name)
    return {n: m for n, m in found.items() if not m.parameter or first[m.parameter] == n}


def _joined(parts: Sequence[_Maker], dim: int) -> Tensor:
    return torch.cat([part.make() for part in parts], dim)


def _write(folder: Path, makers: dict[str, _Maker], dtype: torch.dtype | None, limit: int, progress: bool) -> None:
    """Shards of about ``limit`` bytes and, of several, their index."""

    def dtype_of(maker: _Maker) -> torch.dtype:
        return dtype if dtype is not None and maker.dtype.is_floating_point else maker.dtype

    sizes = {name: m.shape.numel() * dtype_of(m).itemsize for name, m in makers.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > limit:
            shards.append([])
        shards[-1].append(name)
    index = {}
    with tqdm(total=len(makers), desc="merging", disable=not progress, leave=False) as bar:
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            made = {}
            for name in names:
                made[name] = makers[name].make().to("cpu", dtype_of(makers[name])).contiguous()
                index[name] = file
                bar.update()
            save_file(made, folder / file, {"format": "pt"})
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def _write_configs(folder: Path, base: Any, names: Collection[str], dtype: torch.dtype | None, tokenizer: Any) -> None:
    config = copy.deepcopy(getattr(base, "config", None))
    if config is not None and hasattr(config, "save_pretrained"):
        head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        head_name = next((n for n, m in base.named_modules() if m is head), None)
        if getattr(config, "tie_word_embeddings", False) and f"{head_name}.weight" in names:
            config.tie_word_embeddings = False  # the head has weights of its own now
        config.architectures = [type(base).__name__]
        config.dtype = dtype or next(base.parameters()).dtype
        config.save_pretrained(folder)
        if getattr(base, "generation_config", None) is not None and base.can_generate():
            base.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
