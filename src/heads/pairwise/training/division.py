"""Divide a judge's labeled pairs into training pairs and held-out pairs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..data.rows import read_pairs
from ..judge_config import JudgeConfig
from ..pairs import Pair, as_pairs, split_pairs

_FEWEST = 6  # answering models: with at least this many, some are held out
# a model that answers in half of the pairs or more is a reference model, such as AlpacaEval's
# baseline: holding it out would leave too few pairs to train on
_REFERENCE_SHARE = 0.5
# below this share of ties, the judge has no class for ties. It would hardly learn when answers tie,
# and if the judge is not better than chance, its temperature would also make ties likely
_FEW_TIES = 0.05


class Parts(NamedTuple):
    """The pairs of a run, divided by their use.

    The judge is tested on ``home``, which has held-out prompts, and on ``away``, which has answers
    of held-out models.
    """

    train: list[Pair]
    choose_epoch: list[Pair]
    calibrate: list[Pair]
    home: list[Pair]
    away: list[Pair]

    def seen(self) -> list[Pair]:
        """Return all pairs used to train the judge, to choose its epoch or to calibrate it."""
        return [*self.train, *self.choose_epoch, *self.calibrate]


def labeled_pairs(pairs: Any, columns: Mapping[str, str] | None) -> tuple[list[Pair], str]:
    """Return labeled pairs, and a text that describes the rows that were read."""
    if isinstance(pairs, Sequence) and pairs and isinstance(pairs[0], Pair):
        # soft labels of two fractions mean data without ties
        has_two = any(isinstance(p.label, Sequence) and len(p.label) == 2 for p in pairs)
        labeled = as_pairs("train_judge", pairs, 2 if has_two else 3)
        read = f"{len(labeled)} pairs"
    else:
        labeled, report = read_pairs(pairs, columns=columns)
        read = str(report)
    bare = sum(pair.label is None for pair in labeled)
    if bare:
        raise ValueError(f"train_judge: expected labeled pairs, got {bare} without a label")
    return labeled, read


def without_few_ties(pairs: list[Pair], config: JudgeConfig) -> tuple[list[Pair], int]:
    """Return the pairs to use, and the number of ties that are left out; see `JudgeConfig`."""
    tied = 0.0
    for pair in pairs:
        tied += sum(pair.label[2:]) if isinstance(pair.label, tuple) else pair.label == 2
    if config.ties == "keep" or (config.ties == "auto" and tied >= _FEW_TIES * len(pairs)):
        return pairs, 0
    kept = []
    for pair in pairs:
        label: Any = pair.label
        if isinstance(label, tuple):
            votes = sum(label[:2])
            if votes:
                kept.append(pair._replace(label=(label[0] / votes, label[1] / votes)))
        elif label != 2:
            kept.append(pair)
    if not kept:
        raise ValueError(
            f"train_judge: expected pairs in which one answer is better, got {len(pairs)} ties"
        )
    return kept, len(pairs) - len(kept)


def prompts_of(pairs: list[Pair]) -> set[str]:
    """Return the set of all prompts that are not empty."""
    return {str(pair.prompt) for pair in pairs if pair.prompt}


def divide(pairs: list[Pair], config: JudgeConfig) -> tuple[Parts, tuple[str, ...]]:
    """Split pairs by prompt and answering model; also return the names of held-out models."""
    counts: Counter[str] = Counter()
    for pair in pairs:
        counts.update(filter(None, pair.writers))
    names = sorted(name for name, n in counts.items() if n < _REFERENCE_SHARE * len(pairs))
    held = config.unseen_writers
    if held is None:
        held = len(names) // 6 if len(names) >= _FEWEST else 0
    if held >= len(names) and held:
        raise ValueError(
            f"train_judge: unseen_writers is {held}, expected fewer than the {len(names)} "
            "models that answer in less than half of the pairs"
        )
    unseen = tuple(sorted(random.Random(config.seed).sample(names, held)))
    away = [pair for pair in pairs if set(unseen) & set(pair.writers)]
    near = [pair for pair in pairs if not set(unseen) & set(pair.writers)]
    if unseen and len(near) < len(away):
        raise ValueError(
            f"train_judge: unseen_writers={held} leaves {len(near)} of {len(pairs)} pairs to train "
            "on, expected at least half; lower unseen_writers"
        )
    share = config.held_out
    train, choose_epoch, calibrate, home = split_pairs(
        near, (1 - 3 * share, share, share, share), seed=config.seed
    )
    parts = Parts(train, choose_epoch, calibrate, home, away)
    # unseen models are tested on unseen prompts, unless no such pair is left
    asked = prompts_of(parts.seen())
    fresh = [pair for pair in away if str(pair.prompt) not in asked]
    return parts._replace(away=fresh or away), unseen
