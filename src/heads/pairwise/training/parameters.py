"""`parameter_groups`: at which rate each of a judge's parameters trains."""

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
    """Return groups for an optimizer, with rates that fall from layer to layer to the embeddings.

    The top layer has ``learning_rate``, the next ``layer_decay`` of it, and so on; the embeddings
    are below the lowest layer (Howard and Ruder, "ULMFiT", 2018). Biases and norms are not decayed.

    Args:
        model: A `PairwiseModel`, bare.
        learning_rate: The learning rate of the encoder's top layer.
        weight_decay: The weight decay of weights; biases and norms are not decayed.
        layer_decay: The factor of the rate from each layer to the one below, in (0, 1].
        head_lr_ratio: The head's rate over ``learning_rate``.

    Returns:
        Groups; the first has ``learning_rate``, which a trainer logs, where any of the encoder's
        top layer trains.

    Raises:
        ValueError: A decay outside (0, 1], or one below 1 for an encoder whose layers share
            parameters.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(
            f"parameter_groups: layer_decay is {layer_decay}, expected a share in (0, 1]"
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
    head = {id(p) for part in (model.pool, model.head) for p in part.parameters()}
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
