"""`LowRankEmbedding`: an embedding table of low rank.

Letters: V rows; H their width; A is (r, H) and B is (V, r).
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import LowRankConfig, low_rank_sizes
from ..init import Factors, low_rank
from .weights import LowRankLayer


def _check_plain(embedding: nn.Module, operation: str) -> None:
    """Raise a ValueError if an embedding does more than look up rows."""
    # Gemma scales rows, and max_norm changes the table in the forward pass: factors do neither
    if type(embedding).forward is not nn.Embedding.forward or embedding.max_norm is not None:
        raise ValueError(
            f"{operation}: expected a plain nn.Embedding without max_norm, got {embedding}"
        )


class LowRankEmbedding(LowRankLayer):
    """An embedding whose table is the product of B (V, r) and A (r, H).

    Its parameters are ``a`` and ``b``. `convert_` replaces a head that is tied to the table by a
    `LowRankLinear` that shares both parameters.

    Args:
        num_embeddings: The number of rows, V.
        embedding_dim: The width of a row, H.
        rank: The rank r, or the share of the dense table's parameters to use, between 0 and 1.
        padding_idx: The ``padding_idx`` of the result of `to_embedding`. Its row may differ from
            zero.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Raises:
        ValueError: The rank is below 1 or above the smaller of the two sizes.

    Source: ALBERT's factorized table (arXiv 1909.11942, section 3.1).

    >>> table = LowRankEmbedding(50257, 768, rank=64)
    >>> table
    LowRankEmbedding(50257, 768, rank 64, 8.5% of the dense weight)
    >>> table(torch.tensor([[1, 50256]])).shape
    torch.Size([1, 2, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rank: int | float,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        config = low_rank_sizes(rank)
        LowRankLayer.__init__(self, num_embeddings, embedding_dim, config, dtype, device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.reset_parameters()

    @classmethod
    def like(cls, embedding: nn.Embedding, config: LowRankConfig) -> Self:
        """Return a layer with uninitialized factors that can replace a dense table.

        Sizes, dtype and device are taken from the dense table.
        """
        weight = embedding.weight
        layer = cls(
            *weight.shape,
            **config.sizes(),
            padding_idx=embedding.padding_idx,
            dtype=weight.dtype,
            device="meta",
        )
        layer.config = config
        return layer.to_empty(device=weight.device)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, rank: int | float) -> Self:
        """Return the closest embedding of the given rank, by a truncated SVD.

        Raises:
            ValueError: The rank is out of range, or the table is not a plain `nn.Embedding`, is all
                zeros or is not finite.

        >>> LowRankEmbedding.from_embedding(nn.Embedding(8, 6), rank=2)
        LowRankEmbedding(8, 6, rank 2, 58.3% of the dense weight)
        """
        _check_plain(embedding, f"{cls.__name__}.from_embedding")
        layer = cls.like(embedding, low_rank_sizes(rank, init="svd"))
        a, b = low_rank(embedding.weight.detach(), len(layer.a))
        layer.set_factors_(Factors(a, b, 0.0))
        return layer

    def _fresh_stds(self, rank: int, columns: int) -> tuple[float, float]:
        """Return initial standard deviations of A and B that give rows `nn.Embedding`'s scale."""
        return rank**-0.5, 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows (*B, embedding_dim) of ids (*B,)."""
        # only the rows of B that are looked up are multiplied by A
        return F.embedding(ids, self.b) @ self.a

    @torch.no_grad()
    def to_embedding(self) -> nn.Embedding:
        """Return the dense `nn.Embedding` with the same rows."""
        # on the meta device, so that no random numbers are drawn only to be overwritten
        table = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )
        table.weight = nn.Parameter(self.dense_weight())
        return table

    def extra_repr(self) -> str:
        """Return the sizes, structure and compression for the module's repr."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {super().extra_repr()}"
