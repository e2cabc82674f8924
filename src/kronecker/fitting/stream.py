"""Find where to read the residual stream to which a block's MLP adds its output."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor, nn

from model_components._walk import Call

from .calls import WholeModel

# relative tolerance: far above any dtype's rounding errors, and far below the differences between
# architectures
_NEAR = 0.02


def stream_kind(
    block: nn.Module, up: nn.Module, down: nn.Module, call: Call, states: Tensor
) -> str | None:
    """Run the block to find where to read the residual stream to which its MLP adds its output.

    Args:
        block: The block.
        up: A layer that reads the MLP's input.
        down: The layer that writes the MLP's output.
        call: The block's call for one batch.
        states: The hidden states of that batch.

    Returns:
        ``"output"`` if the block's output is the stream plus the MLP's output (pre-norm).
        ``"read"`` if the stream is the MLP's input, and a norm reads the sum of the MLP's input and
        output (post-norm). None in all other cases, or if the whole model is one block.
    """
    if isinstance(call, WholeModel):
        return None
    if _adds_to_output(block, down, call, states):
        return "output"
    if _norm_takes_sum(block, up, down, call, states):
        return "read"
    return None


def _adds_to_output(block: nn.Module, down: nn.Module, call: Call, states: Tensor) -> bool:
    """Return whether a change of a layer's output changes the block's output by the same amount."""
    plain = call.run(block, states).float()
    # a change as large as the stream itself, so that rounding in bfloat16 does not hide it
    step = float(plain.square().mean().sqrt()) or 1.0
    with down.register_forward_hook(lambda module, given, out: out + step):
        moved = call.run(block, states).float()
    return plain.shape == moved.shape and float((moved - plain - step).abs().mean()) < _NEAR * step


def _norm_takes_sum(
    block: nn.Module, up: nn.Module, down: nn.Module, call: Call, states: Tensor
) -> bool:
    """Return whether a norm reads the sum of ``up``'s input and ``down``'s output."""
    seen: dict[str, Tensor] = {}
    takes = [False]

    def norm(module: nn.Module, given: tuple) -> None:
        # before the MLP has run, there is nothing to compare with
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
            # recognized by name, since model families have their own classes, such as LlamaRMSNorm
            if "Norm" in type(module).__name__:
                hooks.enter_context(module.register_forward_pre_hook(norm))
        call.run(block, states)
    return takes[0]
