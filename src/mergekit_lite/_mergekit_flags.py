"""Translate mergekit's command-line flags into flags of `mergekit-lite merge`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SHORT = re.compile(r"(?P<flag>-[vj])(?P<count>v*|\d+)")  # -vv, -j2

FLAGS = {
    "--allow-crimes": "--allow-mixed",
    "--cuda": "--device cuda",
    "--lazy-unpickle": "--allow-pickle weights_only",
    "--num-threads": "--threads {}",
    "--out-shard-size": "--max-shard-size {}",
    "--quiet": "--no-progress",
    "-j": "--threads {}",
    "-q": "--no-progress",
    "--random-seed": "--seed {}",
    "--unsafe-truncate-embeddings": "--truncate-embeddings",
}
"""The flags of `mergekit-lite` that replace a mergekit flag; {} stands for its value."""

IDLE = {
    "--async-write": "threads write the blocks that they compute",
    "--clone-tensors": "a tensor may be used in several layers",
    "--copy-tokenizer": "the tokenizer is copied",
    "--gpu-rich": "--device cuda computes on the GPU",
    "--lora-merge-cache": "adapters are added while they are read",
    "--lora-merge-dtype": "adapters are added in float32",
    "--low-cpu-memory": "one tensor is merged at a time",
    "--multi-gpu": "a merge uses one GPU",
    "--read-to-gpu": "--device sets where tensors are merged",
    "--safe-serialization": "weights are written as safetensors",
    "--transformers-cache": "set the variable HF_HUB_CACHE",
    "--verbose": "the report shows what was done",
    "-v": "the report shows what was done",
    "--write-model-card": "the model card is written",
    "--write-threads": "threads write the blocks that they compute",
    "--no-copy-tokenizer": "the tokenizer is copied",
    "--no-safe-serialization": "weights are written as safetensors",
    "--no-write-model-card": "the model card is written",
}
"""The reason why a mergekit flag has no effect here.

The ``--no-`` form of a flag that is off by default is not listed.
"""

_IDLE_WITH_VALUE = (
    "--lora-merge-cache",
    "--lora-merge-dtype",
    "--transformers-cache",
    "--write-threads",
)

_PLANNED = ("--max-shard-size", "--allow-pickle", "--allow-mixed", "--truncate-embeddings")
"""The flags of `mergekit-lite` that ``plan`` accepts, too."""


def translate(words: Sequence[str], *, plan: bool = False) -> tuple[list[str], list[str]]:
    """Translate mergekit's flags; return the new words, and notes on flags without effect.

    Args:
        words: The words of the command line, after the command's name.
        plan: Whether to drop translated flags that ``plan`` does not accept, and all notes.

    >>> translate(["r.yml", "out", "--cuda", "--random-seed=7", "--low-cpu-memory"])[0]
    ['r.yml', 'out', '--device', 'cuda', '--seed', '7']
    """
    ours: list[str] = []
    notes: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        short = _SHORT.fullmatch(word)
        if short is not None:
            name = short["flag"]
            # -j2 has its value in the same word, as --num-threads=2 has
            value = equals = short["count"]
        positive = name.replace("--no-", "--", 1)
        is_known = name in FLAGS or name in IDLE
        if not is_known and (positive in FLAGS or positive in IDLE):
            continue
        if not is_known:
            ours.append(word)
            continue
        made = FLAGS.get(name, "")
        if not equals and ("{}" in made or name in _IDLE_WITH_VALUE):
            value = next(rest, "")
        if name == "--out-shard-size":
            # mergekit's B is a billion, ours a byte
            value = re.sub(r"(?<=\d)\s*[bB]$", "GB", value)
        # `plan` accepts few of these flags, and its parser would reject the rest
        if not plan or made.startswith(_PLANNED):
            ours += [word.format(value) for word in made.split()]
        if name in IDLE and not plan:
            notes.append(f"{name} has no effect here: {IDLE[name]}")
    return ours, notes
