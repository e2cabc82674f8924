"""`parameter_groups`: the learning rate of each of a judge's parameters."""

from __future__ import annotations

from torch import nn

from ..judge import Judge
from ..surgery import encoder_layers, encoder_parts


def parameter_groups(
    model: Judge,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    head_lr_ratio: float = 1.0,
) -> list[dict[str, object]]:
    """Return optimizer groups whose learning rates fall from the top layer to the embeddings.

    The top layer has ``learning_rate``, the layer below it ``layer_decay`` times that, and so on.
    The embeddings count as one more layer at the bottom (Howard and Ruder, "ULMFiT", 2018).

    Args:
        model: A `PairwiseModel`, without a wrapper such as DDP.
        learning_rate: The learning rate of the encoder's top layer.
        weight_decay: The weight decay; biases and norms have none.
        layer_decay: The factor by which the learning rate falls from each layer to the layer below
            it, in (0, 1].
        head_lr_ratio: The head's learning rate divided by ``learning_rate``.

    Returns:
        The parameter groups. If part of the encoder's top layer trains, the first group has
        ``learning_rate``, because trainers log the rate of the first group.

    Raises:
        ValueError: ``layer_decay`` is outside (0, 1], or it is below 1 and the encoder's layers
            share parameters.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(
            f"parameter_groups: layer_decay is {layer_decay}, expected a number in (0, 1]"
        )
    depth_of: dict[int, int] = {}
    if layer_decay < 1:
        layers = list(encoder_layers("parameter_groups", model.encoder, "layer_decay=1")[1])
    else:
        layers = []
    for depth, layer in enumerate(layers):
        depth_of |= {id(p): len(layers) - 1 - depth for p in layer.parameters()}
    lowest = encoder_parts(model.encoder, "embeddings") if layers else []
    for _, module in lowest:
        depth_of |= {id(p): len(layers) for p in module.parameters()}
    head = {id(parameter) for parameter in model.head.parameters()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            if id(parameter) in head:
                rate = head_lr_ratio
            else:
                # 0: a last norm above the layers trains at the top layer's rate
                rate = layer_decay ** depth_of.get(id(parameter), 0)
            decay = weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((learning_rate * rate, decay), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda group: group[0][0] != learning_rate)
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay}
        for (rate, decay), parameters in ordered
    ]
