"""Find the config that makes a smaller model a stock model of its family."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

_UNSET = ("n_inner",)  # None means a multiple of the width

Shapes = Mapping[str, torch.Size]


def stock_config(
    cls: type[PreTrainedModel], before: PretrainedConfig, wanted: Shapes, sizes: Mapping[int, int]
) -> PretrainedConfig:
    """Return a copy of a config with which a class builds parameters of these shapes.

    The fields to change are found by trying the fields that hold an old size, and n_inner.

    Args:
        cls: The model's class.
        before: The model's config.
        wanted: Shapes of all parameters, by name.
        sizes: The new size or count for each old one.

    Raises:
        ValueError: No field of the config, or no set of fields, gives these shapes.
    """
    places = list(_places(before, sizes))
    # fewest fields first, so that a field that only happens to have the same value stays as it is
    for count in range(1, len(places) + 1):
        for chosen in itertools.combinations(places, count):
            config = copy.deepcopy(before)
            for path, name, new in chosen:
                holder: object = config
                for step in path:
                    holder = getattr(holder, step)
                setattr(holder, name, new)
            try:
                shapes = parameter_shapes(empty(cls, config))
            except Exception:  # families raise different errors if fields do not fit together
                continue
            if shapes == wanted:
                return config
    fields = ", ".join(name for _, name, _ in places) or "none"
    shapes = parameter_shapes(empty(cls, before))
    name = f"{len(wanted)} parameters"
    shape: Sequence[int] = ()
    for wanted_name, wanted_shape in wanted.items():
        if shapes.get(wanted_name) != wanted_shape:
            name, shape = wanted_name, wanted_shape
            break
    raise ValueError(
        f"prune_: no field of {type(before).__name__} gives {name} the shape {list(shape)} (fields "
        f"of that size: {fields}); expected a family whose config has such a field; neurons can "
        "also go with allocate='influence'"
    )


def _places(
    config: PretrainedConfig, sizes: Mapping[int, int], path: tuple[str, ...] = ()
) -> Iterator[tuple]:
    """Yield the fields of a config, and of configs within it, that hold one of the sizes.

    Each field is (path, name, new value).
    """
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        # models of images and text keep the language model's settings in a config of its own
        if isinstance(inner, PretrainedConfig):
            yield from _places(inner, sizes, (*path, name))
        elif name in _UNSET and value is None:
            yield path, name, next(iter(sizes.values()))
        elif isinstance(value, int) and not isinstance(value, bool) and value in sizes:
            yield path, name, sizes[value]


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return all shapes by name; tied parameters are listed under each of their names."""
    return {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}


def empty(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return cls._from_config(config)


Changes = list[tuple[nn.Module, str, object]]  # module, name of its attribute, value


def set_attributes_(changes: Changes) -> Changes:
    """Apply changes, and return the changes that undo them."""
    before = [(module, name, vars(module).get(name)) for module, name, _ in changes]
    for module, name, value in changes:
        vars(module)[name] = value
    return before


def empty_modules(
    model: PreTrainedModel, config: PretrainedConfig
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the modules, by name, of two empty models: one of the old config, one of the new."""
    # a copy, because building a model may write into its config
    old = empty(type(model), copy.deepcopy(model.config))
    new = empty(type(model), config)
    return dict(old.named_modules()), dict(new.named_modules())


def attribute_changes(model: PreTrainedModel, config: PretrainedConfig) -> Changes:
    """Return the attributes to set on a model's modules so that they match this config.

    These are the config itself, and plain attributes (sizes, counts) that differ between a model of
    the old config and one of the new config. Attributes that a user has set stay.
    """
    # attributes that differ between the empty models depend on the config
    old, new = empty_modules(model, config)
    changes: Changes = []
    for name, module in model.named_modules():
        # a module that a user has added is in neither
        if name not in new or name not in old:
            continue
        before = vars(old[name])
        for key, value in vars(new[name]).items():
            differs = isinstance(value, (int, float, str, tuple)) and before.get(key) != value
            if isinstance(value, PretrainedConfig) or (differs and key != "training"):
                changes.append((module, key, value))
    return changes
