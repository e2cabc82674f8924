"""One vocabulary for models that have several.

Rows of embeddings and heads are matched by token string.
"""

from .alignment import (
    EMBEDDING,
    HEAD,
    AlignedSource,
    Vocabulary,
    is_vocabulary_tensor,
    plan_vocabulary,
    stage_tokens,
)
from .tokenizers import copy_tokenizer, has_tokenizer, read_vocabulary

__all__ = [
    "EMBEDDING",
    "HEAD",
    "AlignedSource",
    "Vocabulary",
    "copy_tokenizer",
    "has_tokenizer",
    "is_vocabulary_tensor",
    "plan_vocabulary",
    "read_vocabulary",
    "stage_tokens",
]
