"""Two copies of the hidden states on their way through the blocks: the original model's and the smaller one's.

Each MLP of the smaller model is fitted on what that model really feeds it, towards what the original said there and
what the residual stream has lost before, where the stream can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..data import Batch
from ..surgery.finding import blocks_of
from ..surgery.mlps import Mlp
from .calls import Call, WholeModel, calls_of, outputs_of, tokens, watched
from .neurons import Middle, Seen, middle_of
from .stream import stream_kind


class Block:
    """One block of the model, its MLPs, and how far the hidden states have come.

    Args:
        module: The block.
        mlps: Those within it.
        experts: Names of stacks of experts within it.
        layers: All modules of the model by name.
        calls: One for each batch.
    """

    def __init__(
        self,
        module: nn.Module,
        mlps: Sequence[Mlp],
        experts: Sequence[str],
        layers: Mapping[str, nn.Module],
        calls: Sequence[Call],
    ):
        self.module, self.mlps, self.experts, self.layers, self.calls = module, mlps, experts, layers, calls
        self.kind: str | None = None  # where the residual stream can be read

    def original(self, states: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Run it as it is on the original's states: its outputs, and what each MLP should give, batch by batch.

        Those wanted outputs hold the stream, too, where it can be read: what an MLP gives is added to it.
        """
        if len(self.mlps) == 1 and not self.experts:
            up, down = (self.layers[n] for n in (self.mlps[0].ups[0], self.mlps[0].down))
            self.kind = stream_kind(self.module, up, down, self.calls[0], states[0])
        outputs: list[Tensor] = []
        wanted: dict[str, list[Tensor]] = {m.down: [] for m in self.mlps}
        for call, hidden in zip(self.calls, states, strict=True):
            out, seen = self._run(call, hidden)
            outputs.append(out)
            for mlp in self.mlps:
                x, _, y = seen[mlp.down]
                wanted[mlp.down].append(y + self._stream(x, y, out, call))
        return outputs, wanted

    def smaller(self, mlp: Mlp, states: Sequence[Tensor], wanted: Sequence[Tensor], keep_inputs: bool) -> Seen:
        """Run it on the smaller model's states: what an MLP sees there, and what it should give."""
        down = self.layers[mlp.down]
        total: Seen | None = None
        for call, hidden, target in zip(self.calls, states, wanted, strict=True):
            out, seen = self._run(call, hidden)
            x, h, y = seen[mlp.down]
            if total is None:
                total = Seen.nothing(y.shape[-1], h.shape[-1], next(down.parameters()).device)
            total.add(h, target - self._stream(x, y, out, call), x if keep_inputs else None)
        assert total is not None
        return total

    def routed(self, name: str, states: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each batch the tokens that a stack of experts gets in the smaller model, and their experts."""
        seen: list[tuple[Tensor, Tensor]] = []

        def see(module: nn.Module, given: tuple, named: dict) -> None:
            tokens, experts = (*given, *named.values())[:2]
            seen.append((tokens, experts))

        handle = self.layers[name].register_forward_pre_hook(see, with_kwargs=True)
        try:
            outputs_of(self.module, self.calls, states)
        finally:
            handle.remove()
        return seen

    def middle(self, mlp: Mlp, states: Tensor, config: object) -> Middle | None:
        """What the MLP does between its matrices."""
        said: dict[str, Tensor] = {}
        read: list[Tensor] = []
        names = {n: self.layers[n] for n in (*mlp.ups, mlp.down)}

        def see(name: str, x: Tensor, y: Tensor) -> None:
            if name == mlp.down:
                read.append(x.reshape(-1, x.shape[-1]))
            else:
                said[name] = y.reshape(-1, y.shape[-1])

        self.calls[0].hidden = states
        with watched(names, see):
            self.calls[0].run(self.module)
        return middle_of(mlp, config, list(self.module.modules()), [said[n] for n in mlp.ups], read[-1])

    def _run(self, call: Call, hidden: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor, Tensor]]]:
        """The block's output; and each MLP's input, hidden neurons and output, tokens that are not padding."""
        inputs: dict[str, Tensor] = {}
        seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        first = {m.ups[0]: m.down for m in self.mlps}

        def see(name: str, x: Tensor, y: Tensor) -> None:
            if name in first:
                inputs[first[name]] = tokens(x, call.keep)
            else:
                seen[name] = inputs[name], tokens(x, call.keep), tokens(y, call.keep)

        call.hidden = hidden
        with watched({n: self.layers[n] for m in self.mlps for n in (m.ups[0], m.down)}, see):
            out = call.run(self.module)
        return out, seen

    def _stream(self, x: Tensor, y: Tensor, out: Tensor, call: Call) -> Tensor:
        """The residual stream that an MLP adds to, or nothing where it cannot be read."""
        if self.kind == "read":
            return x
        return tokens(out, call.keep) - y if self.kind == "output" else torch.zeros_like(y)


def blocks_with(model: nn.Module, mlps: Sequence[Mlp], experts: Sequence[str], data: Sequence[Batch]) -> list[Block]:
    """The model's blocks in order, each with its MLPs; the first one's calls have the hidden states to begin with."""
    blocks = blocks_of(model, [*(m.down for m in mlps), *experts])
    whole = len(blocks) == 1 and blocks[0][0] == ""
    calls = [[WholeModel(b) for b in data]] if whole else calls_of(model, [b for _, b, _ in blocks], data)
    layers = dict(model.named_modules())
    pairs = zip(blocks, calls, strict=True)
    return [
        Block(block, [m for m in mlps if m.down in names], [n for n in experts if n in names], layers, c)
        for (_, block, names), c in pairs
    ]
