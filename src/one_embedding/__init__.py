"""Embedding tables of any size with OneEmbedding's API, on PyTorch.

    import one_embedding

    embedding = one_embedding.MultiTableEmbedding(
        name="my_embedding",
        embedding_dim=128,
        dtype=torch.float,
        key_type=torch.int64,
        tables=[one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.1, high=0.1))],
        store_options=one_embedding.make_cached_ssd_store_options(
            cache_budget_mb=8142, persistent_path="/your_path_to_ssd", size_factor=1
        ),
    )
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)

Rows that a batch touched move when the optimizer steps; the rest of the table is where the options say.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    from embstore.extras import missing as _missing

    raise _missing("one_embedding", "torch", _error) from _error

from one_embedding.embedding import MultiTableEmbedding, MultiTableMultiColumnEmbedding
from one_embedding.optimizer import Ftrl, Optimizer, SmartDecayAdam
from one_embedding.options import (
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_column_options,
    make_constant_initializer,
    make_device_mem_store_options,
    make_normal_initializer,
    make_table,
    make_table_options,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from one_embedding.persistent_table import make_persistent_table_reader, make_persistent_table_writer

__all__ = [
    "Ftrl",
    "MultiTableEmbedding",
    "MultiTableMultiColumnEmbedding",
    "Optimizer",
    "SmartDecayAdam",
    "make_cached_host_mem_store_options",
    "make_cached_ssd_store_options",
    "make_column_options",
    "make_constant_initializer",
    "make_device_mem_store_options",
    "make_normal_initializer",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
    "make_table",
    "make_table_options",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
]
