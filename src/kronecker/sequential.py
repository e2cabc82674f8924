"""The whole-model fit: block by block, each layer on what the already compressed model really feeds it.

Two copies of the hidden states walk through the blocks: those of the original model and those of the compressed one. In
a block, the hidden neurons of each MLP are sorted by importance first (both its matrices then drop the same neurons,
and nothing else changes); then each layer is started and fitted by `als` on the compressed model's inputs, towards
what the original layer said at the original inputs. The layer that writes into the residual stream also makes up for
what the stream has lost before it, where the stream can be read. Biases take care of means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .config import KroneckerConfig
from .init import Moments
from .linear import KroneckerLinear, dense
from .sites import Mlp, blocks_of, find_mlps, put

Batch = Mapping[str, Any]


def batches(calibration: Iterable[Any]) -> list[dict[str, Any]]:
    """Calibration data as keyword arguments of the model: from dicts, or from tensors of token ids."""
    made = []
    for item in calibration:
        batch = {"input_ids": item} if isinstance(item, Tensor) else dict(item)
        batch = {k: v for k, v in batch.items() if k not in ("labels", "label")}
        for name, value in batch.items():
            if isinstance(value, Tensor) and name in ("input_ids", "attention_mask") and value.dim() == 1:
                batch[name] = value[None]
        made.append(batch)
    if not made:
        raise ValueError("convert_: calibration is empty, needed batches of token ids")
    return made


@dataclass
class _Call:
    """One batch on its way through the blocks."""

    hidden: Tensor
    rest: tuple[tuple, dict[str, Any]]  # the block's other arguments
    keep: Tensor | None  # which tokens are not padding, flat

    def run(self, block: nn.Module) -> Tensor:
        arguments, named = self.rest
        out = block(self.hidden, *arguments, **named)
        return out[0] if isinstance(out, tuple) else out


class _Stop(Exception):
    pass


def _calls(model: nn.Module, blocks: Sequence[nn.Module], data: Sequence[Batch]) -> list[list[_Call]]:
    """For each block the arguments it gets in the original model; hidden states only for the first."""
    held: list[list[_Call]] = [[] for _ in blocks]

    def hook(index: int, keep: Tensor | None) -> Callable:
        def capture(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            named = dict(named)
            if arguments:
                hidden, rest = arguments[0], arguments[1:]
            else:
                hidden, rest = named.pop("hidden_states"), ()
            for name in ("past_key_values", "past_key_value", "use_cache"):
                if name in named:
                    named[name] = None if name != "use_cache" else False
            held[index].append(_Call(hidden if index == 0 else hidden.new_empty(0), (rest, named), keep))

        return capture

    for batch in data:
        mask = batch.get("attention_mask")
        keep = None if mask is None or mask.dim() != 2 else mask.reshape(-1).bool()
        handles = [b.register_forward_pre_hook(hook(i, keep), with_kwargs=True) for i, b in enumerate(blocks)]
        try:
            model(**batch)
        finally:
            for handle in handles:
                handle.remove()
    return held


@contextmanager
def _watched(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``see(name, input, output)`` whenever one of the modules runs."""
    handles = [
        m.register_forward_hook(lambda module, given, out, name=name: see(name, given[0], out))
        for name, m in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tokens(x: Tensor, keep: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if keep is None or len(keep) != len(flat) else flat[keep]


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x[:, order]


def permuted(linear: nn.Module, order: Tensor, *, rows: bool) -> nn.Module:
    """A copy of a linear layer with its outputs (and bias) or its inputs in another order."""
    weight = dense(linear)
    bias = getattr(linear, "bias", None)
    weight = weight[order] if rows else weight[:, order]
    o, i = weight.shape
    if isinstance(linear, Conv1D):
        made: nn.Module = Conv1D(1, 1)
        made.nf, made.nx = o, i  # pyrefly: ignore
        weight = weight.T
    else:
        made = nn.Linear(i, o, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach()[order] if rows else bias.detach().clone())
    return made.train(linear.training)


def importance(weight: Tensor, hidden: Moments) -> Tensor:
    """What an MLP loses with each hidden neuron, when the others make up for it as well as they can.

    ‖w_j‖² / (C⁻¹)_jj: the columns of the weight (H, I) that reads the neurons, and the covariance C of the neurons
    (optimal brain surgeon; Hassibi and Stork 1993).
    """
    seen = hidden.centred()
    return weight.double().cpu().square().sum(0) / torch.linalg.inv(seen.damped() / max(1, hidden.count)).diagonal()


def neuron_order(importance: Tensor, group: int) -> Tensor:
    """An order of hidden neurons in which each group of ``group`` begins with one of the most important.

    >>> neuron_order(torch.tensor([1.0, 4.0, 3.0, 2.0]), 2)
    tensor([1, 3, 2, 0])
    """
    return importance.argsort(descending=True, stable=True).view(group, -1).T.reshape(-1)


def _fitted_together(mlps: Sequence[Mlp], names: Sequence[str]) -> list[list[str]]:
    """The layers of a block in steps: those of a step read the same input."""
    steps: list[list[str]] = []
    owner = {n: m.ups for m in mlps for n in m.ups}
    for name in names:
        if steps and name in owner and steps[-1][0] in owner[name]:
            steps[-1].append(name)
        else:
            steps.append([name])
    return steps


def group_of(mlp: Mlp, configs: Mapping[str, KroneckerConfig], modules: Mapping[str, nn.Module]) -> int:
    """How many hidden neurons share a row of A, in both of an MLP's matrices; 1 where they do not agree."""
    sizes = set()
    for name in (*mlp.ups, mlp.down):
        if name not in configs:
            return 1  # its neurons could be permuted too, but nothing would be gained
        rows, columns = dense(modules[name]).shape
        b = configs[name].shapes(rows, columns)[1]
        sizes.add(b[1] if name == mlp.down else b[0])
    return sizes.pop() if len(sizes) == 1 else 1


class Fit:
    """A walk through a model's blocks with calibration data.

    Args:
        model: In evaluation mode.
        blocks: As `blocks_of` gives.
        data: Batches, as `batches` gives.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module, list[str]]], data: Sequence[Batch]):
        self.model, self.blocks = model, blocks
        whole = len(blocks) == 1 and blocks[0][0] == ""
        self.calls = [[_Whole(b) for b in data]] if whole else _calls(model, [b for _, b, _ in blocks], data)
        self.theirs = [c.hidden for c in self.calls[0]]  # the original model's hidden states
        self.mlps = find_mlps(model)

    def step(self, index: int, configs: Mapping[str, KroneckerConfig], residual: bool) -> _Block:
        """The fit of one block's layers."""
        _, block, names = self.blocks[index]
        names = [n for n in names if n in configs]
        return _Block(self.model, block, names, configs, [m for m in self.mlps if m.down in names], residual)

    def advance(self, index: int) -> None:
        """Carry the original's hidden states through a block, before that is changed."""
        self.theirs = _outputs(self.blocks[index][1], self.calls[index], self.theirs)


@torch.no_grad()
def fit_(
    model: nn.Module,
    configs: Mapping[str, KroneckerConfig],
    data: Sequence[Batch],
    *,
    keep_originals: bool = False,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Compress these linear layers in place, in the model's order; returns each one's relative output error.

    Args:
        model: In evaluation mode; its layers are replaced.
        configs: By layer name. ``init`` is ``"sequential"``, or ``"als"`` for layers that are each fitted alone, on the
            original model's inputs.
        data: Batches, as `batches` gives.
        keep_originals: Keep each original beside its factors, for `FadeIn`.
        cache: A folder that keeps every fitted block; an interrupted run that is started again goes on from there.
        progress: Called with the name of every layer that is done.
    """
    found: dict[str, float] = {}
    walk = Fit(model, blocks_of(model, configs), data)
    ours = list(walk.theirs)
    key = _key(model, configs, data) if cache is not None else ""
    for index, (name, block, _) in enumerate(walk.blocks):
        step, calls = walk.step(index, configs, residual=True), walk.calls[index]
        stored = None if cache is None or keep_originals else cache / f"{name or 'model'}.safetensors"
        if stored is not None and _matches(stored, key):
            walk.advance(index)
            step.load(stored)
        else:
            walk.theirs = step.fit(calls, walk.theirs, ours, progress, keep_originals)
            if stored is not None:
                step.store(stored, key)
        found |= step.errors
        ours = _outputs(block, calls, ours)
    return found


def _outputs(block: nn.Module, calls: Sequence[_Call], hidden: Sequence[Tensor]) -> list[Tensor]:
    made = []
    for call, states in zip(calls, hidden, strict=True):
        call.hidden = states
        made.append(call.run(block))
    return made


class _Whole(_Call):
    """A whole model as one block."""

    def __init__(self, batch: Batch):
        mask = batch.get("attention_mask")
        self.batch, self.hidden = batch, torch.empty(0)
        self.keep = None if mask is None or mask.dim() != 2 else mask.reshape(-1).bool()

    def run(self, block: nn.Module) -> Tensor:
        block(**self.batch)
        return self.hidden


class _Block:
    """The fit of one block's layers."""

    def __init__(
        self,
        model: nn.Module,
        block: nn.Module,
        names: Sequence[str],
        configs: Mapping[str, KroneckerConfig],
        mlps: Sequence[Mlp],
        residual: bool,
    ):
        self.model, self.block, self.names, self.configs, self.mlps = model, block, names, configs, mlps
        self.modules: dict[str, nn.Module] = {n: model.get_submodule(n) for n in names}
        self.residual = residual and len(mlps) == 1
        self.errors: dict[str, float] = {}
        self.energies: dict[str, float] = {}  # Σ |y|² of the wanted outputs

    def fit(
        self,
        calls: Sequence[_Call],
        theirs: Sequence[Tensor],
        ours: Sequence[Tensor],
        progress: Callable[[str], None] | None = None,
        keep_originals: bool = False,
    ) -> list[Tensor]:
        """Fit the block's layers; returns the original's outputs."""
        said: dict[str, list[Tensor]] = {n: [] for n in self.names}
        given: dict[str, list[Tensor]] = {n: [] for n in self.names}
        hidden = {m.down: Moments.zeros(1, dense(self.modules[m.down]).shape[1]) for m in self.mlps}
        wanted = {n for n in self.names if self.configs[n].init == "als"}
        kind = self._residual_kind(calls[0], theirs[0]) if self.residual and not wanted else None
        if kind == "read":
            wanted = {self.mlps[0].ups[0]}
        keep: list[Tensor | None] = [None]

        def original(name: str, x: Tensor, y: Tensor) -> None:
            said[name].append(_tokens(y, keep[0]))
            if name in wanted:
                given[name].append(_tokens(x, keep[0]))
            if name in hidden:
                tokens = _tokens(x, keep[0])
                hidden[name].add(tokens, tokens[:, :1])

        outputs = []
        with _watched(self.modules, original):
            for call, states in zip(calls, theirs, strict=True):
                call.hidden, keep[0] = states, call.keep
                outputs.append(call.run(self.block))
        streams = self._streams(kind, calls, outputs, said, given)
        orders = self._sort(hidden)
        for step in _fitted_together(self.mlps, self.names):
            moments = {n: Moments.zeros(*dense(self.modules[n]).shape) for n in step}
            if self.configs[step[0]].init == "als":
                for name in step:
                    rows, columns = orders.get(name, (None, None))
                    for x, y in zip(given[name], said[name], strict=True):
                        moments[name].add(_ordered(x, columns), _ordered(y, rows))
            else:
                if streams and step == [self.mlps[0].down]:
                    now = self._current_streams(kind, calls, ours)
                    said[step[0]] = [y + a - b for y, a, b in zip(said[step[0]], streams, now, strict=True)]
                self._collect(step, moments, calls, ours, said, orders)
            for name in step:
                made = KroneckerLinear.from_linear(self.modules[name], self.configs[name], moments[name])
                seen = moments[name].centred() if made.bias is not None else moments[name]
                self.errors[name], self.energies[name] = seen.error(made.dense_weight()), float(seen.energy)
                if keep_originals:
                    made.fade_in_(self.modules[name])
                put(self.model, name, made)
                said[name] = given[name] = []
                if progress:
                    progress(name)
        return outputs

    def _collect(
        self,
        step: Sequence[str],
        moments: Mapping[str, Moments],
        calls: Sequence[_Call],
        ours: Sequence[Tensor],
        said: Mapping[str, list[Tensor]],
        orders: Mapping[str, tuple[Tensor | None, Tensor | None]],
    ) -> None:
        """What the compressed model feeds these layers, and what the original ones said in the original model."""
        for name, x, index in self._inputs(step, calls, ours):
            moments[name].add(x, _ordered(said[name][index], orders.get(name, (None, None))[0]))

    def _inputs(
        self, names: Sequence[str], calls: Sequence[_Call], hidden: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor, int]]:
        """(layer, its input's tokens, batch) as the block stands; it runs no further than it must."""
        seen: list[tuple[str, Tensor]] = []

        def see(name: str, x: Tensor, y: Tensor) -> None:
            seen.append((name, x))
            if name == names[-1]:
                raise _Stop

        for index, (call, states) in enumerate(zip(calls, hidden, strict=True)):
            call.hidden = states
            with _watched({n: self.model.get_submodule(n) for n in names}, see), suppress(_Stop):
                call.run(self.block)
            for name, x in seen:
                yield name, _tokens(x, call.keep), index
            seen.clear()

    def _residual_kind(self, call: _Call, states: Tensor) -> str | None:
        """Where the stream that the MLP adds to can be read.

        ``"output"``: the block's output is that stream plus what the MLP says (pre-norm). ``"read"``: the stream is
        what the MLP reads, and a norm takes the sum of both (post-norm). None: neither, or the model is one block.
        """
        if isinstance(call, _Whole):
            return None
        mlp, call.hidden = self.mlps[0], states
        down, up = self.modules[mlp.down], self.modules[mlp.ups[0]]
        plain = call.run(self.block)
        handle = down.register_forward_hook(lambda module, given, out: out + 1)
        moved = call.run(self.block)
        handle.remove()
        if plain.shape == moved.shape and torch.allclose(moved - plain, torch.ones_like(plain), atol=1e-3):
            return "output"
        seen: dict[str, Tensor] = {}
        found = [False]

        def norm(module: nn.Module, given: tuple) -> None:
            both = seen.get("read"), seen.get("said")
            if given and both[0] is not None and both[1] is not None and both[0].shape == both[1].shape:
                found[0] |= given[0].shape == both[0].shape and torch.allclose(given[0], both[0] + both[1], atol=1e-5)

        handles = [
            up.register_forward_hook(lambda m, given, out: seen.update(read=given[0])),
            down.register_forward_hook(lambda m, given, out: seen.update(said=out)),
            *(m.register_forward_pre_hook(norm) for m in self.block.modules() if "Norm" in type(m).__name__),
        ]
        call.run(self.block)
        for handle in handles:
            handle.remove()
        return "read" if found[0] else None

    def _streams(
        self,
        kind: str | None,
        calls: Sequence[_Call],
        outputs: Sequence[Tensor],
        said: Mapping[str, list[Tensor]],
        given: Mapping[str, list[Tensor]],
    ) -> list[Tensor]:
        """The original's stream that the MLP adds to, by batch; nothing where it cannot be read."""
        if kind is None:
            return []
        mlp = self.mlps[0]
        if kind == "read":
            return given[mlp.ups[0]]
        return [_tokens(o, c.keep) - y for o, c, y in zip(outputs, calls, said[mlp.down], strict=True)]

    def _current_streams(self, kind: str | None, calls: Sequence[_Call], ours: Sequence[Tensor]) -> list[Tensor]:
        """The compressed model's stream that the MLP adds to, by batch."""
        mlp = self.mlps[0]
        if kind == "read":
            return [x for _, x, _ in self._inputs([mlp.ups[0]], calls, ours)]
        made: list[Tensor] = []
        with _watched({mlp.down: self.model.get_submodule(mlp.down)}, lambda name, x, y: made.append(y)):
            outputs = _outputs(self.block, calls, ours)
        return [_tokens(o - y.view_as(o), c.keep) for o, y, c in zip(outputs, made, calls, strict=True)]

    def _sort(self, hidden: Mapping[str, Moments]) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Permute the hidden neurons of each MLP; returns the order of rows and of columns by layer."""
        orders: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        for mlp in self.mlps:
            group = group_of(mlp, self.configs, self.modules)
            if group == 1:
                continue
            order = neuron_order(importance(dense(self.modules[mlp.down]), hidden[mlp.down]), group)
            for name in (*mlp.ups, mlp.down):
                rows = name != mlp.down
                self.modules[name] = permuted(self.modules[name], order, rows=rows)
                orders[name] = (order, None) if rows else (None, order)
                put(self.model, name, self.modules[name])
        return orders

    def store(self, path: Path, key: str) -> None:
        """Keep the fitted layers, under their final name only when whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{n}.{k}": t.contiguous() for n in self.names for k, t in self.model.get_submodule(n).state_dict().items()
        }
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata={"key": key, "errors": json.dumps(self.errors)})
        part.replace(path)

    def load(self, path: Path) -> None:
        """Take the layers that `store` kept."""
        tensors = load_file(path)
        for name in self.names:
            made = KroneckerLinear.like(self.modules[name], self.configs[name])
            made.load_state_dict(
                {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
            )
            put(self.model, name, made)
        self.errors = json.loads(_metadata(path)["errors"])


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as handle:
        return handle.metadata()


def _matches(path: Path, key: str) -> bool:
    return path.exists() and _metadata(path).get("key") == key


def _key(model: nn.Module, configs: Mapping[str, KroneckerConfig], data: Sequence[Batch]) -> str:
    """What a fitted block depends on: the weights, the configs and the data."""
    digest = hashlib.sha256(json.dumps({n: c.to_dict() for n, c in configs.items()}).encode())
    for tensor in (*model.state_dict().values(), *(v for b in data for v in b.values() if isinstance(v, Tensor))):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
