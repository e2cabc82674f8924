"""`train_judge`: train a judge on a file of labeled pairs, and compare it with baselines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import (
    AutoConfig,
    EarlyStoppingCallback,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)

from model_components._checkpoints import newest_whole
from model_components._devices import find_device, is_faster_in_bfloat16
from model_components._folders import names_in, new_file, write_json
from model_components._hub import find_folder
from model_components._report import Axes, Figure, Report, Table
from model_components._runs import RunFolder

from ..data.collate import PairwiseDataset
from ..judge_config import JudgeConfig
from ..model import PairwiseModel
from ..pairs import Pair
from ..report.baselines import Rival, needs_scikit_learn
from ..report.evaluation import (
    CalibrationReport,
    PairwiseReport,
    calibrate_,
    pairwise_report,
)
from ..surgery import freeze_
from ..uncertainty import WIDEST, fit_uncertainty_, width_of
from .division import divide, labeled_pairs, prompts_of, without_few_ties
from .trainer import PairwiseTrainer, check_training_data

_RESULTS = ("report.json", "report.txt", "calibration.png", "model")
_FEW_PAIRS = 200  # below this, the 95 % interval of an accuracy is about ± 7 % or wider
# the fraction of a frozen encoder's layers to use. The upper layers are specialized for the task
# that it was trained on; MiniLM's lower four judge better than all six (docs/pairwise.md)
_FROZEN_SHARE = 2 / 3


@dataclass(frozen=True)
class JudgeReport(Report):
    """The result of `train_judge`.

    Attributes:
        out: The output folder; the judge is in its ``model``.
        home: The report on held-out prompts, with baselines.
        away: The report on pairs with answers of held-out models, which wrote no training answer;
            None if no answering model was held out.
        unseen: The names of the held-out models.
        calibration: The result of `calibrate_`.
        read: A summary of the data that were read.
        shares_prompts: Which of ``"home"`` and ``"away"`` have prompts in common with the pairs
            that the judge was trained or calibrated on, because there were too few other prompts.
    """

    out: Path
    home: PairwiseReport
    away: PairwiseReport | None
    unseen: tuple[str, ...]
    calibration: CalibrationReport
    read: str
    shares_prompts: tuple[str, ...]

    def summary(self) -> list[str]:
        """Return lines on the data that were read and on the temperature."""
        return [self.read, *self.calibration.summary()]

    def table(self) -> Table:
        """Return a table that compares the judge and the best baseline on each held-out set."""
        rows = []
        for name, report in self._sets().items():
            metrics = report.metrics
            rival = _strongest(report)
            rows.append(
                (
                    name,
                    str(metrics.pairs),
                    f"{metrics.accuracy:.1%}",
                    f"{metrics.log_loss:.4f}",
                    f"{metrics.calibration_error:.3f}",
                    f"{rival.name} {rival.log_loss:.4f}",
                    f"{rival.gain:+.4f} ± {rival.error:.4f}",
                )
            )
        header = ("held out", "pairs", "accuracy", "log-loss", "calibration error")
        return Table((*header, "strongest baseline", "the judge's gain"), rows)

    def remarks(self) -> list[str]:
        """Return lines on the gain over the best baseline, the held-out pairs and the files."""
        lines = []
        for name, report in self._sets().items():
            pairs = report.metrics.pairs
            if pairs < _FEW_PAIRS:
                # half of the 95 % interval of a share near one half
                error = 1.96 * 0.5 / pairs**0.5
                lines.append(f"{name}: only {pairs} pairs, so its accuracy is ± {error:.0%}")
            rival = _strongest(report)
            # if all pairs have one prompt, the error is nan, and the judge is not called better
            if rival.gain > 2 * rival.error:
                lines.append(f"{name}: better than {rival.name} by more than two standard errors")
            elif rival.gain < -2 * rival.error:
                lines.append(f"{name}: worse than {rival.name} by more than two standard errors")
            else:
                lines.append(f"{name}: not better than {rival.name} by two standard errors")
        if self.away is None:
            lines.append(
                "away (unseen models): not measured, because no answering model was held out "
                "(unseen_writers); verdicts on other models' answers may be worse"
            )
        else:
            lines.append(
                f"away: pairs with answers of {', '.join(self.unseen)}, which wrote no training "
                "answer"
            )
        for name in self.shares_prompts:
            lines.append(f"{name}: there are so few prompts that some also occur in training pairs")
        if files := names_in(self.out):
            # the last two are written after this line
            files = sorted({*files, "report.json", "report.txt"})
            lines.append(f"in {self.out}: {', '.join(files)}")
        return lines

    def _sets(self) -> dict[str, PairwiseReport]:
        sets = {"home (prompts)": self.home}
        if self.away is not None:
            shared = "away" in self.shares_prompts
            sets["away (models)" if shared else "away (prompts and models)"] = self.away
        return sets

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot accuracy by confidence on held-out prompts (needs the extra ``plot``).

        Raises:
            ImportError: matplotlib is not installed.
        """
        return self.home.plot(ax)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the table and of all baselines, for JSON."""
        found: dict[str, Any] = {"read": self.read, "temperature": self.calibration.temperature}
        for name, report in (("home", self.home), ("away", self.away)):
            if report is None:
                continue
            rivals = {}
            for rival in report.rivals:
                rivals[rival.name] = {
                    "log_loss": round(rival.log_loss, 4),
                    "gain": round(rival.gain, 4),
                    "error": round(rival.error, 4),
                }
            found[name] = report.metrics.to_dict() | {"rivals": rivals}
        return found | {"unseen": list(self.unseen)}


def _strongest(report: PairwiseReport) -> Rival:
    return min(report.rivals, key=lambda rival: rival.log_loss)


def train_judge(
    pairs: str | Path | Iterable[Mapping[str, object]] | Sequence[Pair],
    encoder: str | Path,
    *,
    out: str | Path,
    columns: Mapping[str, str] | None = None,
    device: str = "cpu",
    progress: bool = True,
    **settings: Any,
) -> JudgeReport | None:
    """Train a judge that decides which of two answers is better, and compare it with baselines.

    Three parts of the prompts are held out: one to choose the epoch, one to fit the temperature,
    and one to compare the judge with baselines that need no encoder (home). If six or more
    answering models each occur in less than half of the pairs, some of them are held out, and the
    judge is tested separately on pairs with their answers (away).

    The output folder gets ``model`` (which `PairwiseModel.from_pretrained` loads, and whose model
    card has the report), ``report.txt``, ``report.json`` and, with matplotlib installed,
    ``calibration.png``. A frozen encoder's features are kept in ``features``. The same call
    continues an interrupted run.

    Args:
        pairs: Labeled pairs: a file, rows or `Pair`s; see `read_pairs` for the formats.
        encoder: Folder or hub id of an encoder or a language model.
        out: Output folder: a new path, or the folder of the same run if that is not finished.
        columns: Names of the columns, as in `read_pairs`.
        device: The device to compute on.
        progress: Whether to show progress bars.
        **settings: Fields of `JudgeConfig`.

    Returns:
        The reports on home and away pairs, with baselines; None in processes other than the first.

    Raises:
        ValueError: A setting, the pairs or the encoder are invalid, or ``out`` holds another run or
            a finished one. The error is raised before training starts.
        ImportError: scikit-learn is not installed (extra ``judge``).
        DeadRunError: A loss is not finite, or training learns nothing.
    """
    config = JudgeConfig.from_dict(settings)
    needs_scikit_learn("train_judge")
    device = find_device(device, "train_judge")
    labeled, read = labeled_pairs(pairs, columns)
    labeled, left_out = without_few_ties(labeled, config)
    if left_out:
        read += f"\n{left_out} ties left out (ties='keep' keeps them)"
    folder = find_folder(encoder, operation="train_judge")
    out = Path(out)
    set_seed(config.seed)
    parts, unseen = divide(labeled, config)
    model = _model(folder, labeled, config, device)
    data = {}
    for use, part in parts._asdict().items():
        # only `away` may be empty
        if part:
            data[use] = model.dataset(part, progress=progress)
    # check the data before anything is encoded or written
    check_training_data(data["train"], model)
    arguments = _arguments(out, config, device, progress)
    run = RunFolder(
        out,
        # with the number of layers in use, which the default may have chosen
        {
            "encoder": str(encoder),
            **config.to_dict(),
            "depth": getattr(model.encoder.config, "num_hidden_layers", None),
        },
        "judge train",
        contents={
            "pairs": xxhash.xxh3_128_hexdigest(repr(labeled).encode()),
            "tokenizer": str(data["train"].sample_ids),
        },
        checkpoints="checkpoints",
        results=_RESULTS,
        fresh=None,
    )
    with run:
        if (out / "report.json").is_file():
            raise ValueError(
                f"train_judge: the run in {out} is finished (see its report.txt); choose "
                "another folder"
            )
        if not config.trains_encoder:
            for one in data.values():
                one.encode_(model, cache=out / "features", progress=progress)
        trainer = _trainer(model, data["train"], data["choose_epoch"], arguments, config)
        checkpoint = newest_whole(out / "checkpoints", "train_judge")
        trainer.train(resume_from_checkpoint=checkpoint)
        if not trainer.is_world_process_zero():
            return None
        if config.link == "antisymmetric" and width_of(model) <= WIDEST:
            fit_uncertainty_(model, data["train"], data["calibrate"])
        calibration = calibrate_(model, data["calibrate"], progress=progress)
        seen = parts.seen()
        reports = {}
        for name in ("home", "away"):
            if name in data:
                reports[name] = pairwise_report(model, data[name], train=seen, progress=progress)
        asked = prompts_of(seen)
        shared = tuple(name for name in reports if asked & prompts_of(getattr(parts, name)))
        report = JudgeReport(
            out, reports["home"], reports.get("away"), unseen, calibration, read, shared
        )
        model.save_pretrained(out / "model", report=report.home)
        _write(report, out)
    return report


def _dtype(config: JudgeConfig, device: str) -> torch.dtype:
    """Return the dtype of the encoder's weights."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    # features are pooled in float32; trained bfloat16 weights would not change at small rates
    takes_half = not config.trains_encoder and is_faster_in_bfloat16(torch.device(device))
    return torch.bfloat16 if takes_half else torch.float32


def _lower_layers(folder: Path, config: JudgeConfig) -> int | None:
    """Return the default number of encoder layers to use, from the lowest, or None for all."""
    if config.trains_encoder:
        return None
    try:
        encoder_config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):  # from_encoder gives the reason
        return None
    count = getattr(encoder_config.get_text_config(), "num_hidden_layers", None)
    return max(1, round(_FROZEN_SHARE * count)) if isinstance(count, int) else None


def _model(folder: Path, pairs: list[Pair], config: JudgeConfig, device: str) -> PairwiseModel:
    has_ties = any(
        pair.label[2:] > (0,) if isinstance(pair.label, tuple) else pair.label == 2
        for pair in pairs
    )

    def made(depth: int | None) -> Any:
        return PairwiseModel.from_encoder(
            folder,
            dtype=_dtype(config, device),
            depth=depth,
            link=config.link,
            pooling=list(config.pooling),
            surface=list(config.surface),
            max_tokens=config.max_tokens,
            hidden_features=config.hidden_features,
            dropout=config.dropout,
            ties=has_ties,
        )

    depth = config.depth or _lower_layers(folder, config)
    try:
        model = made(depth)
    except ValueError:
        if depth is None or config.depth is not None:
            raise
        # some model families need their upper layers, for example because layers share
        # parameters; any other error is raised again
        model = made(None)
    freeze_(model, config.freeze)
    return model.to(device)


def _arguments(out: Path, config: JudgeConfig, device: str, progress: bool) -> TrainingArguments:
    tunes = config.trains_encoder
    world = int(os.environ.get("WORLD_SIZE", 1))
    if config.batch_size % world:
        raise ValueError(
            f"train_judge: batch_size is {config.batch_size}, expected a multiple of {world}, the "
            "number of processes"
        )
    return TrainingArguments(
        str(out / "checkpoints"),
        num_train_epochs=config.epochs or (3 if tunes else 8),
        per_device_train_batch_size=config.batch_size // world,
        learning_rate=config.learning_rate or (3e-5 if tunes else 1e-3),
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        weight_decay=config.weight_decay,
        seed=config.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="log_loss",
        greater_is_better=False,
        logging_steps=50,
        report_to="none",
        use_cpu=device == "cpu",
        disable_tqdm=not progress,
        # otherwise the patience of early stopping would start again after an interruption
        restore_callback_states_from_checkpoint=True,
    )


def _trainer(
    model: PairwiseModel,
    train: PairwiseDataset,
    held_out: PairwiseDataset,
    arguments: TrainingArguments,
    config: JudgeConfig,
) -> PairwiseTrainer:
    trainer = PairwiseTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        layer_decay=config.layer_decay,
        # with a frozen encoder, the learning rate is the head's
        head_lr_ratio=config.head_lr_ratio if config.trains_encoder else 1.0,
        callbacks=[EarlyStoppingCallback(3)],
    )
    # without a progress bar, transformers prints a dictionary for each log entry
    trainer.remove_callback(PrinterCallback)
    return trainer


def _write(report: JudgeReport, out: Path) -> None:
    """Write the plot, the text and, last, report.json, which marks the run as finished."""
    if importlib.util.find_spec("matplotlib") is not None:
        with new_file(out / "calibration.png", "train_judge") as temporary:
            report.plot().savefig(temporary, format="png")
    texts = [str(report), "home (held-out prompts):", str(report.home)]
    if report.away is not None:
        texts += ["away (answers of held-out models):", str(report.away)]
    with new_file(out / "report.txt", "train_judge") as temporary:
        temporary.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    write_json(out / "report.json", report.to_dict(), "train_judge")
