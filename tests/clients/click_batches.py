"""Batches of clicks for the client programs, and the dense part of their training over ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

FIELDS = 5


def start_ranks() -> tuple[int, int]:
    """Joins the ranks of torchrun, if it started this process; the rank and how many there are."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def clicks(step: int, rank: int, samples: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels (n, 1), dense features (n, 3) and ids (n, FIELDS); ids of different fields never meet."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    fields = torch.arange(FIELDS) * 1_000_003
    ids = torch.randint(-40, 40, (samples, FIELDS), generator=generator) * 7_919 + fields
    dense = torch.rand(samples, 3, generator=generator)
    labels = ((ids.sum(1) + step) % 3 == 0).float().unsqueeze(1)
    return labels, dense, ids


def average_gradients(model: torch.nn.Module) -> None:
    """What data-parallel training does with dense parameters."""
    if not dist.is_initialized():
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
