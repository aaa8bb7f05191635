"""The plan entry of a dynamic table: its rows are spread over all ranks, or all on one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType

from dynamicemb.enumerations import DynamicEmbKernel
from dynamicemb.options import DynamicEmbTableOptions

ADDITIONAL_FUSED_PARAMS = ("customized_compute_kernel", "dist_type", "dynamicemb_options")


class _NotForTorchRec(str):
    """The name of our kernel among fused parameters. TorchRec's own sharding groups tables by them, and so
    hashes it; ours does not."""

    def __hash__(self) -> int:
        raise ValueError(
            "a dynamic table came to TorchRec's own sharder: give DistributedModelParallel "
            "dynamicemb.shard.DynamicEmbeddingCollectionSharder and DynamicEmbeddingBagCollectionSharder, "
            "and no sharder of TorchRec's for the same modules after them"
        )


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):
    """The plan of a dynamic table: row-wise over all ranks, or table-wise on one.

    Args:
        compute_kernel: "customized_kernel".
        customized_compute_kernel: "DynamicEmb".
        dist_type: as in the options.
        dynamicemb_options: of the table; what is open is completed when the module is sharded.
        num_embeddings: what the user asked for, before rounding; 0 in plans that are not our planner's.

    Raises:
        ValueError: the kernel is another one, or dist_type differs from that of the options.

    Examples:
        >>> from dynamicemb.planner import DynamicEmbParameterSharding
        >>> plan = DynamicEmbParameterSharding(sharding_type="row_wise", num_embeddings=1000)
    """

    compute_kernel: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    customized_compute_kernel: str = DynamicEmbKernel
    dist_type: str = "roundrobin"
    dynamicemb_options: DynamicEmbTableOptions | None = None
    num_embeddings: int = 0

    def __post_init__(self) -> None:
        if self.customized_compute_kernel != DynamicEmbKernel:
            raise ValueError(
                f"customized_compute_kernel should be {DynamicEmbKernel!r} but is: "
                f"{self.customized_compute_kernel!r}"
            )
        options = self.dynamicemb_options
        if options is not None and options.dist_type != self.dist_type:
            raise ValueError(
                f"dist_type should be {options.dist_type!r} as in dynamicemb_options "
                f"but is: {self.dist_type!r}"
            )

    @property
    def owner(self) -> int | None:
        """The rank of a table-wise table; None: rows are spread."""
        if self.sharding_type != ShardingType.TABLE_WISE.value:
            return None
        if not self.ranks or len(self.ranks) != 1:
            raise ValueError(f"ranks of a table-wise table should be one rank but are: {self.ranks}")
        return self.ranks[0]

    def get_additional_fused_params(self) -> dict[str, Any]:
        """TorchRec adds these to the fused parameters of the table."""
        params = {name: getattr(self, name) for name in ADDITIONAL_FUSED_PARAMS}
        return {**params, "customized_compute_kernel": _NotForTorchRec(self.customized_compute_kernel)}

    @staticmethod
    def pop_additional_fused_params(fused_params: dict[str, Any]) -> None:
        """Removes from `fused_params` what `get_additional_fused_params` gave."""
        for name in ADDITIONAL_FUSED_PARAMS:
            fused_params.pop(name, None)


def check_owner(owner: int, world: int, options: DynamicEmbTableOptions, name: str) -> None:
    """Raises ValueError unless this rank can have the whole table."""
    if not 0 <= owner < world:
        raise ValueError(f"the rank of table-wise table {name!r} should be below {world} but is: {owner}")
    if options.shared_rows:
        raise ValueError(
            f"shared_rows of table-wise table {name!r} should be 0 but is: {options.shared_rows}; "
            "row_wise tables may have shared rows"
        )


def describe(options: DynamicEmbTableOptions) -> str:
    """All options in a line, for comparing ranks: `==` compares only what groups tables."""
    # A device belongs to a rank, and so does the store that a function makes.
    own = ("device_id", "external_storage")
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in own}
    values["external_storage"] = options.external_storage is not None
    for name in ("admit_strategy", "admission_counter"):
        if not dataclasses.is_dataclass(values[name]):  # the text of an object may have its address
            values[name] = type(values[name]).__name__
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
