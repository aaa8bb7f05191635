"""Names of element types and eviction strategies: TorchRec's, torch's, and those of the original package.

data_type_to_dtype(DataType.FP16)             torch.float16
torch_to_dyn_emb(torch.float16)               DynamicEmbDataType.Float16
string_to_evict_strategy("KLru")              DynamicEmbEvictStrategy.LRU
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType

from dynamicemb.enumerations import DynamicEmbEvictStrategy


class DynamicEmbDataType(enum.Enum):
    """Element types by the names of the original package.

    Examples:
        >>> from dynamicemb import DynamicEmbDataType, dyn_emb_to_torch
        >>> dyn_emb_to_torch(DynamicEmbDataType.BFloat16)
        torch.bfloat16
    """

    Float32 = "float32"
    BFloat16 = "bfloat16"
    Float16 = "float16"
    Int64 = "int64"
    UInt64 = "uint64"
    Int32 = "int32"
    UInt32 = "uint32"
    Size_t = "size_t"
    Int8 = "int8"
    UInt8 = "uint8"


_DTYPES = {
    DynamicEmbDataType.Float32: torch.float32,
    DynamicEmbDataType.BFloat16: torch.bfloat16,
    DynamicEmbDataType.Float16: torch.float16,
    DynamicEmbDataType.Int64: torch.int64,
    DynamicEmbDataType.UInt64: torch.uint64,
    DynamicEmbDataType.Int32: torch.int32,
    DynamicEmbDataType.UInt32: torch.uint32,
    DynamicEmbDataType.Size_t: torch.int64,  # torch has no such type
    DynamicEmbDataType.Int8: torch.int8,
    DynamicEmbDataType.UInt8: torch.uint8,
}
_OF_DTYPES = {dtype: name for name, dtype in _DTYPES.items() if name is not DynamicEmbDataType.Size_t}
_OF_TORCHREC = {
    DataType.FP32: DynamicEmbDataType.Float32,
    DataType.FP16: DynamicEmbDataType.Float16,
    DataType.BF16: DynamicEmbDataType.BFloat16,
    DataType.INT64: DynamicEmbDataType.Int64,
    DataType.INT32: DynamicEmbDataType.Int32,
    DataType.INT8: DynamicEmbDataType.Int8,
    DataType.UINT8: DynamicEmbDataType.UInt8,
}
_EVICT_STRATEGIES = {
    "KLru": DynamicEmbEvictStrategy.LRU,
    "KLfu": DynamicEmbEvictStrategy.LFU,
    "KEpochLru": DynamicEmbEvictStrategy.EPOCH_LRU,
    "KEpochLfu": DynamicEmbEvictStrategy.EPOCH_LFU,
    "KCustomized": DynamicEmbEvictStrategy.CUSTOMIZED,
}


def _find(names: dict[Any, Any], value: object, argument: str) -> Any:
    if value not in names:
        raise ValueError(f"{argument} should be one of {[str(n) for n in names]} but is: {value!r}")
    return names[value]


def data_type_to_dyn_emb(data_type: DataType) -> DynamicEmbDataType:
    """The original package's name of a TorchRec type.

    Args:
        data_type: a DataType of TorchRec.

    Raises:
        ValueError: it has no such name; the message lists those that have one.

    Examples:
        >>> from dynamicemb import data_type_to_dyn_emb
        >>> from torchrec.modules.embedding_configs import DataType
        >>> data_type_to_dyn_emb(DataType.FP16).name
        'Float16'
    """
    return _find(_OF_TORCHREC, data_type, "data_type")


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """torch's name of a TorchRec type.

    Args:
        data_type: a DataType of TorchRec.

    Raises:
        ValueError: torch has none for it.

    Examples:
        >>> from dynamicemb import data_type_to_dtype
        >>> from torchrec.modules.embedding_configs import DataType
        >>> data_type_to_dtype(DataType.FP16)
        torch.float16
    """
    return _DTYPES[data_type_to_dyn_emb(data_type)]


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """torch's name of a type of the original package.

    Args:
        data_type: a `DynamicEmbDataType`.

    Raises:
        ValueError: it is none.

    Examples:
        >>> from dynamicemb import DynamicEmbDataType, dyn_emb_to_torch
        >>> dyn_emb_to_torch(DynamicEmbDataType.Float32)
        torch.float32
    """
    return _find(_DTYPES, data_type, "data_type")


def torch_to_dyn_emb(torch_dtype: torch.dtype) -> DynamicEmbDataType:
    """The original package's name of a torch type.

    Args:
        torch_dtype: a dtype of torch.

    Raises:
        ValueError: it has no such name.

    Examples:
        >>> import torch
        >>> from dynamicemb import torch_to_dyn_emb
        >>> torch_to_dyn_emb(torch.float32).name
        'Float32'
    """
    return _find(_OF_DTYPES, torch_dtype, "torch_dtype")


def string_to_evict_strategy(strategy_str: str) -> DynamicEmbEvictStrategy:
    """A strategy by the name that it has in `{table}_opt_args.json`.

    Args:
        strategy_str: such as "KLru", with or without "EvictStrategy." before it.

    Raises:
        ValueError: there is none of that name.

    Examples:
        >>> from dynamicemb import string_to_evict_strategy
        >>> string_to_evict_strategy("EvictStrategy.KLfu").name
        'LFU'
    """
    name = strategy_str.removeprefix("EvictStrategy.") if isinstance(strategy_str, str) else strategy_str
    return _find(_EVICT_STRATEGIES, name, "strategy_str")
