"""Learned masks out of core: one block of each component at a time learns to do what the components' blocks do.

Hidden states of each task go through its own component's blocks, and through the merged ones; a block's masks learn, on
the merged states, to give what the component's block gives on its own. What is resident is one block of each component
and the states of the data, whatever the depth; the result is baked from files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from model_components._folders import NewFolder, check_new
from model_components._report import Report, Table

from ..files import open_source
from ..layerwise.blocks import Skeleton
from ..layerwise.data import calibration_batches
from ..layerwise.merging import check_alike
from ..layerwise.states import load_states, run_fingerprint, save_states
from .config import MaskConfig
from .layerwise_run import LayerwiseRun, LayerwiseTraining
from .loading import refuse_unlike
from .storage import check_options, mask_parts

__all__ = ["LayerwiseReport", "LayerwiseTraining", "train_layerwise"]


@dataclass(frozen=True)
class LayerwiseReport(Report):
    """Each block's error, before and after its masks learnt, for each task.

    An error is the mean over tokens of ``|merged - component|^2 / |component|^2`` of the block's output.
    """

    out: Path
    masks: Path
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]

    def summary(self) -> list[str]:
        """Where things are."""
        return [f"merged model: {self.out}; masks by parts: {self.masks}"]

    def table(self) -> Table:
        """A row for each block."""
        count = len(self.before[0])
        names = [f"{when}, task {k}" for k in range(count) for when in ("average", "masks")]
        rows = []
        for number, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            pairs = zip(before, after, strict=True)
            rows.append((str(number), *(f"{value:.5f}" for pair in pairs for value in pair)))
        return Table(("block", *names), rows)


def train_layerwise(
    paths: Sequence[object],
    data: Sequence[object],
    out: str | Path,
    *,
    base: object = None,
    masks: MaskConfig | None = None,
    training: LayerwiseTraining | None = None,
    auto_class: object = AutoModelForCausalLM,
    progress: bool = True,
    **options: object,
) -> LayerwiseReport:
    """Learn masks block by block, and write the merged model, without a whole model in memory at any time.

    Masks outside the blocks (embeddings, the last norm, the head) keep their initial values. The folder ``OUT.masks``
    then holds the masks, from which ``Merger.from_pretrained(paths, base=base, masks="OUT.masks")`` goes on. An
    interrupted run goes on at its block, by the same command.

    Args:
        paths: Components: folders, hub ids, ``"model+adapter"``.
        data: For each component its data: a file or rows for `TextExamples`, examples, or batches.
        out: Folder of the merged model; it must not exist or be empty.
        base: What they were tuned from: masks lie over differences from it.
        masks: How masks lie over the weights.
        training: How they learn.
        auto_class: Of transformers.
        progress: Show a bar.
        **options: ``max_shard_size``, ``threads``, ... of `merge_models`.

    Raises:
        ValueError: Numbers of components and data that differ, models that do not fit each other, no data.
        CheckpointError: A model without a list of blocks.

    Source: after ProDistill (arXiv 2502.12706), which learns element masks over task vectors so.
    """
    config = (masks or MaskConfig()).resolved(over_base=base is not None)
    training = training or LayerwiseTraining()
    for name, given in (("paths", paths), ("data", data)):
        if not isinstance(given, (list, tuple)):
            raise ValueError(f"train_layerwise: {name} is a {type(given).__name__}; needed a list, one a component")
    if len(data) != len(paths):
        raise ValueError(f"train_layerwise: {len(paths)} components, data for {len(data)}; needed data for each")
    if len(paths) < (2 if base is None else 1):
        raise ValueError(f"train_layerwise: {len(paths)} component; needed at least two, or one and a base")
    from_recipe = isinstance(config.initial, str) and config.initial.endswith((".yml", ".yaml"))
    if from_recipe or config.constraint == "spherical":
        raise ValueError("train_layerwise: initial masks of a recipe and constraint 'spherical' are Merger's alone")
    path = check_new(out, "train_layerwise")
    sources = [open_source(p) for p in (paths if base is None else [*paths, base])]
    check_alike(sources)
    skeleton = Skeleton(sources[-1 if base is not None else 0], auto_class, torch.float32)
    folders, labels = [str(source.folder) for source in sources], [source.label for source in sources]
    configs = [AutoConfig.from_pretrained(folder) for folder in folders]
    refuse_unlike(configs, folders, labels, auto_class, {}, strict=True)
    if config.modules is not None:
        modules = {name.rpartition(".")[0] for name, _ in skeleton.model.named_parameters()}
        if not any(fnmatchcase(name, pattern) for name in modules for pattern in config.modules):
            raise ValueError(f"train_layerwise: no module has a name like {config.modules}; there is {min(modules)!r}")
    batches = [
        calibration_batches(d, s, batch_size=training.batch_size, max_length=training.max_length)
        for d, s in zip(data, sources, strict=False)
    ]
    check_options(options)
    mark = run_fingerprint(sources, batches, [asdict(config), asdict(training), base is not None])
    run = LayerwiseRun(skeleton, sources, batches, config, training, mark, over_base=base is not None)
    folder = path.with_name(f"{path.name}.masks")
    if not run.is_done(folder):  # else it was interrupted while it baked
        with NewFolder(folder, "train_layerwise", resumable=True) as stage:
            run.folder = stage.folder
            first, states = load_states(stage.folder, mark)
            if not first:
                stage.clear()
            run.begin(states)
            count = len(skeleton.blocks)
            for number in tqdm(range(first, count), desc="masks", unit="block", initial=first, total=count,
                               disable=not progress):  # fmt: skip
                run.train_block(number)
                save_states(stage.folder, run.states(), done=number + 1, mark=mark, job="train_layerwise")
            stage.clear(keep=[part.name for part in mask_parts(stage.folder)])
    run.folder = folder
    run.bake(path, {**options, "progress": progress})
    before, after = run.errors()
    return LayerwiseReport(path, folder, before, after)
