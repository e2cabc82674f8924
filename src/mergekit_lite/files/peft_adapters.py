"""`PeftSource`: a model with an adapter of any type in `KINDS`, merged into its weights on reading.

The change of a plain LoRA is a product, which `LoraSource` adds to the elements that are read. All
other adapters are merged by peft's code, one layer at a time, so that only one layer is in memory.
"""

from __future__ import annotations

import copy
import threading
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoConfig

from model_components._formats import reading

from ..dtypes import Array, from_torch, stored_of, tensor_of
from .adapter import CONFIG, MOST, PREFIX, WEIGHTS, AdapterSource, refuse_residual
from .experts import stacked
from .headers import CheckpointError, read_json
from .sources import Source

_PLACEHOLDER = torch.zeros(())  # expanded to a weight's shape, it takes no memory
KINDS = (
    "LORA",
    "ADALORA",
    "BOFT",
    "FOURIERFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "OFT",
    "RANDLORA",
    "TRAINABLE_TOKENS",
    "VERA",
)
"""The supported types of peft adapters; tests compare their merges with peft's own merges.

Adapters of other types may compute tensors from the base's weights, but these have no values when
peft creates its layers.
"""

# parts that peft inserts into a parameter's name
_WRAPPERS = (".base_layer", ".token_adapter", ".original_module", ".modules_to_save.default")


class PeftSource(AdapterSource):
    """A model with a peft adapter that is merged into its weights layer by layer, on reading.

    Args:
        base: The model without the adapter.
        folder: The adapter's folder.

    Raises:
        CheckpointError: The adapter's type is not supported, or it does not fit the model, changes
            no weight, or cannot be merged into weights.
    """

    def __init__(self, base: Source, folder: Path):
        # transformers 5 holds experts as stacks, so peft uses the names of stacks
        base = stacked(base)
        super().__init__(base, folder)
        # several threads may read one tensor: the first thread merges the layer for all of them
        self._lock = threading.Lock()
        self._last: tuple[nn.Module | None, dict[str, Tensor]] = (None, {})
        _check_settings(folder)
        try:
            with reading(f"config.json of {base.label}", "merge"):
                model = _skeleton(base)
            # the model's parameters; if the adapter changes one, it must be in the model's files
            self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            # peft warns that the base has no name, which is intended here
            with reading(f"adapter {folder}", "merge"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._model = _adapted(model, base, folder)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self._layers: dict[str, tuple[nn.Module, str]] = {}
        self._find_changes()
        if not self.changed:
            raise CheckpointError(f"adapter {folder}: changes no weight of {base.label}")
        if self._layers:  # merge one layer, so that an error is raised before any other work
            self.read(next(iter(self._layers)), 0, 1)

    @cached_property
    def changed(self) -> list[str]:
        """The names of the tensors that differ from the model's."""
        return list(dict.fromkeys([*self._layers, *self._replaced]))

    def _find_changes(self) -> None:
        """Find what the adapter changes: replaced parameters, and layers that peft wraps."""
        for name, value in self._model.named_parameters():
            dtype = from_torch(value.dtype)
            # all other parameters belong to the adapter
            if _plain(name) in self._names and dtype is not None and not _is_placeholder(value):
                values = stored_of(value.detach().contiguous())
                self._replace(self._stored(_plain(name)), tuple(value.shape), dtype, values)
        # a wrapper inside a wrapped layer is merged together with that layer
        outermost = ""
        for name, layer in self._model.named_modules():
            inside = outermost and name.startswith(f"{outermost}.")
            if inside or not isinstance(layer, BaseTunerLayer):
                continue
            assert isinstance(layer, nn.Module)  # true for all subclasses of BaseTunerLayer
            outermost = name
            if getattr(layer, "tied_adapter", None) is not None:
                continue  # a tied head, whose weight is the embedding
            for own, _ in _innermost(layer).named_parameters(recurse=False):
                self._layers[self._stored(f"{_plain(name)}.{own}")] = (layer, own)

    def _stored(self, name: str) -> str:
        """Return a parameter's name in the model's files, which may have or lack a prefix."""
        prefix = f"{self._model.base_model.model.base_model_prefix}."
        for known in (name, name.removeprefix(prefix), f"{prefix}{name}"):
            if known in self.model.tensors:
                return known
        raise CheckpointError(
            f"adapter {self._adapter_folder}: changes {name}, which is not a tensor of the files "
            f"of {self.model.label}"
        )

    def _before(self, name: str) -> Tensor:
        """Return a tensor in float32, as it is before peft merges its layer."""
        info = self.model.tensors[name]
        if name in self._replaced:
            values = self._replaced[name]
        else:
            values = self.model.read(name, 0, info.count)
        return tensor_of(values).float().view(info.shape)

    def _merged(self, name: str) -> Tensor:
        """Return a tensor after peft has merged its layer; the last merged layer is cached."""
        layer, own = self._layers[name]
        with self._lock:
            if self._last[0] is not layer:
                self._last = (layer, self._merge(layer))
            return self._last[1][own]

    @torch.no_grad()
    def _merge(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return a layer's tensors after peft has merged it, by their names within the layer."""
        names = {own: name for name, (of, own) in self._layers.items() if of is layer}
        # peft merges in place, so merge a copy: later reads need the layer without values
        placeholders = {id(p): p for p in layer.parameters() if _is_placeholder(p)}
        layer = copy.deepcopy(layer, placeholders).float()
        for own, name in names.items():
            before = nn.Parameter(self._before(name), requires_grad=False)
            setattr(_innermost(layer), own, before)
        try:
            for wrapper in list(layer.modules()):
                if isinstance(wrapper, BaseTunerLayer):
                    # safe_merge: peft raises an error if the result has NaN or infinity
                    wrapper.merge(safe_merge=True)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: peft cannot merge it into the weights "
                f"({type(error).__name__}: {error})"
            ) from error
        merged = _innermost(layer)  # some types replace the layer
        return {own: getattr(merged, own).detach() for own in names}

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of a tensor.

        They are in float32 if peft merges the tensor. If the adapter replaces the tensor, they are
        the adapter's values, as stored.
        """
        if name in self._layers and start < stop:
            return stored_of(self._merged(name).reshape(-1)[start:stop])
        if name in self._replaced:
            return self._replaced[name][start:stop]
        return super().read(name, start, stop)


def _check_settings(folder: Path) -> None:
    """Reject adapters whose type is not in `KINDS`, or whose settings do not allow a merge."""
    settings = read_json(folder / CONFIG)
    refuse_residual(folder, settings)
    kind = settings.get("peft_type", "LORA")
    if kind not in KINDS:
        raise CheckpointError(
            f"adapter {folder}: expected one of {', '.join(KINDS)}, got peft_type {kind!r}; merge "
            "the adapter with peft first"
        )
    if settings.get("layer_replication"):
        raise CheckpointError(
            f"adapter {folder}: expected no layer_replication, got "
            f"{settings['layer_replication']!r}; merge the adapter with peft first"
        )
    rank = settings.get("r", 1)
    if isinstance(rank, int) and rank > MOST:
        raise CheckpointError(f"adapter {folder}: expected a rank up to {MOST:,}, got {rank}")


def _skeleton(base: Source) -> Any:
    """Return a source's model with placeholders instead of parameter values."""
    config = AutoConfig.for_model(**base.config)
    names = config.architectures or [""]
    kind = getattr(transformers, names[0], None)
    with torch.device("meta"):
        if kind is None:  # custom code: use a built-in class, which must have the same names
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = kind(config)
    # placeholders are not on the meta device, so a parameter that is still on it after the adapter
    # is loaded must be missing from the adapter's file
    for layer in model.modules():
        for own, parameter in layer.named_parameters(recurse=False):
            setattr(
                layer, own, nn.Parameter(_PLACEHOLDER.expand(parameter.shape), requires_grad=False)
            )
    # tied weights are separate parameters now: tie them again
    model.tie_weights()
    return model


def _adapted(model: Any, base: Source, folder: Path) -> Any:
    """Return a peft model: the adapter with its values, around the model without values."""
    settings = PeftConfig.from_pretrained(str(folder))
    model = get_peft_model(model, settings, low_cpu_mem_usage=True)
    # without a device, peft would use a GPU if there is one
    weights = load_peft_weights(str(folder), device="cpu")
    try:
        loaded = set_peft_model_state_dict(model, weights, low_cpu_mem_usage=True)
    except RuntimeError as error:
        # torch's first line only says that loading failed
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(f"adapter {folder}: does not fit {base.label} ({reason})") from error
    if loaded.unexpected_keys:
        raise CheckpointError(
            f"adapter {folder}: its tensor {loaded.unexpected_keys[0]} fits no parameter of "
            f"{base.label}"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise CheckpointError(f"adapter {folder}: {WEIGHTS} has no tensor for {name}")
    return model


def _is_placeholder(value: Tensor) -> bool:
    return value.untyped_storage().data_ptr() == _PLACEHOLDER.untyped_storage().data_ptr()


def _innermost(layer: nn.Module) -> Any:
    """Return the model's layer inside all of peft's wrappers."""
    while isinstance(layer, BaseTunerLayer):
        layer = layer.get_submodule("base_layer")
    return layer


def _plain(name: str) -> str:
    """Return a parameter's or module's name in the model without peft.

    >>> _plain("base_model.model.lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    name = name.removeprefix(PREFIX)
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
