"""`extract_lora`: find the LoRA adapter that is closest to the change made by tuning."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np

from model_components._checks import Range, Whole, check_choice, check_value
from model_components._folders import NewFolder, check_new
from model_components._model_folders import shown_name

from ..dtypes import FLOAT32, FLOATS, Array, numbers, promote
from ..files import Source, open_source
from ..files.adapter import stores_transposed
from ..planning import PlanError
from ..vocabulary import HEAD, copy_tokenizer, is_vocabulary_tensor
from .report import AdapterModule, AdapterReport
from .storage import module_of, task_of, truncated, with_bar, write_adapter

_TABLE = re.compile(  # embeddings: rows are looked up, not multiplied
    r"(^|\.|_)(embed\w*|embeddings?|wpe|wte|relative_attention_bias)(\.|$)"
)
_WHAT = "this extraction"


def extract_lora(
    model: object,
    base_model: object,
    out: str | os.PathLike[str],
    *,
    rank: int = 16,
    energy: float = 1.0,
    dtype: str | None = None,
    save_others: bool = False,
    progress: bool = True,
    allow_pickle: str | None = None,
) -> AdapterReport:
    """Write the LoRA adapter that is closest to a tuned model.

    Load the adapter with peft, or use it in a merge as ``"base+adapter"``.

    The change of each linear layer's weight is truncated to its largest singular directions. No
    adapter of the same rank is closer (Eckart and Young, 1936). Embeddings, heads, norms and biases
    are not approximated. By default they are left out, and the report shows how much they changed.
    With ``save_others``, most of them are saved at full size.

    Args:
        model: The tuned model, in any form that `merge_models` takes.
        base_model: The model that it was tuned from, with the same names and shapes.
        out: Folder to write: a new path or an empty folder.
        rank: The largest rank of a module.
        energy: Share of a change's squared norm to keep, above 0 and at most 1. Each layer gets the
            smallest rank that keeps it, up to ``rank``.
        dtype: The dtype of the factors; default: the tuned model's dtype.
        save_others: Also save other changed weights, at full size, as peft's ``modules_to_save``.
            Biases are never saved. Neither are tied embeddings and heads, because peft would change
            only one of the two.
        progress: Show a progress bar.
        allow_pickle: Pass ``"weights_only"`` to also load pickled checkpoints (only tensors).

    Returns:
        A report of each module's rank and error, and of the changed tensors that were left out.

    Raises:
        PlanError: The models have different tensors or hold NaN or infinity, or they do not differ
            in any tensor that the adapter can hold. ``problems`` has every reason that was found.
        ValueError: An argument is invalid, or a factor overflows in ``dtype``.
        OutputError: ``out`` is not empty or cannot be written.

    >>> import tempfile, torch
    >>> base = {"layer.weight": torch.zeros(4, 3)}
    >>> model = {"layer.weight": torch.outer(torch.ones(4), torch.arange(3.0))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = extract_lora(model, base, f"{folder}/adapter", rank=2, progress=False)
    >>> [(module.name, module.shape, module.rank) for module in report.modules]
    [('layer', (4, 3), 1)]
    """
    check_value("extract_lora", "rank", rank, Whole)
    check_value("extract_lora", "energy", energy, Annotated[float, Range(above=0, most=1)])
    check_choice("extract_lora", "dtype", dtype or "float32", FLOATS)
    check_new(out, "extract_lora")
    base, tuned = (open_source(m, allow_pickle=allow_pickle) for m in (base_model, model))
    names = _common_tensors(base, tuned)
    kinds = [tuned.tensors[name].dtype for name in names]
    floats = [kind for kind in kinds if kind.is_floating_point]
    chosen = dtype or promote(floats or [FLOAT32]).name
    extraction = _Extraction(base, tuned, rank, energy, chosen, save_others)
    for name in with_bar(names, "extract_lora", "tensor", progress=progress):
        extraction.take(name)
    if not extraction.modules and not extraction.saved:
        problem = (
            f"{tuned.label} and {base.label} differ in no linear layer, so there is nothing to "
            "extract"
        )
        raise PlanError([problem], _WHAT)
    factors = extraction.factors
    if any(".experts." in name for name in base.tensors):
        # peft converts the names of experts' factors, but not the names in rank_pattern, so all
        # modules get the same rank
        factors = _of_one_rank(factors)
    models = f"{shown_name(tuned.label)!r}, {shown_name(base.label)!r}"
    options = f"{rank=}, {energy=}, dtype={chosen!r}, {save_others=}"
    with NewFolder(out, "extract_lora") as folder:
        copy_tokenizer([tuned.folder, base.folder], folder.folder)
        nbytes = write_adapter(
            folder.folder,
            factors,
            dtype=chosen,
            base_model=base.label if isinstance(base_model, (str, os.PathLike)) else None,
            call=f"extract_lora({models}, {options})",
            task_type=task_of(base.config),
            saved=extraction.saved,
            fan_in_fan_out=any(
                stores_transposed(base.config, module) for module in extraction.factors
            ),
        )
    return AdapterReport(
        Path(out), extraction.modules, sorted(extraction.saved), extraction.left, nbytes
    )


def _of_one_rank(factors: Mapping[str, tuple[Array, Array]]) -> dict[str, tuple[Array, Array]]:
    """Pad the factors of each module, (out, r) and (r, in), with zeros to the largest rank.

    The products of the factors do not change.
    """
    rank = max((down.shape[0] for _, down in factors.values()), default=1)
    padded = {}
    for module, (up, down) in factors.items():
        more = rank - down.shape[0]
        padded[module] = np.pad(up, ((0, 0), (0, more))), np.pad(down, ((0, more), (0, 0)))
    return padded


def _common_tensors(base: Source, tuned: Source) -> list[str]:
    """Check that both models have tensors of the same names and shapes, and return the names."""
    problems = []
    for name, info in base.tensors.items():
        other = tuned.tensors.get(name)
        if other is None:
            problems.append(f"{tuned.label} has no {name}")
        elif other.shape != info.shape:
            rows_alone = is_vocabulary_tensor(name) and other.shape[1:] == info.shape[1:]
            why = "the vocabularies differ" if rows_alone else "the shapes differ"
            problems.append(
                f"{why}: {name} has shape {list(info.shape)} in {base.label} and "
                f"{list(other.shape)} in {tuned.label}"
            )
    for name in tuned.tensors:
        if name not in base.tensors:
            problems.append(f"{base.label} has no {name}")
    if problems:
        raise PlanError(problems, _WHAT)
    return list(base.tensors)


class _Extraction:
    """The contents of an adapter, collected tensor by tensor."""

    def __init__(
        self, base: Source, tuned: Source, rank: int, energy: float, dtype: str, save_others: bool
    ):
        self._base = base
        self._tuned = tuned
        self._rank = rank
        self._energy = energy
        self._dtype = FLOATS[dtype]
        self._save_others = save_others
        # a state dict has no config: if it has no head, assume that the head is the embedding
        self._tied = base.config.get(
            "tie_word_embeddings", not any(HEAD.search(n) for n in base.tensors)
        )
        self.factors: dict[str, tuple[Array, Array]] = {}
        self.modules: list[AdapterModule] = []
        self.saved: dict[str, Array] = {}
        self.left: dict[str, float] = {}

    def take(self, name: str) -> None:
        """Add the change of one tensor to the adapter, or to the tensors that are left out."""
        info = self._base.tensors[name]
        # integer buffers, such as position ids, are not tuned
        if not info.dtype.is_floating_point:
            return
        stored = self._tuned.read(name, 0, info.count)
        before = numbers(self._base.read(name, 0, info.count))
        change = (numbers(stored) - before).reshape(info.shape)
        if not change.any():
            return
        if not np.isfinite(change).all():
            raise PlanError(
                [f"{name}: expected finite values, but one of the models holds NaN or infinity"],
                _WHAT,
            )
        if self._is_linear(name, info.shape):
            module = name.removesuffix(".weight")
            if stores_transposed(self._base.config, module):
                # GPT-2's Conv1D stores (in, out), but peft's factors are for (out, in)
                change = change.T
            up, down = truncated(change, self._rank, self._energy)
            self.factors[module] = up, down
            self.modules.append(module_of(module, change, up, down, self._dtype))
        elif self._may_be_saved(name):
            self.saved[name] = stored.reshape(info.shape)
        else:
            size = float(np.linalg.norm(before.astype(np.float64)))
            moved = float(np.linalg.norm(change.astype(np.float64)))
            self.left[name] = moved / size if size else math.inf  # the base's bias may be all zero

    def _may_be_saved(self, name: str) -> bool:
        """Return whether the adapter holds a changed tensor as a whole, instead of factors."""
        is_tied = self._tied and is_vocabulary_tensor(name)  # peft would change only one of the two
        return self._save_others and name.endswith(".weight") and not is_tied

    @staticmethod
    def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor is the weight of a linear layer."""
        module = name.removesuffix(".weight")
        # norms and biases have one dimension, convolutions and stacks of experts three or more
        return (
            len(shape) == 2
            and module != name
            and not is_vocabulary_tensor(name)
            and not _TABLE.search(module)
        )
