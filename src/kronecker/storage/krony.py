"""Checkpoints of Krony-PT: a nanoGPT whose MLPs are sums of Kronecker products, in a ``.pt`` file.

Source: Krony-PT (arXiv 2412.12351). Its weights stand as (in, out), so that its first factor of c_fc is (r, I1, O1);
its other linear layers are `nn.Linear`, where transformers has `Conv1D`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.initialization import no_init_weights

from ..config import KroneckerConfig
from ..layers.linear import KroneckerLinear
from ..surgery.finding import put
from .checkpoints import own_saving_

_HEAD_WIDTH = 64  # of GPT-2 in every size
_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and DDP
_OPERATION = "load_krony"


def load_krony(path: str | Path, *, n_head: int | None = None) -> GPT2LMHeadModel:
    """A checkpoint of Krony-PT as a GPT-2 of transformers with compressed MLPs, in evaluation mode.

    `save_pretrained` writes it, `KroneckerTrainer` trains it on, `fold` makes a dense GPT-2 of it.

    Args:
        path: The ``.pt`` file: a state dict, or a dict that holds one as ``"model"``. It is read with
            ``weights_only=True``: tensors, and no code.
        n_head: Attention heads, which the file does not say; default: one for each 64 of the model's width.

    Returns:
        The model.

    Raises:
        ValueError: No such file, or no state dict of such a model.

    >>> load_krony("nowhere.pt")
    Traceback (most recent call last):
    ValueError: load_krony: nowhere.pt is not a file, needed a checkpoint of Krony-PT
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{_OPERATION}: {path} is not a file, needed a checkpoint of Krony-PT")
    state, blocks = _state(path)
    if n_head is not None and n_head < 1:
        raise ValueError(f"{_OPERATION}: n_head is {n_head}, needed 1 or more")
    width = state["transformer.wte.weight"].shape[1]
    heads = n_head or max(1, width // _HEAD_WIDTH)
    if width % heads:
        raise ValueError(f"{_OPERATION}: n_head is {heads}, needed a divisor of the width {width}")
    sizes = {"vocab_size": len(state["transformer.wte.weight"]), "n_positions": len(state["transformer.wpe.weight"])}
    inner = math.prod(state[f"transformer.h.0.mlp.c_fc_{k}"].shape[2] for k in (0, 1))
    with no_init_weights():
        model = GPT2LMHeadModel(GPT2Config(**sizes, n_embd=width, n_layer=blocks, n_head=heads, n_inner=inner))
    ours: dict[str, Tensor] = {}
    for index in range(blocks):
        for name, scaler in (("c_fc", "scalers_fc"), ("c_proj", "scalers_proj")):
            rank, place = len(state[f"transformer.h.{index}.mlp.{name}_0"]), f"transformer.h.{index}.mlp.{name}"
            scales = state.pop(f"transformer.h.{index}.mlp.{scaler}", None)
            a, b = (state.pop(f"{place}_{k}").transpose(1, 2) for k in (0, 1))
            config = KroneckerConfig(b_shape=(b.shape[1], b.shape[2]), rank=rank, scales=scales is not None)
            put(model, place, KroneckerLinear.like(model.get_submodule(place), config))
            ours |= {f"{place}.a": a, f"{place}.b": b, f"{place}.bias": state.pop(f"{place}_bias")}
            ours |= {} if scales is None else {f"{place}.scales": scales}
    linear = re.compile(r"attn\.(c_attn|c_proj)\.weight$")
    masks = (".attn.bias", ".attn.masked_bias")
    ours |= {n: t.T if linear.search(n) else t for n, t in state.items() if not n.endswith(masks)}
    head, table = ours.setdefault("lm_head.weight", ours["transformer.wte.weight"]), ours["transformer.wte.weight"]
    if head.shape == table.shape and torch.equal(head, table):
        model.lm_head.weight = model.transformer.wte.weight
    else:
        model.config.tie_word_embeddings = False
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and name not in ours:
            ours[name] = torch.zeros_like(parameter)  # a model without biases
    names = {n for n, t in model.state_dict().items() if t.numel()}
    missing, unknown = sorted(names - set(ours)), sorted(set(ours) - names)
    if missing or unknown:
        raise ValueError(f"{_OPERATION}: {path} lacks {missing[:3]} and has {unknown[:3]}, needed a Krony-PT model")
    try:
        model.load_state_dict({n: t.contiguous() for n, t in ours.items()})
    except RuntimeError as error:
        last = str(error).splitlines()[-1].strip()
        raise ValueError(f"{_OPERATION}: {path} has tensors that do not fit: {last}") from None
    own_saving_(model)
    return model.eval()


def _state(path: Path) -> tuple[dict[str, Tensor], int]:
    """The file's tensors under nanoGPT's names, and how many blocks they are of."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler fails in as many ways as there are files
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{_OPERATION}: {path} cannot be read as tensors alone: {first}") from None
    stored = stored.get("model", stored) if isinstance(stored, Mapping) else {}
    named = stored.items() if isinstance(stored, Mapping) else ()
    state = {n: t for n, t in named if isinstance(n, str) and isinstance(t, Tensor)}
    for prefix in _PREFIXES:
        state = {n.removeprefix(prefix): t for n, t in state.items()}
    needed = ["transformer.wte.weight", "transformer.wpe.weight"]
    blocks = max([int(m[1]) for n in state if (m := re.match(r"transformer\.h\.(\d+)\.", n))], default=0) + 1
    layers = [f"transformer.h.{i}.mlp.{n}" for i in range(blocks) for n in ("c_fc", "c_proj")]
    needed += [f"{layer}_{k}" for layer in layers for k in (0, 1, "bias")]
    if missing := [n for n in needed if n not in state]:
        raise ValueError(f"{_OPERATION}: {path} has no {missing[0]}, needed a state dict of Krony-PT")
    for name in needed:
        dims = 3 if name[-1] in "01" else 1 if name.endswith("bias") else 2
        tensor = state[name]
        if tensor.dim() != dims or not tensor.numel() or not tensor.is_floating_point() or not tensor.isfinite().all():
            kind = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{_OPERATION}: {name} in {path} is {kind}, needed {dims} dimensions of finite numbers")
    return state, blocks
