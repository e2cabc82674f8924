"""LoraSource: a model with a peft LoRA adapter folded in while it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model_components._patterns import pattern_problem

from ..dtypes import Array, numbers
from .headers import CheckpointError, Json, TensorInfo, read_header, read_json
from .sources import FolderSource, Source, View, stat_of

_LORA_KEY = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+?)"
    r"\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$"
)
_PAIRS = (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"])
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# initialisations that subtract the adapter from the base
_RESIDUAL = ("pissa", "olora", "corda", "loftq")
# settings of LoRA by which a change is more than a product, or less
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
_MOST = 1_000_000  # rank or alpha: far above every adapter, so more is a damaged file
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_CONV1D_LAYERS = re.compile(r"(^|\.)(c_attn|q_attn|c_proj|c_fc)$")


def is_plain(adapter: Path) -> bool:
    """Return whether an adapter is a plain LoRA: each change is a product of two matrices."""
    if not (adapter / CONFIG).is_file():
        return True  # reading it as such tells what is missing
    settings = read_json(adapter / CONFIG)
    if settings.get("peft_type", "LORA") != "LORA":
        return False
    return not any(settings.get(name) for name in _NO_PRODUCT)


def refuse_residual(adapter: Path, settings: Mapping[str, object]) -> None:
    """Refuse an adapter whose base is not the model that it was made from, but what it left."""
    if str(settings.get("init_lora_weights", "")).lower().startswith(_RESIDUAL):
        raise CheckpointError(
            f"adapter {adapter}: was initialised by {settings['init_lora_weights']}, which also "
            "changed the base weights; save it with path_initial_model_for_weight_conversion, "
            "then fold it in"
        )


def read_adapter_config(adapter: Path) -> Json:
    """The settings of a plain LoRA adapter.

    Raises:
        CheckpointError: A file is missing, or the adapter is of a kind that a sum W + s B A does
            not describe.
    """
    for needed in (CONFIG, WEIGHTS):
        if not (adapter / needed).is_file():
            raise CheckpointError(f"adapter {adapter}: has no {needed}")
    settings = read_json(adapter / CONFIG)
    if not is_plain(adapter):
        raise CheckpointError(
            f"adapter {adapter}: expected a plain LoRA, got one whose changes are more than "
            "products of two matrices"
        )
    refuse_residual(adapter, settings)
    if missing := {"r", "lora_alpha"} - settings.keys():
        raise CheckpointError(
            f"adapter {adapter}: its config has no {' and no '.join(sorted(missing))}"
        )
    for key in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(settings.get(key, False), bool):
            raise CheckpointError(
                f"adapter {adapter}: its {key} is {settings[key]!r}, expected true or false"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(key) or {}, Mapping):
            raise CheckpointError(
                f"adapter {adapter}: its {key} is {settings[key]!r}, expected numbers by module "
                "name"
            )
    values = [settings["r"], settings["lora_alpha"]]
    values += [
        v for key in ("rank_pattern", "alpha_pattern") for v in (settings.get(key) or {}).values()
    ]
    for value in values:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not abs(value) <= _MOST
        ):
            raise CheckpointError(
                f"adapter {adapter}: its config has {value!r} as a rank or alpha, expected a "
                f"number up to {_MOST:,}"
            )
    return settings


def stores_transposed(config: Mapping[str, object], module: str, otherwise: bool = False) -> bool:
    """Return whether a layer's weight is (in, out).

    A Conv1D of GPT-2's family is, whose heads are ordinary layers.

    Args:
        config: The model's.
        module: The layer's name.
        otherwise: What to say of layers of other families.
    """
    if config.get("model_type") not in _CONV1D_MODELS:
        return otherwise
    return bool(_CONV1D_LAYERS.search(module))


def _pattern(settings: Json, key: str, module: str, default: float) -> float:
    for pattern, value in (settings.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def scale_of(settings: Json, module: str) -> tuple[int, float]:
    """Rank of a module's pair by an adapter's config, and the factor s of its product B A."""
    rank = _pattern(settings, "rank_pattern", module, settings["r"])
    alpha = _pattern(settings, "alpha_pattern", module, settings["lora_alpha"])
    if rank < 1:
        raise CheckpointError(f"adapter: its config gives {module} rank {rank}, expected 1 or more")
    return int(rank), alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


@dataclass(frozen=True)
class Pair:
    """The two factors of one module's change, s B A.

    Args:
        down: A, (r, in_features).
        up: B, (out_features, r).
        scale: s.
        embedding: Of a token embedding, whose weight is (tokens, features) and takes the transpose
            of the change.
    """

    down: Array
    up: Array
    scale: float
    embedding: bool = False


class Adapter:
    """A peft LoRA adapter, read whole.

    Its settings, every module's factors, and the tensors that it replaces.

    Raises:
        CheckpointError: Not a plain LoRA adapter, or its files are unsound.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = read_adapter_config(folder)
        self.pairs: dict[str, Pair] = {}
        self.replaced: dict[str, tuple[TensorInfo, Array]] = {}
        stored = FolderSource(folder, str(folder), read_header(folder / WEIGHTS))
        self.tensors = stored.tensors
        factors: dict[str, dict[str, Array]] = {}
        for key, info in stored.tensors.items():
            value = stored.read(key, 0, info.count).reshape(info.shape)
            if match := _LORA_KEY.match(key):
                if len(info.shape) != 2 or not info.dtype.is_floating_point:
                    raise CheckpointError(
                        f"adapter {folder}: {key} is {info.dtype} {list(info.shape)}, not a matrix"
                    )
                factors.setdefault(match["module"], {})[match["part"]] = numbers(value).astype(
                    np.float32
                )
            else:
                # modules_to_save, biases that were trained, embeddings saved beside their adapters
                plain = (
                    key.removeprefix(PREFIX)
                    .replace(".modules_to_save", "")
                    .replace(".base_layer", "")
                )
                self.replaced[plain] = info, value
        patterns = [
            p for key in ("rank_pattern", "alpha_pattern") for p in self.settings.get(key) or ()
        ]
        if why := pattern_problem(patterns, factors):
            raise CheckpointError(f"adapter {folder}: {why}")
        if not stored.tensors:
            raise CheckpointError(f"adapter {folder}: {WEIGHTS} has no tensors")
        for module, parts in factors.items():
            self.pairs[module] = self._pair(module, parts)

    def _pair(self, module: str, parts: dict[str, Array]) -> Pair:
        kinds = sorted(parts)
        if kinds not in _PAIRS:
            raise CheckpointError(
                f"adapter {self.folder}: {module} has {kinds}, expected an A and a B"
            )
        down = parts[kinds[0]]
        up = parts[kinds[1]]
        rank, scale = scale_of(self.settings, module)
        if {up.shape[1], down.shape[0]} != {rank}:
            raise CheckpointError(
                f"adapter {self.folder}: {module} has A {list(down.shape)} and B {list(up.shape)}, "
                f"expected rank {rank}"
            )
        return Pair(down, up, scale, kinds == _PAIRS[1])


class LoraSource(View):
    """A model with a peft LoRA adapter folded in, stretch by stretch.

    W + s B A, with no merged copy anywhere.
    """

    def __init__(self, base: Source, folder: Path):
        super().__init__(base, dict(base.tensors))
        self.label = f"{base.label}+{folder}"
        self._adapter_folder = folder
        self.config = dict(base.config)
        self.adapter = adapter = Adapter(folder)
        self._pairs = {
            f"{module}.weight": self._turned(f"{module}.weight", p)
            for module, p in adapter.pairs.items()
        }
        self._replaced: dict[str, Array] = {}
        for name, (info, value) in adapter.replaced.items():
            if name not in base.tensors:
                raise CheckpointError(f"adapter {folder}: {name} is not a tensor of {base.label}")
            if info.shape != base.tensors[name].shape:
                raise CheckpointError(
                    f"adapter {folder}: {name} has shape {list(info.shape)}, the model's is "
                    f"{list(base.tensors[name].shape)}"
                )
            self._replaced[name], self.tensors[name] = (
                value,
                TensorInfo(name, info.shape, info.dtype),
            )

    @property
    def changed(self) -> list[str]:
        """The tensors that are not as the base's."""
        return [*self._pairs, *self._replaced]

    def pair(self, name: str) -> Pair | None:
        """The factors of a tensor's change, which has the shape of the stored weight."""
        return self._pairs.get(name)

    def _turned(self, name: str, pair: Pair) -> Pair:
        """A pair whose product has the shape of the stored weight, which may be (in, out)."""
        if name not in self.model.tensors:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: {name} is not a tensor of {self.model.label}"
            )
        shape = self.model.tensors[name].shape
        down = pair.down
        up = pair.up
        if pair.embedding or self._is_transposed(name, (up.shape[0], down.shape[1])):
            up, down = np.ascontiguousarray(down.T), np.ascontiguousarray(up.T)
        if (up.shape[0], down.shape[1]) != shape:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: {name} of shape {list(shape)} does not fit "
                f"A {list(pair.down.shape)} and B {list(pair.up.shape)}"
            )
        return Pair(down, up, pair.scale)

    def _is_transposed(self, name: str, product: tuple[int, int]) -> bool:
        """Return whether the stored weight is (in, out).

        Its shape says so, and of a square one its family, else peft's flag.

        The flag comes last because it is that of the last layer that peft saw.
        """
        if product[0] != product[1]:
            return self.model.tensors[name].shape == product[::-1]
        flag = bool(self.adapter.settings.get("fan_in_fan_out"))
        return stores_transposed(self.config, name.removesuffix(".weight"), flag)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements of the folded weight.

        They are float32 where an adapter changes it, as stored elsewhere.
        """
        replaced = self._replaced.get(name)
        if replaced is None:
            stored = self.model.read(name, start, stop)
        else:
            stored = replaced.reshape(-1)[start:stop]
        if name not in self._pairs or start == stop:
            return stored
        pair = self._pairs[name]
        columns = pair.down.shape[1]
        first = start // columns
        last = -(-stop // columns)
        change = (pair.up[first:last] @ pair.down).reshape(-1)[
            start - first * columns : stop - first * columns
        ]
        return numbers(stored) + change * np.float32(pair.scale)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read as the base does, where the adapter changes nothing."""
        if name in self._pairs or name in self._replaced:
            return False
        return super().read_into(name, start, out)

    def fingerprint(self) -> object:
        """The base's, and those of the adapter's two files."""
        return [
            super().fingerprint(),
            *(stat_of(self._adapter_folder / name) for name in (CONFIG, WEIGHTS)),
        ]
