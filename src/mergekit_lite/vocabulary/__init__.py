"""Build one vocabulary for a merge of models whose vocabularies differ.

Rows of embeddings and heads are matched by token.
"""

from .alignment import (
    EMBEDDING,
    HEAD,
    AlignedSource,
    Vocabulary,
    embedding_rows,
    is_vocabulary_tensor,
    plan_vocabulary,
    stage_tokens,
    stored_name,
)
from .tokenizers import copy_tokenizer, has_tokenizer, read_vocabulary

__all__ = [
    "EMBEDDING",
    "HEAD",
    "AlignedSource",
    "Vocabulary",
    "copy_tokenizer",
    "embedding_rows",
    "has_tokenizer",
    "is_vocabulary_tensor",
    "plan_vocabulary",
    "read_vocabulary",
    "stage_tokens",
    "stored_name",
]
