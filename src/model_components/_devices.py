"""A device by its name, once something could be put there."""

from __future__ import annotations

import os


def find_device(name: str, operation: str) -> str:
    """The device; under torchrun, ``"cuda"`` is the process's own.

    Raises:
        ValueError: This torch has none of that name, nothing can be put there, or what is put there is lost ("meta").

    >>> find_device("cpu", "merge_models")
    'cpu'
    """
    if name == "cpu":  # without torch, which a merge of files does not need
        return name
    import torch

    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{operation}: device {name} cannot be used here ({error})") from error
    return str(device)
