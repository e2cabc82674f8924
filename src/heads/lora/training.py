"""`tune`: fine-tune a language model, or adapters for it, on rows of text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)

from model_components._checkpoints import newest_whole
from model_components._devices import peak_memory, reset_peak_memory
from model_components._examples import Example, split_examples
from model_components._folders import NewFolder, OutputError
from model_components._formats import reading
from model_components._hub import cached_commit, find_folder
from model_components._model_folders import card_of, complete_folder, load_tokenizer, shown_name
from model_components._runs import RunFolder
from model_components._trainer import StepTrainer

from .config import TuneConfig
from .data import TextExamples
from .evaluation import ANSWERS, HeldOut, JudgeMaker, check_judge, name_of
from .losses import answer_loss
from .report.runs import CURVES, LOG, REPORT, TuneReport, read_report
from .storage.merge import RoundingError, merge_lora
from .surgery.trainable import load_trainable

_LARGE = 1_000_000_000  # models with at least this many parameters get a lower learning rate
# Default learning rates of small and of large models. The rates of small models come from a search
# on SmolLM2-135M (docs/lora.md), and the rates of large models from Dettmers et al., arXiv
# 2305.14314, and from Stanford Alpaca.
_ADAPTER_RATES = (5e-4, 2e-4)
_FULL_RATES = (5e-5, 2e-5)
_MOST_HELD_OUT = 200  # examples
_WATCHED = 64  # number of held-out examples whose loss is computed during training
_SAVE_INTERVAL = 0.1  # fraction of all steps between two checkpoints
_FINGERPRINT = 1 << 20  # bytes that are hashed at the beginning and at the end of a weight file
_RESULTS = (REPORT, LOG, ANSWERS, CURVES, "adapter", "model")


def tune(
    model: str | Path,
    rows: str | Path | Iterable[object],
    *,
    out: str | Path,
    eval_rows: str | Path | Iterable[object] | None = None,
    judge: Literal["likelihood_gain"] | JudgeMaker | None = None,
    progress: bool = True,
    **settings: Any,
) -> TuneReport:
    """Fine-tune a language model on rows of text, and report whether the training went well.

    The folder ``out`` receives ``adapter`` (peft's files, unless r is 0), ``model`` (the merged
    checkpoint, or the tuned model if r is 0), ``answers.json``, ``log.json``, ``report.json`` and,
    if matplotlib is installed, ``curves.png``. A merged checkpoint is not written if ``merge`` is
    False, or if `merge_lora` does not support the model; the report then says why. It is written in
    float32 if rounding to the model's dtype would lose more than a quarter of the updates. The
    folder also keeps ``run.json`` and the newest checkpoint of the training, in ``checkpoints``.

    A checkpoint is written after every tenth of the steps. Repeating the call continues an
    interrupted run from its newest checkpoint. If the run has finished, the call returns its
    report.

    Args:
        model: Folder or hub id of a causal language model.
        rows: Training rows, or their file or hub id; see `TextExamples` for files and layouts.
        out: Output folder: a new path, or the folder of the same run.
        eval_rows: Held-out rows, in the same forms as ``rows``; default: a part of ``rows``.
        judge: The judge that scores the answers to held-out prompts, before and after tuning. If
            None, answers get no score. ``"likelihood_gain"`` is `LikelihoodGain` under the model
            before tuning. A function receives a mapping from prompts to reference answers and
            returns a judge, for example ``partial(WinRate, pairwise_model)``. Only the judge's name
            is stored with the run.
        progress: Show progress bars.
        **settings: Fields of `TuneConfig`.

    Returns:
        The losses before and after tuning, the verdict on their curves, the cost, and the folder.

    Raises:
        ValueError: A setting, a row or the model is invalid, or ``out`` belongs to another run. In
            these cases, nothing has been trained. A failure of the judge is also a ValueError;
            to continue after it, repeat the call with or without a judge.
        DeadRunError: A loss or gradient is not finite.
    """
    config = TuneConfig.from_dict(settings)
    if not isinstance(model, (str, Path)):
        raise ValueError(
            f"tune: expected a folder or a hub id, got a {type(model).__name__}; for a model in "
            "memory, use prepare_lora"
        )
    check_judge(judge, config)
    folder = find_folder(model)
    tokenizer = _load_tokenizer(folder)
    data = _read_data(rows, eval_rows, folder, tokenizer, config)
    out = Path(out)
    run = RunFolder(
        out,
        {"model": str(model), "judge": name_of(judge), **config.to_dict()},
        "tune",
        contents={"rows": data.digest, "model": _fingerprint(folder)},
        checkpoints="checkpoints",
        # no weight depends on the judge, so another judge may replace one that failed
        may_change=("judge",),
        results=_RESULTS,
        fresh=None,
    )
    if (out / REPORT).is_file():
        return _finished(run, name_of(judge))
    set_seed(config.seed)
    tuned = load_trainable(folder, config)
    _check_tokens(tuned, tokenizer, data)
    steps = _count_steps(data, config)
    checkpoint = newest_whole(out / "checkpoints", "tune")
    arguments = _arguments(tuned, out, config, steps, is_new=checkpoint is None, progress=progress)
    evaluation = HeldOut(tuned, tokenizer, data.held_out, _collator(tokenizer, config), config)
    evaluation.progress = progress
    evaluation.set_judge(judge, folder)
    with run:
        trainer = _trainer(tuned, arguments, data, evaluation.collator)
        # correct in a continued run, too: the weights are untuned until train loads the checkpoint
        before = evaluation.measure()
        _reset_peak()
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - start - trainer.evaluation_seconds
        peak = _peak_mb()
        notes = list(data.notes)
        if checkpoint is not None:
            notes.append(
                f"continued from {checkpoint.name}; the time covers only the steps since then"
            )
        # the written model must stop at the tokens that end the answers that it was trained on
        tuned.generation_config.eos_token_id = evaluation.ends
        notes += _save(tuned, folder, out, config, progress=progress)
        after = evaluation.measure()  # last, because a judge may fail
        evaluation.write(out, before, after)
        report = TuneReport(
            out=out,
            model=str(model),
            train_rows=len(data.train),
            held_out_rows=len(data.held_out),
            trained_parameters=sum(p.numel() for p in tuned.parameters() if p.requires_grad),
            parameters=sum(p.numel() for p in tuned.parameters()),
            steps=trainer.state.global_step,
            learning_rate=arguments.learning_rate,
            loss_before=before.loss,
            loss=after.loss,
            score_before=before.score,
            score=after.score,
            seconds=seconds,
            peak_mb=peak,
            notes=tuple(notes),
            log=tuple(trainer.state.log_history),
        )
        # record this call's judge before the report marks the run as finished
        run.update()
        report.write()
        return report


def _finished(run: RunFolder, judge: str | None) -> TuneReport:
    """Return the report of a finished run; raise ValueError if its settings or judge differ."""
    with run:  # entering raises if the folder belongs to another run
        facts = run.read() or {}
        if facts.get("judge") != judge:
            raise ValueError(
                f"tune: expected the judge {facts.get('judge')} of the finished run in "
                f"{run.folder}, got {judge}; choose another output folder"
            )
        return read_report(run.folder)


def _load_tokenizer(folder: Path) -> Any:
    with reading(folder, "tune"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"  # else padding would precede the first token
    if tokenizer.pad_token is None:
        # any token is suitable, because the labels of padding are ignored
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


@dataclass(frozen=True)
class _Data:
    """The examples of a run.

    Attributes:
        train: The training examples.
        held_out: The held-out examples.
        digest: A hash of the rows.
        notes: Remarks on rows that were truncated or left out.
    """

    train: list[Example]
    held_out: list[Example]
    digest: str
    notes: list[str]


def _read_data(
    rows: Any, eval_rows: Any, folder: Path, tokenizer: Any, config: TuneConfig
) -> _Data:
    with reading(folder, "tune"):
        model_config = AutoConfig.from_pretrained(folder).get_text_config()
    positions = getattr(model_config, "max_position_embeddings", None) or config.max_length
    length = min(config.max_length, positions)
    texts = TextExamples(rows, tokenizer, max_length=length)
    notes = []
    if texts.cut:
        notes.append(f"truncated to {length} tokens: {texts.cut} examples")
    if texts.left_out:
        notes.append(
            f"left out because they have no answer within {length} tokens: {texts.left_out} rows"
        )
    if eval_rows is not None:
        others = TextExamples(eval_rows, tokenizer, max_length=length)
        digest = f"{texts.digest} {others.digest}"
        return _Data(texts.examples, others.examples, digest, notes)
    [(train, held_out)] = split_examples([texts], config.held_out, _MOST_HELD_OUT)
    shared = len(texts) - len(train) - len(held_out)
    if shared:
        notes.append(f"left out because a held-out row has the same prompt: {shared} examples")
    if not train:
        raise ValueError(
            "tune: expected training rows besides the held-out ones, got none: each of the "
            f"{len(texts)} examples is held out or has the same prompt as a held-out row; add rows "
            "with other prompts, or pass eval_rows"
        )
    return _Data(train, held_out, texts.digest, notes)


def _fingerprint(folder: Path) -> str:
    """Return a hash of the config and weight files: their names, sizes, first and last bytes."""
    digest = xxhash.xxh3_128()
    paths: list[Path] = []
    for pattern in ("*.safetensors", "*.bin", "config.json"):
        paths += folder.glob(pattern)
    for path in sorted(paths):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        # reading gigabytes in full would delay every call
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT))
            file.seek(max(0, size - _FINGERPRINT))
            digest.update(file.read(_FINGERPRINT))
    return digest.hexdigest()


def _length(example: Example) -> int:
    """Return the length of an example, by which examples are sorted to reduce padding."""
    return len(example["input_ids"])


class TuneTrainer(StepTrainer):
    """A trainer whose held-out loss is the mean over all supervised tokens.

    Attributes:
        evaluation_seconds: The total time of all evaluations, in seconds.
    """

    evaluation_seconds = 0.0

    def evaluate(self, *_: object, **named: object) -> dict[str, float]:
        """Compute and log the loss of ``eval_dataset``; the arguments are ignored."""
        start = time.perf_counter()
        collator: Any = self.data_collator
        loss, _perplexity = answer_loss(
            self.unwrapped(),
            self.eval_dataset,
            collator,
            batch_size=self.args.per_device_eval_batch_size,
            progress=False,
        )
        metrics = {"eval_loss": loss}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self.evaluation_seconds += time.perf_counter() - start
        return metrics


class _LossBar(ProgressCallback):
    """A progress bar of the steps that also shows the latest losses."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Show the logged losses in the progress bar."""
        self._losses |= {k: f"{logs[k]:.3f}" for k in ("loss", "eval_loss") if k in (logs or {})}
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._losses, refresh=False)


def _check_tokens(model: Any, tokenizer: Any, data: _Data) -> None:
    """Raise ValueError if an example or the padding has a token without an embedding."""
    count = model.get_input_embeddings().weight.shape[0]
    largest = max(max(one["input_ids"]) for one in (*data.train, *data.held_out))
    largest = max(largest, tokenizer.pad_token_id)
    if largest >= count:
        raise ValueError(
            f"tune: expected token ids below {count} (the size of the model's embedding), got "
            f"{largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) from the tokenizer"
        )


def _default_rate(model: nn.Module, config: TuneConfig) -> float:
    small, large = _ADAPTER_RATES if config.r else _FULL_RATES
    if sum(p.numel() for p in model.parameters()) < _LARGE:
        return small
    return large


def _count_steps(data: _Data, config: TuneConfig) -> int:
    """Return the number of optimizer steps of a run on one device."""
    if config.max_steps is not None:
        return config.max_steps
    batches = math.ceil(len(data.train) / config.batch_size)
    # transformers also takes a step at the end of an epoch if fewer batches than usual are left
    return math.ceil(config.epochs * math.ceil(batches / config.accumulation))


def _arguments(
    model: nn.Module, out: Path, config: TuneConfig, steps: int, *, is_new: bool, progress: bool
) -> TrainingArguments:
    # most other schedules do not accept min_lr_rate
    has_floor = config.lr_scheduler_type == "cosine_with_min_lr"
    return TrainingArguments(
        output_dir=str(out / "checkpoints"),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate or _default_rate(model, config),
        lr_scheduler_type=config.lr_scheduler_type,
        lr_scheduler_kwargs={"min_lr_rate": config.min_lr_ratio} if has_floor else {},
        # rounded down: transformers would round up, and a run of 1 step would have a rate of 0
        warmup_steps=int(config.warmup * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        optim=config.optim,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(1, round(steps / config.evaluations)),
        eval_on_start=is_new,  # a continued run has this loss in its log
        save_steps=max(1, math.ceil(_SAVE_INTERVAL * steps)),
        save_total_limit=1,
        seed=config.seed,
        report_to="none",
        disable_tqdm=not progress,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _collator(tokenizer: Any, config: TuneConfig) -> Any:
    return DataCollatorWithFlattening() if config.pack else DataCollatorForSeq2Seq(tokenizer)


def _trainer(model: Any, arguments: TrainingArguments, data: _Data, collator: Any) -> TuneTrainer:
    # do not group by length: such batches make the loss oscillate, which looks like spikes
    trainer = TuneTrainer(
        model,
        arguments,
        train_dataset=data.train,
        eval_dataset=sorted(data.held_out[:_WATCHED], key=_length),
        data_collator=collator,
    )
    # these callbacks print a line for every step, which would hide everything else
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if not arguments.disable_tqdm:
        trainer.add_callback(_LossBar())
    return trainer


def _save(model: Any, folder: Path, out: Path, config: TuneConfig, *, progress: bool) -> list[str]:
    """Write the adapter and the tuned model; return remarks on the merge."""
    tokenizer = load_tokenizer(folder)
    if config.r:
        # other machines do not have this cache folder: they need the hub id and the same commit
        if cached := cached_commit(folder):
            for adapter in model.peft_config.values():
                adapter.base_model_name_or_path, adapter.revision = cached
        model.save_pretrained(out / "adapter")
        card = card_of(
            f"LoRA adapter of {shown_name(str(folder))}",
            [
                f"Rank {config.r}, trained by `heads.lora.tune`.",
                "Load it with `peft.PeftModel.from_pretrained(base, folder)`.",
            ],
            bases=[str(folder)],
            tags=["lora"],
            relation="adapter",
            library_name="peft",
        )
        # this replaces the card that peft wrote, which is an unfilled template
        complete_folder(out / "adapter", card, tokenizer=tokenizer)
    if (out / "model").exists():  # an earlier call wrote it, but was stopped later
        return _note_on_dtype(model, out / "model")
    if not config.r:
        card = card_of(
            f"{shown_name(str(folder))}, tuned",
            ["Trained by `heads.lora.tune`."],
            bases=[str(folder)],
            tags=["fine-tuned"],
            relation="finetune",
        )
        with NewFolder(out / "model", "tune") as new:
            model.save_pretrained(new.folder)
            complete_folder(new.folder, card, source=str(folder), tokenizer=tokenizer)
    elif config.merge:
        return _merged(model, out / "model", tokenizer, progress)
    return []


def _merged(model: Any, out: Path, tokenizer: Any, progress: bool) -> list[str]:
    """Write the merged model; return remarks, such as the reason why it was not written."""
    try:
        merge_lora(model, out, tokenizer=tokenizer, progress=progress)
    except OutputError:
        # an OutputError means a full disk or a folder in use, not a rejected merge
        raise
    except RoundingError:
        merge_lora(model, out, dtype="float32", tokenizer=tokenizer, progress=progress)
    except ValueError as error:
        return [f"model was not written: {error}. The adapter is saved."]
    return _note_on_dtype(model, out)


def _note_on_dtype(model: Any, out: Path) -> list[str]:
    """Return a remark if the merged model is in float32 although the base is not."""
    base = {parameter.dtype for parameter in model.get_base_model().parameters()}
    if base == {torch.float32} or _stored_dtypes(out) != {"F32"}:
        return []
    return [
        "model is in float32, because rounding to the dtype of the base would lose more than a "
        "quarter of the updates"
    ]


def _stored_dtypes(folder: Path) -> set[str]:
    """Return the dtypes of a checkpoint's tensors, by the names that safetensors uses."""
    dtypes = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                dtypes.add(file.get_slice(name).get_dtype())
    return dtypes


def _reset_peak() -> None:
    """Reset the peak that `_peak_mb` returns."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    reset_peak_memory()


def _peak_mb() -> float:
    """Return the peak memory of the GPU or, without a GPU, of the process, in MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_memory() / 2**20
