"""Modules for torch whose rows live in tables."""

from embstore.nn.modules import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection
from embstore.nn.table_module import TableModule

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection", "TableModule"]
