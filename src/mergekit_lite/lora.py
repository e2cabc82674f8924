"""LoraSource: a model with a peft LoRA adapter folded in while it is read."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import CheckpointError, FolderSource, Source, TensorInfo, read_header, read_json

_LORA_KEY = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$"
)


_FILES = ("adapter_config.json", "adapter_model.safetensors")
_RESIDUAL = ("pissa", "olora", "corda", "loftq")  # initialisations that subtract the adapter from the base
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # their linear layers store (in, out)


class LoraSource:
    """A model with a peft LoRA adapter folded in, stretch by stretch: W + s B A, with no merged copy anywhere."""

    def __init__(self, base: Source, adapter: Path):
        self.label, self.folder = f"{base.label}+{adapter}", base.folder
        self._base, self._adapter_folder = base, adapter
        for needed in _FILES:
            if not (adapter / needed).is_file():
                raise CheckpointError(f"adapter {adapter}: has no {needed}")
        settings = read_json(adapter / "adapter_config.json")
        if settings.get("peft_type", "LORA") != "LORA" or settings.get("use_dora") or settings.get("lora_bias"):
            raise CheckpointError(
                f"adapter {adapter}: only plain LoRA adapters can be folded in (no DoRA, no lora_bias)"
            )
        if str(settings.get("init_lora_weights", "")).lower().startswith(_RESIDUAL):
            raise CheckpointError(
                f"adapter {adapter}: was initialised by {settings['init_lora_weights']}, which also changed the base "
                "weights; save it with path_initial_model_for_weight_conversion, then fold it in"
            )
        if missing := {"r", "lora_alpha"} - settings.keys():
            raise CheckpointError(f"adapter {adapter}: its config has no {' and no '.join(sorted(missing))}")
        self.config = dict(base.config)
        stored = FolderSource(adapter, str(adapter), read_header(adapter / "adapter_model.safetensors"))
        self._pairs: dict[str, tuple[Tensor, Tensor, float]] = {}
        self._replaced: dict[str, Tensor] = {}
        # peft's flag is that of the last layer it saw, so the architecture's own word comes first.
        self._transposed = bool(settings.get("fan_in_fan_out")) or base.config.get("model_type") in _CONV1D
        found: dict[str, dict[str, Tensor]] = {}
        for key, info in stored.tensors.items():
            value = stored.read(key, 0, info.count).view(info.shape)
            if match := _LORA_KEY.match(key):
                found.setdefault(match["module"], {})[match["part"]] = value.float()
            else:  # modules_to_save, biases that were trained, embeddings saved beside their adapters
                plain = key.removeprefix("base_model.model.")
                self._replaced[plain.replace(".modules_to_save", "").replace(".base_layer", "")] = value
        for module, parts in found.items():
            self._add_pair(f"{module}.weight", parts, settings)
        for name, value in self._replaced.items():
            if name not in base.tensors:
                raise CheckpointError(f"adapter {adapter}: {name} is not a tensor of {base.label}")
            if tuple(value.shape) != base.tensors[name].shape:
                raise CheckpointError(
                    f"adapter {adapter}: {name} has shape {list(value.shape)}, the model's is "
                    f"{list(base.tensors[name].shape)}"
                )
        self.tensors = {
            name: TensorInfo(name, info.shape, self._dtype(name, info.dtype)) for name, info in base.tensors.items()
        }

    def _dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        return self._replaced[name].dtype if name in self._replaced else stored

    def _add_pair(self, name: str, parts: dict[str, Tensor], settings: dict[str, Any]) -> None:
        kinds = sorted(parts)
        if kinds not in (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"]):
            raise CheckpointError(f"adapter {self._adapter_folder}: {name} has {kinds}, needed an A and a B")
        down, up = parts[kinds[0]], parts[kinds[1]]
        if name not in self._base.tensors:
            raise CheckpointError(f"adapter {self._adapter_folder}: {name} is not a tensor of {self._base.label}")
        shape = self._base.tensors[name].shape
        turned = kinds[0] == "lora_embedding_A" or self._is_transposed(name, (up.shape[0], down.shape[1]))
        if turned:  # the stored weight is (in, out): rows of it come from A's transpose
            up, down = down.mT.contiguous(), up.mT.contiguous()
        if up.dim() != 2 or down.dim() != 2 or (up.shape[0], down.shape[1]) != shape or up.shape[1] != down.shape[0]:
            raise CheckpointError(
                f"adapter {self._adapter_folder}: {name} of shape {list(shape)} does not fit "
                f"A {list(parts[kinds[0]].shape)} and B {list(parts[kinds[1]].shape)}"
            )
        module = name.removesuffix(".weight")
        rank = self._pattern(settings, "rank_pattern", module, settings["r"])
        alpha = self._pattern(settings, "alpha_pattern", module, settings["lora_alpha"])
        if up.shape[1] != rank:
            raise CheckpointError(f"adapter {self._adapter_folder}: {name} has rank {up.shape[1]}, its config {rank}")
        self._pairs[name] = (up, down, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))

    def _is_transposed(self, name: str, product: tuple[int, int]) -> bool:
        """Whether the stored weight is (in, out): its shape says so; a square one goes by peft's fan_in_fan_out."""
        shape = self._base.tensors[name].shape
        return self._transposed if product[0] == product[1] else shape == product[::-1]

    @staticmethod
    def _pattern(settings: dict[str, Any], key: str, module: str, default: float) -> float:
        for pattern, value in (settings.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of the folded weight: float32 where an adapter changes it, as stored elsewhere."""
        replaced = self._replaced.get(name)
        stored = self._base.read(name, start, stop) if replaced is None else replaced.reshape(-1)[start:stop]
        if name not in self._pairs or start == stop:
            return stored
        up, down, scale = self._pairs[name]
        columns = down.shape[1]
        first, last = start // columns, -(-stop // columns)
        change = (up[first:last] @ down).reshape(-1)[start - first * columns : stop - first * columns]
        return torch.add(stored.to(torch.promote_types(stored.dtype, torch.float32)), change, alpha=scale)

    def prefetch(self, name: str) -> None:
        """The base's; the adapter is in memory."""
        self._base.prefetch(name)

    def fingerprint(self) -> Any:
        """The base's, and those of the adapter's two files."""
        files = [(self._adapter_folder / name).stat() for name in _FILES]
        return [self._base.fingerprint(), *([file.st_size, file.st_mtime_ns] for file in files)]
