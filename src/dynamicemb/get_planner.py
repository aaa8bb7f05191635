"""A planner from a list of tables and the options of the dynamic ones, as HSTU training asks for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints

logger = logging.getLogger(__name__)

_FUSED = EmbeddingComputeKernel.FUSED.value
_KERNELS = {  # of static tables, on a GPU
    "prefetch": [EmbeddingComputeKernel.FUSED_UVM_CACHING.value],
    "native": [_FUSED, EmbeddingComputeKernel.FUSED_UVM.value],
    "none": None,
}


def get_planner(
    eb_configs: Sequence[BaseEmbeddingConfig],
    data_parallel_embedding_table_names: Collection[str],
    dynamicemb_options_dict: Mapping[str, DynamicEmbTableOptions],
    device: torch.device,
    pipeline_type: str = "none",
    ddr_cap: int = 512 << 30,
    intra_host_bw: float = 450e9,
    inter_host_bw: float = 25e9,
) -> DynamicEmbeddingShardingPlanner:
    """Tables in `dynamicemb_options_dict` are dynamic, those named data-parallel are copied to every rank,
    and all others are spread row-wise by TorchRec.

    pipeline_type  kernels of static tables on a GPU: "prefetch" (fused_uvm_caching), "native" (fused,
                   fused_uvm) or "none" (any). On the CPU they are fused

    Raises ValueError for another pipeline_type, and for a name that no config has or that is in both lists.

        planner = get_planner(configs, {"country"}, {"user": DynamicEmbTableOptions()}, torch.device("cpu"))
    """
    if pipeline_type not in _KERNELS:
        raise ValueError(f"pipeline_type should be one of {list(_KERNELS)} but is: {pipeline_type!r}")
    names = {config.name for config in eb_configs}
    copied, dynamic = set(data_parallel_embedding_table_names), set(dynamicemb_options_dict)
    if (copied | dynamic) - names or copied & dynamic:
        raise ValueError(
            f"data_parallel_embedding_table_names and dynamicemb_options_dict should name different tables "
            f"of {sorted(names)} but are: {sorted(copied)} and {sorted(dynamic)}"
        )
    on_gpu = torch.device(device).type == "cuda"
    kernels = _KERNELS[pipeline_type]
    if kernels is not None and not on_gpu:
        logger.info("static tables use the kernel fused: %s is for GPUs", " and ".join(kernels))
        kernels = [_FUSED]

    def constraint(name: str) -> DynamicEmbParameterConstraints:
        if name in dynamic:
            return DynamicEmbParameterConstraints(
                sharding_types=[ShardingType.ROW_WISE.value],
                bounds_check_mode=BoundsCheckMode.NONE,
                use_dynamicemb=True,
                dynamicemb_options=dynamicemb_options_dict[name],
            )
        if name in copied:
            return DynamicEmbParameterConstraints(
                sharding_types=[ShardingType.DATA_PARALLEL.value],
                compute_kernels=[EmbeddingComputeKernel.DENSE.value],
                bounds_check_mode=BoundsCheckMode.NONE,
            )
        return DynamicEmbParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value],
            compute_kernels=kernels,
            bounds_check_mode=BoundsCheckMode.NONE,
        )

    world = dist.get_world_size() if dist.is_initialized() else 1
    topology = Topology(
        world_size=world,
        local_world_size=min(world, torch.cuda.device_count()) if on_gpu else world,
        compute_device="cuda" if on_gpu else "cpu",
        hbm_cap=torch.cuda.get_device_properties(device).total_memory if on_gpu else 0,
        ddr_cap=ddr_cap,
        intra_host_bw=intra_host_bw,
        inter_host_bw=inter_host_bw,
    )
    return DynamicEmbeddingShardingPlanner(
        list(eb_configs),
        topology,
        storage_reservation=FixedPercentageStorageReservation(0.05),
        constraints={config.name: constraint(config.name) for config in eb_configs},
    )
