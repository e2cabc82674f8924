"""`KroneckerEmbedding` and `LowRankEmbedding`: embedding tables made of smaller ones.

Letters: V rows of width H; for low rank A is (r, H) and B (V, r).
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import KroneckerConfig, LowRankConfig
from ..functional import kron_embedding
from .weights import KroneckerLayer, LowRankLayer, SmallerWeight, start


class SmallerEmbedding(SmallerWeight):
    """Base of tables of smaller weights: a stock table's sizes, and the way back to one."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    @classmethod
    def like(cls, embedding: nn.Embedding, config: object) -> Self:
        """An empty table of a dense one's sizes, dtype and device."""
        weight = embedding.weight
        padding = embedding.padding_idx
        rows, columns = weight.shape
        layer = cls(rows, columns, config, padding_idx=padding, dtype=weight.dtype, device="meta")
        return layer.to_empty(device=weight.device)

    @torch.no_grad()
    def to_embedding(self) -> nn.Embedding:
        """The dense `nn.Embedding` with the same rows."""
        table = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )
        table.weight = nn.Parameter(self.dense_weight())
        return table

    def extra_repr(self) -> str:
        """Sizes, structure and compression."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {super().extra_repr()}"


class KroneckerEmbedding(SmallerEmbedding, KroneckerLayer):
    """An embedding whose table is Σ_r s_r A_r ⊗ B_r.

    Rows are made from gathered rows of the factors.

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
        KroneckerLayer.__init__(self, num_embeddings, embedding_dim, config, dtype, device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, config: KroneckerConfig) -> Self:
        """Return a compressed `nn.Embedding`.

        It starts as the config says where that looks at weights alone, else by Van Loan.
        """
        layer = cls.like(embedding, config)
        layer.set_factors_(
            start(embedding.weight.detach(), layer.b_shape, config, None, alone=True)
        )
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (*B,) to rows (*B, embedding_dim)."""
        return kron_embedding(ids, self.a, self.b, self.scales)


class LowRankEmbedding(SmallerEmbedding, LowRankLayer):
    """An embedding whose rows are those of B (V, r) times A (r, H).

    Its parameters are ``a`` and ``b``. A head that is tied to the table is a `LowRankLinear` with
    the same two.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        config: Its rank.
        padding_idx: Kept for `to_embedding`; its row is not forced to zero.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        ValueError: A rank above the smaller of the two sizes.

    Source: ALBERT's factorized table (arXiv 1909.11942, section 3.1).

    >>> table = LowRankEmbedding(50257, 768, LowRankConfig(rank=64))
    >>> table
    LowRankEmbedding(50257, 768, rank 64, 8.5% of the dense weight)
    >>> table(torch.tensor([[1, 50256]])).shape
    torch.Size([1, 2, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        config: LowRankConfig,
        *,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        LowRankLayer.__init__(self, num_embeddings, embedding_dim, config, dtype, device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    def _fresh_stds(self, rank: int, columns: int) -> tuple[float, float]:
        """Rows of size one, as those of a fresh `nn.Embedding`."""
        return rank**-0.5, 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (*B,) to rows (*B, embedding_dim)."""
        return F.embedding(ids, self.b) @ self.a
