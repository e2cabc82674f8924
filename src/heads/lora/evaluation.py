"""`HeldOut`: the loss of held-out rows, and judged answers to their prompts."""

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
"""A function from reference answers by prompt to a judge, such as ``partial(WinRate, model)``."""

ANSWERS = "answers.json"
_GENERATED = 8  # answers per batch


def check_judge(judge: object, config: TuneConfig) -> None:
    """Raise if ``judge`` is not a valid judge, or if no answers are generated for it."""
    if judge not in (None, "likelihood_gain") and not callable(judge):
        raise ValueError(
            f"tune: judge is {judge!r}, expected 'likelihood_gain', None or a function of "
            "the reference answers"
        )
    if judge is not None and not config.answers:
        raise ValueError("tune: answers is 0, expected 1 or more for the judge")


def name_of(judge: object) -> str | None:
    """Return the name of a judge for ``run.json``."""
    if judge is None or isinstance(judge, str):
        return judge
    function = getattr(judge, "func", judge)  # functools.partial wraps it
    return getattr(function, "__qualname__", type(function).__name__)


@dataclass(frozen=True)
class Measurement:
    """The held-out loss, answers and mean score at one point of training.

    Attributes:
        loss: Mean loss of the held-out answers, in nats per token.
        answers: Answers to held-out prompts.
        score: Mean score of the answers by the judge; None without a judge.
    """

    loss: float
    answers: list[str]
    score: float | None


class HeldOut:
    """An evaluation of a model on held-out rows: its loss, and its answers to prompts.

    Args:
        model: The model that is tuned.
        tokenizer: Its tokenizer.
        examples: The held-out examples. The first ``config.answers`` of them are answered, if their
            prompts leave room for an answer.
        collator: Makes a batch of examples.
        config: The settings of the run.

    Attributes:
        prompts: The prompts that are answered, as text.
        references: The reference answers in the rows, as text.
        ends: The tokens at which an answer ends.
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
        room = (positions or 1 << 30) - config.answer_length - 1  # a judge may add a first token
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
        """Return the model's end tokens, and the special tokens that occur in the references."""
        own = self._model.generation_config.eos_token_id
        ends = [own] if isinstance(own, int) else list(own or [])
        # base models often do not list their chat template's end-of-turn token
        special = set(self._tokenizer.all_special_ids)
        trained: set[int] = set()
        for reference in references:
            trained |= special.intersection(reference)
        ends += sorted(trained.difference(ends))
        return ends or [self._tokenizer.eos_token_id or 0]

    def set_judge(
        self, judge: Literal["likelihood_gain"] | JudgeMaker | None, folder: Path
    ) -> None:
        """Create the judge that was passed to `tune`.

        Args:
            judge: The judge, as in `tune`.
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
        """Return greedy answers to the prompts."""
        # not the model's generation config, which may sample and end at other tokens
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
        """Write prompts, references and answers to ``answers.json``."""
        columns = (self.prompts, self.references, before.answers, after.answers)
        names = ("prompt", "reference", "before", "after")
        rows = []
        for row in zip(*columns, strict=True):
            rows.append(dict(zip(names, row, strict=True)))
        write_json(out / ANSWERS, rows, "tune")


def _likelihood_gain_judge(model: Any, folder: Path, tokenizer: Any) -> Judge:
    """Return a judge of the likelihood gain under the model before tuning."""
    if not isinstance(model, PeftModel):
        # the weights themselves are trained, so the model before tuning is loaded once more
        base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return LikelihoodGain(base.to(model.device), tokenizer)
    # without its adapters it is the model before tuning, and no second copy is needed
    tuned = LikelihoodGain(model, tokenizer)

    def gain(prompt: str, answer: str) -> float:
        with model.disable_adapter():
            return tuned(prompt, answer)

    return gain
