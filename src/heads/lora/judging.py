"""Judges of answers that run locally: a language model, or a trained pairwise model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from model_components._modes import evaluating

Judge = Callable[[str, str], float]
"""A function from a prompt and an answer to a score; higher is better."""


class LikelihoodGain:
    """A judge that scores how much likelier a prompt makes an answer under a language model.

    The score is ``log p(answer | prompt) - log p(answer)``, in nats. Text that is likely after any
    prompt, such as one repeated word, gains little. An empty answer scores 0. The score is a sum
    over tokens, because a mean would prefer half an answer to the whole.

    Args:
        model: A causal language model, for example the model before tuning.
        tokenizer: Its tokenizer. The chat template is not applied: pass prompts that already
            contain it.

    Raises:
        ValueError: The tokenizer has neither a beginning nor an end token to put before a bare
            answer.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase):
        if tokenizer.bos_token_id is None:
            # Qwen's tokenizers have no beginning token
            start = tokenizer.eos_token_id
        else:
            start = tokenizer.bos_token_id
        if start is None:
            raise ValueError(
                "LikelihoodGain: expected a tokenizer with a bos_token or an eos_token, got neither"
            )
        self.model = model
        self.tokenizer = tokenizer
        self._start = start

    @torch.no_grad()
    def log_likelihood(self, before: Sequence[int], answer: Sequence[int]) -> float:
        """Return the log-likelihood of an answer's tokens after those of ``before``, in nats.

        Raises:
            ValueError: ``before`` is empty, or there are more tokens in all than the model has
                positions.
        """
        if not before:
            raise ValueError("LikelihoodGain: expected a token before the answer, got none")
        most = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        if most is not None and len(before) + len(answer) > most:
            raise ValueError(
                f"LikelihoodGain: expected at most {most} tokens (the model's positions), got "
                f"{len(before)} of prompt and {len(answer)} of answer"
            )
        ids = torch.tensor([[*before, *answer]], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logits = self.model(input_ids=ids).logits[0, len(before) - 1 : -1].float()
        return float(torch.log_softmax(logits, -1).gather(1, ids[0, len(before) :, None]).sum())

    def __call__(self, prompt: str, answer: str) -> float:
        """Return the score in nats; an empty answer scores 0."""
        # a chat template has written its special tokens into the prompt as text
        asked, said = (
            list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (prompt, answer)
        )
        if not said:
            return 0.0
        # a chat template may have written the start token already
        if asked[:1] != [self._start]:
            asked.insert(0, self._start)
        return self.log_likelihood(asked, said) - self.log_likelihood([self._start], said)


class WinRate:
    """A judge that returns the probability, in percent, that an answer beats a reference.

    A pairwise model estimates it. A tie counts half.

    Args:
        model: A trained `heads.pairwise.PairwiseModel`.
        references: Answers to beat, by prompt.

    Raises:
        ValueError: The model has no ``predict``.
    """

    def __init__(self, model: Any, references: Mapping[str, str]):
        if not hasattr(model, "predict"):
            raise ValueError(
                f"WinRate: the model is a {type(model).__name__}, expected a "
                "heads.pairwise.PairwiseModel"
            )
        self.model = model
        self.references = dict(references)

    def __call__(self, prompt: str, answer: str) -> float:
        """Return the score, 0 to 100.

        Raises:
            ValueError: There is no reference for the prompt.
        """
        if prompt not in self.references:
            raise ValueError(
                f"WinRate: expected one of the {len(self.references)} prompts that have a "
                f"reference, got {prompt[:60]!r}"
            )
        other = self.references[prompt]
        shares = (
            self.model.predict([prompt], [answer], [other], progress=False)
            .probabilities[0]
            .tolist()
        )
        return 100.0 * (shares[0] + (shares[2] / 2 if len(shares) == 3 else 0.0))


def judge_answers(
    judge: Judge, prompts: Sequence[str], answers: Sequence[str], *, progress: bool = True
) -> float:
    """Return the mean score of answers.

    Args:
        judge: A judge of this module, or any function of prompt and answer.
        prompts: One for each answer.
        answers: The answers to judge.
        progress: Show a progress bar.

    Returns:
        The mean score, in the judge's unit.

    Raises:
        ValueError: The numbers of prompts and answers differ or are 0, or a score is not finite.

    >>> judge_answers(
    ...     lambda prompt, answer: 100.0 * (prompt == answer),
    ...     ["a", "b"],
    ...     ["a", "c"],
    ...     progress=False,
    ... )
    50.0
    """
    if len(prompts) != len(answers) or not prompts:
        raise ValueError(
            "judge_answers: expected as many answers as prompts, at least 1, got "
            f"{len(prompts)} prompts and {len(answers)} answers"
        )
    scores = []
    pairs = zip(prompts, answers, strict=True)
    for prompt, answer in tqdm(pairs, "judging", len(prompts), disable=not progress, leave=False):
        score = float(judge(prompt, answer))
        if not math.isfinite(score):
            raise ValueError(
                f"judge_answers: the judge gave {score} to {answer[:60]!r}, expected a finite "
                "number"
            )
        scores.append(score)
    return sum(scores) / len(scores)
