"""How much room a table takes, by the rules of the original package: what clients budget with.

get_table_value_bytes(config, EmbOptimType.ADAM, world_size=2)      vectors and optimizer state, all ranks
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from dynamicemb.enumerations import (
    BUCKET_ALIGNMENT,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
)
from dynamicemb.options import capacity_per_rank

DTYPE_NUM_BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
_ROWWISE_STATE_BYTES = 16  # the original keeps the one float of a row in a cell of this size


def dtype_to_bytes(dtype: torch.dtype) -> int:
    """Bytes of an element of a table."""
    if dtype not in DTYPE_NUM_BYTES:
        raise ValueError(f"dtype should be one of {list(DTYPE_NUM_BYTES)} but is: {dtype!r}")
    return DTYPE_NUM_BYTES[dtype]


def align_to_table_size(n: int, alignment: int = BUCKET_ALIGNMENT) -> int:
    """A number of rows rounded up to whole groups of rows.

    Args:
        n: rows.
        alignment: rows of a group; the result is at least that.

    Returns:
        A multiple of alignment.

    Raises:
        ValueError: alignment is less than 1.

    Examples:
        >>> from dynamicemb import align_to_table_size
        >>> align_to_table_size(17)
        32
    """
    if alignment < 1:
        raise ValueError(f"alignment should be at least 1 but is: {alignment}")
    return max(-(-n // alignment), 1) * alignment


def get_optimizer_state_dim(optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None) -> int:
    """Elements of optimizer state beside a vector of `dim`, as the original package lays them out in memory.

    Raises ValueError for EXACT_ROWWISE_ADAGRAD without a dtype, whose size decides.
    """
    if optimizer_type == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        if dtype is None:
            raise ValueError("dtype should be given for EXACT_ROWWISE_ADAGRAD but is: None")
        return _ROWWISE_STATE_BYTES // dtype_to_bytes(dtype)
    return get_optimizer_ckpt_state_dim(optimizer_type, dim, dtype)


def get_optimizer_ckpt_state_dim(
    optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None
) -> int:
    """Elements of optimizer state of a vector of `dim` in a dump."""
    if optimizer_type == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return 1
    return {EmbOptimType.ADAM: 2 * dim, EmbOptimType.EXACT_ADAGRAD: dim}.get(optimizer_type, 0)


def get_sharded_table_capacity(
    embedding_config: BaseEmbeddingConfig, world_size: int, bucket_capacity: int
) -> int:
    """Rows a rank may hold of a table: `max_capacity` of the plan.

    Our planner takes the next power of two of num_embeddings / world_size, at least a bucket; with
    MAX_BUCKET_CAPACITY the rows rounded up to 16. The original package rounds up to whole buckets instead.

    Args:
        embedding_config: of the table.
        world_size: ranks that share it.
        bucket_capacity: rows of a bucket, as in the options of the table.

    Raises:
        ValueError: world_size is not positive, or bucket_capacity is no positive multiple of 16.

    Examples:
        >>> from dynamicemb import get_sharded_table_capacity
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> config = EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=1000)
        >>> get_sharded_table_capacity(config, world_size=2, bucket_capacity=128)
        512
    """
    if world_size <= 0:
        raise ValueError(f"world_size should be at least 1 but is: {world_size}")
    return capacity_per_rank(embedding_config.num_embeddings, world_size, bucket_capacity)


def get_table_value_bytes(
    embedding_config: BaseEmbeddingConfig,
    optimizer_type: EmbOptimType,
    world_size: int,
    bucket_capacity: int = 128,
) -> int:
    """Bytes of the vectors and optimizer states of a full table, over all ranks.

    Args:
        embedding_config: of the table.
        optimizer_type: an EmbOptimType of FBGEMM.
        world_size: ranks that share it.
        bucket_capacity: rows of a bucket, as in the options of the table.

    Raises:
        ValueError: world_size or bucket_capacity is out of range, or the dtype is no float of 16 or 32 bits.

    Examples:
        >>> from dynamicemb import EmbOptimType, get_table_value_bytes
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> config = EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=1000)
        >>> get_table_value_bytes(config, EmbOptimType.ADAM, world_size=2)  # 1024 rows of 24 floats
        98304
    """
    dtype = data_type_to_dtype(embedding_config.data_type)
    dim = embedding_config.embedding_dim
    rows = get_sharded_table_capacity(embedding_config, world_size, bucket_capacity) * world_size
    return rows * (dim + get_optimizer_state_dim(optimizer_type, dim, dtype)) * dtype_to_bytes(dtype)


def get_constraint_capacity(
    memory_bytes: int, dtype: torch.dtype, dim: int, optimizer_type: EmbOptimType, bucket_capacity: int
) -> int:
    """Rows, in whole buckets, whose vectors and optimizer states fit `memory_bytes`."""
    row = (dim + get_optimizer_state_dim(optimizer_type, dim, dtype)) * dtype_to_bytes(dtype)
    return int(memory_bytes) // row // bucket_capacity * bucket_capacity


def complete_initializer_args(
    args: DynamicEmbInitializerArgs, *, embedding_config: BaseEmbeddingConfig | None = None
) -> DynamicEmbInitializerArgs:
    """A copy in which the open bounds of UNIFORM are -+sqrt(1 / num_embeddings), or 0.0 and 1.0 without a
    config. Other modes are copied as they are."""
    if embedding_config is not None:
        return args.with_bounds(embedding_config.num_embeddings)
    copied = args.copy()
    if args.mode is DynamicEmbInitializerMode.UNIFORM:
        copied.lower = 0.0 if args.lower is None else args.lower
        copied.upper = 1.0 if args.upper is None else args.upper
    return copied
