"""The base class of model configs with checked fields, which transformers saves and loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from ._checks import check_config, declared_fields, refuse_unknown
from ._formats import check_format, stamp

FORMAT = 1
_OF_TRANSFORMERS = re.compile(
    r".*_token_id|(attn|experts)_implementation|quantization_config|auto_map|tokenizer_class"
    r"|use_cache|tie_word_embeddings|is_decoder|torchscript|torch_dtype|task_specific_params"
)


class CheckedModelConfig(PreTrainedConfig):
    """The base class of model configs: subclasses declare fields, which are checked on creation.

    transformers makes each subclass a dataclass.
    """

    def __post_init__(self, **rest: Any) -> None:
        """Derive missing fields, check all fields, and pass the other values to transformers."""
        # derive fields first, because the check covers derived fields as well
        self.derive()
        check_config(self, CheckedModelConfig)
        refuse_unknown(type(self).__name__, _unknown(type(self), rest), _fields(type(self)))
        super().__post_init__(**rest)

    def derive(self) -> None:
        """Set fields that follow from other fields; subclasses may override this method."""

    def problems(self) -> Iterable[str]:
        """Return messages about valid fields that conflict; subclasses may override this method."""
        return ()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, object], **kwargs: object) -> Any:
        """Make a config from saved fields, and ignore unknown ones.

        Trainers and other programs may have added unknown fields to the file.

        Raises:
            ValueError: The config has a newer format, lacks a field, or has an invalid value.
        """
        check_format(config_dict, FORMAT, cls.__name__)
        lost = [name for name in _fields(cls) if name not in config_dict]
        if lost and "format_version" in config_dict:  # a saved config has every field
            raise ValueError(f"{cls.__name__}: the saved config lacks the fields {', '.join(lost)}")
        unknown = _unknown(cls, config_dict)
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        return super().from_dict(known, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the version of the format as JSON values."""
        return super().to_dict() | stamp(FORMAT)

    @classmethod
    def default_config_fields(cls) -> dict[str, Any]:
        """Return an empty mapping, so that transformers saves even fields with default values.

        transformers would leave out fields that equal the defaults, and defaults may change later.
        """
        return {}


def _fields(cls: type) -> list[str]:
    """Return the names of the fields that a config adds to transformers' own."""
    return list(declared_fields(cls, CheckedModelConfig))


def _unknown(cls: type, names: Iterable[str]) -> list[str]:
    """Return the names that are fields of neither a config class nor transformers' own configs.

    transformers accepts some names that are not attributes of its base class.
    """
    known = {*_fields(cls), *vars(PreTrainedConfig())}
    return [
        name
        for name in names
        if name not in known
        and not hasattr(PreTrainedConfig, name)
        # private fields of transformers, such as _name_or_path
        and not name.startswith("_")
        and not _OF_TRANSFORMERS.fullmatch(name)
    ]
