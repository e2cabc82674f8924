"""`KroneckerEmbedding`: an embedding table held as factors."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ..config import KroneckerConfig
from ..functional import kron_embedding
from .weights import KroneckerLayer, start


class KroneckerEmbedding(KroneckerLayer):
    """An embedding whose table is Σ_r s_r A_r ⊗ B_r; rows are made from gathered rows of the factors.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        config: Shapes and terms.
        padding_idx: Kept for `to_embedding`; its row is not forced to zero.
        dtype: Of the parameters.
        device: Of the parameters.

    >>> table = KroneckerEmbedding(50257, 768, KroneckerConfig(b_shape=(1, 2)))
    >>> table(torch.tensor([[1, 50256]])).shape
    torch.Size([1, 2, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        config: KroneckerConfig,
        *,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, config, dtype, device)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @classmethod
    def like(cls, embedding: nn.Embedding, config: KroneckerConfig) -> Self:
        """An empty table of a dense one's sizes, dtype and device."""
        weight, padding = embedding.weight, embedding.padding_idx
        rows, columns = weight.shape
        layer = cls(rows, columns, config, padding_idx=padding, dtype=weight.dtype, device="meta")
        return layer.to_empty(device=weight.device)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, config: KroneckerConfig) -> Self:
        """A compressed `nn.Embedding`, by the config's start where that looks at weights alone, else by Van Loan."""
        layer = cls.like(embedding, config)
        layer.set_factors_(start(embedding.weight.detach(), layer.b_shape, config, None, alone=True))
        return layer

    @torch.no_grad()
    def to_embedding(self) -> nn.Embedding:
        """The dense `nn.Embedding` with the same rows."""
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        table.weight = nn.Parameter(self.dense_weight())
        return table

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (*B,) to rows (*B, embedding_dim)."""
        return kron_embedding(ids, self.a, self.b, self.scales)

    def extra_repr(self) -> str:
        """Sizes, shapes and compression."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {super().extra_repr()}"
