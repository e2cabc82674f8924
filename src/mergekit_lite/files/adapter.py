"""`LoraSource`: a model with a peft LoRA adapter, which is merged into its weights on reading."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from model_components._patterns import pattern_problem

from ..dtypes import Array, DType, numbers, stored_as
from .headers import CheckpointError, Json, TensorInfo, read_header, read_json
from .sources import FolderSource, Source, View, stat_of

# an embedding's factors are parameters, not layers, so their names do not end with .weight
_LORA_KEY = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+?)"
    r"\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$"
)
_PAIRS = (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"])
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
# initializations that subtract the adapter from the base
_RESIDUAL = ("pissa", "olora", "corda", "loftq")
# LoRA settings with which the change of a weight is not s B A
_NO_PRODUCT = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# to estimate the loss by rounding, sample about 16 weights, and 2**14 elements of each
_SAMPLED = 16
_SAMPLE = 1 << 14
MOST = 1_000_000  # a rank or alpha above this means that the file is damaged
# transformers model types that use Conv1D, which stores its weight as (in, out)
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_CONV1D_LAYERS = re.compile(r"(^|\.)(c_attn|q_attn|c_proj|c_fc)$")


def _check_files(adapter: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise CheckpointError(f"adapter {adapter}: has no {name}")


def more_than_lora(adapter: Path) -> str | None:
    """Return the setting that makes an adapter more than a plain LoRA, or None for a plain LoRA.

    The changes of a plain LoRA are products s B A.
    """
    if not (adapter / CONFIG).is_file():
        return None  # `LoraSource` reports the missing file
    settings = read_json(adapter / CONFIG)
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        return f"peft_type {kind}"
    return next((name for name in _NO_PRODUCT if settings.get(name)), None)


def refuse_residual(adapter: Path, settings: Mapping[str, object]) -> None:
    """Raise an error if an adapter's initialization also changed the base's weights.

    PiSSA, OLoRA, CorDA and LoftQ do so.
    """
    # true, false or a name; PiSSA's name may include the number of steps, as in pissa_niter_16
    if str(settings.get("init_lora_weights", "")).lower().startswith(_RESIDUAL):
        raise CheckpointError(
            f"adapter {adapter}: was initialized by {settings['init_lora_weights']}, which also "
            "changed the base's weights; save the adapter again with peft's "
            "path_initial_model_for_weight_conversion"
        )


def read_adapter_config(adapter: Path) -> Json:
    """Read and check the settings of a plain LoRA adapter.

    Raises:
        CheckpointError: A file is missing, a setting is invalid, or the adapted weights are not
            W + s B A.
    """
    _check_files(adapter)
    settings = read_json(adapter / CONFIG)
    setting = more_than_lora(adapter)
    if setting is not None:
        raise CheckpointError(
            f"adapter {adapter}: expected a plain LoRA adapter, got one with {setting}"
        )
    refuse_residual(adapter, settings)
    if missing := {"r", "lora_alpha"} - settings.keys():
        raise CheckpointError(
            f"adapter {adapter}: {CONFIG} has no {' and no '.join(sorted(missing))}"
        )
    for key in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(settings.get(key, False), bool):
            raise CheckpointError(
                f"adapter {adapter}: {key} is {settings[key]!r}, expected true or false"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(key) or {}, Mapping):
            raise CheckpointError(
                f"adapter {adapter}: {key} is {settings[key]!r}, expected an object that maps "
                "module names to numbers"
            )
    values = [settings["r"], settings["lora_alpha"]]
    for key in ("rank_pattern", "alpha_pattern"):
        values += (settings.get(key) or {}).values()
    for value in values:
        # `not <=` is also true for NaN, which JSON may hold
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST:
            raise CheckpointError(
                f"adapter {adapter}: expected ranks and alphas that are numbers up to {MOST:,}, "
                f"got {value!r}"
            )
    return settings


def stores_transposed(config: Mapping[str, object], module: str, otherwise: bool = False) -> bool:
    """Return whether a layer's weight is stored as (in, out).

    Conv1D layers, as in GPT-2, store their weights as (in, out), but the heads of such models do
    not.

    Args:
        config: The model's config.
        module: The layer's name.
        otherwise: The result for models without Conv1D layers.
    """
    if config.get("model_type") not in _CONV1D_MODELS:
        return otherwise
    return bool(_CONV1D_LAYERS.search(module))


def _pattern(settings: Json, key: str, module: str, default: float) -> float:
    # the same expression as in peft: the first pattern that matches is used, not the longest
    for pattern, value in (settings.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def scale_of(settings: Json, module: str) -> tuple[int, float]:
    """Return a module's rank in the adapter's config, and the factor s of its change s B A."""
    rank = _pattern(settings, "rank_pattern", module, settings["r"])
    alpha = _pattern(settings, "alpha_pattern", module, settings["lora_alpha"])
    if rank < 1:
        raise CheckpointError(
            f"adapter: {CONFIG} gives {module} the rank {rank}, expected 1 or more"
        )
    return int(rank), alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


@dataclass(frozen=True)
class Pair:
    """The two factors of one module's change, s B A.

    Args:
        down: A, (r, in_features).
        up: B, (out_features, r).
        scale: s.
        embedding: Whether the module is a token embedding. Its weight is (tokens, features), so
            the transpose of the change is added to it.
    """

    down: Array
    up: Array
    scale: float
    embedding: bool = False


class Adapter:
    """A peft LoRA adapter in memory: settings, factors, and the tensors that it replaces.

    Raises:
        CheckpointError: The folder is not a plain LoRA adapter, or its files are damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = read_adapter_config(folder)
        self.pairs: dict[str, Pair] = {}
        self.replaced: dict[str, tuple[TensorInfo, Array]] = {}
        stored = FolderSource(folder, str(folder), read_header(folder / WEIGHTS))
        self.tensors = stored.tensors
        if not stored.tensors:
            raise CheckpointError(f"adapter {folder}: expected tensors in {WEIGHTS}, got none")
        factors: dict[str, dict[str, Array]] = {}
        for key, info in stored.tensors.items():
            value = stored.read(key, 0, info.count).reshape(info.shape)
            match = _LORA_KEY.match(key)
            if match is None:
                # modules_to_save, trained biases, and embeddings that were saved with the adapter
                plain = key.removeprefix(PREFIX)
                plain = plain.replace(".modules_to_save", "").replace(".base_layer", "")
                self.replaced[plain] = info, value
                continue
            if len(info.shape) != 2 or not info.dtype.is_floating_point:
                raise CheckpointError(
                    f"adapter {folder}: {key} has shape {list(info.shape)} and dtype {info.dtype}, "
                    "expected a matrix of a floating-point dtype"
                )
            parts = factors.setdefault(match["module"], {})
            parts[match["part"]] = numbers(value).astype(np.float32)
        patterns = []
        for key in ("rank_pattern", "alpha_pattern"):
            patterns += self.settings.get(key) or ()
        # checked before any pattern is used, because a malicious pattern may never finish matching
        why = pattern_problem(patterns, factors)
        if why:
            raise CheckpointError(f"adapter {folder}: {why}")
        for module, parts in factors.items():
            self.pairs[module] = self._pair(module, parts)

    def _pair(self, module: str, parts: dict[str, Array]) -> Pair:
        kinds = sorted(parts)
        if kinds not in _PAIRS:
            raise CheckpointError(
                f"adapter {self.folder}: {module} has the factors {', '.join(kinds)}, expected an "
                "A and a B"
            )
        down = parts[kinds[0]]
        up = parts[kinds[1]]
        rank, scale = scale_of(self.settings, module)
        if {up.shape[1], down.shape[0]} != {rank}:
            raise CheckpointError(
                f"adapter {self.folder}: {module} has A of shape {list(down.shape)} and B of shape "
                f"{list(up.shape)}, expected rank {rank}, as in {CONFIG}"
            )
        return Pair(down, up, scale, kinds == _PAIRS[1])


class AdapterSource(View):
    """The base class of models with an adapter that is merged into their weights on reading.

    Args:
        base: The model without the adapter.
        folder: The adapter's folder.

    Raises:
        CheckpointError: A file of the adapter is missing.
    """

    def __init__(self, base: Source, folder: Path):
        _check_files(folder)
        super().__init__(base, dict(base.tensors))
        self.label = f"{base.label}+{folder}"
        self.config = dict(base.config)
        self._adapter_folder = folder
        self._replaced: dict[str, Array] = {}

    @cached_property
    def changed(self) -> list[str]:
        """The names of the tensors that differ from the model's."""
        raise NotImplementedError

    def _replace(self, name: str, shape: tuple[int, ...], dtype: DType, value: Array) -> None:
        """Replace a tensor of the model with a tensor of the adapter."""
        expected = self._expected_shape(name)
        if shape != expected:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: {name} has shape {list(shape)}, expected "
                f"{list(expected)}, as in {self.model.label}"
            )
        self._replaced[name] = value.reshape(-1)
        self.tensors[name] = TensorInfo(name, shape, dtype)

    def _expected_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that an adapter replaces.

        A whole head in the adapter of a tied model is a new tensor, which unties the model.
        """
        if name in self.model.tensors:
            return self.model.tensors[name].shape
        if name == _HEAD:
            for other, info in self.model.tensors.items():
                if other.endswith(_EMBEDDINGS):
                    self.config["tie_word_embeddings"] = False
                    return info.shape
        raise CheckpointError(
            f"adapter {self._adapter_folder}: {name} is not a tensor of {self.model.label}"
        )

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from element ``start`` on into ``out``, as the model does.

        Return False, without reading, if the adapter changes the tensor.
        """
        return name not in self.changed and super().read_into(name, start, out)

    def fingerprint(self) -> object:
        """Return the fingerprints of the model and of the adapter's two files."""
        files = [stat_of(self._adapter_folder / name) for name in (CONFIG, WEIGHTS)]
        return [super().fingerprint(), *files]


class OtherNamesError(CheckpointError):
    """The error for an adapter that changes a weight whose name the model does not have.

    Args:
        message: The message.
        tensor: The name of the weight.
    """

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


class LoraSource(AdapterSource):
    """A model with a plain LoRA adapter, merged into its weights on reading.

    W + s B A is computed only for the elements that are read, so no merged copy is in memory.

    Raises:
        OtherNamesError: The model lacks a weight that the adapter changes.
    """

    def __init__(self, base: Source, folder: Path):
        super().__init__(base, folder)
        self.adapter = adapter = Adapter(folder)
        self._pairs: dict[str, Pair] = {}
        for module, pair in adapter.pairs.items():
            self._pairs[f"{module}.weight"] = self._turned(f"{module}.weight", pair)
        for name, (info, value) in adapter.replaced.items():
            self._replace(name, info.shape, info.dtype, value)

    @cached_property
    def changed(self) -> list[str]:
        """The names of the tensors that differ from the model's."""
        return [*self._pairs, *self._replaced]

    def pair(self, name: str) -> Pair | None:
        """Return the factors of a stored weight's change, or None if the weight is unchanged."""
        return self._pairs.get(name)

    def _turned(self, name: str, pair: Pair) -> Pair:
        """Transpose a pair if needed, so that its product has the shape of the stored weight."""
        if name not in self.model.tensors:
            raise OtherNamesError(
                f"adapter {self._adapter_folder}: {name} is not a tensor of {self.model.label}",
                name,
            )
        shape = self.model.tensors[name].shape
        down = pair.down
        up = pair.up
        if pair.embedding or self._is_transposed(name, (up.shape[0], down.shape[1])):
            # (B A)ᵀ = Aᵀ Bᵀ; made contiguous once, because each read multiplies rows of the factors
            up, down = np.ascontiguousarray(down.T), np.ascontiguousarray(up.T)
        if (up.shape[0], down.shape[1]) != shape:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: {name} has shape {list(shape)}, which does not "
                f"match A of shape {list(pair.down.shape)} and B of shape {list(pair.up.shape)}"
            )
        return Pair(down, up, pair.scale)

    def _is_transposed(self, name: str, product: tuple[int, int]) -> bool:
        """Return whether a weight is stored as (in, out).

        The shape shows this, unless the weight is square. The layout of a square weight depends on
        the layer's name in models with Conv1D layers, and on the adapter's ``fan_in_fan_out`` in
        all other models. That flag is used last, because peft sets it to the value of the last
        adapted layer.
        """
        if product[0] != product[1]:
            return self.model.tensors[name].shape == product[::-1]
        flag = bool(self.adapter.settings.get("fan_in_fan_out"))
        return stores_transposed(self.config, name.removesuffix(".weight"), flag)

    @property
    def without_adapters(self) -> Source:
        """The model without this adapter, and without the adapters of the wrapped model."""
        if isinstance(self.model, LoraSource):
            return self.model.without_adapters
        return self.model

    def adapts(self, name: str) -> bool:
        """Return whether a weight is changed by this adapter, or by one of the wrapped model."""
        if name in self._pairs:
            return True
        return isinstance(self.model, LoraSource) and self.model.adapts(name)

    def lost_to_rounding(self, names: Sequence[str]) -> float:
        """Estimate the fraction of the change that rounding to the model's dtype loses.

        Let D be the change of the named weights by adapters, and C the change of the rounded
        weights. The fraction is 1 - <C, D> / |D|², computed from a part of some of the weights.
        """
        stored = self.without_adapters
        kept = 0.0
        total = 0.0
        # at random, because every n-th name could be of the same kind of layer, and the first rows
        # of a weight may have no change
        rng = random.Random(0)
        for name in rng.sample(names, min(_SAMPLED, len(names))):
            info = stored.tensors[name]
            count = min(info.count, _SAMPLE)
            start = rng.randint(0, info.count - count)
            before = numbers(stored.read(name, start, start + count)).astype(np.float32)
            merged = self.read(name, start, start + count)
            change = merged - before
            with np.errstate(over="ignore", invalid="ignore"):  # the merge itself rejects infinity
                rounded = numbers(stored_as(merged, info.dtype)) - before
            weight = info.count / count
            kept += weight * float(np.vdot(rounded, change))
            total += weight * float(np.vdot(change, change))
        return 1 - kept / total if total else 0.0

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of the merged weight.

        They are in float32 if the adapter adds a change to the weight, otherwise as stored.
        """
        if name in self._replaced:
            stored = self._replaced[name][start:stop]
        else:
            stored = self.model.read(name, start, stop)
        if name not in self._pairs or start == stop:
            return stored
        pair = self._pairs[name]
        columns = pair.down.shape[1]
        # the rows that the range covers; it may begin and end inside a row
        first = start // columns
        last = -(-stop // columns)
        rows = (pair.up[first:last] @ pair.down).reshape(-1)
        change = rows[start - first * columns : stop - first * columns]
        return numbers(stored) + change * np.float32(pair.scale)
