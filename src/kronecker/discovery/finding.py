"""Find the layers that can be compressed, and the blocks in which they run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from model_components._layers import is_conv1d

from ..config import Config
from ..layers.embedding import LowRankEmbedding
from ..layers.experts import is_experts
from ..layers.linear import SmallerLinear
from ..layers.weights import is_linear
from .mlps import Mlp, find_mlps, names_of

COMPRESSED = (SmallerLinear, LowRankEmbedding)


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is a plain `nn.Embedding`, without scaled rows or ``max_norm``."""
    return type(module).forward is nn.Embedding.forward and module.max_norm is None


def convertible(module: nn.Module) -> bool:
    """Return whether `convert_` can make a module smaller."""
    return is_linear(module) or is_embedding(module)


def _refuse_special(name: str, module: nn.Module) -> None:
    """Raise a ValueError for experts, or for a linear layer or embedding that is not plain."""
    if is_experts(module):
        raise ValueError(
            f"convert_: {name} is a stack of experts, expected linear layers and embeddings; to "
            "make experts smaller, call prune_"
        )
    if isinstance(module, (nn.Linear, nn.Embedding)) and not convertible(module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ValueError(
            f"convert_: expected {name} to be a plain linear layer or embedding, got a {kind} that "
            "is quantized, has max_norm or overrides forward"
        )


def mlps_if_any(model: nn.Module, batch: Mapping[str, object] | None = None) -> list[Mlp]:
    """Return the MLPs that `find_mlps` finds, or an empty list if the model cannot be run."""
    try:
        return find_mlps(model, batch)
    except ValueError:
        return []


def resolve(
    model: nn.Module,
    config: Config | Mapping[str, Config],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    batch: Mapping[str, object] | None = None,
) -> dict[str, Config]:
    """Return the config of each layer to compress, by name and in the model's order.

    A single config applies to the layers of MLPs or, with a ``filter_fn``, to the layers that this
    function accepts. The last layer of each MLP gets the transposed shapes.
    In a map, the first pattern (`fnmatch`) that matches a layer's name sets its config. ``batch``
    holds arguments to run the model with. It is needed if the model reads neither tokens nor
    images.
    """
    if isinstance(config, Config):
        return _resolve_one(model, config, filter_fn, batch)
    return _resolve_map(model, config, filter_fn)


def _resolve_one(
    model: nn.Module,
    config: Config,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    batch: Mapping[str, object] | None,
) -> dict[str, Config]:
    """Return the config of each layer for `resolve`, given a single config."""
    modules = dict(model.named_modules())
    if filter_fn is None:
        mlps = find_mlps(model, batch)
    else:
        # with a filter, the MLPs only decide which layers get the transposed shapes
        mlps = mlps_if_any(model, batch)
    downs = {mlp.down for mlp in mlps}
    members = names_of(mlps)
    resolved: dict[str, Config] = {}
    for name, module in modules.items():
        if filter_fn is None:
            chosen = name in members
        else:
            chosen = filter_fn(module, name)
        if not chosen:
            continue
        _refuse_special(name, module)
        if convertible(module) or isinstance(module, COMPRESSED):
            resolved[name] = config.opposite() if name in downs else config
    if not resolved:
        # nothing was found; the reason may be a layer that is not plain, so name it in the error
        for name, module in modules.items():
            _refuse_special(name, module)
        near = ", ".join(_convertible_names(modules)[:6]) or "none"
        raise ValueError(
            f"convert_: found nothing to convert in {type(model).__name__}, expected at least one "
            f"layer; layers that can be converted: {near}"
        )
    return resolved


def _resolve_map(
    model: nn.Module,
    config: Mapping[str, Config],
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> dict[str, Config]:
    """Return the config of each layer for `resolve`, given a map from patterns to configs."""
    modules = dict(model.named_modules())
    resolved: dict[str, Config] = {}
    unused = set(config)
    shadowed = set[str]()
    if not unused:
        raise ValueError("convert_: expected configs by pattern, got an empty mapping")
    for name, module in modules.items():
        fitting = [p for p in config if fnmatchcase(name, p)]
        pattern = fitting[0] if fitting else None
        if convertible(module):
            shadowed.update(fitting[1:])
        if pattern is None or (filter_fn is not None and not filter_fn(module, name)):
            continue
        _refuse_special(name, module)
        if convertible(module) or isinstance(module, COMPRESSED):
            unused.discard(pattern)
            resolved[name] = config[pattern]
    if unused & shadowed:
        first = sorted(unused & shadowed)[0]
        raise ValueError(
            f"convert_: the pattern {first!r} matches only layers that an earlier pattern already "
            "matches; put it before that pattern"
        )
    if unused:
        names = _convertible_names(modules)
        raise ValueError(f"convert_: {_no_match(sorted(unused)[0], names)}")
    return resolved


def _convertible_names(modules: Mapping[str, nn.Module]) -> list[str]:
    return [name for name, module in modules.items() if convertible(module)]


def _no_match(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3)
    if near:
        layers = f"similar names: {', '.join(near)}"
    else:
        layers = f"layers that can be converted: {', '.join(names[:4]) or 'none'}"
    return f"the pattern {pattern!r} matches no layer that can be converted; {layers}"


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module, list[str]]]:
    """Return, in order, all blocks in the list of modules that contains these layers.

    Each block is (name, module, names of its layers). If the layers are not within one list of
    modules, the whole model is one block, with an empty name.
    """
    names = list(names)
    # a list within a list holds experts or sublayers of one block
    outermost: list[str] = []
    # named_modules yields a module before its submodules
    for name, module in model.named_modules():
        is_inside = name.startswith(tuple(f"{outer}." for outer in outermost))
        if isinstance(module, nn.ModuleList) and not is_inside:
            outermost.append(name)
    for name in outermost:
        if all(n.startswith(f"{name}.") for n in names):
            blocks = model.get_submodule(name)
            assert isinstance(blocks, nn.ModuleList)
            with_layers = []
            for i, block in enumerate(blocks):
                layers = [n for n in names if n.startswith(f"{name}.{i}.")]
                with_layers.append((f"{name}.{i}", block, layers))
            return with_layers
    return [("", model, names)]


HOOKS = [
    n
    for n in vars(nn.Module())
    if "hook" in n and not n.startswith(("_state_dict", "_load_state_dict"))
]


def num_parameters(model: nn.Module) -> int:
    """Count the parameters of a model, each tied parameter once.

    Args:
        model: A module of any kind.

    Returns:
        The number of parameters, trainable or not.
    """
    return sum(p.numel() for p in model.parameters())


def submodules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return submodules by name."""
    return {name: model.get_submodule(name) for name in names}


def prefixed(name: str, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a submodule's tensors, or their shapes, by their names in the whole model."""
    return {f"{name}.{key}": tensor for key, tensor in tensors}


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule called ``name`` by ``module``, and give ``module`` the old hooks."""
    parent, _, last = name.rpartition(".")
    for hooks in HOOKS:  # the same dictionaries, so that the handles of the hooks still work
        setattr(module, hooks, getattr(model.get_submodule(name), hooks))
    setattr(model.get_submodule(parent), last, module)


def set_parameters_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace parameters, by name, with tensors of any size; frozen parameters stay frozen."""
    for name, tensor in state.items():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        old = model.get_parameter(name)
        # a tensor that was cached on disk is on the CPU
        new = nn.Parameter(tensor.to(old.device).contiguous(), requires_grad=old.requires_grad)
        module.register_parameter(key, new)
        # peft and repr read these attributes instead of the weight's shape
        if key == "weight" and (isinstance(module, nn.Linear) or is_conv1d(module)):
            if is_conv1d(module):
                names = ("nx", "nf")
            else:
                names = ("out_features", "in_features")
            for attribute, size in zip(names, new.shape, strict=True):
                setattr(module, attribute, size)


@contextmanager
def all_or_nothing(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Undo all changes to these submodules if the ``with`` block raises an exception.

    This restores the modules, their parameters and attributes, and ``requires_grad`` of all
    parameters of the model.
    """
    modules = submodules(model, names)
    # copies, since a fit puts new parameters into the modules' own dictionaries
    contents = {name: (dict(m._parameters), dict(vars(m))) for name, m in modules.items()}
    # the original values, which are restored after an error
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        # also after Ctrl-C, which raises a BaseException that is not an Exception
        for name, module in modules.items():
            parameters, attributes = contents[name]
            vars(module).update(attributes)
            module._parameters.update(parameters)
            put(model, name, module)
        for parameter, wanted in trainable:
            parameter.requires_grad_(wanted)
        raise
