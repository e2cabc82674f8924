"""mergekit's flags for a merge, as flags of `mergekit-lite merge`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SIZE = re.compile(r"(?P<count>\d+(\.\d*)?)\s*(?P<unit>[KMBkmb]?)$")
_SHORT = re.compile(r"(?P<flag>-[vj])(?P<count>v*|\d+)")  # -vv, -j2
# its help says parameters, and it counts bytes
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Flag:
    """One of mergekit's flags, and our words for it.

    Attributes:
        ours: Function of its value ("" without one) that returns our words.
        takes_value: Whether a value follows.
        note: Why it has no effect; None if it has one.
    """

    ours: Callable[[str], list[str]] = lambda value: []
    takes_value: bool = False
    note: str | None = None


def _size(value: str) -> list[str]:
    match = _SIZE.match(value)
    if match is None:
        return ["--max-shard-size", value]  # which is then refused by its name
    count = float(match["count"]) * _UNITS[match["unit"].lower()]
    return ["--max-shard-size", str(int(count))]


def _idle(note: str, *, takes_value: bool = False) -> Flag:
    return Flag(takes_value=takes_value, note=note)


FLAGS = {
    "--allow-crimes": Flag(lambda value: ["--allow-mixed"]),
    "--cuda": Flag(lambda value: ["--device", "cuda"]),
    "--lazy-unpickle": Flag(lambda value: ["--allow-pickle", "weights_only"]),
    "--num-threads": Flag(lambda value: ["--threads", value], takes_value=True),
    "--out-shard-size": Flag(_size, takes_value=True),
    "--quiet": Flag(lambda value: ["--no-progress"]),
    "-j": Flag(lambda value: ["--threads", value], takes_value=True),
    "-q": Flag(lambda value: ["--no-progress"]),
    "--random-seed": Flag(lambda value: ["--seed", value], takes_value=True),
    "--unsafe-truncate-embeddings": Flag(lambda value: ["--truncate-embeddings"]),
    "--async-write": _idle("threads write the blocks that they compute"),
    "--clone-tensors": _idle("a tensor may stand in several layers"),
    "--copy-tokenizer": _idle("the tokenizer is copied"),
    "--gpu-rich": _idle("--device cuda computes on the GPU"),
    "--lora-merge-cache": _idle("adapters are added while they are read", takes_value=True),
    "--lora-merge-dtype": _idle("adapters are added in float32", takes_value=True),
    "--low-cpu-memory": _idle("one tensor is merged at a time"),
    "--multi-gpu": _idle("a merge uses one GPU"),
    "--read-to-gpu": _idle("--device says where tensors are merged"),
    "--safe-serialization": _idle("weights are written as safetensors"),
    "--transformers-cache": _idle("set the variable HF_HUB_CACHE", takes_value=True),
    "--verbose": _idle("the report says what was done"),
    "-v": _idle("the report says what was done"),
    "--write-model-card": _idle("the model card is written"),
    "--write-threads": _idle("threads write the blocks that they compute", takes_value=True),
    "--no-copy-tokenizer": _idle("the tokenizer is copied"),
    "--no-safe-serialization": _idle("weights are written as safetensors"),
    "--no-write-model-card": _idle("the model card is written"),
}
"""By mergekit's name. The ``--no-`` form of a flag that is off by default asks for nothing."""


_PLANNED = ("--max-shard-size", "--allow-pickle", "--allow-mixed", "--truncate-embeddings")
"""Our flags that a plan has, too."""


def translate(words: Sequence[str], *, plan: bool = False) -> tuple[list[str], list[str]]:
    """Return the words of a command line with our flags, and a note on each that has no effect.

    Args:
        words: The words.
        plan: Leave out what matters only to a merge.

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
        flag = FLAGS.get(name)
        positive = name.replace("--no-", "--", 1)
        if flag is None and positive != name and positive in FLAGS:
            continue
        if flag is None:
            ours.append(word)
            continue
        if flag.takes_value and not equals:
            value = next(rest, "")
        made = flag.ours(value)
        # a plan has few of these flags, and its parser would refuse the others
        if not plan or made[:1] in ([known] for known in _PLANNED):
            ours += made
        if flag.note is not None and not plan:
            notes.append(f"{name} has no effect here: {flag.note}")
    return ours, notes
