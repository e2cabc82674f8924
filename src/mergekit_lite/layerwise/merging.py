"""Data-driven merges of whole models, block by block.

This module does the work of `merge_models(..., calibration=...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from model_components._folders import NewFolder
from model_components._loading import read_config
from model_components._model_folders import shown_name

from ..computing import readable_tokens, settings_of
from ..dtypes import Array
from ..files import CheckpointError, Source, open_source
from ..files.experts import stacked
from .blocks import Skeleton
from .config import CalibratedMerge
from .data import calibration_batches
from .run import BlockMerge


def merged_source(
    models: Sequence[object],
    calibration: Sequence[object],
    merge: CalibratedMerge,
    stage: NewFolder,
    *,
    device: str | torch.device = "cpu",
    progress: bool,
) -> Source:
    """Merge models block by block into an open folder, and return the result as a `Source`.

    Memory holds one block of each model, the merged block, and the hidden states of the calibration
    data.

    Args:
        models: Models of one architecture: folders, hub ids or ``"model+adapter"``.
        calibration: The data of each model: a file or rows for `TextExamples`, or examples.
        merge: The settings of the merge.
        stage: The folder of the merged blocks. If an interrupted run of the same merge left blocks
            there, the merge continues after them.
        device: The device that runs blocks and solves for weights.
        progress: Show a progress bar.

    Raises:
        ValueError: There are fewer than two models, more or fewer data sets than models, a data set
            is empty, or the models have different architectures or vocabularies.
    """
    if isinstance(calibration, (str, Path)):
        raise ValueError(
            f"merge_models: calibration is {str(calibration)!r}; expected a list with the data of "
            "each model"
        )
    if len(models) < 2 or len(calibration) != len(models):
        raise ValueError(
            "merge_models: expected two or more models and calibration data for each, got "
            f"{len(models)} models, calibration for {len(calibration)}"
        )
    shares = merge.shares(len(models))
    # give experts' tensors the names and stacks that transformers uses
    sources = [stacked(open_source(model)) for model in models]
    check_alike(sources)
    # float32 whatever the files hold, so that merged weights are rounded only when they are written
    skeleton = Skeleton(sources[0], merge.auto_class, torch.float32, device)
    length = readable_tokens(skeleton.model.config, merge.max_length)
    data = []
    for given, source in zip(calibration, sources, strict=True):
        data.append(
            calibration_batches(given, source, batch_size=merge.batch_size, max_length=length)
        )
    run = BlockMerge(skeleton, sources, data, shares, merge, stage.folder)
    first = run.resumed()
    if not first:
        # remove damaged blocks, and blocks from other models, settings or data
        stage.clear()
        run.begin()
    count = len(skeleton.blocks)
    for number in tqdm(
        range(first, count),
        desc=merge.method,
        unit="block",
        initial=first,
        total=count,
        disable=not progress,
    ):
        run.merge_block(number)
        run.save(number + 1)
    run.merge_outside()
    # names without paths, because the label is in the model card
    names = " and ".join(Path(shown_name(source.label)).name for source in sources)
    parts = [open_source(path) for path in run.parts()]
    return _Joined(f"{merge.method} of {names}", sources[0], parts)


def check_alike(sources: Sequence[Source]) -> None:
    """Check that models have tensors of the same names and shapes, and the same settings.

    Raises:
        CheckpointError: The models differ. The message describes the first difference.
    """
    first = sources[0]
    for other in sources[1:]:
        unlike = []
        for name in sorted(first.tensors.keys() | other.tensors.keys()):
            shapes = _shape_of(other, name), _shape_of(first, name)
            if shapes[0] != shapes[1]:
                unlike.append((name, *shapes))
        if unlike:
            name, theirs, ours = unlike[0]
            raise CheckpointError(
                f"{other.label}: expected {name} to be {ours}, as in {first.label}, got {theirs} "
                f"({len(unlike)} tensors differ); merges with calibration need models of one "
                "architecture and vocabulary"
            )
    check_computing(sources)


def _shape_of(source: Source, name: str) -> tuple[int, ...] | str:
    info = source.tensors.get(name)
    return "missing" if info is None else info.shape


def check_computing(sources: Sequence[Source]) -> None:
    """Check that models have the same settings, because all weights run in the first model's code.

    Raises:
        CheckpointError: The models differ. The message describes the first difference.
    """
    first, ours = None, {}
    for source in sources:
        if source.folder is None:
            raise CheckpointError(
                f"{source.label}: expected a folder with config.json, got a file or a state dict"
            )
        settings = settings_of(read_config(source.folder, "merge"))
        if first is None:
            first, ours = source, settings
        for name in dict.fromkeys([*ours, *settings]):
            if ours.get(name) != settings.get(name):
                raise CheckpointError(
                    f"{source.label}: expected {name} {ours.get(name)!r} as in {first.label}, got "
                    f"{settings.get(name)!r}; merges with calibration need models with the same "
                    "settings"
                )


class _Joined(Source):
    """The merged parts as one source.

    The first model provides the config, the tokenizer and all tensors that no part has.
    """

    def __init__(self, label: str, first: Source, parts: Iterable[Source]):
        self.label = label
        self.config = first.config
        self.folder = first.folder
        # for the names in the files of the first model
        self.parts = getattr(first, "parts", {})
        self._first = first
        self.tensors = dict(first.tensors)
        self._of: dict[str, Source] = {}
        for part in parts:
            self.tensors |= part.tensors
            self._of |= dict.fromkeys(part.tensors, part)

    def _source(self, name: str) -> Source:
        return self._of.get(name, self._first)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start`` to ``stop`` of a tensor."""
        return self._source(name).read(name, start, stop)

    def read_into(self, name: str, start: int, out: Array) -> bool:
        """Read a tensor from ``start`` on into ``out``; return False if its source cannot."""
        return self._source(name).read_into(name, start, out)

    def prefetch(self, name: str) -> None:
        """Ask the operating system to read a tensor in the background."""
        self._source(name).prefetch(name)

    def fingerprint(self) -> object:
        """Return the fingerprints of all parts."""
        return [part.fingerprint() for part in dict.fromkeys(self._of.values())]
