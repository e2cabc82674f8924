"""Judge answers without a service: by a language model or a trained pairwise model."""

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
"""(prompt, answer) to a score, more is better."""


class LikelihoodGain:
    """A judge that is a language model: how much likelier a prompt makes an answer, in nats.

    ``log p(answer | prompt) - log p(answer)``. What is likely anywhere, such as one word again and
    again, gains little, and no answer gains 0. Not a mean over tokens, which prefers half an answer
    to the whole.

    Args:
        model: A causal language model, better than the one that is judged.
        tokenizer: Its tokenizer. Prompts are not put into its chat template: give them with it, if
            it has one.

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
                "LikelihoodGain: the tokenizer has neither a beginning nor an end token, expected "
                "one"
            )
        self.model = model
        self.tokenizer = tokenizer
        self._start = start

    @torch.no_grad()
    def log_likelihood(self, before: Sequence[int], answer: Sequence[int]) -> float:
        """Log-likelihood of an answer's tokens after those of ``before``, in nats.

        Raises:
            ValueError: ``before`` is empty, or together they are more than the model has
                positions.
        """
        if not before:
            raise ValueError("LikelihoodGain: expected a token before the answer, got none")
        most = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        if most is not None and len(before) + len(answer) > most:
            raise ValueError(
                f"LikelihoodGain: {len(before)} tokens of prompt and {len(answer)} of answer; the "
                f"model has {most} positions"
            )
        ids = torch.tensor([[*before, *answer]], device=next(self.model.parameters()).device)
        with evaluating(self.model):
            logits = self.model(input_ids=ids).logits[0, len(before) - 1 : -1].float()
        return float(torch.log_softmax(logits, -1).gather(1, ids[0, len(before) :, None]).sum())

    def __call__(self, prompt: str, answer: str) -> float:
        """A score in nats; an empty answer scores 0."""
        # a chat template has written its special tokens into the prompt as text
        asked, said = (
            list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (prompt, answer)
        )
        if not said:
            return 0.0
        # as chat templates write it
        if asked[:1] != [self._start]:
            asked.insert(0, self._start)
        return self.log_likelihood(asked, said) - self.log_likelihood([self._start], said)


class WinRate:
    """A judge that is a pairwise model: how likely an answer beats a reference, in %.

    A tie counts half.

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
        """A score, 0 to 100.

        Raises:
            ValueError: There is no reference for the prompt.
        """
        if prompt not in self.references:
            raise ValueError(f"WinRate: there is no reference for the prompt {prompt[:60]!r}")
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
    """The mean score of answers.

    Args:
        judge: A judge of this module, or any function of prompt and answer.
        prompts: One for each answer.
        answers: What was said.
        progress: Show a bar.

    Returns:
        A number in the judge's unit.

    Raises:
        ValueError: As many prompts as answers are needed, one at least, and scores that are finite.

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
            f"judge_answers: {len(prompts)} prompts and {len(answers)} answers; expected as many, "
            "and some"
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
