"""`HeldOut`: measure the loss on held-out rows, and score answers to their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from model_components._examples import Example, first_answer
from model_components._folders import write_json
from model_components._modes import evaluating

from .config import TuneConfig
from .judging import Judge, LikelihoodGain, judge_answers
from .losses import answer_loss

JudgeMaker = Callable[[Mapping[str, str]], Judge]
"""A function that takes a mapping from prompts to reference answers, and returns a judge.

For example, ``partial(WinRate, model)`` is such a function.
"""

ANSWERS = "answers.json"
_GENERATED = 8  # answers that are generated in one batch


def check_judge(judge: object, config: TuneConfig) -> None:
    """Raise ValueError if ``judge`` is invalid, or if there are no answers for it to score."""
    if judge not in (None, "likelihood_gain") and not callable(judge):
        raise ValueError(
            f"tune: judge is {judge!r}, expected 'likelihood_gain', None, or a function that takes "
            "the reference answers and returns a judge"
        )
    if judge is not None and not config.answers:
        raise ValueError("tune: answers is 0, expected 1 or more, because a judge is given")


def name_of(judge: object) -> str | None:
    """Return a judge's name, as stored in ``run.json``, or None without a judge."""
    if judge is None or isinstance(judge, str):
        return judge
    function = getattr(judge, "func", judge)  # functools.partial stores its function as func
    return getattr(function, "__qualname__", type(function).__name__)


@dataclass(frozen=True)
class Measurement:
    """The held-out loss, the model's answers and their mean score at one point of training.

    Attributes:
        loss: Mean loss on the held-out rows, in nats per supervised token.
        answers: The model's answers to held-out prompts.
        score: Mean score that the judge gives to the answers; None without a judge or answers.
    """

    loss: float
    answers: list[str]
    score: float | None


class HeldOut:
    """An evaluation of a model on held-out rows: its loss, and its answers to prompts.

    Args:
        model: The model that is being tuned.
        tokenizer: The model's tokenizer.
        examples: The held-out examples. The model answers the prompts of the first
            ``config.answers`` of them. Examples without a prompt, or with a prompt that leaves no
            room for an answer, are skipped.
        collator: A function from a list of examples to a batch.
        config: The settings of the run.

    Attributes:
        prompts: The prompts that the model answers, as text.
        references: The reference answers to these prompts, as text.
        ends: The ids of the tokens that end an answer.
        progress: Whether to show progress bars.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        examples: Sequence[Example],
        collator: Any,
        config: TuneConfig,
    ):
        self.collator = collator
        self.progress = False
        self._model = model
        self._tokenizer = tokenizer
        self._examples = sorted(examples, key=lambda example: len(example["input_ids"]))
        self._config = config
        answers = [first_answer(example) for example in examples[: config.answers]]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        room = (positions or 1 << 30) - config.answer_length - 1  # - 1 for a judge's start token
        # plain texts have no prompt
        answers = [one for one in answers if 0 < len(one.prompt) <= room]
        self._ids = [answer.prompt for answer in answers]
        self.prompts = [tokenizer.decode(answer.prompt) for answer in answers]
        self.references = []
        for answer in answers:
            self.references.append(tokenizer.decode(answer.reference, skip_special_tokens=True))
        self.ends = self._end_tokens([first_answer(example).reference for example in examples])
        self._judge: Judge | None = None

    def _end_tokens(self, references: Sequence[Sequence[int]]) -> list[int]:
        """Return the ids of the model's end tokens and of special tokens in the references.

        If there are none, return the id of the tokenizer's end token, or 0.
        """
        own = self._model.generation_config.eos_token_id
        ends = [own] if isinstance(own, int) else list(own or [])
        # base models often do not list the end-of-turn token of their chat template
        special = set(self._tokenizer.all_special_ids)
        trained: set[int] = set()
        for reference in references:
            trained |= special.intersection(reference)
        ends += sorted(trained.difference(ends))
        return ends or [self._tokenizer.eos_token_id or 0]

    def set_judge(
        self, judge: Literal["likelihood_gain"] | JudgeMaker | None, folder: Path
    ) -> None:
        """Create the judge that scores the answers from now on.

        Args:
            judge: The ``judge`` argument of `tune`.
            folder: The folder of the model before tuning.
        """
        if judge == "likelihood_gain":
            self._judge = _likelihood_gain_judge(self._model, folder, self._tokenizer)
        elif judge is not None:
            self._judge = judge(dict(zip(self.prompts, self.references, strict=True)))

    def measure(self) -> Measurement:
        """Return the held-out loss, the model's answers and, with a judge, their mean score."""
        loss, _perplexity = answer_loss(
            self._model,
            self._examples,
            self.collator,
            batch_size=self._config.batch_size,
            progress=self.progress,
        )
        answers = self._answers()
        score = None
        if self._judge is not None and answers:
            score = judge_answers(self._judge, self.prompts, answers, progress=self.progress)
        return Measurement(loss, answers, score)

    @torch.no_grad()
    def _answers(self) -> list[str]:
        """Return the model's answers to the prompts, decoded greedily."""
        # do not use the model's generation config, which may sample or stop at other tokens
        settings = GenerationConfig(
            max_new_tokens=self._config.answer_length,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self.ends,
        )
        answers = []
        starts = range(0, len(self._ids), _GENERATED)
        bar = tqdm(starts, "answering", disable=not self.progress, leave=False)
        with evaluating(self._model):
            for start in bar:
                batch = self._tokenizer.pad(
                    {"input_ids": self._ids[start : start + _GENERATED]},
                    # generate continues from the last position, which must not be padding
                    padding_side="left",
                    return_tensors="pt",
                ).to(self._model.device)
                ids = self._model.generate(**batch, generation_config=settings)
                new = ids[:, batch["input_ids"].shape[1] :]
                answers += self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    def write(self, out: Path, before: Measurement, after: Measurement) -> None:
        """Write prompts, references, and answers before and after tuning to ``answers.json``."""
        columns = (self.prompts, self.references, before.answers, after.answers)
        names = ("prompt", "reference", "before", "after")
        rows = []
        for row in zip(*columns, strict=True):
            rows.append(dict(zip(names, row, strict=True)))
        write_json(out / ANSWERS, rows, "tune")


def _likelihood_gain_judge(model: Any, folder: Path, tokenizer: Any) -> Judge:
    """Return a judge that computes `LikelihoodGain` under the model before tuning."""
    if not isinstance(model, PeftModel):
        # the base weights are trained, so the model before tuning is loaded again
        base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return LikelihoodGain(base.to(model.device), tokenizer)
    # without its adapters, the model is as before tuning, so no second copy is needed
    tuned = LikelihoodGain(model, tokenizer)

    def gain(prompt: str, answer: str) -> float:
        with model.disable_adapter():
            return tuned(prompt, answer)

    return gain
