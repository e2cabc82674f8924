"""Where layers are: which can be compressed, the MLPs they belong to, and the blocks they run in."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers.pytorch_utils import Conv1D

from .config import KroneckerConfig
from .embedding import KroneckerEmbedding
from .experts import KroneckerExperts, is_experts
from .linear import KroneckerLinear

_MLPS = (  # (layers that read the block's width, the layer that writes it), by name within the module that holds them
    (("c_fc",), "c_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("intermediate.dense",), "output.dense"),
    (("lin1",), "lin2"),
    (("fc1",), "fc2"),
    (("w1", "w3"), "w2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
)
COMPRESSED = (KroneckerLinear, KroneckerEmbedding, KroneckerExperts)


@dataclass(frozen=True)
class Mlp:
    """Layers that share hidden neurons: those that write them and the one that reads them. Names within the model."""

    ups: tuple[str, ...]
    down: str


def is_linear(module: nn.Module) -> bool:
    """Whether it is a plain `nn.Linear` or transformers' `Conv1D`."""
    return type(module).forward is nn.Linear.forward or isinstance(module, Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """Whether it is a plain `nn.Embedding`: one that scales or shifts has a forward of its own."""
    return type(module).forward is nn.Embedding.forward and module.max_norm is None


def convertible(module: nn.Module) -> bool:
    """Whether there is a compressed layer for it."""
    return is_linear(module) or is_embedding(module) or is_experts(module)


def _refuse_own_forward(name: str, module: nn.Module) -> None:
    """A linear layer or embedding that computes in its own way cannot be replaced."""
    if isinstance(module, (nn.Linear, nn.Embedding)) and not convertible(module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ValueError(f"convert_: {name} is a {kind}, quantised or with a forward of its own; needed a plain layer")


def find_mlps(model: nn.Module) -> list[Mlp]:
    """The MLPs of a model, by their layers' names.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> find_mlps(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)))
    [Mlp(ups=('transformer.h.0.mlp.c_fc',), down='transformer.h.0.mlp.c_proj')]
    """
    modules, found, taken = dict(model.named_modules()), [], set()
    for name in modules:
        prefix = f"{name}." if name else ""
        for ups, down in _MLPS:
            names = [prefix + n for n in (*ups, down)]
            held = [modules.get(n) for n in names]
            if not all(m is not None and (is_linear(m) or isinstance(m, KroneckerLinear)) for m in held):
                continue
            if taken.isdisjoint(names):
                taken.update(names)
                found.append(Mlp(tuple(names[:-1]), names[-1]))
    return found


def resolve(
    model: nn.Module,
    config: KroneckerConfig | Mapping[str, KroneckerConfig],
    filter_fn: Callable[[str, nn.Module], bool] | None,
) -> dict[str, KroneckerConfig]:
    """The layers to compress, by name in the model's order, each with its config.

    A single config means the MLPs and experts, with opposite shapes for the layer that writes the block's width; with a
    ``filter_fn``, whatever that accepts. A map gives patterns (`fnmatch`) literal configs, the first that fits.
    """
    modules = dict(model.named_modules())
    mlps = find_mlps(model)
    downs, members = {m.down for m in mlps}, {n for m in mlps for n in (*m.ups, m.down)}
    found: dict[str, KroneckerConfig] = {}
    if isinstance(config, KroneckerConfig):
        for name, module in modules.items():
            wanted = (name in members or is_experts(module)) if filter_fn is None else filter_fn(name, module)
            if wanted:
                _refuse_own_forward(name, module)
            if wanted and (convertible(module) or isinstance(module, COMPRESSED)):
                found[name] = config.opposite() if name in downs else config
        if not found:
            for name, module in modules.items():
                _refuse_own_forward(name, module)
            near = ", ".join([n for n, m in modules.items() if convertible(m)][:6])
            raise ValueError(f"convert_: nothing to convert in {type(model).__name__}; layers that could be: {near}")
        return found
    unused = set(config)
    for name, module in modules.items():
        pattern = next((p for p in config if fnmatchcase(name, p)), None)
        if pattern is None or (filter_fn is not None and not filter_fn(name, module)):
            continue
        _refuse_own_forward(name, module)
        if convertible(module) or isinstance(module, COMPRESSED):
            unused.discard(pattern)
            found[name] = config[pattern]
    if unused:
        names = [n for n, m in modules.items() if convertible(m)]
        raise ValueError(f"convert_: {_no_match(sorted(unused)[0], names)}")
    return found


def _no_match(pattern: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(pattern.replace("*", ""), list(names), n=3, cutoff=0.3)
    return f"{pattern!r} fits no layer that can be converted; near it: {', '.join(near) or 'nothing'}"


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module, list[str]]]:
    """The model's repeated blocks that hold these layers: (name, module, names of layers), in order.

    The whole model is one block where the layers are not within one list of modules.
    """
    names = list(names)
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outermost = [n for n in lists if not any(n.startswith(f"{o}.") for o in lists if o != n)]
    for name in outermost:
        if all(n.startswith(f"{name}.") for n in names):
            blocks = model.get_submodule(name)
            assert isinstance(blocks, nn.ModuleList)
            made = [(f"{name}.{i}", block) for i, block in enumerate(blocks)]
            return [(n, block, [t for t in names if t.startswith(f"{n}.")]) for n, block in made]
    return [("", model, names)]


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set a submodule by its dotted name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
