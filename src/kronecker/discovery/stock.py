"""Find the config from which a model's own class builds its smaller version."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

# fields of GPT-2 and GPT-Neo that may be None, which means a multiple of the width
_UNSET = ("n_inner", "intermediate_size")

Shapes = Mapping[str, torch.Size]


def as_loaded(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config as it is after saving and loading.

    Loading applies each family's own rules, which set or check fields: for example, the last layer
    of Gemma 4 always has full attention.
    """
    return type(config).from_dict(config.to_dict())


def stock_config(
    cls: type[PreTrainedModel],
    before: PretrainedConfig,
    wanted: Shapes,
    sizes: Mapping[int, int],
    advice: str = "",
) -> PretrainedConfig:
    """Return a copy of a config, changed so that the class builds parameters of given shapes.

    The function tries to change each field that holds an old size, and each field in `_UNSET` that
    is None, alone and in combination.

    Args:
        cls: The model's class.
        before: The model's config.
        wanted: The shapes of all parameters, by name.
        sizes: The new size or count for each old one.
        advice: What to do instead, for the error message.

    Raises:
        ValueError: No field of the config, and no set of fields, gives these shapes.
    """
    places = list(_places(before, sizes))
    # the fewest fields first, so that a field with the same value by chance stays as it is
    for count in range(1, len(places) + 1):
        for chosen in itertools.combinations(places, count):
            config = copy.deepcopy(before)
            for path, name, new in chosen:
                holder: object = config
                for step in path:
                    holder = getattr(holder, step)
                setattr(holder, name, new)
            try:
                shapes = parameter_shapes(empty(cls, as_loaded(config)))
            # if fields do not fit together, the error depends on the model family
            except Exception:
                continue
            if shapes == wanted:
                return config
    fields = ", ".join(name for _, name, _ in places) or "none"
    raise ValueError(
        f"prune_: no field of {type(before).__name__} gives {_differing(cls, before, wanted)} "
        f"(fields that hold the old size: {fields}); expected a model family whose config has such "
        f"a field{advice}"
    )


def _differing(cls: type[PreTrainedModel], config: PretrainedConfig, wanted: Shapes) -> str:
    """Describe the first parameter that does not yet have its new shape, for an error message."""
    try:
        shapes = parameter_shapes(empty(cls, config))
    # a config with shorter lists but the old number of blocks may not build a model
    except Exception:
        shapes = {}
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape:
            return f"{name} the shape {list(shape)}"
    return "all parameters their new shapes"


def _places(
    config: PretrainedConfig, sizes: Mapping[int, int], path: tuple[str, ...] = ()
) -> Iterator[tuple]:
    """Yield the fields of a config, and of configs within it, that hold one of the old sizes.

    Each field is a tuple (path, name, new value).
    """
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        # models of images and text have a nested config for the language model
        if isinstance(inner, PretrainedConfig):
            yield from _places(inner, sizes, (*path, name))
        elif name in _UNSET and value is None:
            yield path, name, next(iter(sizes.values()))
        elif isinstance(value, int) and not isinstance(value, bool) and value in sizes:
            yield path, name, sizes[value]


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of all parameters by name; tied ones are listed under each name."""
    return {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}


def empty(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return cls._from_config(config)


Changes = list[tuple[nn.Module, str, object]]  # a module, the name of an attribute, a value


def set_attributes_(changes: Changes) -> Changes:
    """Set attributes of modules, and return the changes that restore the old values."""
    before = [(module, name, vars(module).get(name)) for module, name, _ in changes]
    for module, name, value in changes:
        vars(module)[name] = value
    return before


def empty_modules(
    model: PreTrainedModel, config: PretrainedConfig
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the modules by name of two empty models, built from the old and the new config."""
    # a copy, because building a model may write into its config
    old = empty(type(model), copy.deepcopy(model.config))
    new = empty(type(model), config)
    return dict(old.named_modules()), dict(new.named_modules())


def attribute_changes(model: PreTrainedModel, config: PretrainedConfig) -> Changes:
    """Return the attributes to set on a model's modules so that they match a new config.

    The changes cover the config itself, and plain attributes (sizes, counts) that differ between a
    model of the old config and a model of the new config. Attributes that a user has set are not
    changed.
    """
    # only attributes that depend on the config differ between the empty models
    old, new = empty_modules(model, config)
    changes: Changes = []
    for name, module in model.named_modules():
        # a module that a user has added is in neither empty model
        if name not in new or name not in old:
            continue
        before = vars(old[name])
        for key, value in vars(new[name]).items():
            differs = isinstance(value, (int, float, str, tuple)) and before.get(key) != value
            if isinstance(value, PretrainedConfig) or (differs and key != "training"):
                changes.append((module, key, value))
    return changes
