"""Other libraries' ways to train a judge, for the table of `pairwise_encoders`: TRL's RewardTrainer
and sentence-transformers' CrossEncoder, which score each answer, and SmolLM2's own verdict, untrained.

All give a logit for "A is better", which is divided by the temperature that is best on the pairs that
the temperature of our judges comes from.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from heads.pairwise import Pair, PairwiseModel
from tests.benchmarks.pairwise_trial import training_arguments
from tests.support import real

BATCH = 32
REWARD = "TRL's RewardTrainer, all trained"
CROSS = "sentence-transformers' CrossEncoder, all trained"
VERDICT = "SmolLM2-135M-Instruct's own verdict, both orders"
QUESTION = (
    "Here are a question and two answers. Which answer is better?\n\nQuestion: {}\n\n"
    "Answer A: {}\n\nAnswer B: {}\n\nReply with the letter of the better answer only."
)

# pairs to logits that A is better, (N,)
Scorer = Callable[[Sequence[Pair]], Tensor]


def log_losses(logits: Tensor, pairs: Sequence[Pair]) -> Tensor:
    """The log-loss of each pair, (N,)."""
    signs = torch.tensor([1.0 if pair.label == 0 else -1.0 for pair in pairs])
    return -logsigmoid(signs * logits)


def calibrated(scorer: Scorer, pairs: Sequence[Pair]) -> Callable[[Sequence[Pair]], Tensor]:
    """Log-probabilities (N, 2) of other pairs at the temperature that is best on these."""
    logits = scorer(pairs)
    temperatures = torch.logspace(-1, 2, 301)
    losses = torch.stack([log_losses(logits / t, pairs).mean() for t in temperatures])
    best = temperatures[losses.argmin()]

    def verdicts(others: Sequence[Pair]) -> Tensor:
        found = scorer(others) / best
        return torch.stack([logsigmoid(found), logsigmoid(-found)], 1)

    return verdicts


def arguments_of(kind: Any, folder: str, rate: float, seed: int, epochs: int, **more: Any) -> Any:
    """The arguments of our runs as another library's."""
    return training_arguments(
        folder,
        epochs=epochs,
        batch=BATCH,
        rate=rate,
        seed=seed,
        kind=kind,
        metric="eval_loss",
        per_device_eval_batch_size=BATCH,
        **more,
    )


def reward_trainer(
    data: dict[str, list[Pair]], rate: float, seed: int, epochs: int, max_tokens: int
) -> tuple[Scorer, float, float]:
    """Train a reward model on what our template makes of the pairs."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(real.minilm())
    model: Any = AutoModelForSequenceClassification.from_pretrained(real.minilm(), num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    ours: Any = PairwiseModel.from_encoder(real.minilm(), ties=False, max_tokens=max_tokens)

    def ids_of(pairs: Sequence[Pair]) -> list[list[int]]:
        told = ours.dataset(pairs, progress=False)
        return [told.answer(k).tokens.ids.tolist() for k in range(2 * len(pairs))]

    def rows(pairs: Sequence[Pair]) -> Dataset:
        ids = ids_of(pairs)
        better = [2 * k + (pair.label == 1) for k, pair in enumerate(pairs)]
        chosen = [ids[k] for k in better]
        return Dataset.from_dict(
            {"chosen_ids": chosen, "rejected_ids": [ids[k ^ 1] for k in better]}
        )

    @torch.no_grad()
    def scorer(pairs: Sequence[Pair]) -> Tensor:
        model.eval()
        scores = []
        for one in ids_of(pairs):
            scores.append(model(input_ids=torch.tensor([one])).logits[0, 0])
        told = torch.stack(scores)
        return told[::2] - told[1::2]

    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=model,
            args=arguments_of(
                RewardConfig,
                folder,
                rate,
                seed,
                epochs,
                bf16=False,
                gradient_checkpointing=False,
                max_length=None,
            ),
            train_dataset=rows(data["train"]),
            eval_dataset=rows(data["epoch"]),
            processing_class=tokenizer,
        )
        begin = time.process_time()
        trainer.train()
        return scorer, time.process_time() - begin, trainer.state.best_metric


def cross_encoder(
    data: dict[str, list[Pair]], rate: float, seed: int, epochs: int, max_tokens: int
) -> tuple[Scorer, float, float]:
    """Train a CrossEncoder by the logistic loss of the difference of two scores (RankNet)."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import RankNetLoss

    torch.manual_seed(seed)
    made = CrossEncoder(str(real.minilm()), num_labels=1, max_length=max_tokens, device="cpu")

    def rows(pairs: Sequence[Pair]) -> Dataset:
        return Dataset.from_dict(
            {
                "query": [str(pair.prompt) for pair in pairs],
                "docs": [[str(pair.a), str(pair.b)] for pair in pairs],
                "labels": [[float(pair.label == 0), float(pair.label == 1)] for pair in pairs],
            }
        )

    def scorer(pairs: Sequence[Pair]) -> Tensor:
        texts = [(str(pair.prompt), str(answer)) for pair in pairs for answer in (pair.a, pair.b)]
        scores = made.predict(
            texts,
            activation_fn=torch.nn.Identity(),
            show_progress_bar=False,
            convert_to_tensor=True,
        )
        return scores[::2] - scores[1::2]

    with tempfile.TemporaryDirectory() as folder:
        trainer = CrossEncoderTrainer(
            model=made,
            args=arguments_of(CrossEncoderTrainingArguments, folder, rate, seed, epochs),
            train_dataset=rows(data["train"]),
            eval_dataset=rows(data["epoch"]),
            loss=RankNetLoss(made, reduction_log="natural"),
        )
        begin = time.process_time()
        trainer.train()
        return scorer, time.process_time() - begin, trainer.state.best_metric


def own_verdict(max_tokens: int) -> Scorer:
    """Judge by the likelihood of the letters A and B, the mean over both orders of the answers."""
    folder = Path(real.smollm2())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "AB"]

    def cut(text: object) -> str:
        return tokenizer.decode(tokenizer.encode(str(text))[:max_tokens])

    @torch.no_grad()
    def log_odds(prompt: object, first: object, second: object) -> Tensor:
        words = QUESTION.format(cut(prompt), cut(first), cut(second))
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": words}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        logits = model(**ids, logits_to_keep=1).logits[0, -1].float()
        return logits[letters[0]] - logits[letters[1]]

    def scorer(pairs: Sequence[Pair]) -> Tensor:
        found = []
        for pair in pairs:
            both = log_odds(pair.prompt, pair.a, pair.b), log_odds(pair.prompt, pair.b, pair.a)
            found.append((both[0] - both[1]) / 2)
        return torch.stack(found)

    return scorer
