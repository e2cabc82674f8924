"""The base class of this library's models, which load completely or raise an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ._folders import run_hint
from ._formats import reading
from ._hub import find_folder, is_path

_MOST_LAYERS = 10_000
"""Far more layers than any model has; with a mistyped number, loading would take forever."""


def read_config(place: str | Path, operation: str, **options: Any) -> PreTrainedConfig:
    """Read the config of a transformers model.

    Args:
        place: Folder or hub id.
        operation: The name that error messages begin with.
        **options: Arguments of `transformers.AutoConfig.from_pretrained`.

    Raises:
        ValueError: There is no config, it cannot be read, or a number in it is out of range.
    """
    with reading(f"config.json of {place}", operation):
        file = Path(place, "config.json")
        if not file.is_file() and (hint := run_hint(place)):
            raise ValueError(f"{operation}: expected config.json in {place}, got none{hint}")
        # a hub id has no local file; transformers downloads the config below
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for name, value in dict(values).items():
            # other names with "layer" hold other numbers, such as vocab_size_per_layer_input
            is_count = name.endswith(("layers", "n_layer"))
            if is_count and isinstance(value, int) and value > _MOST_LAYERS:
                raise ValueError(
                    f"{operation}: expected {name} up to {_MOST_LAYERS:,} in {file}, got {value}"
                )
            if "head" in name and isinstance(value, int) and value < 0:
                raise ValueError(
                    f"{operation}: expected {name} of 0 or more in {file}, got {value}"
                )
        return AutoConfig.from_pretrained(place, **options)


class CompleteModel(PreTrainedModel):
    """The base class of models whose files must hold all of their weights.

    transformers itself fills missing weights with random numbers and only prints a table.
    """

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model as transformers does, and raise an error if it is incomplete or damaged.

        Args:
            pretrained_model_name_or_path: Folder or hub id.
            *args: As in `transformers.PreTrainedModel.from_pretrained`.
            output_loading_info: Return a tuple of the model and transformers' loading report.
            **kwargs: As in `transformers.PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: There is no such folder, or it cannot be read. Tensors are missing, unknown
                or not finite, or have another shape or an integer dtype.
        """
        place = pretrained_model_name_or_path
        # if the path does not exist, transformers would look for it on the hub
        if place is not None and is_path(str(place)):
            place = find_folder(place, operation="from_pretrained")
        if place is not None and "config" not in kwargs and Path(place).is_dir():
            _check_kind(cls, Path(place, kwargs.get("subfolder", "")))
        excused = kwargs.pop("ignore_mismatched_sizes", False)
        # True, because transformers' own error does not name the tensors
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        with reading(place, "from_pretrained"):
            loaded: Any = super().from_pretrained(place, *args, **kwargs)
        model, info = loaded
        mismatched = () if excused else info["mismatched_keys"]
        integers = _stored_as_integers(model, place, kwargs.get("subfolder", ""))
        _check_loaded(model, {**info, "mismatched_keys": mismatched}, integers, place)
        return (model, info) if output_loading_info else model


def _check_kind(cls: Any, folder: Path) -> None:
    """Check that a folder's config has the model type of a class.

    For another type, transformers would use the defaults of the class.
    """
    expected = cls.config_class.model_type
    file = folder / "config.json"
    found = None
    if file.is_file():
        with reading(file, "from_pretrained"):
            found = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    if found != expected:
        what = f"model_type {found!r}" if file.is_file() else "no config.json"
        raise ValueError(
            f"from_pretrained: expected model_type {expected!r} in {file}, got {what}"
            f"{run_hint(file.parent)}"
        )


def _stored_as_integers(model: PreTrainedModel, place: object, subfolder: str) -> list[str]:
    """Return the names of tensors that are integers in a folder and floats in the model.

    transformers would convert them without an error.
    """
    state = model.state_dict()
    found = []
    if not isinstance(place, (str, Path)):
        return found
    for path in Path(place, subfolder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                stored = file.get_slice(name).get_dtype()
                # the header names integer dtypes I8 to I64 and U8 to U64, so no tensor is read
                if stored[0] in "IU" and name in state and state[name].is_floating_point():
                    found.append(name)
    return found


def _check_loaded(
    model: PreTrainedModel, info: Mapping[str, Any], integers: list[str], place: object
) -> None:
    """Check that the files had exactly a model's tensors, all of them finite and not integers."""
    damaged = [
        name
        for name, tensor in model.state_dict().items()
        # tensors that a device map leaves on the disk are on the meta device here, without values
        if tensor.is_floating_point() and tensor.device.type != "meta" and not _is_finite(tensor)
    ]
    for problem, names in (
        ("lacks", info["missing_keys"]),
        ("has other shapes of", info["mismatched_keys"]),
        ("has unknown", info["unexpected_keys"]),
        ("has NaN or infinity in", damaged),
        ("has integers in", integers),
    ):
        if names:
            shown = ", ".join(sorted(map(str, names))[:3])
            raise ValueError(
                f"from_pretrained: expected the tensors of {type(model).__name__} in {place}, but "
                f"it {problem} {shown} ({len(names)} in all)"
            )


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
