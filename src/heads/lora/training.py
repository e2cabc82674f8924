"""`tune`: fine-tune a language model on rows of text, with adapters or in full."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from peft import LoraConfig, PeftModel
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    GenerationConfig,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)

from model_components._checkpoints import newest_whole
from model_components._devices import peak_memory, reset_peak_memory
from model_components._examples import Example
from model_components._folders import NewFolder, OutputError, write_json
from model_components._formats import reading
from model_components._hub import find_folder
from model_components._model_folders import card_of, complete_folder, load_tokenizer, shown_name
from model_components._modes import evaluating
from model_components._runs import RunFolder
from model_components._trainer import StepTrainer

from .config import TuneConfig
from .data import TextExamples, check_packed_examples, first_answer, split_examples
from .judging import Judge, LikelihoodGain, judge_answers
from .losses import answer_loss, fuse_cross_entropy_
from .report.runs import LOG, REPORT, TuneReport, read_report
from .storage.merge import merge_lora
from .surgery.prepare import prepare_lora

JudgeMaker = Callable[[Mapping[str, str]], Judge]
"""A function from reference answers by prompt to a judge, such as ``partial(WinRate, model)``."""

_LARGE = 1_000_000_000  # parameters of a model that wants a lower rate
# Learning rates of small and of large models. Those of small models come from a search on
# SmolLM2-135M (docs/lora.md), those of large ones from Dettmers et al., arXiv 2305.14314, and from
# Stanford Alpaca.
_ADAPTER_RATES = (5e-4, 2e-4)
_FULL_RATES = (5e-5, 2e-5)
_MOST_HELD_OUT = 200  # rows
_WATCHED = 64  # held-out rows whose loss is computed during training
_SAVE_INTERVAL = 0.1  # fraction of all steps between two checkpoints
_GENERATED = 8  # answers at once


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
    """Fine-tune a language model on rows of text, and report whether that went well.

    ``out`` gets ``adapter`` (files of peft), ``model`` (the merged checkpoint, or the tuned model
    if r is 0), ``answers.json``, ``log.json``, ``report.json`` and, with matplotlib installed,
    ``curves.png``. ``model`` is missing if ``merge`` is False, or if rounding would lose too much
    of the adapters. ``run.json`` and the newest of the ``checkpoints`` stay there, too.

    The same call continues an interrupted run from its newest checkpoint, of which there is one
    every tenth of the steps. If the run has finished, the call returns its report.

    Args:
        model: Folder or hub id of a causal language model.
        rows: Rows to train, or a file of them; see `TextExamples` for their layouts.
        out: Output folder: new, empty, or of the same run.
        eval_rows: Held-out rows; default: a part of the rows.
        judge: Also score the answers to held-out prompts, before and after tuning.
            ``"likelihood_gain"`` is `LikelihoodGain` under the model before tuning. A function
            returns another judge, given the reference answers by prompt, for example
            ``partial(WinRate, pairwise_model)``.
        progress: Show progress bars.
        **settings: Fields of `TuneConfig`.

    Returns:
        The losses before and after, the verdict on the curves, and where everything is.

    Raises:
        ValueError: A setting, a row or the model is invalid, or ``out`` belongs to another run;
            nothing has been written then. Or the judge failed; the same call goes on from there.
        DeadRunError: A loss or gradient is not finite.
    """
    config = TuneConfig.from_dict(settings)
    if judge not in (None, "likelihood_gain") and not callable(judge):
        raise ValueError(
            f"tune: judge is {judge!r}, expected 'likelihood_gain', None or a function of "
            "the reference answers"
        )
    if judge is not None and not config.answers:
        raise ValueError("tune: answers is 0, expected 1 or more for the judge")
    folder = find_folder(model)
    tokenizer = _load_tokenizer(folder)
    train, held_out, notes = _examples(rows, eval_rows, tokenizer, config)
    contents = {"rows": _hash([train, held_out])}
    facts = {"model": str(model), "judge": _name_of(judge), **config.to_dict()}
    run = RunFolder(
        Path(out),
        facts,
        "tune",
        contents=contents,
        checkpoints="checkpoints",
        results=(REPORT, LOG),
        fresh=None,
    )
    if (Path(out) / REPORT).is_file():
        with run:  # entering raises if the folder belongs to another run
            return read_report(Path(out))
    set_seed(config.seed)
    tuned = _trainable(folder, config)
    rate = config.learning_rate or _default_rate(tuned, config)
    with run:
        trainer = _trainer(tuned, tokenizer, train, held_out, Path(out), config, rate, progress)
        evaluation = _HeldOut(trainer, tokenizer, held_out, config, progress)
        evaluation.judge = _judge_of(judge, tuned, folder, evaluation, tokenizer)
        before = evaluation.measure()
        checkpoint = newest_whole(Path(out) / "checkpoints", "tune")
        _reset_peak()
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - start - trainer.evaluation_seconds
        peak = _peak_mb()
        after = evaluation.measure()
        if checkpoint is not None:
            notes.append(f"continued from {checkpoint.name}; the time is of the steps since then")
        notes += _save(tuned, folder, Path(out), config, progress)
        evaluation.write(Path(out), before, after)
        report = TuneReport(
            out=Path(out),
            model=str(model),
            train_rows=len(train),
            held_out_rows=len(held_out),
            trained_parameters=sum(p.numel() for p in tuned.parameters() if p.requires_grad),
            parameters=sum(p.numel() for p in tuned.parameters()),
            steps=trainer.state.global_step,
            learning_rate=rate,
            loss_before=before.loss,
            loss=after.loss,
            score_before=before.score,
            score=after.score,
            seconds=seconds,
            peak_mb=peak,
            notes=tuple(notes),
            log=tuple(trainer.state.log_history),
        )
        report.write()
        return report


def _load_tokenizer(folder: Path) -> Any:
    with reading(folder, "tune"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        # any token will do, since padded labels are ignored
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _examples(
    rows: Any, eval_rows: Any, tokenizer: Any, config: TuneConfig
) -> tuple[list[Example], list[Example], list[str]]:
    """Return the examples to train, the held-out ones, and remarks on them."""
    texts = TextExamples(rows, tokenizer, max_length=config.max_length)
    notes = []
    if texts.cut:
        notes.append(f"cut to max_length {config.max_length}: {texts.cut} rows")
    if texts.left_out:
        notes.append(f"left out, without an answer: {texts.left_out} rows")
    if eval_rows is not None:
        held_out = TextExamples(eval_rows, tokenizer, max_length=config.max_length).examples
        return texts.examples, held_out, notes
    train, held_out = split_examples(texts.examples, config.held_out, _MOST_HELD_OUT, config.seed)
    shared = len(texts) - len(train) - len(held_out)
    if shared:
        notes.append(f"left out, with the prompt of a held-out row: {shared} rows")
    if not train:
        raise ValueError(
            "tune: expected rows to train besides the held-out ones, got none of "
            f"{len(texts)}; give rows with other prompts, or eval_rows"
        )
    return train, held_out, notes


def _hash(examples: object) -> str:
    return xxhash.xxh3_128(json.dumps(examples).encode()).hexdigest()


def _name_of(judge: object) -> str | None:
    """Return the name of a judge for ``run.json``."""
    if judge is None or isinstance(judge, str):
        return judge
    function = getattr(judge, "func", judge)  # of functools.partial
    return getattr(function, "__qualname__", type(function).__name__)


def _length(example: Example) -> int:
    """Return the key of sorting by length, which leaves little padding in a batch."""
    return len(example["input_ids"])


class TuneTrainer(StepTrainer):
    """A trainer whose held-out loss is the mean over all supervised tokens.

    Attributes:
        evaluation_seconds: The time that evaluations took.
    """

    evaluation_seconds = 0.0

    def evaluate(self, *_: object, **named: object) -> dict[str, float]:
        """Take the loss of the held-out rows, and log it."""
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
    """A progress bar that shows the newest losses after the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Show the losses."""
        self._losses |= {k: f"{logs[k]:.3f}" for k in ("loss", "eval_loss") if k in (logs or {})}
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._losses, refresh=False)


def _trainable(folder: Path, config: TuneConfig) -> Any:
    """Return the model with adapters, or itself with the blocks to train."""
    dtype: Any = config.dtype
    if not config.r and dtype == "auto":
        dtype = torch.float32  # small updates of bfloat16 weights would be rounded away
    with reading(folder, "tune"):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    blocks = base.config.get_text_config().num_hidden_layers
    count = config.last_blocks or blocks
    if count > blocks:
        raise ValueError(f"tune: last_blocks is {count}, expected at most {blocks}")
    chosen = list(range(blocks - count, blocks))
    if config.r:
        adapters = LoraConfig(
            r=config.r,
            # pyrefly: ignore[bad-argument-type]: peft takes fractions, too
            lora_alpha=config.lora_alpha or 2 * config.r,
            lora_dropout=config.lora_dropout,
            use_rslora=config.use_rslora,
            target_modules=list(config.target_modules) or "all-linear",
            layers_to_transform=chosen if config.last_blocks else None,
            task_type="CAUSAL_LM",
        )
        model = prepare_lora(base, adapters)
    else:
        model = base
        if config.last_blocks:
            _freeze_all_but(base, chosen)
    if config.gradient_checkpointing:
        options = {"use_reentrant": False}
        if hasattr(base, "activation_checkpointing_enable"):  # transformers 5.23 and later
            base.activation_checkpointing_enable(options)
        else:
            base.gradient_checkpointing_enable(options)
    fuse_cross_entropy_(model)
    if config.pack:
        check_packed_examples(model)
    return model


def _freeze_all_but(model: nn.Module, blocks: Sequence[int]) -> None:
    """Freeze every parameter outside the transformer blocks with these numbers."""
    # the first number in a name is the block's; later ones are those of experts and the like
    first_number = re.compile(r"\.(\d+)\.")
    for name, parameter in model.named_parameters():
        found = first_number.search(name)
        parameter.requires_grad_(found is not None and int(found[1]) in blocks)


def _default_rate(model: nn.Module, config: TuneConfig) -> float:
    small, large = _ADAPTER_RATES if config.r else _FULL_RATES
    if sum(p.numel() for p in model.parameters()) < _LARGE:
        return small
    return large


def _trainer(
    model: Any,
    tokenizer: Any,
    train: list[Example],
    held_out: list[Example],
    out: Path,
    config: TuneConfig,
    rate: float,
    progress: bool,
) -> TuneTrainer:
    has_floor = config.lr_scheduler_type == "cosine_with_min_lr"
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=rate,
        lr_scheduler_type=config.lr_scheduler_type,
        lr_scheduler_kwargs={"min_lr_rate": config.min_lr_ratio} if has_floor else {},
        warmup_steps=config.warmup,  # numbers below 1 are fractions of all steps
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        optim=config.optim,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1 / config.evaluations,
        eval_on_start=True,
        save_steps=_SAVE_INTERVAL,
        save_total_limit=1,
        seed=config.seed,
        report_to="none",
        disable_tqdm=not progress,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    if config.pack:
        collator: Any = DataCollatorWithFlattening()
    else:
        collator = DataCollatorForSeq2Seq(tokenizer)
    # not grouped by length: such batches make the loss oscillate, which looks like spikes
    trainer = TuneTrainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=sorted(held_out[:_WATCHED], key=_length),
        data_collator=collator,
    )
    # a line for every step would hide everything else
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if progress:
        trainer.add_callback(_LossBar())
    return trainer


@dataclass(frozen=True)
class _Measurement:
    """The held-out loss, answers and mean score at one point of training.

    Attributes:
        loss: Mean loss of the held-out answers, in nats per token.
        answers: Answers to held-out prompts.
        score: Mean score of the answers by the judge; None without a judge.
    """

    loss: float
    answers: list[str]
    score: float | None


class _HeldOut:
    """An evaluation of a model on held-out rows: its loss, and its answers to prompts.

    Attributes:
        prompts: The prompts that are answered, as text.
        references: The answers in the rows.
        judge: The judge of the answers, or None.
    """

    def __init__(
        self,
        trainer: TuneTrainer,
        tokenizer: Any,
        held_out: list[Example],
        config: TuneConfig,
        progress: bool,
    ):
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._held_out = sorted(held_out, key=_length)
        self._config = config
        self._progress = progress
        answers = [first_answer(example) for example in held_out[: config.answers]]
        answers = [answer for answer in answers if answer.prompt]  # plain texts have no prompt
        self._ids = [answer.prompt for answer in answers]
        self.prompts = [tokenizer.decode(answer.prompt) for answer in answers]
        self.references = [
            tokenizer.decode(answer.reference, skip_special_tokens=True).strip()
            for answer in answers
        ]
        self.judge: Judge | None = None

    def measure(self) -> _Measurement:
        """Measure the model as it is now."""
        model: Any = self._trainer.model
        collator: Any = self._trainer.data_collator
        loss, _ = answer_loss(
            model,
            self._held_out,
            collator,
            batch_size=self._config.batch_size,
            progress=self._progress,
        )
        answers = self._answers(model)
        score = None
        if self.judge is not None and answers:
            score = judge_answers(self.judge, self.prompts, answers, progress=self._progress)
        return _Measurement(loss, answers, score)

    @torch.no_grad()
    def _answers(self, model: Any) -> list[str]:
        """Return greedy answers."""
        settings = GenerationConfig(
            max_new_tokens=self._config.answer_length,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=model.generation_config.eos_token_id or self._tokenizer.eos_token_id,
        )
        answers = []
        starts = range(0, len(self._ids), _GENERATED)
        bar = tqdm(starts, "answering", disable=not self._progress, leave=False)
        with evaluating(model):
            for start in bar:
                batch = self._tokenizer.pad(
                    {"input_ids": self._ids[start : start + _GENERATED]},
                    padding_side="left",
                    return_tensors="pt",
                ).to(model.device)
                ids = model.generate(**batch, generation_config=settings)
                new = ids[:, batch["input_ids"].shape[1] :]
                answers += self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    def write(self, out: Path, before: _Measurement, after: _Measurement) -> None:
        """Write prompts, references and answers to ``answers.json``."""
        columns = (self.prompts, self.references, before.answers, after.answers)
        names = ("prompt", "reference", "before", "after")
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        write_json(out / "answers.json", rows, "tune")


def _judge_of(
    judge: Literal["likelihood_gain"] | JudgeMaker | None,
    model: Any,
    folder: Path,
    evaluation: _HeldOut,
    tokenizer: Any,
) -> Judge | None:
    """Return the judge that `tune` was asked for."""
    if judge is None:
        return None
    if judge == "likelihood_gain":
        return _likelihood_gain_judge(model, folder, tokenizer)
    return judge(dict(zip(evaluation.prompts, evaluation.references, strict=True)))


def _likelihood_gain_judge(model: Any, folder: Path, tokenizer: Any) -> Judge:
    """Return the likelihood gain by the model before tuning."""
    if not isinstance(model, PeftModel):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return LikelihoodGain(base.to(model.device), tokenizer)
    tuned = LikelihoodGain(model, tokenizer)

    def gain(prompt: str, answer: str) -> float:
        with model.disable_adapter():
            return tuned(prompt, answer)

    return gain


def _save(model: Any, folder: Path, out: Path, config: TuneConfig, progress: bool) -> list[str]:
    """Write the adapter and the checkpoint; return a remark if that was refused."""
    tokenizer = load_tokenizer(folder)
    if config.r:
        model.save_pretrained(out / "adapter")
        if tokenizer is not None:
            tokenizer.save_pretrained(out / "adapter")
    if (out / "model").exists():  # an earlier call wrote it completely before it was stopped
        return []
    if not config.r:
        card = card_of(
            f"{shown_name(str(folder))}, tuned",
            ["All parameters were trained by `heads.lora.tune`."],
            bases=[str(folder)],
            tags=["fine-tuned"],
            relation="finetune",
        )
        with NewFolder(out / "model", "tune") as new:
            model.save_pretrained(new.folder)
            complete_folder(new.folder, card, source=str(folder), tokenizer=tokenizer)
    elif config.merge:
        try:
            merge_lora(model, out / "model", tokenizer=tokenizer, progress=progress)
        except OutputError:
            raise
        except ValueError as error:
            return [f"not merged, see adapter: {error}"]
    return []


def _reset_peak() -> None:
    """Let `_peak_mb` count from here on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    reset_peak_memory()


def _peak_mb() -> float:
    """Return the peak of the GPU's memory, or without a GPU that of the process, in MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_memory() / 2**20
