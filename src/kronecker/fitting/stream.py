"""The residual stream that a block's MLP adds to: where it can be read, and what it is."""

from __future__ import annotations

from torch import Tensor, nn

from .calls import Call, WholeModel

_NEAR = 0.02  # of the size: far above any dtype's rounding, far below another architecture's difference


def stream_kind(block: nn.Module, up: nn.Module, down: nn.Module, call: Call, states: Tensor) -> str | None:
    """Where the stream can be read, found out by running the block.

    ``"output"``: the block's output is the stream plus what the MLP says (pre-norm). ``"read"``: the stream is what the
    MLP reads, and a norm takes the sum of both (post-norm). None: neither, or the whole model is one block.

    Args:
        block: The block.
        up: A layer that reads the MLP's input.
        down: The layer that writes its output.
        call: One batch.
        states: Its hidden states.
    """
    if isinstance(call, WholeModel):
        return None
    call.hidden = states
    plain = call.run(block).float()
    step = float(plain.square().mean().sqrt()) or 1.0
    handle = down.register_forward_hook(lambda module, given, out: out + step)
    try:
        moved = call.run(block).float()
    finally:
        handle.remove()
    if plain.shape == moved.shape and float((moved - plain - step).abs().mean()) < _NEAR * step:
        return "output"
    seen: dict[str, Tensor] = {}
    found = [False]

    def norm(module: nn.Module, given: tuple) -> None:
        both = seen.get("read"), seen.get("said")
        if given and all(isinstance(t, Tensor) and t.shape == given[0].shape for t in both):
            apart = given[0].float() - sum(t.float() for t in both if t is not None)
            found[0] |= bool(apart.abs().mean() < _NEAR * given[0].float().abs().mean())

    handles = [
        up.register_forward_hook(lambda m, given, out: seen.update(read=given[0])),
        down.register_forward_hook(lambda m, given, out: seen.update(said=out)),
        *(m.register_forward_pre_hook(norm) for m in block.modules() if "Norm" in type(m).__name__),
    ]
    try:
        call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    return "read" if found[0] else None
