"""Factorize changes of weights, and write the factors as a peft adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from model_components._folders import write_json
from model_components._model_folders import card_of, complete_folder, shown_name

from ..dtypes import FLOATS, Array, DType, byte_view, from_numpy, numbers, stored_as
from ..files import TensorInfo
from ..files.adapter import CONFIG, PREFIX, WEIGHTS
from ..files.headers import header_bytes
from .report import AdapterModule

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
}
# eigenvalues are squares: 1e-14 of the largest is 1e-7 of the largest singular value
_NOTHING = 1e-14  # relative to the largest eigenvalue: anything smaller is a rounding error


def with_bar(names: Sequence[str], operation: str, unit: str, *, progress: bool) -> Iterable[str]:
    """Return the names, with a progress bar if ``progress``; tqdm is imported only for the bar."""
    if not progress:
        return names
    from tqdm.auto import tqdm

    return tqdm(names, operation, unit=unit)


def task_of(config: Mapping[str, object]) -> str | None:
    """Return peft's task type for a model with this config, or None if it is unknown."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    for end, task in _TASKS.items():
        if str(architectures[0]).endswith(end):
            return task
    return None


def truncated(
    change: Array,  # (out_features, in_features)
    rank: int,
    energy: float = 1.0,
) -> tuple[Array, Array]:
    """Return factors B (out, r) and A (r, in) whose product is closest to a change.

    Each factor is scaled by the square roots of the change's singular values. The factors are
    computed in float64 from the eigenvectors of the smaller of the two Gram matrices.

    Args:
        change: The matrix that B A should approximate.
        rank: The largest r.
        energy: Share of the squared norm to keep. r is the smallest rank that keeps this share, but
            at most ``rank``.
    """
    wide = change.astype(np.float64)
    tall = wide.shape[0] > wide.shape[1]
    values, vectors = np.linalg.eigh(wide.T @ wide if tall else wide @ wide.T)
    # eigh sorts in ascending order; rounding may make a zero negative
    values = values[::-1].clip(0)
    vectors = vectors[:, ::-1]
    shares = np.cumsum(values) / max(values.sum(), 1e-300)
    # sums in different orders may differ in the last bit
    enough = 1 + int(np.searchsorted(shares, energy * (1 - 1e-12)))
    # at least 1, because peft rejects rank 0, but merged changes may cancel to zero
    r = max(1, min(rank, enough, int((values > values[0] * _NOTHING).sum())))
    # fourth roots of eigenvalues are square roots of singular values: with them B and A have equal
    # norms, so rounding affects both equally
    root = np.sqrt(np.sqrt(values[:r]))
    root = np.where(root > 0, root, 1.0)
    vectors = vectors[:, :r]
    if tall:
        up = wide @ vectors / root
        down = (vectors * root).T
    else:
        up = vectors * root
        down = (vectors.T @ wide) / root[:, None]
    return up.astype(np.float32), down.astype(np.float32)


def module_of(name: str, change: Array, up: Array, down: Array, dtype: DType) -> AdapterModule:
    """Return a module's entry in the report, with the error of the factors rounded to ``dtype``.

    Raises:
        ValueError: A factor has NaN or infinity in ``dtype``.
    """
    with np.errstate(over="ignore"):  # the error below names the module
        # in float64, in which the square of a small float32 does not become 0
        stored = [numbers(stored_as(factor, dtype)).astype(np.float64) for factor in (up, down)]
    if not all(np.isfinite(factor).all() for factor in stored):
        raise ValueError(f"{name}: the adapter's factors have NaN or infinity in {dtype.name}")
    size = float(np.linalg.norm(change.astype(np.float64)))
    error = 0.0
    if size > 0:
        error = float(np.linalg.norm(change - stored[0] @ stored[1])) / size
    return AdapterModule(name, (change.shape[0], change.shape[1]), down.shape[0], error)


def write_adapter(
    folder: Path,
    factors: Mapping[str, tuple[Array, Array]],
    *,
    dtype: str,
    base_model: str | None,
    call: str,
    task_type: str | None,
    saved: Mapping[str, Array] | None = None,
    fan_in_fan_out: bool = False,
) -> int:
    """Write an adapter's weights, config and model card; return the size of its tensors in bytes.

    Args:
        folder: The folder to write to.
        factors: B (out, r) and A (r, in) of every module. The module's change is their product.
        dtype: The dtype of the factors.
        base_model: The name or path of the base, for the config.
        call: The Python call that made the adapter, for the model card.
        task_type: peft's task type of the base model.
        saved: Tensors, as stored, that replace the base's tensors of these names.
        fan_in_fan_out: Whether the base's linear layers store (in, out).
    """
    arrays: dict[str, Array] = {}
    for module, (up, down) in factors.items():
        arrays[f"{PREFIX}{module}.lora_A.weight"] = stored_as(down, FLOATS[dtype])
        arrays[f"{PREFIX}{module}.lora_B.weight"] = stored_as(up, FLOATS[dtype])
    arrays |= {f"{PREFIX}{name}": value for name, value in (saved or {}).items()}
    placed = []
    offset = 0
    for name, value in arrays.items():
        info = TensorInfo(name, value.shape, from_numpy(value))
        placed.append((info, offset))
        offset += info.nbytes
    with (folder / WEIGHTS).open("wb") as file:
        file.write(header_bytes(placed))
        for value in arrays.values():
            file.write(byte_view(np.ascontiguousarray(value)))
    ranks = {module: down.shape[0] for module, (_, down) in factors.items()}
    # 1 if there are no factors, only saved tensors, because peft rejects rank 0
    largest = max(ranks.values(), default=1)
    smaller = {module: r for module, r in ranks.items() if r != largest}
    # alpha equals the rank of every module, so that peft adds B A without a factor
    settings = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted(name.removesuffix(".weight") for name in saved or {}) or None,
        "fan_in_fan_out": fan_in_fan_out,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    write_json(folder / CONFIG, settings)
    name = base_model or ""
    card = card_of(
        f"LoRA adapter of {shown_name(name)}",
        [f"Made by `mergekit_lite` with\n\n```python\n{call}\n```"],
        bases=[name],
        tags=["lora"],
        relation="adapter",
        library_name="peft",
    )
    complete_folder(folder, card)
    return offset
