"""All wrapped collections of a DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from .distributed import Peers
from .id_transformer_collection import IDTransformerCollection
from .jagged_ids import ids_of, with_slots
from .prefetch import Pipeline
from .ps import FetchHandle, PSCollection, Url
from .training_hooks import TrainingHooks
from .windows import Windows


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
        self._sharded: dict[str, Any] = {}
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
                self._sharded[path] = child
                names = [config.name for config in configs]
                if unknown := sorted(set(names) - set(plan)):
                    raise ValueError(f"the tables of {path!r} should be of {sorted(plan)} but are: {unknown}")
                _check_configs(path, child, configs)
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
        TrainingHooks(module, self._sharded, self.windows.in_flight)
        self.pipeline: Pipeline | None = None  # the last one that was started

    def __contains__(self, path: str) -> bool:
        return path in self.collections

    def check_train_pipeline(self) -> None:
        """A train pipeline of TorchRec replaces `forward` of what it prepares batches ahead for. Most of them
        look rows up before the rows of earlier batches are updated."""
        for child in self._sharded.values():
            kind = type(vars(child).get("forward"))
            is_pipeline = kind.__module__.startswith("torchrec.distributed.train_pipeline")
            if is_pipeline and kind.__name__ != "PipelinedForward":  # that of TrainPipelineSparseDist
                raise RuntimeError(
                    "a wrapped model should be trained by a plain loop, TrainPipelineBase or "
                    "TrainPipelineSparseDist, but it is in a pipeline that looks up rows ahead of time "
                    f"({kind.__name__})"
                )

    def tables(self, path: str) -> dict[str, int]:
        """Feature to the number of its table, counted over all collections."""
        begin = 0
        for other, collection in self.collections.items():
            if other == path:
                return {feature: begin + table for feature, table in collection.features.items()}
            begin += len(collection.windows)
        raise KeyError(path)

    def transform(
        self, kjt_dict: Mapping[str, KeyedJaggedTensor]
    ) -> tuple[dict[str, KeyedJaggedTensor], list[FetchHandle]]:
        """Slots for the ids of a batch on their own; it counts as trained when the next one is asked for."""
        parts = [(kjt, self.tables(path)) for path, kjt in kjt_dict.items()]
        prepared = self.windows.prepare(ids_of(parts, len(self.windows.tables)))
        assert prepared is not None, "a rank with a batch is not at its end"
        time, slots = prepared
        self.windows.in_flight.remove([time])
        return dict(zip(kjt_dict, with_slots(parts, slots))), [FetchHandle()]

    def save(self) -> None:
        """Pushes every row that was used since the last save. All ranks call it together."""
        self.windows.save(self._save_peers)


def _check_configs(path: str, child: Any, configs: Sequence[Any]) -> None:
    """Refuses what would let ids, or slots that do not exist, reach a table of the model."""
    known = getattr(child, "_table_name_to_config", {})
    for config in configs:
        model = known.get(config.name)
        if model is None:
            continue
        features = config.feature_names or [config.name]
        if set(features) != set(model.feature_names):
            raise ValueError(
                f"feature_names of {path}.{config.name} in configs_dict should be those of the model "
                f"({model.feature_names}) but are: {features}"
            )
        if config.num_embeddings != model.num_embeddings:
            raise ValueError(
                f"num_embeddings of {path}.{config.name} in configs_dict should be that of the model "
                f"({model.num_embeddings}) but is: {config.num_embeddings}"
            )
