"""All wrapped collections of a DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from .distributed import Peers
from .id_transformer_collection import IDTransformerCollection
from .prefetch import Pipeline
from .ps import FetchHandle, PSCollection, Url
from .windows import Ids, Windows


def sharded_modules(module: DistributedModelParallel) -> dict[str, tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Path to (sharded module, its part of the plan)."""
    found = {}
    for path, child in module.module.named_modules():
        plan = module.plan.get_plan_for_module(path)
        if plan is not None:
            found[path] = (child, plan)
    return found


class IDTransformerGroup:
    """The collections of `configs_dict`, a path inside the model to the configs of its tables.

    To be made by all ranks together. When one of them fails, all raise.
    """

    def __init__(
        self,
        url: Url,
        module: DistributedModelParallel,
        configs_dict: Mapping[str, Sequence[Any]],
        *,
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
        ps_config: Mapping[str, Any] | None = None,
        parallel: bool = True,
    ) -> None:
        peers, self._save_peers = Peers(), Peers()
        self.collections: dict[str, IDTransformerCollection] = {}
        self._sharded: list[Any] = []
        error: BaseException | None = None
        try:
            modules = sharded_modules(module)
            for path, configs in configs_dict.items():
                if path not in modules:
                    raise ValueError(
                        f"configs_dict should have paths of sharded modules ({sorted(modules)}) "
                        f"but has: {path!r}"
                    )
                child, plan = modules[path]
                self._sharded.append(child)
                names = [config.name for config in configs]
                if unknown := sorted(set(names) - set(plan)):
                    raise ValueError(f"the tables of {path!r} should be of {sorted(plan)} but are: {unknown}")
                ps = PSCollection.fromModule(
                    path, child, {name: plan[name] for name in names}, url, ps_config
                )
                self.collections[path] = IDTransformerCollection(
                    configs, eviction_config, transform_config, ps
                )
        except BaseException as failure:
            error = failure
        peers.share(error)
        tables = [window for collection in self.collections.values() for window in collection.windows]
        self.windows = Windows(tables, peers, parallel)
        self.pipeline: Pipeline | None = None  # the last one that was started

    def __contains__(self, path: str) -> bool:
        return path in self.collections

    def check_no_train_pipeline(self) -> None:
        """A train pipeline of TorchRec replaces `forward` of what it prepares batches ahead for."""
        for child in self._sharded:
            kind = type(vars(child).get("forward"))
            if kind.__module__.startswith("torchrec.distributed.train_pipeline"):
                raise RuntimeError(
                    "a wrapped loader should be read by a plain loop, one batch at a time, but the model is "
                    f"in a train pipeline ({kind.__name__}), which asks for batches before it has trained "
                    "the last ones; num_prefetch prepares batches ahead"
                )

    def ids(self, kjts: Mapping[str, KeyedJaggedTensor]) -> list[Ids]:
        """The ids of all tables of all collections; a collection without a batch has none."""
        ids: list[Ids] = []
        for path, collection in self.collections.items():
            kjt = kjts.get(path)
            ids += collection.ids(kjt) if kjt is not None else [NO_IDS] * len(collection.windows)
        return ids

    def replaced(
        self, kjts: Mapping[str, KeyedJaggedTensor], slots: Sequence[Ids]
    ) -> dict[str, KeyedJaggedTensor]:
        """The same jagged tensors with slots in place of ids."""
        result, begin = {}, 0
        for path, collection in self.collections.items():
            end = begin + len(collection.windows)
            if path in kjts:
                result[path] = collection.replaced(kjts[path], slots[begin:end])
            begin = end
        return result

    def transform(
        self, kjt_dict: Mapping[str, KeyedJaggedTensor]
    ) -> tuple[dict[str, KeyedJaggedTensor], list[FetchHandle]]:
        """Slots for the ids of a batch on their own; it counts as trained when the next one is asked for."""
        prepared = self.windows.prepare(self.ids(kjt_dict))
        assert prepared is not None, "a rank with a batch is not at its end"
        time, slots = prepared
        self.windows.in_flight.remove([time])
        return self.replaced(kjt_dict, slots), [FetchHandle()]

    def save(self) -> None:
        """Pushes every row that was used since the last save. All ranks call it together."""
        self.windows.save(self._save_peers)


NO_IDS: Ids = torch.empty(0, dtype=torch.int64).numpy()
