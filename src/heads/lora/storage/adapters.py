"""`load_lora` reads peft's files after checking them; `export_lora` writes them for a stock GPT-2."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model_components._folders import NewFolder, check_new
from model_components._hub import find_folder

from ..surgery.accelerate import accelerate_lora_
from ..surgery.prepare import PREFIX, check_adapter_name, inject, is_quantised, quiet, skeleton
from ..surgery.split import FUSED, PARTS, SplitQKV, split_fused_qkv_

WEIGHTS = "adapter_model.safetensors"


def load_lora(
    model: nn.Module,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    is_trainable: bool = False,
    accelerate: bool = True,
    **options: Any,
) -> PeftModel:
    """Peft's `PeftModel.from_pretrained`, after the checkpoint has been compared with the model, with our forward.

    A checkpoint with separate q, k and v adapters for a fused ``c_attn`` splits the model's first.

    Args:
        model: The base model, or one with adapters already, which gets one more.
        folder: A folder with peft's two files, or a hub id.
        adapter_name: What the adapter is called here.
        is_trainable: Whether it will be trained on.
        accelerate: Also call `accelerate_lora_`.
        options: More of peft's, such as ``autocast_adapter_dtype``; ``revision``, ``token`` and ``subfolder`` are the
            hub's.

    Returns:
        The model with the adapter.

    Raises:
        ValueError: A folder or id that does not exist, another method's adapter, a pickle, a truncated file, modules
            that the model does not have, tensors that the config does not name, shapes that do not fit, numbers that
            are not finite or not floating, a name that is taken.

    >>> from peft import get_peft_model
    >>> model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     loaded = load_lora(nn.Sequential(nn.Linear(4, 4)), folder)
    >>> loaded.active_adapters
    ['default']
    """
    operation = "load_lora"
    check_adapter_name(operation, adapter_name)
    if isinstance(model, PeftModel) and adapter_name in model.peft_config:
        raise ValueError(f"{operation}: the model has an adapter {adapter_name!r} already; needed another adapter_name")
    hub = {k: options.pop(k) for k in ("revision", "token") if k in options}
    path = find_folder(folder, patterns=["*adapter_*"], operation=operation, **hub) / options.pop("subfolder", "")
    shapes = _shapes(operation, path)
    try:
        config = PeftConfig.from_pretrained(str(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # what a JSON decoder raises, too, or a list
        raise ValueError(f"{operation}: {path / 'adapter_config.json'} cannot be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{operation}: {path} holds an adapter of {config.peft_type}, needed LoRA")
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    split = any(f".{FUSED}.{part}." in name for name in shapes for part in PARTS)
    split = split and not any(isinstance(m, SplitQKV) for m in base.modules())
    if split and isinstance(model, PeftModel):
        raise ValueError(f"{operation}: {path} adapts q, k and v apart, and the model's {FUSED} is not split")
    if not is_quantised(base):
        trial = skeleton(model).unload() if isinstance(model, PeftModel) else skeleton(model)
        if split:
            split_fused_qkv_(trial)
        _compare(operation, path, shapes, trial, config)
    if split:
        split_fused_qkv_(base)
    with quiet():
        if isinstance(model, PeftModel):
            peft_model = model
            peft_model.load_adapter(str(path), adapter_name, is_trainable=is_trainable, **options)
        else:
            peft_model = PeftModel.from_pretrained(base, str(path), adapter_name, is_trainable=is_trainable, **options)
    if accelerate:
        accelerate_lora_(peft_model)
    return peft_model


def _shapes(operation: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, each of which is read once to see that its numbers are finite."""
    if not (path / WEIGHTS).exists():
        file_names = sorted(p.name for p in path.iterdir())
        why = " (a pickle can run code: save it again with safetensors)" if "adapter_model.bin" in file_names else ""
        raise ValueError(f"{operation}: {path} has no {WEIGHTS}{why}; it holds {file_names}")
    shapes = {}
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                tensor = file.get_tensor(name)
                if ".lora_" in name and not tensor.is_floating_point():  # others may be counters of a whole module
                    raise ValueError(f"{operation}: {name} in {path} is {tensor.dtype}, needed floating numbers")
                if not torch.isfinite(tensor).all():
                    raise ValueError(f"{operation}: {name} in {path} has numbers that are not finite")
                shapes[name] = tuple(tensor.shape)
    except SafetensorError as error:
        raise ValueError(f"{operation}: {path / WEIGHTS} cannot be read: {error}") from error
    return shapes


def _compare(
    operation: str, path: Path, shapes: dict[str, tuple[int, ...]], base: nn.Module, config: LoraConfig
) -> None:
    """Refuse a checkpoint that does not fit the model; ``base`` is a copy on the meta device, which is changed."""
    of = f"{operation}: {path}, trained on {config.base_model_name_or_path},"
    modules = {name for name, _ in base.named_modules()}
    places = {re.sub(r"\.(lora_.*|base_layer.*|token_adapter.*|[^.]*)$", "", name) for name in shapes}
    places = {place.removeprefix(PREFIX) for place in places}
    strange = sorted(places - modules)
    if strange:
        raise ValueError(
            f"{of} is of another base model: of its {len(places)} modules this {type(base).__name__} does not have "
            f"{strange[0]} and {len(strange) - 1} more"
        )
    expected = {name: tuple(p.shape) for name, p in base.named_parameters()}
    trial = copy.deepcopy(config)
    trial.init_lora_weights, trial.inference_mode = False, False
    injected = inject(base, trial, "default")
    tensors = get_peft_model_state_dict(injected, save_embedding_layers=False)
    needed = {name: tuple(t.shape) for name, t in tensors.items()}
    parameters = injected.named_parameters(remove_duplicate=False)  # base layers that peft saves, too
    adapted = {name: tuple(p.shape) for name, p in parameters}
    expected = {PREFIX + name: shape for name, shape in expected.items()} | adapted | needed
    wrong = [f"{n} is {list(s)}, needed {list(expected[n])}" for n, s in shapes.items() if expected.get(n, s) != s]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"{of} does not fit: {wrong[0]}{more}")
    left = sorted(set(shapes) - set(expected))
    if left:
        named = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
        raise ValueError(f"{of} holds {left[0]} and {len(left) - 1} more that its config does not name ({named})")
    absent = sorted(set(needed) - set(shapes))
    if absent:
        raise ValueError(f"{of} lacks {absent[0]} and {len(absent) - 1} more of what its config names")


def export_lora(model: PeftModel, out: str | Path, *, adapter_name: str = "default") -> Path:
    """Write an adapter for a stock GPT-2: separate q, k and v adapters become one, block-diagonal, of ``c_attn``.

    Its A holds theirs one under the other and its B theirs along the diagonal, so that its rank is the sum of theirs
    and it computes the same. What is not split is written as it is: peft loads the result, on a model that knows
    nothing of splits.

    Args:
        model: A model prepared with ``split_fused_qkv``.
        out: The folder to write; it must not exist, or be empty.
        adapter_name: Which adapter.

    Returns:
        ``out``.

    Raises:
        ValueError: An adapter that the model does not have, or with DoRA or biases; nothing that was split; a folder
            with something in it.
    """
    operation = "export_lora"
    if adapter_name not in model.peft_config:
        raise ValueError(f"{operation}: adapter_name is {adapter_name!r}, the model has {sorted(model.peft_config)}")
    base = model.get_base_model()
    fused = [name for name, m in base.named_modules() if isinstance(m, SplitQKV)]
    if not fused:
        raise ValueError(f"{operation}: nothing was split; needed a model of prepare_lora(..., split_fused_qkv=True)")
    check_new(out, operation)
    config = copy.deepcopy(model.peft_config[adapter_name])
    assert isinstance(config, LoraConfig)
    if config.use_dora or config.lora_bias or config.bias != "none":
        raise ValueError(
            f"{operation}: use_dora is {config.use_dora}, lora_bias {config.lora_bias} and bias {config.bias!r}; "
            "needed none of them, which one block-diagonal adapter could not say"
        )
    tensors = dict(get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False))
    config.rank_pattern, config.alpha_pattern = dict(config.rank_pattern or {}), dict(config.alpha_pattern or {})
    for name in fused:
        joined = _joined(model, name, adapter_name)
        for key in [k for k in tensors if k.startswith(f"{PREFIX}{name}.")]:
            del tensors[key]
        if joined is not None:
            tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"], scaling = joined
            rank = tensors[f"{PREFIX}{name}.lora_A.weight"].shape[0]
            config.rank_pattern[re.escape(name)] = rank
            config.alpha_pattern[re.escape(name)] = scaling * (rank**0.5 if config.use_rslora else rank)
    config.target_modules = sorted({re.sub(r"\.lora_.*", "", k.removeprefix(PREFIX)) for k in tensors if ".lora_" in k})
    config.inference_mode = True
    with NewFolder(out, operation) as new:
        tensors = {k: t.detach().cpu().contiguous() for k, t in tensors.items()}
        save_file(tensors, new.folder / WEIGHTS, {"format": "pt"})
        config.save_pretrained(str(new.folder))
    return new.out


def _joined(model: Any, name: str, adapter_name: str) -> tuple[Tensor, Tensor, float] | None:
    """A (R, I), B (3 O, R) and the scaling of one adapter that equals the parts'; None where no part has one."""
    split = model.get_base_model().get_submodule(name)
    width = split.q_proj.nf if hasattr(split.q_proj, "nf") else split.q_proj.out_features
    factors = [
        (j, layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight, layer.scaling[adapter_name])
        for j, layer in enumerate(getattr(split, part) for part in PARTS)
        if adapter_name in getattr(layer, "lora_A", {})
    ]
    if not factors:
        return None
    scaling = factors[0][3]
    b = factors[0][2].new_zeros(len(PARTS) * width, sum(a.shape[0] for _, a, _, _ in factors))
    at = 0
    for j, a, part_b, part_scaling in factors:
        b[j * width : (j + 1) * width, at : at + a.shape[0]] = part_b.detach() * (part_scaling / scaling)
        at += a.shape[0]
    return torch.cat([a.detach() for _, a, _, _ in factors]), b, float(scaling)
