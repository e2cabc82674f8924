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
"""For each mergekit flag, the `mergekit-lite` flags that replace it; {} stands for its value."""

IDLE = {
    "--async-write": "threads write the blocks that they compute",
    "--clone-tensors": "a tensor can be used in several layers without this flag",
    "--copy-tokenizer": "the tokenizer is always copied",
    "--gpu-rich": "--device cuda computes on the GPU",
    "--lora-merge-cache": "adapters are added to each weight when it is read",
    "--lora-merge-dtype": "adapters are added in float32",
    "--low-cpu-memory": "one tensor is merged at a time",
    "--multi-gpu": "a merge uses one GPU",
    "--read-to-gpu": "--device sets where tensors are merged",
    "--safe-serialization": "weights are always written as safetensors",
    "--transformers-cache": "set the environment variable HF_HUB_CACHE instead",
    "--verbose": "the report shows what was done",
    "-v": "the report shows what was done",
    "--write-model-card": "the model card is always written",
    "--write-threads": "threads write the blocks that they compute",
    "--no-copy-tokenizer": "the tokenizer is always copied",
    "--no-safe-serialization": "weights are always written as safetensors",
    "--no-write-model-card": "the model card is always written",
}
"""For each mergekit flag that has no effect here, the reason.

The ``--no-`` form of a flag that is off by default is not listed.
"""

_IDLE_WITH_VALUE = (
    "--lora-merge-cache",
    "--lora-merge-dtype",
    "--transformers-cache",
    "--write-threads",
)

_PLANNED = ("--max-shard-size", "--allow-pickle", "--allow-mixed", "--truncate-embeddings")
"""The flags of ``mergekit-lite merge`` that ``mergekit-lite plan`` also accepts."""


def translate(words: Sequence[str], *, plan: bool = False) -> tuple[list[str], list[str]]:
    """Translate mergekit's flags; return the new arguments, and notes on flags without effect.

    Args:
        words: The command-line arguments after the subcommand.
        plan: Whether the subcommand is ``plan``. If so, all notes are dropped, and so are the
            translated flags that it does not accept.

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
            # -j2 and --num-threads=2 both hold the flag and its value in one argument
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
            # in mergekit, B stands for a billion bytes; here it stands for one byte
            value = re.sub(r"(?<=\d)\s*[bB]$", "GB", value)
        # `plan` accepts few of these flags, and its parser would reject the rest
        if not plan or made.startswith(_PLANNED):
            ours += [word.format(value) for word in made.split()]
        if name in IDLE and not plan:
            notes.append(f"{name} has no effect here: {IDLE[name]}")
    return ours, notes
