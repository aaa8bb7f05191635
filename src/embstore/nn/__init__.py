"""Modules for torch whose rows live in tables."""

from embstore.nn.modules import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection"]
