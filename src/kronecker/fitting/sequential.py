"""The whole-model fit: block by block, each layer on what the already compressed model really feeds it.

Two copies of the hidden states walk through the blocks: those of the original model and those of the compressed one. In
a block, the hidden neurons of each MLP are sorted by importance first (both its matrices then drop the same neurons,
and nothing else changes); then each layer is started and fitted by `als` on the compressed model's inputs, towards
what the original layer said at the original inputs. The layer that writes into the residual stream also makes up for
what the stream has lost before it, where the stream can be read. Biases take care of means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import KroneckerConfig
from ..data import Batch
from ..init import Moments
from ..layers.linear import KroneckerLinear, dense
from ..surgery.finding import blocks_of, mlps_if_any, put
from ..surgery.mlps import Mlp
from .cache import FitCache
from .calls import Call, Stop, WholeModel, calls_of, ordered, outputs_of, tokens, watched
from .sorting import group_of, importance, neuron_order, permuted
from .stream import stream_kind, stream_of


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
        self.calls = [[WholeModel(b) for b in data]] if whole else calls_of(model, [b for _, b, _ in blocks], data)
        self.theirs = [c.hidden for c in self.calls[0]]  # the original model's hidden states
        self.mlps = mlps_if_any(model, data[0])

    def step(self, index: int, configs: Mapping[str, KroneckerConfig], residual: bool) -> BlockFit:
        """The fit of one block's layers."""
        _, block, names = self.blocks[index]
        names = [n for n in names if n in configs]
        return BlockFit(self.model, block, names, configs, [m for m in self.mlps if m.down in names], residual)

    def advance(self, index: int) -> None:
        """Carry the original's hidden states through a block, before that is changed."""
        self.theirs = outputs_of(self.blocks[index][1], self.calls[index], self.theirs)


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
    settings = {n: c.to_dict() for n, c in configs.items()}
    fitted = FitCache(None if keep_originals else cache, model, settings, data, "convert_")
    for index, (name, block, _) in enumerate(walk.blocks):
        step, calls = walk.step(index, configs, residual=True), walk.calls[index]
        if (stored := fitted.load(name)) is not None:
            walk.advance(index)
            step.take(*stored)
            if progress is not None:
                for done in step.names:
                    progress(done)
        else:
            walk.theirs = step.fit(calls, walk.theirs, ours, progress, keep_originals)
            fitted.store(name, step.state(), step.errors)
        found |= step.errors
        ours = outputs_of(block, calls, ours)
    return found


class BlockFit:
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
        calls: Sequence[Call],
        theirs: Sequence[Tensor],
        ours: Sequence[Tensor],
        progress: Callable[[str], None] | None = None,
        keep_originals: bool = False,
    ) -> list[Tensor]:
        """Fit the block's layers; returns the original's outputs."""
        said: dict[str, list[Tensor]] = {n: [] for n in self.names}
        given: dict[str, list[Tensor]] = {n: [] for n in self.names}
        hidden = {m.down: Moments.zeros(1, dense(self.modules[m.down]).shape[1]) for m in self.mlps}
        alone = {n for n in self.names if self.configs[n].init == "als"}
        kind = stream_kind(self.block, *self._ends(), calls[0], theirs[0]) if self.residual and not alone else None
        keep: list[Tensor | None] = [None]
        ran: list[str] = []

        def original(name: str, x: Tensor, y: Tensor) -> None:
            if name not in ran:
                ran.append(name)
            said[name].append(tokens(y, keep[0]))
            if name in alone:
                given[name].append(tokens(x, keep[0]))
            if name in hidden:
                seen = tokens(x, keep[0])
                hidden[name].add(seen, seen[:, :1])

        outputs = []
        with watched(self.modules, original):
            for call, states in zip(calls, theirs, strict=True):
                call.hidden, keep[0] = states, call.keep
                outputs.append(call.run(self.block))
        if silent := [n for n in self.names if n not in ran]:
            raise ValueError(f"convert_: {silent[0]} saw no calibration token, needed data that it runs on")
        self.names = ran  # in the order they run, not that of their definition
        streams = [] if kind is None else stream_of(kind, self.block, *self._ends(), calls, theirs)
        orders = self._sort(hidden)
        for step in _fitted_together(self.mlps, self.names):
            moments = {n: Moments.zeros(*dense(self.modules[n]).shape) for n in step}
            if self.configs[step[0]].init == "als":
                for name in step:
                    rows, columns = orders.get(name, (None, None))
                    for x, y in zip(given[name], said[name], strict=True):
                        moments[name].add(ordered(x, columns), ordered(y, rows))
            else:
                if kind is not None and step == [self.mlps[0].down]:
                    now = stream_of(kind, self.block, *self._ends(), calls, ours)
                    said[step[0]] = [y + (a - b) for y, a, b in zip(said[step[0]], streams, now, strict=True)]
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

    def _ends(self) -> tuple[nn.Module, nn.Module]:
        """The layers that read and write the stream, as they are now."""
        mlp = self.mlps[0]
        return self.model.get_submodule(mlp.ups[0]), self.model.get_submodule(mlp.down)

    def _collect(
        self,
        step: Sequence[str],
        moments: Mapping[str, Moments],
        calls: Sequence[Call],
        ours: Sequence[Tensor],
        said: Mapping[str, list[Tensor]],
        orders: Mapping[str, tuple[Tensor | None, Tensor | None]],
    ) -> None:
        """What the compressed model feeds these layers, and what the original ones said in the original model."""
        for name, x, index in self._inputs(step, calls, ours):
            moments[name].add(x, ordered(said[name][index], orders.get(name, (None, None))[0]))

    def _inputs(
        self, names: Sequence[str], calls: Sequence[Call], hidden: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor, int]]:
        """(layer, its input's tokens, batch) as the block stands; it runs no further than it must."""
        seen: list[tuple[str, Tensor]] = []

        def see(name: str, x: Tensor, y: Tensor) -> None:
            seen.append((name, x))
            if name == names[-1]:
                raise Stop

        for index, (call, states) in enumerate(zip(calls, hidden, strict=True)):
            call.hidden = states
            with watched({n: self.model.get_submodule(n) for n in names}, see), suppress(Stop):
                call.run(self.block)
            for name, x in seen:
                yield name, tokens(x, call.keep), index
            seen.clear()

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

    def state(self) -> dict[str, Tensor]:
        """The fitted layers' tensors."""
        return {f"{n}.{k}": t for n in self.names for k, t in self.model.get_submodule(n).state_dict().items()}

    def take(self, tensors: Mapping[str, Tensor], errors: Mapping[str, float]) -> None:
        """The layers that `state` gave, in place of a fit."""
        for name in self.names:
            layer = KroneckerLinear.like(self.modules[name], self.configs[name])
            layer.load_state_dict(
                {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
            )
            put(self.model, name, layer)
        self.errors = dict(errors)
