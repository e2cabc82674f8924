"""`parameter_groups`: a thinker's parameters with and without weight decay."""

from __future__ import annotations

from torch import nn


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float = 0.01
) -> list[dict[str, object]]:
    """Return optimizer groups in which only the matrices of linear layers have weight decay.

    Embeddings, positions, latents, norms and biases have none.

    Args:
        model: A module of any kind.
        learning_rate: The learning rate of all parameters.
        weight_decay: The weight decay of the matrices.

    Returns:
        Groups for a torch optimizer: the matrices, then the other parameters. Empty groups are left
            out.
    """
    # by the kind of module: embeddings and latents have two axes as well
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_kind[id(parameter) in matrices].append(parameter)
    return [
        {"params": parameters, "lr": learning_rate, "weight_decay": weight_decay if decays else 0.0}
        for decays, parameters in by_kind.items()
        if parameters
    ]
