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
    prompt, such as one repeated word, gets a low score. An empty answer gets 0. The score is a sum
    over tokens, because a mean would prefer half an answer to the whole.

    Args:
        model: A causal language model, for example the model before tuning.
        tokenizer: The model's tokenizer. Its chat template is not applied, so pass prompts that are
            already formatted with the template.

    Raises:
        ValueError: The tokenizer has neither a beginning-of-sequence token nor an end-of-sequence
            token, one of which must precede an answer without a prompt.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase):
        if tokenizer.bos_token_id is None:
            # Qwen's tokenizers have no beginning-of-sequence token
            start = tokenizer.eos_token_id
        else:
            start = tokenizer.bos_token_id
        if start is None:
            raise ValueError(
                "LikelihoodGain: expected a tokenizer with a bos_token or eos_token, got neither"
            )
        self.model = model
        self.tokenizer = tokenizer
        self._start = start

    @torch.no_grad()
    def log_likelihood(self, before: Sequence[int], answer: Sequence[int]) -> float:
        """Return the log-likelihood of an answer's tokens given the tokens before it, in nats.

        Raises:
            ValueError: ``before`` is empty, or ``before`` and ``answer`` together have more tokens
                than the model has positions.
        """
        if not before:
            raise ValueError("LikelihoodGain: expected at least 1 token before the answer, got 0")
        most = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        if most is not None and len(before) + len(answer) > most:
            raise ValueError(
                f"LikelihoodGain: expected at most {most} tokens (the model's context length), got "
                f"{len(before)} in the prompt and {len(answer)} in the answer"
            )
        ids = torch.tensor([[*before, *answer]], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logits = self.model(input_ids=ids).logits[0, len(before) - 1 : -1].float()
        return float(torch.log_softmax(logits, -1).gather(1, ids[0, len(before) :, None]).sum())

    def __call__(self, prompt: str, answer: str) -> float:
        """Return the score of an answer to a prompt, in nats; an empty answer scores 0."""
        # add no special tokens, because the chat template has already written them into the prompt
        asked, said = (
            list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (prompt, answer)
        )
        if not said:
            return 0.0
        # the chat template may have written the start token, too
        if asked[:1] != [self._start]:
            asked.insert(0, self._start)
        return self.log_likelihood(asked, said) - self.log_likelihood([self._start], said)


class WinRate:
    """A judge that returns the probability, in percent, that an answer beats a reference.

    A pairwise model estimates the probability. A tie counts as half a win.

    Args:
        model: A trained `heads.pairwise.PairwiseModel`.
        references: A mapping from prompts to reference answers.

    Raises:
        ValueError: The model has no method ``predict``.
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
        """Return the score of an answer to a prompt, from 0 to 100.

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
    """Return the mean score that a judge gives to answers.

    Args:
        judge: A judge from this module, or any function that takes a prompt and an answer and
            returns a score.
        prompts: The prompts, one for each answer.
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
            "judge_answers: expected as many answers as prompts, and at least 1, got "
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
