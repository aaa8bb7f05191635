"""Small tables for tests of the current names: rows of 4 that start at 0.25, SGD with a rate of 0.5."""

from __future__ import annotations

from typing import Any

import torch

from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables

CPU = torch.device("cpu")
Strategy, Mode = DynamicEmbScoreStrategy, DynamicEmbInitializerMode
TIMESTAMP, LFU, STEP = Strategy.TIMESTAMP, Strategy.LFU, Strategy.STEP
QUARTER = DynamicEmbInitializerArgs(Mode.CONSTANT, value=0.25)


def options(**more: Any) -> DynamicEmbTableOptions:
    return DynamicEmbTableOptions(**{"dim": 4, "max_capacity": 1024, "initializer_args": QUARTER, **more})


def tables(*made: DynamicEmbTableOptions, **keywords: Any) -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(list(made), learning_rate=0.5, **keywords)


def train(module: Any, *keys: int) -> torch.Tensor:
    out = module(torch.tensor(keys), torch.tensor([0, len(keys)]))
    out.sum().backward()
    return out.detach()
