"""The residual stream that a block's MLP adds to: where it can be read, and what it is."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor, nn

from model_components._walk import Call

from .calls import WholeModel

# of the size: far above any dtype's rounding, far below another architecture's difference
_NEAR = 0.02


def stream_kind(
    block: nn.Module, up: nn.Module, down: nn.Module, call: Call, states: Tensor
) -> str | None:
    """Return where the stream that an MLP adds to can be read, found out by running the block.

    ``"output"``: the block's output is the stream plus what the MLP says (pre-norm). ``"read"``:
    the stream is what the MLP reads, and a norm takes the sum of both (post-norm). None: neither,
    or the whole model is one block.

    Args:
        block: The block.
        up: A layer that reads the MLP's input.
        down: The layer that writes its output.
        call: One batch.
        states: Its hidden states.
    """
    if isinstance(call, WholeModel):
        return None
    if _adds_to_output(block, down, call, states):
        return "output"
    if _norm_takes_sum(block, up, down, call, states):
        return "read"
    return None


def _adds_to_output(block: nn.Module, down: nn.Module, call: Call, states: Tensor) -> bool:
    """Return whether what a layer says is added to the block's output and changes nothing else."""
    plain = call.run(block, states).float()
    # as large as the stream itself, so that rounding in bfloat16 does not hide it
    step = float(plain.square().mean().sqrt()) or 1.0
    with down.register_forward_hook(lambda module, given, out: out + step):
        moved = call.run(block, states).float()
    return plain.shape == moved.shape and float((moved - plain - step).abs().mean()) < _NEAR * step


def _norm_takes_sum(
    block: nn.Module, up: nn.Module, down: nn.Module, call: Call, states: Tensor
) -> bool:
    """Return whether a norm reads the sum of a layer's input and another's output.

    The block's input may stand in the first one's place.
    """
    seen: dict[str, Tensor] = {}
    takes = [False]

    def norm(module: nn.Module, given: tuple) -> None:
        # norms that run before the MLP find nothing to compare with yet
        if not given or len(seen) < 2:
            return
        shapes = {given[0].shape, seen["read"].shape, seen["said"].shape}
        if len(shapes) == 1:
            apart = given[0].float() - seen["read"].float() - seen["said"].float()
            takes[0] |= bool(apart.abs().mean() < _NEAR * given[0].float().abs().mean())

    with ExitStack() as hooks:
        hooks.enter_context(
            up.register_forward_hook(lambda m, given, out: seen.update(read=given[0]))
        )
        hooks.enter_context(down.register_forward_hook(lambda m, given, out: seen.update(said=out)))
        for module in block.modules():
            # by name: families have norm classes of their own, as LlamaRMSNorm
            if "Norm" in type(module).__name__:
                hooks.enter_context(module.register_forward_pre_hook(norm))
        call.run(block, states)
    return takes[0]
