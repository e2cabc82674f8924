"""The tokenizer of a model that is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ._hub import find_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_tokenizer(place: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a model's folder, or under its hub id; None if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(find_folder(place))
    except (OSError, ValueError):
        return None
