"""A dynamic table on one rank, and the base of the modules that hold such tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import embstore
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.optimizers import optimizer_args


@dataclass(eq=False)
class DynamicTable:
    """The part of a table that lives on this rank.

    name           of the table in its collection
    table          its rows here
    options        as planned: capacity, dtype and bounds are filled in
    ownership      which rank owns a key
    world, rank    of the ranks that share the table
    process_group  of those ranks
    param_group    its entry in the fused optimizer; "lr" is what the next update uses
    """

    name: str
    table: embstore.Table
    options: DynamicEmbTableOptions
    ownership: embstore.Ownership
    world: int
    rank: int
    process_group: dist.ProcessGroup | None
    param_group: dict[str, Any] = field(default_factory=dict)

    def optimizer_args(self) -> dict[str, Any]:
        """The optimizer as it stands, in the words of `{table}_opt_args.json`."""
        self.sync_learning_rate()
        return optimizer_args(self.table)

    def load_optimizer_args(self, args: Mapping[str, Any]) -> None:
        """Takes over the learning rate and the step from what `optimizer_args` gave."""
        if "lr" in args:
            self.param_group["lr"] = float(args["lr"])
        if "iters" in args:
            self.table.optimizer_step = int(args["iters"])
        self.sync_learning_rate()

    def sync_learning_rate(self) -> None:
        """Schedulers write into the parameter group; the table follows."""
        lr = self.param_group.get("lr")
        if lr is not None and lr != self.table.learning_rate:
            self.table.learning_rate = float(lr)


class HoldsDynamicTables:
    """Base of the sharded collections: what `find_collections` looks for."""

    dynamic_tables: dict[str, DynamicTable]
