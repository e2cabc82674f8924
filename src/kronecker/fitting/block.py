"""One block: the inputs of its layers in the smaller model, and their target outputs.

The blocks run on two sets of hidden states, from the original model and from the smaller model. A
layer's target is its output in the original model. An MLP's target also includes the error that the
residual stream has accumulated so far, if the stream can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import Tensor, nn

from model_components._walk import Batch, Call, Stop, outputs_of, tokens

from ..discovery.finding import blocks_of, submodules
from ..discovery.mlps import Mlp, watched
from ..layers.experts import is_experts
from ..layers.weights import dense
from ..moments import Moments
from .calls import WholeModel, calls_of
from .mlp import Middle, Seen, middle_of
from .precision import as_float32, has_half, in_float32
from .stream import stream_kind


class Block:
    """One block of the model, and the layers in it that are fitted.

    Args:
        model: The whole model.
        name: The name of the block in the model; empty if the whole model is one block.
        mlps: The MLPs in the block.
        singles: The names of layers that are fitted one by one: linear layers and stacks of
            experts.
        calls: The block's recorded calls, one for each batch.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        mlps: Sequence[Mlp],
        singles: Sequence[str],
        calls: Sequence[Call],
    ):
        self.model = model
        self.name = name
        self.mlps = mlps
        self.singles = singles
        self.calls = calls
        self.module = model.get_submodule(name)
        # where the residual stream that each MLP adds to can be read: a result of `stream_kind`
        self.kinds: dict[str, str | None] = {}
        # the last layers of MLPs, and the singles, in the order they run
        self.ran: list[str] = []
        # outputs of the singles in the original model, one tensor per batch
        self.said: dict[str, list[Tensor]] = {}
        # statistics of each MLP in the original model, if all MLPs are fitted in one pass
        self.seen: dict[str, Seen] = {}
        # the target of each MLP, plus the residual stream if it can be read, one tensor per batch
        self.wanted: dict[str, list[Tensor]] = {}

    @contextmanager
    def computing_in_float32(self) -> Iterator[None]:
        """Compute in float32 within a context, if the block's weights have half precision."""
        if not has_half(self.module):
            yield
            return
        recorded = self.calls
        # cast for one block at a time, since all blocks share the recorded tensors
        self.calls = [call.mapped(as_float32) for call in recorded]
        try:
            with in_float32(self.module):
                yield
        finally:
            self.calls = recorded

    def outputs(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the hidden states after the block, one tensor per batch."""
        with self.computing_in_float32():
            return outputs_of(self.module, self.calls, states)

    def original(self, states: Sequence[Tensor], *, one_pass: bool = False) -> list[Tensor]:
        """Run the unchanged block on the original model's hidden states.

        Return the block's outputs, and store the targets of its layers.

        Args:
            states: Hidden states before the block, one tensor per batch.
            one_pass: Store statistics of the block's MLPs instead of their targets, so that
                `smaller` need not run.
        """
        with self.computing_in_float32():
            return self._original(states, one_pass)

    def _original(self, states: Sequence[Tensor], one_pass: bool) -> list[Tensor]:
        if one_pass:  # the targets then ignore errors of earlier blocks, so no stream is read
            self.kinds = dict.fromkeys((m.down for m in self.mlps), None)
            self.seen = {m.down: self._nothing_seen(m) for m in self.mlps}
        else:
            self.kinds = {m.down: self._kind(m, states[0]) for m in self.mlps}
        outputs: list[Tensor] = []
        self.wanted = {m.down: [] for m in self.mlps}
        self.said = {n: [] for n in self.singles}
        for call, hidden in zip(self.calls, states, strict=True):
            out, seen = self._run(call, hidden, self.singles)
            outputs.append(out)
            for mlp in self.mlps:
                if mlp.down not in seen:
                    raise ValueError(
                        f"kronecker: expected every calibration batch to reach {mlp.down}, but one "
                        "did not"
                    )
                x, h, y = seen[mlp.down]
                if one_pass:
                    self.seen[mlp.down].add(h, y)
                else:
                    # `smaller` subtracts the smaller model's stream, so that the target includes
                    # the error of that stream
                    self.wanted[mlp.down].append(y + self._stream(mlp, x, y, out, call))
            for name in self.singles:
                if name in seen:
                    self.said[name].append(seen[name][2])
        return outputs

    def look_ahead(self, outputs: Sequence[Tensor], later: Sequence[Tensor]) -> None:
        """Add the contribution of the dropped blocks after this block to its MLPs' targets.

        This changes only the targets of MLPs whose output is added to the block's output.

        Args:
            outputs: The original model's hidden states after this block.
            later: The original model's hidden states after the dropped blocks.
        """
        for mlp in self.mlps:
            if self.kinds[mlp.down] != "output":
                continue
            wanted = self.wanted[mlp.down]
            for number, call in enumerate(self.calls):
                added = later[number] - outputs[number]
                wanted[number] = wanted[number] + tokens(added, call.keep)

    def smaller(self, mlp: Mlp, states: Sequence[Tensor], *, keep_inputs: bool) -> Seen:
        """Run the block on the smaller model's hidden states.

        Return the statistics of an MLP's hidden neurons in the smaller model, and of its targets.
        """
        total = self._nothing_seen(mlp)
        with self.computing_in_float32():
            for call, hidden, target in zip(self.calls, states, self.wanted[mlp.down], strict=True):
                out, seen = self._run(call, hidden)
                x, h, y = seen[mlp.down]
                target_of_mlp = target - self._stream(mlp, x, y, out, call)
                total.add(h, target_of_mlp, x if keep_inputs else None)
        return total

    def _nothing_seen(self, mlp: Mlp) -> Seen:
        matrix = dense(self.model.get_submodule(mlp.down))
        return Seen(Moments.zeros(*matrix.shape, device=matrix.device))

    def inputs(self, name: str, states: Sequence[Tensor]) -> list[Tensor]:
        """Return a layer's inputs in the smaller model, one tensor for each batch that reaches it.

        The block runs only up to this layer.
        """
        seen: list[Tensor] = []

        def see(name: str, x: Tensor, y: Tensor) -> None:
            seen.append(x)
            raise Stop

        inputs = []
        with self.computing_in_float32():
            for call, hidden in zip(self.calls, states, strict=True):
                with watched({name: self.model.get_submodule(name)}, see), suppress(Stop):
                    call.run(self.module, hidden)
                inputs += [tokens(x, call.keep) for x in seen]
                seen.clear()
        return inputs

    def routed(self, name: str, states: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens that reach a stack of experts, and their experts, for each call."""
        seen: list[tuple[Tensor, Tensor]] = []
        keep: list[Tensor | None] = [None]

        def see(module: nn.Module, given: tuple, named: dict) -> None:
            # transformers calls a stack with hidden states, the experts' indices and their weights
            hidden, experts = (*given, *named.values())[:2]
            seen.append((tokens(hidden, keep[0]), tokens(experts, keep[0])))

        module = self.model.get_submodule(name)
        with self.computing_in_float32(), module.register_forward_pre_hook(see, with_kwargs=True):
            for call, hidden in zip(self.calls, states, strict=True):
                keep[0] = call.keep
                call.run(self.module, hidden)
        return seen

    def middle(self, mlp: Mlp, states: Tensor, config: object) -> Middle | None:
        """Return the function that the MLP computes between its matrices, or None if unknown."""
        said: dict[str, Tensor] = {}
        read: list[Tensor] = []

        def see(name: str, x: Tensor, y: Tensor) -> None:
            if name == mlp.down:
                read.append(x.reshape(-1, x.shape[-1]))
            else:
                said[name] = y.reshape(-1, y.shape[-1])

        layers = submodules(self.model, (*mlp.ups, mlp.down))
        with self.computing_in_float32(), self._full_precision():
            with watched(layers, see):
                self.calls[0].run(self.module, self._in_own_dtype(states))
            return middle_of(
                mlp, config, list(self.module.modules()), [said[n] for n in mlp.ups], read[-1]
            )

    def _run(
        self, call: Call, hidden: Tensor, singles: Sequence[str] = ()
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor, Tensor]]]:
        """Run the block; return its output, and three tensors for each MLP and single layer.

        The keys are the names of the MLPs' last layers and of the single layers. The tensors are
        the input, the last layer's input and the output; for a single layer, the first two are the
        same.
        """
        inputs: dict[str, Tensor] = {}
        seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        # the first up layer is enough, since gate and up read the same input
        first = {m.ups[0]: m.down for m in self.mlps}

        def see(name: str, x: Tensor, y: Tensor) -> None:
            if name in first:
                inputs[first[name]] = tokens(x, call.keep)
                return
            # a layer that runs several times is fitted to its first run
            if name in seen and name in singles:
                return
            if name not in self.ran:
                self.ran.append(name)
            flat = tokens(x, call.keep)
            seen[name] = inputs.get(name, flat), flat, tokens(y, call.keep)

        names = list(singles)
        for mlp in self.mlps:
            names += [mlp.ups[0], mlp.down]
        with watched(submodules(self.model, names), see):
            out = call.run(self.module, hidden)
        return out, seen

    def _kind(self, mlp: Mlp, states: Tensor) -> str | None:
        up = self.model.get_submodule(mlp.ups[0])
        down = self.model.get_submodule(mlp.down)
        # with two MLPs, or an MLP and experts, their contributions cannot be separated
        singles = submodules(self.model, self.singles).values()
        if len(self.mlps) > 1 or any(map(is_experts, singles)):
            return None
        with self._full_precision():
            own = self._in_own_dtype(states)
            return stream_kind(self.module, up, down, self.calls[0], own)

    def _full_precision(self) -> AbstractContextManager[object]:
        """Return a context manager that turns autocast off, for comparisons of values."""
        return torch.autocast(next(self.module.parameters()).device.type, enabled=False)

    def _in_own_dtype(self, states: Tensor) -> Tensor:
        """Cast hidden states back to the block's dtype, in case autocast has changed theirs."""
        return states.to(next(self.module.parameters()).dtype)

    def _stream(self, mlp: Mlp, x: Tensor, y: Tensor, out: Tensor, call: Call) -> Tensor:
        """Return the residual stream that an MLP adds to, or zeros if it cannot be read."""
        kind = self.kinds[mlp.down]
        if kind == "output":
            # pre-norm: the block's output is the stream plus y
            return tokens(out, call.keep) - y
        if kind == "read":
            return x
        return torch.zeros_like(y)


def blocks_with(
    model: nn.Module,
    mlps: Sequence[Mlp],
    singles: Sequence[str],
    data: Sequence[Batch],
) -> tuple[list[Block], list[Tensor]]:
    """Return the model's blocks in order, and the hidden states before the first block.

    If the input of a block is not the output of the block before it, the whole model is one block.
    There is one tensor of hidden states per batch.
    """
    names = [*(m.down for m in mlps), *singles]
    blocks = blocks_of(model, names)
    recorded = None
    if blocks[0][0]:
        recorded = calls_of(model, [b for _, b, _ in blocks], data)
    if recorded is None:  # not a chain of blocks
        blocks = [("", model, names)]
        recorded = [[WholeModel.of(b) for b in data]], [torch.empty(0)] * len(data)
    calls_by_block, states = recorded
    result = []
    for (block_name, _, layer_names), calls in zip(blocks, calls_by_block, strict=True):
        block_mlps = [m for m in mlps if m.down in layer_names]
        block_singles = [n for n in singles if n in layer_names]
        result.append(Block(model, block_name, block_mlps, block_singles, calls))
    # in float32, in which the blocks compute
    return result, as_float32(states)
