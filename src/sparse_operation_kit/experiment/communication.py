"""Ranks and collectives: those of `sparse_operation_kit.communication`."""

from sparse_operation_kit.communication import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    global_gpu_id,
    id_in_rank,
    init,
    local_rank,
    num_gpu_per_rank,
    num_gpus,
    num_ranks,
    rank,
    set_comm_tool,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "global_gpu_id",
    "id_in_rank",
    "init",
    "local_rank",
    "num_gpu_per_rank",
    "num_gpus",
    "num_ranks",
    "rank",
    "set_comm_tool",
]
